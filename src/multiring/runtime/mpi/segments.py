"""Executes a program on a buffer: every segment runs the whole list on its own, several at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np
from mpi4py import MPI

from multiring import _native
from multiring._native import Call
from multiring.errors import Mismatch
from multiring.runtime.buffers import copy
from multiring.runtime.mpi.channel import LANES, SLOTS, Channel, complete
from multiring.runtime.mpi.operation import Operation
from multiring.runtime.mpi.program import REDUCE, REPAY, ROUND, SEND, Extent, InstalledStep, Program, staged_bytes
from multiring.runtime.mpi.signature import NBYTES, Signature, both_sides, unpacked

_FLOAT32 = _native.DTYPES.index("float32")
_SUM, _AVG = _native.OPS.index("sum"), _native.OPS.index("avg")

Requests = list[MPI.Request]


class CollectiveOperation(Operation):
    """A program on the buffer of a call, of ``signature.elements`` elements in each of its blocks."""

    def __init__(self, channel: Channel, program: Program, signature: Signature, call: Call, owner: object) -> None:
        super().__init__(channel, signature, call, owner)
        self.program = program
        self.itemsize = _native.ITEMSIZES[signature.dtype]
        self.narrows = signature.dtype == _FLOAT32 and signature.op in (_SUM, _AVG)
        self.residual = call.residual if self.narrows else 0
        self.slice = program.slice_elements(self.itemsize)
        self._count = max(1, -(-signature.elements // self.slice))
        self._rows = min(program.facts.window, SLOTS, self._count)
        self._lane = signature.number % LANES
        self._has_begun = False
        self._flying: deque[Segment] = deque()
        self._next = 0
        self._headers: dict[int, tuple[np.ndarray[tuple[int], np.dtype[np.int64]], Requests]] = {}
        self._told: Requests = []

    def advance(self) -> bool:
        if not self._has_begun and not self._begin():
            return False
        progressed = self._hear()
        for segment in self._flying:
            progressed |= segment.advance(not self._headers)
        progressed |= self._slide()
        if self._next == self._count and not self._flying and not self._headers and complete(self._told):
            self._end()
        return progressed

    def waits_for(self) -> list[int]:
        if not self._has_begun:
            return []
        members = set(self._headers)
        if not members and self._flying:
            members = set(self._flying[0].waits_for())
        return sorted(self.channel.members[member] for member in members)

    def _begin(self) -> bool:
        if self.channel.lanes[self._lane] is not None:
            return False
        self.channel.lanes[self._lane] = self
        header, tag = self.signature.packed(), self.tag(0)
        for member in self.program.hears:
            arriving = np.empty_like(header)
            self._headers[member] = arriving, self.channel.receive(arriving.ctypes.data, NBYTES, member, tag)
        self._header = header  # kept while it is sent
        for member in self.program.tells:
            self._told += self.channel.send(header.ctypes.data, NBYTES, member, tag)
        self._row_bytes = self.program.staging_bytes(self.signature.elements, self.itemsize, self.narrows)
        staging = self.channel.staging[self._lane]
        if staging is None or staging.nbytes < self._rows * self._row_bytes:
            staging = self.channel.staging[self._lane] = np.empty(self._rows * self._row_bytes, np.uint8)
        self._staging: int = staging.ctypes.data
        self._has_begun = True
        self._slide()
        return True

    def _hear(self) -> bool:
        """Compare the calls of those that send to this rank with its own; Mismatch shows both."""
        heard = [member for member, (_, requests) in self._headers.items() if complete(requests)]
        for member in heard:
            theirs = unpacked(self._headers.pop(member)[0])
            if theirs != self.signature:
                rank, own = self.channel.members[member], self.channel.members[self.channel.own]
                raise Mismatch(
                    _native.explain_labels(
                        both_sides(
                            (own, self.signature.described(theirs)),
                            (rank, theirs.described(self.signature)),
                            f"call number {self.signature.number}",
                        )
                    ),
                    rank=rank,
                    collective=_native.COLLECTIVES[self.signature.collective],
                    number=self.signature.number,
                )
        return bool(heard)

    def _slide(self) -> bool:
        """Retire segments that are done and begin as many others."""
        before = self._next
        while True:
            while self._flying and self._flying[0].is_done:
                self._flying.popleft()
            if self._next == self._count or len(self._flying) == self._rows:
                return self._next != before
            row = self._next % self._rows
            segment = Segment(self, self._next, self._staging + row * self._row_bytes, self.tag(row))
            self._next += 1
            self._flying.append(segment)
            segment.advance(not self._headers)

    def _end(self) -> None:
        self.channel.lanes[self._lane] = None
        self.complete()
        record = self.program
        record.operations += 1
        record.bytes += self.nbytes
        record.seconds += self.ended_at - self.began

    @property
    def nbytes(self) -> int:
        return self.program.facts.blocks * super().nbytes

    @property
    def segments(self) -> int:
        return self._count

    def tag(self, row: int) -> int:
        return self._lane * SLOTS + row


class Segment:
    """One slice of every block, on its way through the steps; ``staging`` is memory of its own."""

    def __init__(self, call: CollectiveOperation, index: int, staging: int, tag: int) -> None:
        self._call = call
        self._channel = call.channel
        self._steps = call.program.steps
        self._staging = staging
        self._tag = tag
        self._first = index * call.slice
        length = min(call.slice, call.signature.elements - self._first)
        self._extents = call.program.layout(length, call.itemsize, call.narrows).extents
        self._next = 0
        self._sends: dict[int, Requests] = {}
        self._arrivals: dict[int, list[Requests]] = {}
        self.is_done = False
        for step in sorted(call.program.early):
            if self._extents[step].elements:
                self._receive(step)

    def advance(self, may_receive: bool) -> bool:
        """Go on as far as possible; without ``may_receive``, up to the first step that needs what others send."""
        if self.is_done:
            return False
        before = self._next
        while self._next < len(self._steps):
            step, extent = self._steps[self._next], self._extents[self._next]
            if extent.elements and not self._do(step, extent, may_receive):
                break
            self._next += 1
        self.is_done = self._next == len(self._steps) and all([complete(sent) for sent in self._sends.values()])
        return self.is_done or self._next != before

    def waits_for(self) -> list[int]:
        """The members without which the next step cannot be done."""
        if self._next < len(self._steps):
            peers = [peer for peer in self._steps[self._next].peers if peer != self._channel.own]
            arrivals = self._arrivals.get(self._next, [])
            return [peer for peer, requests in zip(peers, arrivals, strict=False) if requests] or peers
        return [peer for index, sent in self._sends.items() if sent for peer in self._steps[index].peers]

    def _do(self, step: InstalledStep, extent: Extent, may_receive: bool) -> bool:
        if step.kind == SEND:
            self._send(step, extent)
            return True
        settles = step.kind in (REPAY, ROUND)
        if settles and not self._call.residual:
            return True
        index = self._next
        if not (may_receive or settles) or not all([complete(self._sends.get(b, [])) for b in step.blockers]):
            return False
        if settles:
            self._settle(step, extent)
            return True
        if index not in self._arrivals:
            self._receive(index)
        if not all([complete(requests) for requests in self._arrivals[index]]):
            return False
        if step.kind == REDUCE:
            self._reduce(step, extent)
        elif self._is_staged(index):
            self._unstage(step, extent)
        return True

    def _send(self, step: InstalledStep, extent: Extent) -> None:
        address, nbytes = self._address(step, extent), self._message_bytes(step, extent)
        if self._is_narrow(step):
            staged = self._staging + extent.staging
            _native.narrow(step.wire, staged, address, extent.elements)
            address = staged
        self._sends[self._next] = [
            request for peer in step.peers for request in self._channel.send(address, nbytes, peer, self._tag)
        ]

    def _receive(self, index: int) -> None:
        """Ask for the messages of a step: into staging, or, where nothing else is to be done, where they belong."""
        step, extent = self._steps[index], self._extents[index]
        places = self._places(step, extent) if self._is_staged(index) else iter([self._address(step, extent)])
        peers = [peer for peer in step.peers if peer != self._channel.own]
        nbytes = self._message_bytes(step, extent)
        self._arrivals[index] = [
            self._channel.receive(place, nbytes, peer, self._tag) for peer, place in zip(peers, places, strict=False)
        ]

    def _reduce(self, step: InstalledStep, extent: Extent) -> None:
        """Sum in the order of the peers, this rank at its place among them, so that the plan fixes the bits."""
        destination, places = self._address(step, extent), self._places(step, extent)
        sources = [destination if peer == self._channel.own else next(places) for peer in step.peers]
        signature = self._call.signature
        divisor = len(self._channel.members) if step.final and signature.op == _AVG else 1
        wires = (step.wire, step.rounded) if self._call.narrows else (0, 0)
        kept_in = self._residual(step, extent) if step.keeps else 0
        _native.reduce(
            destination, sources, extent.elements, signature.dtype, signature.op, float(divisor), *wires, kept_in
        )

    def _settle(self, step: InstalledStep, extent: Extent) -> None:
        """Add what this rank owes to what it contributes, or round that and owe what it loses."""
        values, owed = self._address(step, extent), self._residual(step, extent)
        if step.kind == REPAY:
            _native.repay(values, owed, extent.elements)
        else:
            _native.round(step.wire, values, owed, extent.elements)

    def _residual(self, step: InstalledStep, extent: Extent) -> int:
        """The address of that of a step's elements; 0 in a call without one."""
        call = self._call
        return call.residual and call.residual + (self._address(step, extent) - call.pointer)

    def _unstage(self, step: InstalledStep, extent: Extent) -> None:
        destination, staged = self._address(step, extent), self._staging + extent.staging
        if self._is_narrow(step):
            _native.widen(step.wire, destination, staged, extent.elements)
        else:
            copy(destination, staged, extent.elements * self._call.itemsize)

    def _is_staged(self, index: int) -> bool:
        return index in self._call.program.early or self._is_narrow(self._steps[index])

    def _is_narrow(self, step: InstalledStep) -> bool:
        return self._call.narrows and step.wire != 0

    def _message_bytes(self, step: InstalledStep, extent: Extent) -> int:
        if self._is_narrow(step):
            return _native.narrow_bytes(step.wire, extent.elements)
        return extent.elements * self._call.itemsize

    def _places(self, step: InstalledStep, extent: Extent) -> Iterator[int]:
        size = staged_bytes(extent.elements * self._call.itemsize)
        return iter([self._staging + extent.staging + size * each for each in range(len(step.peers))])

    def _address(self, step: InstalledStep, extent: Extent) -> int:
        elements = step.block * self._call.signature.elements + self._first + extent.first
        return self._call.pointer + elements * self._call.itemsize
