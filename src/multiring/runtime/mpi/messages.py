"""Messages between two ranks: a header each, in the order of the sends; the contents when they are received.

MPI matches by tags that are shorter than ours, and a receive that another one precedes: so all headers of a
communicator have one tag of MPI, and the receiver matches them by ours.
"""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

from multiring._native import ANY_SOURCE, ITEMSIZES, Call
from multiring.errors import Mismatch
from multiring.runtime.mpi.channel import MESSAGE_TAG, Channel, complete
from multiring.runtime.mpi.operation import Operation
from multiring.runtime.mpi.signature import NBYTES, Signature, both_sides, unpacked


class SendMessage(Operation):
    """Complete when the memory of the call is the caller's again."""

    def __init__(self, channel: Channel, signature: Signature, call: Call, member: int, owner: object) -> None:
        super().__init__(channel, signature, call, owner)
        self._member = member
        self.other = channel.members[member]
        self._header = signature.packed()
        self._requests = channel.send(self._header.ctypes.data, NBYTES, member, MESSAGE_TAG)
        nbytes = signature.elements * ITEMSIZES[signature.dtype]
        if nbytes:
            self._requests += channel.send(self.pointer, nbytes, member, channel.contents_tag(signature.number))

    def advance(self) -> bool:
        if complete(self._requests):
            self.complete()
        return self.is_complete

    def waits_for(self) -> list[int]:
        return [self.other]


class ReceiveMessage(Operation):
    """Receives a message of ``member``, or with ANY_SOURCE the one that arrives first; the sender numbers it."""

    def __init__(self, channel: Channel, signature: Signature, call: Call, member: int, owner: object) -> None:
        super().__init__(channel, signature, call, owner)
        self.member = member
        self._contents: list[MPI.Request] | None = None

    def accepts(self, member: int, header: Signature) -> bool:
        """Return True, and start to receive the contents, if a message that arrived is the one that this receives."""
        if self._contents is not None or header.plan != self.signature.plan or self.member not in (member, ANY_SOURCE):
            return False
        rank = self.channel.members[member]
        if header._replace(number=self.signature.number) != self.signature:
            own = self.channel.members[self.channel.own]
            with_tag = f" with tag {header.plan}" if header.is_sent_by_user() else ""
            raise Mismatch(
                both_sides(
                    (own, self.signature.described(header, receives=True)),
                    (rank, header.described(self.signature)),
                    f"message number {header.number}{with_tag} from rank {rank} to rank {own}",
                ),
                rank=rank,
                collective="recv",
                number=header.number,
            )
        self.other = rank
        nbytes = header.elements * ITEMSIZES[header.dtype]
        tag = self.channel.contents_tag(header.number)
        self._contents = self.channel.receive(self.pointer, nbytes, member, tag) if nbytes else []
        return True

    def advance(self) -> bool:
        if self._contents is not None and complete(self._contents):
            self.complete()
        return self.is_complete

    @property
    def counted_as(self) -> str:
        return "recv"

    def described(self) -> str:
        return self.signature.described(receives=True)

    def waits_for(self) -> list[int]:
        own = self.channel.members[self.channel.own]
        return [rank for rank in self.channel.members if rank != own] if self.other == ANY_SOURCE else [self.other]


class Inbox:
    """The receives of one communicator in the order of their calls, and the headers that none of them has taken."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._wanted: list[ReceiveMessage] = []
        self._untaken: list[tuple[int, Signature]] = []

    def want(self, receive: ReceiveMessage) -> None:
        """Take part in the matching."""
        self._wanted.append(receive)

    def match(self) -> bool:
        """Give what has arrived to those that want it; whether anything was given."""
        if not self._wanted:
            return False
        self._take_arrived()
        before = len(self._wanted)
        for receive in list(self._wanted):
            for place, (member, header) in enumerate(self._untaken):
                if receive.accepts(member, header):
                    self._wanted.remove(receive)
                    del self._untaken[place]
                    break
        return len(self._wanted) != before

    def _take_arrived(self) -> None:
        status = MPI.Status()
        header = np.empty(NBYTES // 8, np.int64)
        while self._channel.mpi.Iprobe(MPI.ANY_SOURCE, MESSAGE_TAG, status):
            member = status.Get_source()
            self._channel.mpi.Recv(header, member, MESSAGE_TAG)
            self._untaken.append((member, unpacked(header)))
