"""Simulated calls of collectives on a topology, and their outcome."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from multiring.planning.plan import Plan


@dataclass(frozen=True, slots=True)
class SimulatedCall:
    """A collective with ``nbytes`` (all blocks together), which every rank calls at ``ready`` seconds."""

    plan: Plan
    nbytes: int
    ready: float = 0.0

    def __post_init__(self) -> None:
        if self.nbytes < 1 or self.ready < 0:
            raise ValueError(f"a call has at least one byte and starts at 0 or later, not {self.nbytes}, {self.ready}")

    @property
    def segment_bytes(self) -> int:
        """Bytes of a segment, all blocks together."""
        return self.plan.segment_bytes * self.plan.blocks

    @property
    def segments(self) -> int:
        """Number of segments."""
        return -(-self.nbytes // self.segment_bytes)

    def bytes_of(self, segment: int) -> int:
        """Bytes of a segment: all are full but the last."""
        return min(self.segment_bytes, self.nbytes - segment * self.segment_bytes)


@dataclass(frozen=True, slots=True)
class Load:
    """Bytes that a link carried, and the seconds that it needs for them alone; ``count`` links did the same."""

    link: str
    count: int
    nbytes: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """Begin and end of each call on all ranks, and the loads of all links, the busiest first.

    ``approximate`` where ranks differ and yet all were taken through each step together.
    """

    begun: tuple[float, ...]
    ended: tuple[float, ...]
    loads: tuple[Load, ...]
    approximate: bool = False

    @property
    def seconds(self) -> float:
        """Until the last call ended."""
        return max(self.ended, default=0.0)


def check_world(calls: Sequence[SimulatedCall], world_size: int) -> None:
    """ValueError for a plan of another world."""
    for call in calls:
        if call.plan.world_size != world_size:
            raise ValueError(f"plan {call.plan.id} is for {call.plan.world_size} ranks, the topology has {world_size}")
