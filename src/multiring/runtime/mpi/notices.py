"""Notices between ranks beside the data: that one has failed, and that one leaves."""

from __future__ import annotations

import pickle
import time
from collections.abc import Sequence
from typing import NamedTuple

from mpi4py import MPI

from multiring import errors
from multiring.errors import MultiringError

_FAILURE, _FAREWELL = 1, 2


class FailureNotice(NamedTuple):
    """An error as it travels: the name of its class, the message, and what MultiringError keeps beside it."""

    kind: str
    message: str
    rank: int = -1
    host: str = ""
    collective: str = ""
    number: int = -1
    seconds: float = 0.0

    def error(self) -> MultiringError:
        kind, message, *kept = self
        made: MultiringError = getattr(errors, kind)(message, **dict(zip(self._fields[2:], kept, strict=True)))
        return made


class Notices:
    """Sends and receives the notices, in an MPI communicator of all ranks that carries nothing else."""

    def __init__(self, mpi: MPI.Intracomm, hosts: Sequence[str]) -> None:
        self._mpi = mpi
        self._hosts = hosts
        self._own = mpi.Get_rank()
        self._sent: list[tuple[bytes, MPI.Request]] = []
        self._status = MPI.Status()
        self.left: dict[int, float] = {}
        """Times at which this rank heard each other rank's farewell, by rank, in seconds of ``time.monotonic``."""

    def fail(self, failure: FailureNotice) -> None:
        """Tell all others."""
        self._tell(pickle.dumps(tuple(failure)), _FAILURE)

    def leave(self) -> None:
        """Say farewell to all others: this rank takes part in nothing more."""
        self._tell(b"", _FAREWELL)

    def _tell(self, said: bytes, tag: int) -> None:
        others = [rank for rank in range(self._mpi.Get_size()) if rank != self._own]
        self._sent += [(said, self._mpi.Isend([said, MPI.BYTE], rank, tag)) for rank in others]

    def sent(self) -> bool:
        """True if all that was told is on its way."""
        return all([request.Test() for _, request in self._sent])

    def heard(self) -> FailureNotice | None:
        """A failure, if one has been told; farewells are noted."""
        while self._mpi.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG, self._status):
            rank, tag = self._status.Get_source(), self._status.Get_tag()
            said = bytearray(self._status.Get_count(MPI.BYTE))
            self._mpi.Recv([said, MPI.BYTE], rank, tag)
            if tag == _FAILURE:
                failure = FailureNotice(*pickle.loads(said))
                if (failure.kind, failure.rank) == ("Mismatch", self._own):  # each of two that disagree names the other
                    return failure._replace(rank=rank, host=self._hosts[rank])
                return failure
            self.left[rank] = time.monotonic()
        return None
