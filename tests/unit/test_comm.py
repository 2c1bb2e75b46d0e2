"""A world of one: the interface without a job, and what it says of wrong arguments."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import multiring as mr
from multiring.theano import broadcast_variables
from multiring.training.sharding import shard


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[mr.Communicator]:
    for name in list(os.environ):
        if name.startswith(("MULTIRING_", "OMPI_", "PMI_", "SLURM_")) or name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name)
    yield mr.init()
    mr.shutdown()


@pytest.mark.usefixtures("alone")
def test_collectives_of_one() -> None:
    assert (mr.rank(), mr.world_size(), mr.local_rank(), mr.local_world_size()) == (0, 1, 0, 1)
    x = np.arange(5.0)
    for op in ("sum", "avg", "min", "max", "prod"):
        mr.all_reduce(x, op)
    mr.broadcast(x)
    mr.reduce(x)
    np.testing.assert_array_equal(x, np.arange(5.0))
    np.testing.assert_array_equal(mr.all_gather(x), [np.arange(5.0)])
    np.testing.assert_array_equal(mr.reduce_scatter(x), np.arange(5.0))
    np.testing.assert_array_equal(mr.all_to_all(x), np.arange(5.0))
    np.testing.assert_array_equal(mr.all_to_all(x, [5]), np.arange(5.0))
    np.testing.assert_array_equal(mr.gather(x), [np.arange(5.0)])
    y = np.empty(5)
    mr.scatter(y, x)
    np.testing.assert_array_equal(y, x)
    assert mr.broadcast_object({"a": 1}) == {"a": 1}
    assert mr.all_gather_object("one") == ["one"]
    mr.barrier()
    work = mr.all_reduce(x, async_op=True)
    assert work.wait(5) is None
    assert work.done()


def test_a_communicator_offers_what_the_functions_of_the_module_offer(alone: mr.Communicator) -> None:
    """Only the group has what front ends build on: `publish`, messages of a gather, labels, the internal group."""
    functions = {name for name in mr.__all__ if callable(getattr(mr, name)) and name[0].islower()}
    offered = {name for name in dir(alone) if not name.startswith("_")}
    values = {"world", "members", "rank", "size", "timeout", "hosts", "local_rank", "local_size", "oldest", "levels"}
    assert offered - functions - values == {"close", "plans_used", "ranks_by"}
    assert "label" not in inspect.signature(alone.all_reduce).parameters


def test_levels_of_one(alone: mr.Communicator) -> None:
    assert alone.levels == ("rank", "host")
    assert alone.ranks_by("rank") == alone.ranks_by("host") == [[0]]
    with pytest.raises(ValueError, match="level='rack': the topology has rank, host"):
        alone.ranks_by("rack")


def test_init_twice_is_one(alone: mr.Communicator) -> None:
    assert mr.init() is alone
    assert mr.init(timeout=600) is alone
    with pytest.raises(ValueError, match=r"initialised with other settings than \{'timeout': 5\}"):
        mr.init(timeout=5)


@pytest.mark.parametrize(
    "options",
    [
        {"trace": "t.json", "engine": "mpi"},
        {"reproducible": True, "wire": "host=bfloat16"},
        {"reproducible": True, "plan": "ring"},
    ],
)
def test_settings_that_contradict_one_another(options: dict[str, Any]) -> None:
    one, other = (f"MULTIRING_{name.upper()}" for name in options)
    with pytest.raises(mr.RendezvousError, match="do not go together") as error:
        mr.init(**options)
    assert one in str(error.value)
    assert other in str(error.value)
    assert not mr.is_initialized()


def test_not_initialised() -> None:
    assert not mr.is_initialized()
    with pytest.raises(mr.MultiringError, match=r"call multiring\.init\(\) first"):
        mr.rank()
    mr.shutdown()


def test_neither_sockets_nor_threads(alone: mr.Communicator) -> None:
    assert alone.world.links is None
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("multiring")]


class Immutable:
    """Looks like what jax makes."""

    __module__ = "jaxlib._jax"

    def __array__(self) -> np.ndarray[Any, Any]:
        return np.zeros(3)


class Exported:
    """An array as it is seen through DLPack alone."""

    def __init__(self, x: np.ndarray[Any, Any]) -> None:
        self.x = x

    def __dlpack__(self, **asked: Any) -> object:
        return self.x.__dlpack__(**asked)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.x.__dlpack_device__()


class Unwilling:
    """Like a parameter of torch, which is handed over only when detached."""

    def __dlpack__(self, **_: object) -> object:
        raise BufferError("x requires a gradient")


class Nonsense:
    """Promises what it does not keep."""

    def __dlpack__(self, **_: object) -> object:
        return 5


def read_only() -> np.ndarray[Any, Any]:
    x = np.zeros(3)
    x.flags.writeable = False
    return x


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: mr.all_reduce([1.0, 2.0]), TypeError, "list"),
        (lambda: mr.all_reduce(Immutable()), TypeError, r"jaxlib\._jax\.Immutable is immutable.*numpy\.array\(x\)"),
        (lambda: mr.all_reduce(read_only()), ValueError, r"read-only.*y = numpy\.array\(x\)"),
        (
            lambda: mr.all_reduce(np.zeros((4, 4))[:, 1]),
            ValueError,
            r"shape \(4,\), float64\) is not contiguous.*back: x",
        ),
        (
            lambda: mr.all_reduce(np.zeros((4, 3), order="F")),
            ValueError,
            r"in C order.*copy the result back: x\[...\] = y",
        ),
        (
            lambda: mr.all_gather(np.zeros((4, 3), order="F")),
            ValueError,
            r"C order: hand over numpy.ascontiguousarray\(x\)",
        ),
        (lambda: mr.all_reduce(np.zeros(4)[::-1]), ValueError, "is not contiguous"),
        (lambda: mr.all_reduce(np.broadcast_to(np.zeros(3), (2, 3))), ValueError, "is not contiguous"),
        (lambda: mr.all_reduce(np.lib.stride_tricks.sliding_window_view(np.zeros(5), 3)), ValueError, "not contiguous"),
        (lambda: mr.all_reduce(np.zeros((2, 3), ">i8")), TypeError, "elements of type >i8.*convert back"),
        (lambda: mr.all_reduce(Exported(read_only())), ValueError, r"read-only.*y = numpy\.array\(x\), and use y"),
        (lambda: mr.all_reduce(Exported(np.zeros((4, 3), order="F"))), ValueError, "is not contiguous"),
        (lambda: mr.all_reduce(np.ma.masked_equal([1.0, 2.0], 2)), TypeError, r"mask.*x\.filled\(0\)"),
        (lambda: mr.all_reduce(np.zeros(3, "U4")), TypeError, "not supported"),
        (lambda: mr.all_reduce(np.zeros(3), "mean"), ValueError, "op='mean': known are sum, avg"),
        (lambda: mr.all_reduce(np.zeros(3), ["sum"]), ValueError, r"op=\['sum'\]: known are sum, avg"),
        (lambda: mr.all_reduce(np.zeros(3), "band"), ValueError, "band is not defined for float64"),
        (lambda: mr.broadcast(np.zeros(3), root=1), ValueError, "root=1: ranks of this communicator are 0 to 0"),
        (lambda: mr.broadcast(np.zeros(3), root="a"), TypeError, "root='a': a rank is a whole number"),
        (lambda: mr.all_reduce(np.zeros(3), timeout=-1), ValueError, "timeout=-1: a time limit is in seconds"),
        (lambda: mr.all_reduce(np.zeros(3), timeout=float("nan")), ValueError, "timeout=nan"),
        (lambda: mr.barrier(timeout="5"), ValueError, "timeout='5'"),
        (lambda: mr.barrier(async_op=True).wait("5"), ValueError, "timeout='5': a time limit is in seconds"),
        (lambda: mr.barrier(async_op=True).wait(-1), ValueError, "timeout=-1: a time limit is in seconds"),
        (lambda: mr.barrier(async_op=True).wait(float("nan")), ValueError, "timeout=nan: a time limit is in seconds"),
        (lambda: mr.new_group([0], timeout=-2), ValueError, "timeout=-2"),
        (lambda: mr.all_reduce(np.zeros(3), group=[0]), TypeError, r"group=\[0\]: a communicator is needed"),
        (lambda: mr.all_reduce(Unwilling()), TypeError, r"Unwilling cannot be read: x requires a gradient"),
        (lambda: mr.all_reduce(None), TypeError, "a DLPack tensor is needed, not None"),
        (lambda: mr.all_reduce(np.zeros(3, "S2")), TypeError, r"elements of type \|S2 \(in numpy\.ndarray\).*int8"),
        (lambda: mr.all_reduce(np.zeros(3, ">f4")), TypeError, "elements of type >f4 .*convert them to one of float32"),
        (lambda: mr.all_reduce(np.zeros(3, "datetime64[s]")), TypeError, r"elements of type datetime64\[s\]"),
        (lambda: mr.all_reduce(Nonsense()), TypeError, r"Nonsense cannot be read: its __dlpack__ returns no capsule"),
        (lambda: mr.empty(-1), ValueError, "shape=-1: extents are 0 or more"),
        (lambda: mr.empty((1 << 30, 1 << 30)), mr.ResourceError, "MULTIRING_ARENA_BYTES"),
        (lambda: mr.empty(1 << 70), ValueError, "an array has less than"),
        (lambda: mr.empty(3.5), TypeError, "shape=3.5: an extent is a whole number"),
        (lambda: mr.empty((2, True)), TypeError, "shape=True: an extent is a whole number"),
        (lambda: mr.plan(-1), ValueError, "nbytes=-1: a buffer has 0 bytes or more"),
        (lambda: mr.plan("100MB"), TypeError, "nbytes='100MB': a buffer's size is a whole number"),
        (lambda: mr.plan(True), TypeError, "nbytes=True: a buffer's size is a whole number"),
        (lambda: mr.shard(4.5), TypeError, "length=4.5: expected a whole number"),
        (lambda: mr.shard(True), TypeError, "length=True: expected a whole number"),
        (lambda: mr.shard(4, epoch=0.5), TypeError, "epoch=0.5: expected a whole number"),
        (lambda: mr.shard(4, seed=-1), ValueError, "seed=-1 and epoch=0: both are 0 to"),
        (lambda: mr.broadcast(np.zeros(3), True), TypeError, "root=True: a rank is a whole number"),
        (lambda: mr.reduce(np.zeros(3), root=0.0), TypeError, "root=0.0: a rank is a whole number"),
        (lambda: mr.gather(np.zeros(3), False), TypeError, "root=False: a rank is a whole number"),
        (lambda: mr.scatter(np.zeros(3), np.zeros(3), 0.5), TypeError, "root=0.5: a rank is a whole number"),
        (lambda: mr.broadcast_object(3, None), TypeError, "root=None: a rank is a whole number"),
        (lambda: mr.new_group([False]), TypeError, r"ranks\[0\]=False: a rank is a whole number"),
        (lambda: mr.new_group(0), TypeError, r"ranks=0: expected a list of ranks, such as \[0, 1\]"),
        (lambda: mr.new_group("0"), TypeError, "ranks='0': expected a list of ranks"),
        (lambda: mr.new_group([0, 7]), ValueError, r"ranks\[1\]=7: ranks of this communicator are 0 to 0"),
        (lambda: mr.average({1: 2.0}), TypeError, "metrics has the key 1: the key of a metric is text"),
        (lambda: mr.average({"a": 1, 1: 2.0}), TypeError, "metrics has the key 1: the key of a metric is text"),
        (lambda: mr.average(np.ma.masked), TypeError, "metrics=masked: a metric is a real number"),
        (lambda: mr.average(1.0, weight=np.ma.masked), ValueError, "weight=masked: a weight is 0 or more"),
        (lambda: mr.empty(2, object), TypeError, "dtype=<class 'object'>: expected numbers, such as float32"),
        (lambda: mr.report(""), ValueError, "path='': expected the name of a file, such as report.html"),
        (lambda: mr.send(np.zeros(3), True), TypeError, "dst=True: a rank is a whole number"),
        (lambda: mr.recv(np.zeros(3), 0.0), TypeError, "src=0.0: a rank is a whole number"),
        (lambda: mr.send(np.zeros(3), dst=0), ValueError, "dst=0 is this rank itself"),
        (lambda: mr.recv(np.zeros(3), src=-1), ValueError, "src=-1: ranks"),
        (lambda: mr.all_gather(np.zeros(3), out=np.zeros(4)), ValueError, "out is 4 x float64, but 3 x float64 arrive"),
        (lambda: mr.all_gather(np.zeros(3), out=np.zeros(3, "f4")), ValueError, "3 x float32, but 3 x float64"),
        (lambda: mr.reduce_scatter(np.float64(3)), ValueError, r"shape \(\) cannot be cut into 1 equal blocks"),
        (lambda: mr.all_to_all(np.zeros(3), [3.0]), TypeError, "splits=3.0: a number of rows is a whole number"),
        (lambda: mr.all_to_all(np.zeros(3), [2]), ValueError, r"splits=\[2\]: 1 numbers of rows that add up to 3"),
        (lambda: mr.scatter(np.zeros(3)), ValueError, "rank 0 is the root and has to give blocks"),
        (
            lambda: mr.scatter(np.zeros(3), np.zeros(4)),
            ValueError,
            "blocks are 4 x float64; rank 0, the root, has to give 3 x float64, a block of 3 for each of 1 ranks",
        ),
        (
            lambda: mr.scatter(np.zeros(3), [np.zeros(3)]),
            TypeError,
            r"blocks is a list, expected one buffer .*: hand over numpy\.stack\(blocks\)",
        ),
        (lambda: mr.scatter(np.zeros(3), np.zeros(3, "f4")), ValueError, "3 x float32; rank 0, .* give 3 x float64, a"),
        (lambda: mr.init().close(), mr.MultiringError, r"the communicator of all ranks.*call multiring\.shutdown\(\)"),
        (lambda: mr.new_group([]), ValueError, r"ranks=\[\]: a group has at least one rank"),
        (lambda: mr.new_group([0, 0]), ValueError, r"ranks=\[0, 0\]: a group has at least one rank, each once"),
        (lambda: mr.plan(100, "all_reduse"), ValueError, "all_reduse"),
        (lambda: mr.init(tiemout=3), TypeError, "unknown option 'tiemout'"),
    ],
)
def test_wrong_arguments(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.usefixtures("alone")
def test_what_is_read_only_can_be_read() -> None:
    for x in (read_only(), Exported(read_only())):
        assert mr.all_gather(x).tolist() == [[0, 0, 0]]


class Variable:
    """A variable of Theano's, whose value has the order in memory that it was given."""

    name = "w"

    def __init__(self, value: np.ndarray[Any, Any]) -> None:
        self.value = value

    def get_value(self) -> np.ndarray[Any, Any]:
        return self.value.copy("K")

    def set_value(self, value: np.ndarray[Any, Any]) -> None:
        self.value = value


