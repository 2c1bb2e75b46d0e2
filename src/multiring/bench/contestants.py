"""The contestants: multiring through NumPy or torch, on the CPU or on CUDA devices, and its peers."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from multiring.bench import devices
from multiring.bench.peers import ON_CUDA, PEERS
from multiring.job.cores import allowed_cores, cgroup_quota, divide

Array = NDArray[np.float32]


class Measurable(str, Enum):
    """A collective that is measured."""

    all_reduce = "all_reduce"
    all_gather = "all_gather"
    reduce_scatter = "reduce_scatter"
    broadcast = "broadcast"


BUFFERS = ("private", "arena")


class Api(str, Enum):
    """The library that multiring is called through; Gloo and DeepSpeed are called through torch, MPI through mpi4py."""

    numpy = "numpy"
    torch = "torch"


class MemoryKind(str, Enum):
    """The memory in which the buffers lie."""

    cpu = "cpu"
    cuda = "cuda"


class Elements(Protocol):
    """A buffer of float32: an array, or what is read and written as one."""

    def __len__(self) -> int: ...
    def __setitem__(self, where: slice, value: Any, /) -> None: ...
    def __array__(self) -> NDArray[Any]: ...


@dataclass(frozen=True)
class Task:
    """One collective, ready to be called again and again: from ``given`` to ``result``, the same buffer if in place.

    On a CUDA device the call returns before the result is there: ``finish`` waits for that, and ``bare`` copies the
    buffers out and back and does nothing else. Both are None on the CPU.
    """

    call: Callable[[], object]
    given: Elements
    result: Elements
    finish: Callable[[], object] | None = None
    bare: Callable[[], object] | None = None


@dataclass(frozen=True)
class Planned:
    """A plan's prediction of a collective: its seconds, and the fewest that the links allow.

    ``error``: what a narrow wire may put a sum off, as a part of the sum of the absolute values. Where blocks of
    ``rounded_together`` elements are rounded together, each rank's part of that sum is the largest of its block.
    """

    seconds: float
    bound: float
    error: float
    rounded_together: int = 1


class Contestant(Protocol):
    """A library, in a job of its ranks that it has joined. Buffers are float32."""

    rank: int
    world_size: int
    buffers: tuple[str, ...]

    def task(self, collective: str, count: int, kind: str) -> Task:
        """The collective on ``count`` elements, all blocks together (a multiple of the ranks), in a ``kind`` buffer."""

    def start(self, array: Array) -> Callable[[], object]:
        """Start an all-reduce in place, beside the caller; what is returned waits for it."""

    def maximum(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """The largest over the ranks, element by element."""

    def total(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """The sum over the ranks, element by element."""

    def barrier(self) -> None: ...
    def planned(self, collective: str, nbytes: int) -> Planned | None:
        """None of a library without plans."""

    def close(self) -> None: ...


class ThroughNumPy:
    """multiring with NumPy arrays."""

    buffers: tuple[str, ...] = BUFFERS

    def __init__(self) -> None:
        from multiring import api

        api.init()
        self._mr = api
        self.rank, self.world_size = api.rank(), api.world_size()

    def task(self, collective: str, count: int, kind: str) -> Task:
        mr, new = self._mr, _maker(kind)
        whole = new(count)
        if collective == "all_reduce":
            return Task(lambda: mr.all_reduce(whole), whole, whole)
        if collective == "broadcast":
            return Task(lambda: mr.broadcast(whole), whole, whole)
        block = new(count // self.world_size)
        if collective == "all_gather":
            return Task(lambda: mr.all_gather(block, out=whole), block, whole)
        return Task(lambda: mr.reduce_scatter(whole, out=block), whole, block)

    def start(self, array: Array) -> Callable[[], object]:
        wait: Callable[[], object] = self._mr.all_reduce(array, async_op=True).wait
        return wait

    def maximum(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        self._mr.all_reduce(values, op="max")
        return values

    def total(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        self._mr.all_reduce(values)
        return values

    def barrier(self) -> None:
        self._mr.barrier()

    def planned(self, collective: str, nbytes: int) -> Planned | None:
        return _planned(collective, nbytes)

    def close(self) -> None:
        self._mr.shutdown()


class ThroughTorch:
    """A backend of torch.distributed."""

    def __init__(self, backend: str) -> None:
        import torch
        import torch.distributed as dist

        dist.init_process_group(backend)
        self._torch, self._dist, self._backend = torch, dist, backend
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.buffers: tuple[str, ...] = BUFFERS if backend == "multiring" else BUFFERS[:1]

    def task(self, collective: str, count: int, kind: str) -> Task:
        dist = self._dist
        (all_of_it, whole), (one, block) = (self.buffer(n, kind) for n in (count, count // self.world_size))
        if collective == "all_reduce":
            return Task(lambda: self.all_reduce(whole), all_of_it, all_of_it)
        if collective == "broadcast":
            return Task(lambda: dist.broadcast(whole, 0), all_of_it, all_of_it)
        if collective == "all_gather":
            gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its name since torch 2.13
            return Task(lambda: gather(whole, block), one, all_of_it)
        scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
        return Task(lambda: scatter(block, whole), all_of_it, one)

    def buffer(self, count: int, kind: str) -> tuple[Elements, Any]:
        """A buffer, as it is read and written here and as torch takes it."""
        array = _maker(kind)(count)
        return array, self._torch.from_numpy(array)

    def all_reduce(self, tensor: Any) -> None:
        """Sum a tensor in place."""
        self._dist.all_reduce(tensor)

    def start(self, array: Array) -> Callable[[], object]:
        wait: Callable[[], object] = self._dist.all_reduce(self._torch.from_numpy(array), async_op=True).wait
        return wait

    def maximum(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        self._dist.all_reduce(self._torch.from_numpy(values), self._dist.ReduceOp.MAX)
        return values

    def total(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        self._dist.all_reduce(self._torch.from_numpy(values))
        return values

    def barrier(self) -> None:
        self._dist.barrier()

    def planned(self, collective: str, nbytes: int) -> Planned | None:
        return _planned(collective, nbytes) if self._backend == "multiring" else None

    def close(self) -> None:
        self._dist.destroy_process_group()


class ThroughTorchOnCuda(ThroughTorch):
    """The same with tensors on CUDA devices; what the ranks say besides goes through tensors of the CPU."""

    def __init__(self, backend: str, *, apart: bool) -> None:
        import torch

        found = devices.look()
        torch.cuda.set_device(devices.own_device(found.count))
        if backend == "nccl":
            devices.check_nccl(found)
            if apart or devices.ranks_share(found.count):
                devices.make_nccl_send_by_sockets(int(os.environ["RANK"]))
        super().__init__("cpu:gloo,cuda:nccl" if backend == "nccl" else backend)
        self.buffers = (MemoryKind.cuda.value,)

    def task(self, collective: str, count: int, kind: str) -> Task:
        task = super().task(collective, count, kind)
        assert isinstance(task.given, devices.OnDevice)
        assert isinstance(task.result, devices.OnDevice)
        reads, writes = (self.rank == 0, self.rank != 0) if collective == "broadcast" else (True, True)
        bare = devices.BareCopies(task.given if reads else None, task.result if writes else None)
        return replace(task, finish=self._torch.cuda.synchronize, bare=bare)

    def buffer(self, count: int, kind: str) -> tuple[devices.OnDevice, Any]:
        tensor = self._torch.empty(count, device=kind)
        return devices.OnDevice(tensor), tensor

    def barrier(self) -> None:
        self._dist.all_reduce(self._torch.zeros(1))  # torch's barrier may be one of the device


class ThroughDeepSpeed(ThroughTorch):
    """DeepSpeed's all-reduce in shared memory; whatever else is needed goes over Gloo."""

    def __init__(self) -> None:
        # It takes ranks for local ones if this says that they are.
        os.environ.setdefault("LOCAL_SIZE", os.environ["LOCAL_WORLD_SIZE"])
        from deepspeed.ops.op_builder.cpu.comm import ShareMemCommBuilder

        super().__init__("gloo")
        # Built when it is first loaded: by one rank, while the others wait, not by all at once into one directory.
        if self.rank == 0:
            ShareMemCommBuilder().load(verbose=False)
        self.barrier()
        library = ShareMemCommBuilder().load(verbose=False)
        library.initialize(self.world_size, self.rank)
        self._sum = self._torch.ops.deepspeed.inference_all_reduce_

    def all_reduce(self, tensor: Any) -> None:
        self._sum(tensor)


