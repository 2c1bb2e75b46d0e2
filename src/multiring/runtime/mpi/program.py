"""A schedule as it is installed: what each instruction waits for, and where its span lies in a slice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from multiring._native import INSTRUCTIONS, PlanFacts, cut
from multiring.planning.plan import FINEST_GRAIN

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

SEND, REDUCE, STORE, REPAY, ROUND = map(INSTRUCTIONS.index, ("send", "reduce", "store", "repay", "round"))
LARGEST_SEGMENT = 1 << 30
"""Bytes of a message that any MPI can count."""


@dataclass(frozen=True)
class InstalledStep:
    """An instruction of `Engine.install`; ``peers`` holds this rank too where its own contribution is summed."""

    kind: int
    phase: int
    peers: tuple[int, ...]
    block: int
    lo: tuple[int, int]
    hi: tuple[int, int]
    final: bool
    wire: int
    rounded: int
    keeps: bool
    blockers: tuple[int, ...]
    """The earlier sends of bytes that this one writes."""


class Extent(NamedTuple):
    """The elements of a step in a slice, and the place of a copy for each of its messages in the segment's staging."""

    first: int
    elements: int
    staging: int


class SliceLayout(NamedTuple):
    extents: list[Extent]
    staging_bytes: int


class Program:
    """The instructions of one rank, and what its calls have taken."""

    def __init__(
        self,
        communicator: int,
        instructions: NDArray[np.int64],
        peers: NDArray[np.int32],
        own: int,
        facts: PlanFacts,
    ) -> None:
        self.communicator = communicator
        self.own = own
        self.facts = facts
        self.steps: list[InstalledStep] = []
        members = peers.tolist()
        for kind, phase, first, count, block, *rest in instructions.tolist():
            lo, hi = tuple(rest[:2]), tuple(rest[2:4])
            final, wire, rounded, keeps = rest[4:]
            blockers = () if kind == SEND else tuple(self._sends_from(block, lo, hi))
            who = tuple(members[first : first + count])
            step = InstalledStep(kind, phase, who, block, lo, hi, bool(final), wire, rounded, bool(keeps), blockers)
            self.steps.append(step)
        self.early = self._find_early()
        self.hears = sorted({peer for step in self.steps if step.kind != SEND for peer in step.peers} - {own})
        self.tells = sorted({peer for step in self.steps if step.kind == SEND for peer in step.peers})
        self.layout = lru_cache(maxsize=8)(self._layout)
        self.operations, self.bytes, self.seconds = 0, 0, 0.0

    def _sends_from(self, block: int, lo: tuple[int, int], hi: tuple[int, int]) -> Iterator[int]:
        for index, step in enumerate(self.steps):
            if step.kind == SEND and step.block == block and _less(step.lo, hi) and _less(lo, step.hi):
                yield index

    def _find_early(self) -> frozenset[int]:
        """The receiving steps whose messages arrive in staging, asked for when the segment begins.

        These are sums; what overwrites bytes that the same phase sends, since two ranks that exchange would wait for
        each other to receive; and what precedes such a message from the same rank, since MPI keeps them in order.
        """
        early: set[int] = set()
        before: set[int] = set()
        for index, step in reversed(list(enumerate(self.steps))):
            exchanges = any(self.steps[blocker].phase == step.phase for blocker in step.blockers)
            if step.kind == REDUCE or (step.kind == STORE and (exchanges or before.intersection(step.peers))):
                early.add(index)
                before.update(step.peers)
        return frozenset(early)

    def slice_elements(self, itemsize: int) -> int:
        """Elements of a block in every segment but the last."""
        least = max(1, self.facts.grain // itemsize)
        return max(least, min(self.facts.segment_bytes, LARGEST_SEGMENT) // itemsize // least * least)

    def staging_bytes(self, elements: int, itemsize: int, narrows: bool) -> int:
        """Bytes of staging for any segment of a call; cuts are rounded, so a shorter last segment may take the most."""
        full = min(self.slice_elements(itemsize), elements)
        last = elements - (elements - 1) // full * full if full else 0
        return max(self.layout(length, itemsize, narrows).staging_bytes for length in {full, last})

    def _layout(self, slice: int, itemsize: int, narrows: bool) -> SliceLayout:
        extents: list[Extent] = []
        staging = 0
        for index, step in enumerate(self.steps):
            first = cut(*step.lo, slice, itemsize, self.facts.grain)
            count = cut(*step.hi, slice, itemsize, self.facts.grain) - first
            extents.append(Extent(first, count, staging))
            if index in self.early or (narrows and step.wire):
                copies = 1 if step.kind == SEND else len(step.peers)
                staging += copies * staged_bytes(count * itemsize)
        return SliceLayout(extents, staging)


def staged_bytes(nbytes: int) -> int:
    """Bytes of a copy in the staging: whole cache lines."""
    return -(-nbytes // FINEST_GRAIN) * FINEST_GRAIN


def _less(a: tuple[int, int], b: tuple[int, int]) -> bool:
    return a[0] * b[1] < b[0] * a[1]