@pytest.mark.usefixtures("alone")
def test_variables_in_fortran_order_are_broadcast() -> None:
    variable = Variable(np.asfortranarray(np.arange(6.0).reshape(2, 3)))
    broadcast_variables([variable])
    assert variable.value.tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.usefixtures("alone")
def test_arena() -> None:
    x = mr.empty((3, 4), "float32")
    assert (x.shape, x.dtype, x.ctypes.data % 64) == ((3, 4), np.float32, 0)
    with pytest.raises(mr.ResourceError, match="MULTIRING_ARENA_BYTES"):
        mr.empty(1 << 40, "int8")
    assert mr.empty(0).size == 0
    assert mr.empty(np.int64(3)).shape == (3,)
    assert mr.empty([2, np.int64(3)]).shape == (2, 3)


def test_topology_file_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(mr.RendezvousError, match=f"MULTIRING_TOPOLOGY={tmp_path}/none: No such file"):
        mr.init(topology=f"{tmp_path}/none")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(mr.RendezvousError, match=f"MULTIRING_TOPOLOGY={pipe}: it is a pipe, and a"):
        mr.init(topology=pipe)
    wrong = tmp_path / "wrong.toml"
    wrong.write_text("hosts")
    with pytest.raises(ValueError, match=f"{wrong}: "):
        mr.init(topology=wrong)
    assert not mr.is_initialized()