class ThroughMPI:
    """The MPI whose launcher started the job, through mpi4py."""

    buffers: tuple[str, ...] = BUFFERS[:1]

    def __init__(self) -> None:
        if "RANK" in os.environ:  # before MPI is loaded: by itself it makes a world of one, and leaves files behind
            raise ValueError(
                "the ranks of an MPI are started by its own launcher, and this job was not: `multiring bench --peers "
                "NAME` does that, or `mpirun -n 2 python -m multiring.cli.bench_rank --library NAME`"
            )
        _bind_as_multiring_run()
        from mpi4py import MPI

        self._mpi, self._world = MPI, MPI.COMM_WORLD
        self.rank, self.world_size = self._world.rank, self._world.size
        self._beside = ThreadPoolExecutor(1)  # MPI makes no progress by itself: a thread calls it, as Horovod does

    def task(self, collective: str, count: int, kind: str) -> Task:
        world, whole, block = self._world, _private(count), _private(count // self.world_size)
        if collective == "all_reduce":
            return Task(lambda: world.Allreduce(self._mpi.IN_PLACE, whole), whole, whole)
        if collective == "broadcast":
            return Task(lambda: world.Bcast(whole), whole, whole)
        if collective == "all_gather":
            return Task(lambda: world.Allgather(block, whole), block, whole)
        return Task(lambda: world.Reduce_scatter_block(whole, block), whole, block)

    def start(self, array: Array) -> Callable[[], object]:
        return self._beside.submit(self._world.Allreduce, self._mpi.IN_PLACE, array).result

    def maximum(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        self._world.Allreduce(self._mpi.IN_PLACE, values, self._mpi.MAX)
        return values

    def total(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        self._world.Allreduce(self._mpi.IN_PLACE, values)
        return values

    def barrier(self) -> None:
        self._world.Barrier()

    def planned(self, collective: str, nbytes: int) -> Planned | None:
        return None

    def close(self) -> None:
        self._beside.shutdown()  # MPI itself ends with the process


def _planned(collective: str, nbytes: int) -> Planned:
    from multiring import api

    choice = api.plan(nbytes, collective)
    plan, prediction = choice.plan, choice.chosen.prediction
    return Planned(prediction.seconds, choice.bound, plan.wire_error, plan.rounded_together)


def _private(count: int) -> Array:
    return np.empty(count, np.float32)


def _maker(kind: str) -> Callable[[int], Array]:
    """Return a function that makes a buffer of a number of elements."""
    if kind == "private":
        return _private
    from multiring import api

    return lambda count: api.empty(count, np.float32)


def _bind_as_multiring_run() -> None:
    """Bind this rank to the cores that `multiring run` would give it, so that nobody gains by another binding."""
    for rank, size in (
        ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ):
        if rank in os.environ:
            share = divide(allowed_cores(), cgroup_quota(), int(os.environ[size]), "core")[int(os.environ[rank])]
            if share.cpus:
                os.sched_setaffinity(0, share.cpus)


def stand_apart() -> None:
    """Make multiring take this rank for a host of its own, which reaches the others by TCP over loopback."""
    if "RANK" not in os.environ or not devices.all_are_here():
        raise ValueError("--apart: it takes ranks on one host that `multiring run` or torchrun has started")
    os.environ.update(MULTIRING_HOST=f"rank{os.environ['RANK']}", MULTIRING_INTERFACE="lo")


def join(library: str, api: Api, device: MemoryKind = MemoryKind.cpu, *, apart: bool = False) -> Contestant:
    """Join the job as a rank of ``library``: multiring, an MPI, deepspeed, or a backend of torch.distributed.

    With ``apart`` this rank is a host of its own. ValueError if the library is unknown, cannot use the device, or
    is an MPI whose launcher has not started this rank.
    """
    known = PEERS if device is MemoryKind.cpu else ON_CUDA
    if library not in ("multiring", *known):
        raise ValueError(f"--library {library!r}: known on {device.value} are multiring, {', '.join(known)}")
    if apart:
        stand_apart()
    if device is MemoryKind.cuda:
        return ThroughTorchOnCuda(library, apart=apart)
    if library in ("openmpi", "mpich", "impi"):
        return ThroughMPI()
    if library == "deepspeed":
        return ThroughDeepSpeed()
    return ThroughNumPy() if library == "multiring" and api is Api.numpy else ThroughTorch(library)
