"""Programs for ranks: every collective against what NumPy computes from all ranks' inputs."""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import os
import re
import resource
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

import multiring as mr
from multiring.planning import planner
from multiring.planning.choice import Choice
from multiring.planning.topology import Topology
from multiring.runtime.comm import group_of
from multiring.runtime.group import GROUPS
from multiring.training.buckets import Bucket, Buckets, GradientSpec, ResidualOf

Array = np.ndarray[Any, Any]

FLOATS = ("float16", "float32", "float64")
INTEGERS = ("int8", "uint8", "int16", "int32", "int64")
COMPLEX = ("complex64", "complex128")
PERIOD = 11 * 5 * 4 * 3
"""After so many elements the values repeat that are no means."""

REDUCTIONS: dict[str, Callable[[Array], Array]] = {
    "sum": lambda rows: rows.sum(axis=0, dtype=rows.dtype),
    "avg": lambda rows: rows.sum(axis=0, dtype=rows.dtype) / rows.dtype.type(len(rows)),
    "min": lambda rows: rows.min(axis=0),
    "max": lambda rows: rows.max(axis=0),
    "prod": lambda rows: rows.prod(axis=0, dtype=rows.dtype),
    "band": lambda rows: np.bitwise_and.reduce(rows),
    "bor": lambda rows: np.bitwise_or.reduce(rows),
    "bxor": lambda rows: np.bitwise_xor.reduce(rows),
}


def ops_of(dtype: str) -> list[str]:
    """The reductions that exist for a type."""
    if dtype in COMPLEX:
        return ["sum", "avg"]
    if dtype in INTEGERS:
        return ["sum", "min", "max", "prod", "band", "bor", "bxor"]
    return ["sum", "min", "max"] if dtype == "bool" else ["sum", "avg", "min", "max", "prod"]