@pytest.mark.parametrize("length", [0, 1, 5, 6, 100])
@pytest.mark.parametrize("size", [1, 3, 7])
def test_shards(length: int, size: int) -> None:
    kept = [shard(length, rank, size, epoch=2, seed=1) for rank in range(size)]
    assert sorted(np.concatenate(kept)) == list(range(length))
    padded = [shard(length, rank, size, epoch=2, seed=1, uneven="pad") for rank in range(size)]
    assert {len(part) for part in padded} == {-(-length // size)}
    assert set(np.concatenate(padded)) == set(range(length))
    dropped = [shard(length, rank, size, epoch=2, seed=1, uneven="drop") for rank in range(size)]
    assert {len(part) for part in dropped} == {length // size}
    assert len(set(np.concatenate(dropped))) == size * (length // size)


@pytest.mark.parametrize("uneven", ["keep", "pad", "drop"])
def test_shards_are_the_same_by_small_numbers_of_numpy(uneven: str) -> None:
    for rank in range(200):
        small = shard(np.uint8(255), np.int16(rank), np.uint8(200), np.int8(2), np.uint8(250), uneven)
        assert small.tolist() == shard(255, rank, 200, 2, 250, uneven).tolist()
    with pytest.raises(ValueError, match="rank=3 and size=3: ranks are 0 to 2"):
        shard(10, 3, 3)


@pytest.mark.usefixtures("alone")
def test_numbers_of_numpy_are_those_of_python() -> None:
    small = np.uint8(0)
    assert mr.shard(np.uint8(255), uneven="pad").tolist() == mr.shard(255, uneven="pad").tolist()
    assert mr.broadcast_object("x", small) == "x"
    assert mr.gather(np.arange(3.0), small).tolist() == [[0, 1, 2]]
    assert mr.new_group([small]).members == (0,)
    assert mr.plan(np.uint8(200)).plan.id == mr.plan(200).plan.id


def test_shards_depend_on_epoch_and_seed() -> None:
    one = shard(1000, 0, 2, epoch=0, seed=0)
    assert (one == shard(1000, 0, 2, epoch=0, seed=0)).all()
    assert (one != shard(1000, 0, 2, epoch=1, seed=0)).any()
    assert (one != shard(1000, 0, 2, epoch=0, seed=1)).any()
    with pytest.raises(ValueError, match="uneven='round': known are keep, pad, drop"):
        shard(10, 0, 3, uneven="round")


def test_import_is_light_and_without_side_effects() -> None:
    program = """
import sys, threading
import multiring
assert "numpy" not in sys.modules and "asyncio" not in sys.modules, "import multiring loads too much"
multiring.init
assert not {"torch", "asyncio", "ifaddr"} & set(sys.modules)
assert threading.active_count() == 1
assert callable(multiring.plan) and callable(multiring.report)
"""
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, timeout=30)


def test_every_name_has_a_docstring() -> None:
    for name in mr.__all__:
        value = getattr(mr, name)
        assert name == "__version__" or value.__doc__, name
    with pytest.raises(AttributeError, match="no attribute 'allreduce'"):
        mr.allreduce  # noqa: B018
