"""Bytes between the members of one communicator, in an MPI communicator of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpi4py import MPI

LANES = 8
"""Most collectives of a communicator in flight; collective n begins when collective n - ``LANES`` has ended."""

SLOTS = 256
"""Segments of a collective that may be in flight."""

MESSAGE_TAG = LANES * SLOTS
"""The tag of the headers of messages between two ranks; of their contents, those above it."""

LARGEST_MESSAGE = 1 << 30

Count = Callable[[int, int, int], None]
"""Told of messages: the world rank, how many bytes were sent, how many received."""


class Channel:
    """The members' world ranks in order, and their own place among them; whether its calls are the library's own."""

    def __init__(self, mpi: MPI.Intracomm, members: list[int], count: Count, *, is_internal: bool) -> None:
        self.mpi = mpi
        self.members = members
        self.own = mpi.Get_rank()
        self.is_internal = is_internal
        self.lanes: list[object | None] = [None] * LANES
        self.staging: list[Any] = [None] * LANES
        self.next_number = 0
        self.numbers_sent = [0] * len(members)
        self._contents_tags = largest_tag(mpi) - MESSAGE_TAG
        self._count = count

    def send(self, address: int, nbytes: int, member: int, tag: int) -> list[MPI.Request]:
        """Begin to send memory, which may not change until the requests are complete."""
        self._count(self.members[member], nbytes, 0)
        return [self.mpi.Isend([part, MPI.BYTE], member, tag) for part in _parts(address, nbytes)]

    def receive(self, address: int, nbytes: int, member: int, tag: int) -> list[MPI.Request]:
        """Begin to receive into memory."""
        self._count(self.members[member], 0, nbytes)
        return [self.mpi.Irecv([part, MPI.BYTE], member, tag) for part in _parts(address, nbytes)]

    def contents_tag(self, number: int) -> int:
        """The tag of the contents of message ``number`` from one member to another."""
        return MESSAGE_TAG + 1 + number % self._contents_tags


def largest_tag(mpi: MPI.Intracomm) -> int:
    """The largest tag of MPI: 32767 by the standard, mostly more."""
    return mpi.Get_attr(MPI.TAG_UB) or 32767


def _parts(address: int, nbytes: int) -> list[MPI.buffer]:
    starts = range(0, nbytes, LARGEST_MESSAGE) if nbytes else [0]
    return [MPI.buffer.fromaddress(address + start, min(LARGEST_MESSAGE, nbytes - start)) for start in starts]


def complete(requests: list[MPI.Request]) -> bool:
    """Return True if all are complete; those that are leave the list."""
    while requests and requests[-1].Test():
        requests.pop()
    return not requests
