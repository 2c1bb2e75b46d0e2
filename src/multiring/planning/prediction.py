"""What the cost model says of a plan: how long a call takes, and what each phase and each link has of it."""

from __future__ import annotations

from dataclasses import dataclass

from .topology import Link


@dataclass(frozen=True, slots=True)
class LinkLoad:
    """Bytes that the link of a place sends and receives in one call.

    ``level`` and ``rank`` name the place: that of the level around the rank. ``count`` links look alike; this is
    the busiest of them.
    """

    level: str
    rank: int
    count: int
    link: Link
    up: float
    down: float

    @property
    def seconds(self) -> float:
        """The time that these bytes take alone."""
        return max(self.up / self.link.up, self.down / self.link.down)


@dataclass(frozen=True, slots=True)
class PhaseTime:
    """What one phase takes by itself, the whole buffer being one segment; its longest rings have ``members``."""

    kind: str
    level: str
    method: str
    members: int
    steps: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """How long a call takes, in how many segments, ``window`` of them in flight, and why.

    In every phase each link between hosts passes ``burst_seconds`` of its rate at once.
    """

    seconds: float
    segment_bytes: int
    segments: int
    window: int
    phases: tuple[PhaseTime, ...]
    links: tuple[LinkLoad, ...]
    burst_seconds: float = 0.0

    @property
    def unpipelined(self) -> float:
        """Seconds with the whole buffer as one segment."""
        return sum(phase.seconds for phase in self.phases)
