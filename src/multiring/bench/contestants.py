"""What is measured: multiring through NumPy or torch, and its peers."""

from __future__ import annotations

from enum import Enum
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

BUFFERS = ("private", "arena")
PEERS = ("gloo",)


class Api(str, Enum):
    """What multiring is called through; a peer is always called through torch."""

    numpy = "numpy"
    torch = "torch"


class Contestant(Protocol):
    """A library that sums buffers over all ranks of the job it has joined."""

    rank: int
    world_size: int
    buffers: tuple[str, ...]

    def buffer(self, count: int, kind: str) -> tuple[Any, NDArray[np.float32]]:
        """A float32 buffer as the library takes it, and the same memory as an array."""

    def all_reduce(self, buffer: Any) -> None: ...
    def maximum(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """The largest over the ranks, element by element."""

    def barrier(self) -> None: ...
    def close(self) -> None: ...


class ThroughNumPy:
    """multiring with NumPy arrays."""

    buffers: tuple[str, ...] = BUFFERS

    def __init__(self) -> None:
        import multiring

        multiring.init()
        self._mr = multiring
        self.rank, self.world_size = multiring.rank(), multiring.world_size()

    def buffer(self, count: int, kind: str) -> tuple[Any, NDArray[np.float32]]:
        array = self._mr.empty(count, np.float32) if kind == "arena" else np.empty(count, np.float32)
        return array, array

    def all_reduce(self, buffer: Any) -> None:
        self._mr.all_reduce(buffer)

    def maximum(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        self._mr.all_reduce(values, op="max")
        return values

    def barrier(self) -> None:
        self._mr.barrier()

    def close(self) -> None:
        self._mr.shutdown()


class ThroughTorch:
    """A backend of torch.distributed."""

    def __init__(self, backend: str) -> None:
        import torch
        import torch.distributed as dist

        dist.init_process_group(backend)
        self._torch, self._dist = torch, dist
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.buffers: tuple[str, ...] = BUFFERS if backend == "multiring" else BUFFERS[:1]

    def buffer(self, count: int, kind: str) -> tuple[Any, NDArray[np.float32]]:
        if kind == "arena":
            import multiring

            array = multiring.empty(count, np.float32)
            return self._torch.from_numpy(array), array
        tensor = self._torch.empty(count, dtype=self._torch.float32)
        return tensor, tensor.numpy()

    def all_reduce(self, buffer: Any) -> None:
        self._dist.all_reduce(buffer)

    def maximum(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        self._dist.all_reduce(self._torch.from_numpy(values), self._dist.ReduceOp.MAX)
        return values

    def barrier(self) -> None:
        self._dist.barrier()

    def close(self) -> None:
        self._dist.destroy_process_group()


class ThroughMPI:
    """The MPI whose launcher started the job, through mpi4py."""

    buffers: tuple[str, ...] = BUFFERS[:1]

    def __init__(self) -> None:
        from mpi4py import MPI

        self._mpi, self._world = MPI, MPI.COMM_WORLD
        self.rank, self.world_size = self._world.rank, self._world.size

    def buffer(self, count: int, kind: str) -> tuple[Any, NDArray[np.float32]]:
        array = np.empty(count, np.float32)
        return array, array

    def all_reduce(self, buffer: Any) -> None:
        self._world.Allreduce(self._mpi.IN_PLACE, buffer)

    def maximum(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        self._world.Allreduce(self._mpi.IN_PLACE, values, self._mpi.MAX)
        return values

    def barrier(self) -> None:
        self._world.Barrier()

    def close(self) -> None:
        """MPI ends with the process."""


def join(library: str, api: Api) -> Contestant:
    """Join the job as a rank of ``library``: multiring, openmpi, or a backend of torch.distributed."""
    if library == "openmpi":
        return ThroughMPI()
    return ThroughNumPy() if library == "multiring" and api is Api.numpy else ThroughTorch(library)