def values(rank: int, count: int, dtype: str, op: str = "sum") -> Array:
    """Contribution of rank ``rank``: small whole numbers by rank and index, so that sums are exact."""
    if op == "avg" and dtype != "float16":  # divisible by any number of ranks that the tests use
        return (840 * (np.arange(count) + rank)).astype(dtype)
    index = np.arange(min(count, PERIOD))
    if op == "prod":
        pattern = (1 + (index + rank) % 2).astype(dtype)
    elif op == "avg":
        pattern = (840 // 8 * ((index + 3 * rank) % 4)).astype(dtype)
    elif dtype == "bool":
        pattern = (index + rank) % 3 == 0
    else:
        pattern = ((7 * index + 13 * rank) % 11).astype(dtype)
        if dtype in COMPLEX:
            pattern += (1j * ((index + rank) % 5)).astype(dtype)
    # Copies are cheaper than as many divisions.
    return pattern if count <= PERIOD else np.tile(pattern, -(-count // PERIOD))[:count]


def all_values(count: int, dtype: str, op: str = "sum") -> Array:
    return _rows(mr.world_size(), count, dtype, op)


@lru_cache(maxsize=8)
def _rows(ranks: int, count: int, dtype: str, op: str) -> Array:
    rows = np.stack([values(rank, count, dtype, op) for rank in range(ranks)])
    rows.flags.writeable = False  # they are asked for again
    return rows


def sizes(large: int) -> list[int]:
    """Around nothing, around the number of ranks, and more than a segment."""
    n = mr.world_size()
    return sorted({0, 1, n - 1, n, n + 1, 1000, large})


def check(got: Array, expected: Array, *what: object) -> None:
    if not np.array_equal(got, expected):  # which says so in a tenth of the time
        np.testing.assert_array_equal(got, expected, err_msg=f"rank {mr.rank()}: {what}")


def refused(call: Callable[[], object], error: type[Exception], words: str) -> None:
    """Check that a call raises this error with these words; a rank has no pytest, which takes long to import."""
    said = "nothing was raised"
    try:
        call()
    except error as found:
        said = str(found)
    assert re.search(words, said), said


def all_reduce(large: int) -> None:
    """All types, reductions and sizes."""
    for dtype in (*FLOATS, *INTEGERS, *COMPLEX, "bool"):
        for op in ops_of(dtype):
            for count in sizes(large if op == "sum" else 100):
                x = values(mr.rank(), count, dtype, op)
                mr.all_reduce(x, op)
                expected = REDUCTIONS[op](all_values(count, dtype, op)) if dtype != "bool" else _logical(op, count)
                check(x, expected, "all_reduce", dtype, op, count)


def _logical(op: str, count: int) -> Array:
    rows = all_values(count, "bool")
    return rows.all(axis=0) if op == "min" else rows.any(axis=0)


def rooted(large: int) -> None:
    """broadcast, reduce, gather and scatter from and to every rank."""
    rank, size = mr.rank(), mr.world_size()
    for root in range(size):
        for count in sizes(large):
            x = values(rank, count, "int32")
            mr.broadcast(x, root)
            check(x, values(root, count, "int32"), "broadcast", root, count)
            x = values(rank, count, "float64")
            mr.reduce(x, "sum", root)
            if rank == root:
                check(x, all_values(count, "float64").sum(axis=0), "reduce", root, count)
        y = mr.gather(values(rank, 6, "int64").reshape(2, 3), root)
        if rank == root:
            check(y, all_values(6, "int64").reshape(size, 2, 3), "gather", root)
        else:
            assert y is None
        mine = np.empty(5)
        mr.scatter(mine, all_values(5, "float64") + root if rank == root else None, root)
        check(mine, values(rank, 5, "float64") + root, "scatter", root)


def blocks(large: int) -> None:
    """all_gather, reduce_scatter and all_to_all, with results in new arrays and in given ones."""
    rank, size = mr.rank(), mr.world_size()
    for count in sizes(large):
        for dtype in ("float32", "int8", "complex128"):
            y = mr.all_gather(values(rank, count, dtype))
            check(y, all_values(count, dtype), "all_gather", dtype, count)
            whole = values(rank, size * count, dtype)
            kept = whole.copy()
            y = mr.reduce_scatter(whole)
            expected = REDUCTIONS["sum"](all_values(size * count, dtype)).reshape(size, count)[rank]
            check(y, expected, "reduce_scatter", dtype, count)
            check(whole, kept, "input of reduce_scatter", dtype, count)
            y = mr.all_to_all(whole)
            expected = all_values(size * count, dtype).reshape(size, size, count)[:, rank].ravel()
            check(y, expected, "all_to_all", dtype, count)
    matrix = values(rank, 12 * size, "float64").reshape(4 * size, 3)
    out = np.empty((4, 3))
    assert mr.reduce_scatter(matrix, "max", out=out) is out
    check(out, all_values(12 * size, "float64").max(axis=0).reshape(4 * size, 3)[4 * rank : 4 * rank + 4], "out")
    assert mr.all_to_all(matrix).shape == matrix.shape
    gathered = np.empty((size, 4, 3))
    assert mr.all_gather(out, out=gathered) is gathered
    check(gathered.reshape(-1, 3), all_values(12 * size, "float64").max(axis=0).reshape(-1, 3), "all_gather out")


def uneven() -> None:
    """all_to_all with splits: rank r sends r + p rows to rank p, none to rank 0."""
    rank, size = mr.rank(), mr.world_size()

    def rows(sender: int, receiver: int) -> Array:
        count = sender + receiver if receiver else 0
        return np.arange(2 * count).reshape(count, 2) + 100 * sender + 1000 * receiver

    blocks = [rows(rank, peer) for peer in range(size)]
    y = mr.all_to_all(np.concatenate(blocks), [len(block) for block in blocks])
    check(y, np.concatenate([rows(peer, rank) for peer in range(size)]), "uneven all_to_all")


def overlapping() -> None:
    """Check calls that write over their input: it counts as it was when the call was made."""
    rank, size = mr.rank(), mr.world_size()
    count = 60_000

    def block(sender: int, receiver: int) -> Array:
        return np.arange(count * 2.0).reshape(count, 2) + 1e6 * sender + 1e7 * receiver

    x = np.concatenate([block(rank, peer) for peer in range(size)])
    mr.all_to_all(x, [count] * size, out=x)
    check(x, np.concatenate([block(peer, rank) for peer in range(size)]), "all_to_all in place")
    longer = np.zeros((size * count + 1, 2))
    longer[1:] = np.concatenate([block(rank, peer) for peer in range(size)])
    mr.all_to_all(longer[1:], [count] * size, out=longer[:-1])
    check(longer[:-1], np.concatenate([block(peer, rank) for peer in range(size)]), "all_to_all one row further")
    x = np.stack([block(rank, peer) for peer in range(size)])
    mr.scatter(x[size - 1], x, root=0)
    check(x[size - 1], block(0, rank), "scatter into another rank's block")
    x = np.stack([block(rank, peer) for peer in range(size)])
    mr.gather(x[0], root=size - 1, out=x if rank == size - 1 else None)
    if rank == size - 1:
        check(x, np.stack([block(peer, 0) for peer in range(size)]), "gather out of the result")
    x = np.stack([block(rank, peer) for peer in range(size)])
    mr.all_gather(x[0], out=x)
    check(x, np.stack([block(peer, 0) for peer in range(size)]), "all_gather out of the result")
    x = np.stack([block(rank, peer) for peer in range(size)])
    mr.reduce_scatter(x, out=x[0])
    check(x[0], sum(block(peer, rank) for peer in range(size)), "reduce_scatter into what is reduced")


def messages() -> None:
    """send and recv around a cycle: several tags out of order, and a large one that both sides send at once."""
    rank, size = mr.rank(), mr.world_size()
    right, left = (rank + 1) % size, (rank - 1) % size
    sends = [mr.send(np.array([rank, tag]), right, tag, async_op=True) for tag in (1, 2, 1)]
    for tag in (2, 1, 1):
        x = np.empty(2, np.int64)
        mr.recv(x, left, tag)
        check(x, np.array([left, tag]), "recv", tag)
    for work in sends:
        work.wait()
    x, y = values(rank, 1 << 20, "float32"), np.empty(1 << 20, np.float32)
    work = mr.send(x, right, async_op=True)
    mr.recv(y, left)
    work.wait()
    check(y, values(left, 1 << 20, "float32"), "large message")
    for count in (0, 5, 50_000):
        works = [
            mr.send(values(rank, count, "float32"), peer, 8, async_op=True) for peer in range(size) if peer != rank
        ]
        sources = []
        for _ in works:
            x = np.empty(count, np.float32)
            sources.append(mr.recv(x, tag=8))
            check(x, values(sources[-1], count, "float32"), "from any rank", count)
        assert sorted(sources) == [peer for peer in range(size) if peer != rank], sources
        for work in works:
            work.wait()
        mr.barrier()


def objects() -> None:
    """Object forms, of other sizes on each rank."""
    rank, size = mr.rank(), mr.world_size()
    told = mr.broadcast_object({"from": rank, "text": "x" * 3000} if rank == 1 else None, root=1)
    assert told == {"from": 1, "text": "x" * 3000}
    assert mr.all_gather_object([rank] * rank) == [[peer] * peer for peer in range(size)]


def same_bits(count: int) -> str:
    """Random numbers, whose sum depends on the order: a hash of this rank's results."""
    random = np.random.default_rng(mr.rank())
    digest = hashlib.sha256()
    for dtype in FLOATS:
        for size in (3, 1000, count):
            x = random.standard_normal(size).astype(dtype)
            mr.all_reduce(x)
            digest.update(x.tobytes())
    return digest.hexdigest()


def grid(large: int) -> str:
    """All collectives in all types, reductions and sizes; the hash of `same_bits`."""
    mr.init()
    all_reduce(large)
    rooted(large)
    blocks(large)
    bits = same_bits(large)
    mr.shutdown()
    return bits


def others() -> None:
    """Check the calls that are not one plan on one buffer."""
    whole = mr.init()
    for part in (uneven, overlapping, messages, objects, in_flight, arena):
        part()
    group = whole.new_group(range(mr.world_size()))
    assert group is not None
    untouched(group, ValueError, "timeout=-1: a time limit", timeout=-1)
    untouched(group, ValueError, "timeout='5': a time limit", timeout="5")
    mr.barrier()
    group.close()
    untouched(group, mr.MultiringError, "whose lowest rank is 0, was closed")
    mr.shutdown()
    untouched(whole, mr.MultiringError, "was shut down: call multiring.init")


def untouched(group: mr.Communicator, error: type[Exception], words: str, **options: Any) -> None:
    """Calls that are refused have written nothing before."""
    rank, size = group.rank, group.size
    x, out = np.arange(3.0 * size) + 100 * rank, np.full(3 * size * size, -1.0)
    for call in (
        lambda: group.all_gather(x, out=out, **options),
        lambda: group.gather(x, rank, out=out, **options),
        lambda: group.all_to_all(x, out=out[: x.size], **options),
        lambda: group.all_to_all(x, [3] * size, out=out[: x.size], **options),
        lambda: group.scatter(out[:3], x, rank, **options),
        lambda: group.reduce_scatter(x, out=out[:3], **options),
    ):
        refused(call, error, words)
    assert (out == -1).all()
    np.testing.assert_array_equal(x, np.arange(3.0 * size) + 100 * rank)


def weights_beyond_a_float() -> list[Any]:
    mr.init()
    told = []
    try:
        mr.average(1.0 * mr.rank(), weight=1e308 - mr.rank())
    except ValueError as error:
        told.append(str(error))
    return [*told, mr.average(1.0 * mr.rank(), weight=4e307 * (1 + mr.rank()))]


def in_flight() -> None:
    """Many works at once in two communicators, waited for in reverse."""
    rank, size = mr.rank(), mr.world_size()
    backwards = mr.new_group(range(size - 1, -1, -1))
    assert backwards is not None
    assert backwards.rank == size - 1 - rank
    works = []
    for number in range(40):
        x = values(rank, 1 + 700 * number, "int64") + number
        group = backwards if number % 3 else None
        works.append((number, x, mr.all_reduce(x, group=group, async_op=True)))
        if number % 7 == 0:
            mr.barrier(group=group)
    for number, x, work in reversed(works):
        work.wait(30)
        assert work.done()
        check(x, (all_values(1 + 700 * number, "int64") + number).sum(axis=0), "work", number)
    later = mr.all_gather(np.array([rank]), async_op=True)
    check(later.wait().ravel(), np.arange(size), "result of a work")


def groups() -> list[list[int]]:
    """Even and odd ranks, everybody in pairs with rank 0, and a group of a group; returns who added up to what."""
    mr.init()
    rank, size = mr.rank(), mr.world_size()
    sums = []
    halves = [mr.new_group(range(parity, size, 2)) for parity in (0, 1)]
    mine = halves[rank % 2]
    assert mine is not None
    assert halves[1 - rank % 2] is None
    pairs = [mr.new_group([peer, 0]) for peer in range(1, size)]
    for group in [mine, *pairs]:
        if group is not None:
            x = np.array([1 << rank])
            group.all_reduce(x)
            sums.append(int(x[0]))
    inner = mine.new_group([0, mine.size - 1]) if mine.size > 1 else None
    if inner is not None:
        x = np.array([rank])
        inner.broadcast(x, root=1)
        sums.append(int(x[0]))
        inner.close()
        inner.close()
        calls = (inner.barrier, lambda: inner.all_reduce(x), lambda: inner.all_gather_object(0), lambda: inner.plan(8))
        for call in calls:
            refused(
                call,
                mr.MultiringError,
                r"this group, whose lowest rank is [01], was closed: make a new one by new_group",
            )
    numbers = []
    for _ in range(30):  # other ranks may still be in a group that was closed here: the next one is told apart from it
        again = mr.new_group(range(size))
        assert again is not None
        x = np.array([rank])
        again.all_reduce(x)
        assert x[0] == size * (size - 1) // 2
        again.close()
        numbers.append(group_of(again).number)
    assert len(set(numbers)) == 30
    mr.shutdown()
    return [sums, [mine.rank, mine.size]]


def dropped_groups(count: int) -> list[int]:
    """Groups that nobody closes: KB of private memory that so many of them leave, and groups that still exist."""
    world = mr.init().world
    rank = mr.rank()

    def one(index: int) -> None:
        group = mr.new_group([1, 0] if index % 2 else [0, 1])
        assert group is not None
        x = np.arange(50, dtype="float32") + rank + index
        group.all_reduce(x)
        assert (x == 2 * np.arange(50) + 1 + 2 * index).all()

    for index in range(200):
        one(index)
    before = _private_kilobytes()
    for index in range(count):
        one(index)
    grown = _private_kilobytes() - before

    # A call in flight keeps its group; native code that knows the number of a group keeps it too.
    group = mr.new_group([0, 1])
    assert group is not None
    number, y = group_of(group).number, np.arange(300_000, dtype="float32") * (rank + 1)
    if rank == 1:
        time.sleep(0.2)
    work = group.all_reduce(y, async_op=True)
    del group
    published = mr.new_group([0, 1])
    assert published is not None
    kept = group_of(published).publish()
    del published
    work.wait()
    assert (y == 3 * np.arange(300_000, dtype="float32")).all()
    for index in range(2):
        one(index)
    assert number not in world.groups
    assert kept in world.groups
    left = len(world.groups)
    mr.shutdown()
    return [grown, left]


def _private_kilobytes() -> int:
    """After what is free went back to the system."""
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/smaps_rollup") as file:
        return sum(int(line.split()[1]) for line in file if line.startswith("Private_"))


def groups_of_one_number() -> None:
    """Two ranks make groups in turn. The last message of rank 0 reaches rank 1 when that has closed the group."""
    world = mr.init().world
    object.__setattr__(world, "draws", itertools.count(7, GROUPS - 1))  # as if it had made thousands in between
    rank = mr.rank()
    for round in range(5):
        group = mr.new_group(range(2))
        assert group is not None
        assert group_of(group).number == 8
        x, said = np.ones(100 + round, "float32"), np.full(10 + round, round)
        group.all_reduce(x)
        assert (x == 2).all()
        if rank == 0:
            group.send(said, 1, tag=round)
            mr.barrier()
            group.send(np.zeros(1000), 1, tag=round + 1)
        else:
            received = np.empty_like(said)
            group.recv(received, 0, tag=round)
            assert (received == round).all()
            group.close()
            mr.barrier()
        mr.barrier()
        if rank == 0:
            group.close()
    mr.shutdown()


def arena() -> None:
    """Buffers in shared memory, reused and freed."""
    for round in range(20):
        x = mr.empty((100, 1000), "float32")
        x[:] = values(mr.rank(), 100_000, "float32").reshape(100, 1000) + round
        mr.all_reduce(x)
        check(x.ravel(), (all_values(100_000, "float32") + round).sum(axis=0), "arena", round)


def faults_of_first_calls() -> int:
    """Pages that this process had to ask the kernel for in the first call of each lane but one."""
    mr.init()
    x = values(mr.rank(), 256 << 10, "float32")
    kept = x.copy()
    for call in range(8):
        x[:] = kept
        mr.all_reduce(x)
        if call == 0:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    check(x, all_values(256 << 10, "float32").sum(axis=0), "first calls")
    mr.shutdown()
    return faults


def planned_ahead(sizes: list[int]) -> list[Any]:
    """Return how often calls of these bytes had the planner choose, and those plans that are told of, with their
    sizes."""
    communicator = mr.init()
    chosen = []
    choose = planner.choose

    def counted(topology: Topology, collective: str, nbytes: int, *rest: Any, **options: Any) -> Choice:
        chosen.append([collective, nbytes])
        return choose(topology, collective, nbytes, *rest, **options)

    planner.choose = counted
    assert mr.stats()["plans"] == {}
    for nbytes in sizes:
        x = values(mr.rank(), nbytes // 4, "float32")
        mr.all_reduce(x)
        check(x, all_values(nbytes // 4, "float32").sum(axis=0), "planned ahead", nbytes)
    asked = list(chosen)
    used = [[choice.nbytes, choice.measured.calls] for choice in communicator.plans_used() if choice.measured]
    plans = [plan["calls"] for plan in mr.stats()["plans"].values()]
    mr.all_gather(values(mr.rank(), 10, "float32"))
    mr.shutdown()
    return [asked, used, plans, chosen[-1][0]]


def flat(count: int) -> list[int]:
    """Random collectives; growth of memory in kB and of descriptors over all but the first tenth of them."""
    mr.init()
    rank, size = mr.rank(), mr.world_size()
    random = np.random.default_rng(0)  # the same on all ranks
    before = [0, 0]
    for number in range(count):
        if number == count // 10:
            before = _used()
        kind, length, root = random.integers(6), int(2 ** random.uniform(0, 14)), int(random.integers(size))
        if kind == 0:
            x = np.full(length, rank, np.float32)
            mr.all_reduce(x)
            assert x[-1] == size * (size - 1) / 2
        elif kind == 1:
            x = np.full(length, rank)
            mr.broadcast(x, root)
            assert x[-1] == root
        elif kind == 2:
            assert mr.all_gather(np.full(length, rank))[:, -1].tolist() == list(range(size))
        elif kind == 3:
            assert mr.reduce_scatter(np.full(size * length, rank))[-1] == size * (size - 1) // 2
        elif kind == 4:
            assert mr.all_to_all(np.full((size, length), rank))[:, -1].tolist() == list(range(size))
        else:
            works = [mr.all_reduce(np.ones(length), async_op=True) for _ in range(3)]
            for work in works:
                work.wait()
    after = _used()
    mr.shutdown()
    return [after[0] - before[0], after[1] - before[1]]


def _used() -> list[int]:
    with open("/proc/self/statm") as statm:
        pages = int(statm.read().split()[1])
    return [pages * resource.getpagesize() // 1024, len(os.listdir("/proc/self/fd"))]


def narrow() -> list[float]:
    """Return the sums of 1 + 1/512 of every rank: in float64, and in float32, which may travel as 16 bits."""
    mr.init()
    try:
        exact = np.full(100_003, 1 + 1 / 512, np.float64)
        x = exact.astype(np.float32)
        mr.all_reduce(exact)
        mr.all_reduce(x)
        assert (x == x[0]).all()
        return [float(exact[0]), float(x[0])]
    finally:
        mr.shutdown()


def narrow_buckets(size_of_values: float, error: float = 0.0080, keeps: bool = False) -> None:
    """Means of gradients that travel in blocks, and who had them, whatever the size of the gradients beside the marks.

    Values are between one and two times ``size_of_values``, so that an eighth of them is far from what is rounded off.
    """
    communicator = mr.init()
    try:
        rank, size = mr.rank(), mr.world_size()
        gradients = [GradientSpec(count, "float32", str(count)) for count in (5, 700, 300, 9, 16)]
        values = [
            [size_of_values * (1 + (np.arange(g.elements) * 7 + r * 5) % 11 / 11) for r in range(size)]
            for g in gradients
        ]
        bound = 2 * size_of_values * error  # error of the mean over the ranks, whose largest values are below two sizes
        kept: ResidualOf | None = (lambda _, count: np.zeros(count, np.float32)) if keeps else None
        for bucket_bytes in (100, 3_000, 1 << 20):
            fused = Buckets(communicator, gradients, [4, 3, 2, 1, 0], bucket_bytes=bucket_bytes, residual_of=kept)
            for lacking in range(size):  # gradient 3 is on every other rank; nobody has gradient 4
                fused.begin()
                for i in range(4):
                    if i != 3 or rank != lacking:
                        fused.slot(i)[:] = values[i][rank]
                        fused.ready(i)
                assert fused.finish() == {0, 1, 2, 3}
                for i in range(5):
                    having = [r for r in range(size) if i < 3 or (i == 3 and r != lacking)]
                    mean = sum((values[i][r] for r in having), np.zeros(gradients[i].elements)) / size
                    assert (np.abs(fused.slot(i) - mean) <= bound).all(), (bucket_bytes, i)
        for some in (gradients, [GradientSpec(256, "float32")] * 2):
            bucket = Bucket(communicator, some, residual_of=kept)
            for slot in bucket.slots:
                slot[:] = size_of_values * (1 + rank)
            bucket.marks[:] = [rank == i % size for i in range(len(bucket.marks))]
            bucket.start("sum")
            bucket.wait()
            # Scales keep 17 bits, and a mark is rounded twice.
            np.testing.assert_allclose(bucket.marks, 1, rtol=2.0**-16)
    finally:
        mr.shutdown()


def narrow_blocks(block: int = 256, error: float = 0.0080) -> str:
    """The bits of sums that travel in blocks, checked to be near those of float64; what travels as it is, is exact."""
    mr.init()
    try:
        rank, size = mr.rank(), mr.world_size()
        digest = hashlib.sha256()
        for count in (0, 1, 255, 256, 257, 5_003, 100_003):
            rows = np.random.default_rng(count).standard_normal((size, count)) * (1 + np.arange(count) % 1000)
            rows = rows.astype(np.float32)
            exact = rows.astype(np.float64).sum(axis=0)
            starts = np.arange(0, count, block)
            largest = [np.maximum.reduceat(np.abs(row), starts).repeat(block)[:count] for row in rows if count]
            bound = sum(large.astype(np.float64) for large in largest) * error
            for make in (np.empty, mr.empty):
                x = make(count, np.float32)
                x[:] = rows[rank]
                mr.all_reduce(x)
                assert (np.abs(x - exact) <= bound).all(), count
                digest.update(x.tobytes())
            assert count < 1000 or np.abs(x - exact).max() > 1e-3 * np.abs(exact).max()
            mean = rows[rank].copy()
            mr.all_reduce(mean, op="avg")
            assert (np.abs(mean - exact / size) <= bound / size).all(), count
            digest.update(mean.tobytes())
            greatest, wide = rows[rank].copy(), rows[rank].astype(np.float64)
            mr.all_reduce(greatest, op="max")
            np.testing.assert_array_equal(greatest, rows.max(axis=0, initial=-np.inf))
            mr.all_reduce(wide)
            np.testing.assert_allclose(wide, exact, rtol=1e-12, atol=1e-9)
        return digest.hexdigest()
    finally:
        mr.shutdown()


def two_bits() -> list[Any]:
    """Return the errors of sums in int2 without a residual, and a hash of later sums with one."""
    mr.init()
    try:
        rank, size, count = mr.rank(), mr.world_size(), 5_003
        rows = np.random.default_rng(3).standard_normal((size, count)).astype(np.float32)
        said = []
        for op, of in (("sum", count), ("avg", 3)):
            try:
                mr.all_reduce(rows[rank, :of].copy(), op)
            except ValueError as error:
                said.append(str(error))
        wide = rows[rank].astype(np.float64)
        mr.all_reduce(wide)
        np.testing.assert_allclose(wide, rows.sum(axis=0, dtype=np.float64), rtol=1e-12, atol=1e-12)
        total, residual = np.zeros(count), np.zeros(count, np.float32)
        for _ in range(8):
            x = rows[rank].copy()
            mr.all_reduce(x, residual=residual)
            total += x
        owed = mr.all_gather(residual).reshape(size, count).sum(axis=0, dtype=np.float64)
        np.testing.assert_allclose(total + owed, 8 * wide, atol=1e-3)
        assert len(np.unique(np.abs(x[:64]))) <= 2  # 0 and the scale
        return [said, hashlib.sha256(total.tobytes()).hexdigest()]
    finally:
        mr.shutdown()


def forced(plan: str) -> list[Any]:
    """The plans that two sizes use, and the sum of the larger."""
    mr.init(plan=plan)
    try:
        x = np.arange(1 << 18, dtype=np.float32) % 509 + mr.rank()
        mr.all_reduce(x)
        n = mr.world_size()
        assert (x == np.arange(1 << 18) % 509 * n + n * (n - 1) // 2).all()
        used = [plan for plan, did in mr.stats()["plans"].items() if did["calls"]]
        return [mr.plan(1 << 20).plan.id, mr.plan(64).plan.id, used]
    finally:
        mr.shutdown()


def forced_strategies(names: list[str], counts: list[int]) -> list[Any]:
    """A hash of the bits of all sums under each strategy, and the plans that they used."""
    found = []
    for name in names:
        mr.init(plan=name)
        try:
            bits = hashlib.sha256()
            for count in counts:
                x = values(mr.rank(), count, "float32")
                mr.all_reduce(x)
                assert (x == all_values(count, "float32").sum(axis=0)).all(), (name, count)
                inexact = np.random.default_rng([mr.rank(), count]).standard_normal(count).astype(np.float32)
                mr.all_reduce(inexact, async_op=True).wait()
                bits.update(x.tobytes() + inexact.tobytes())
            assert np.array_equal(mr.all_gather(np.array([mr.rank()])).ravel(), np.arange(mr.world_size()))
            plans = [mr.plan(4 * count).plan.id for count in counts]
            used = [plan for plan, did in mr.stats()["plans"].items() if did["calls"]]
            found.append([bits.hexdigest(), plans, sorted(set(plans) - set(used))])
        finally:
            mr.shutdown()
    return found


def pair_under(strategy: str) -> list[Any]:
    """The plans of the world and of a group of two of its ranks, and what the group sums."""
    mr.init(plan=strategy)
    try:
        group = mr.new_group([0, 1])
        if group is None:
            return [mr.plan(1000).plan.id]
        x = np.array([1.0 + mr.rank()])
        group.all_reduce(x)
        return [mr.plan(1000).plan.id, group.plan(1000).plan.id, x[0]]
    finally:
        mr.shutdown()


def keeping(steps: int) -> list[Any]:
    """The bits of sums and residuals over some steps with the same gradients, checked to near the exact sum.

    Also what is said of residuals that cannot be; the same call goes on afterwards.
    """
    mr.init()
    try:
        rank, size, count = mr.rank(), mr.world_size(), 20_011
        rows = np.random.default_rng(3).standard_normal((size, count)).astype(np.float32)
        exact = rows.astype(np.float64).sum(axis=0)
        plain = rows[rank].copy()
        mr.all_reduce(plain)
        lost = np.abs(plain - exact).mean()
        digest, total = hashlib.sha256(), np.zeros(count)
        residual, small = np.zeros(count, np.float32), np.zeros(100, np.float32)
        for step in range(1, steps + 1):
            x = mr.empty(count) if step % 2 else np.empty(count, np.float32)
            x[:] = rows[rank]
            some = rows[rank, :100].copy()
            work = mr.all_reduce(x, residual=residual, async_op=True)
            mr.all_reduce(some, "avg", residual=small)
            work.wait()
            digest.update(x.tobytes() + some.tobytes())
            total += x
            assert np.abs(total / step - exact).mean() < 2 * lost / step, step
        everyones = mr.all_gather(residual)
        assert np.abs(total + everyones.sum(axis=0, dtype=np.float64) - steps * exact).max() < 1e-2
        assert np.abs(everyones).max() > 0
        said = []
        x = rows[rank].copy()
        for wrong, op, residue in (
            (x, "sum", residual[1:]),
            (x, "sum", residual.astype(np.float64)),
            (x, "max", residual),
            (x.astype(np.float64), "sum", residual),
            (x.astype(np.int32), "sum", residual),
            (x[:-1], "sum", x[1:]),
            (x, "sum", np.broadcast_to(np.float32(0), count)),
        ):
            try:
                mr.all_reduce(wrong, op, residual=residue)
            except ValueError as error:
                said.append(str(error))
        return [digest.hexdigest(), hashlib.sha256(everyones.tobytes()).hexdigest(), said]
    finally:
        mr.shutdown()
