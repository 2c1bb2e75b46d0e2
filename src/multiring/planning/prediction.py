"""Predictions of the cost model for a plan: the time of a call, and the parts of each phase and each link."""

from __future__ import annotations

from dataclasses import dataclass

from .topology import Link


@dataclass(frozen=True, slots=True)
class LinkLoad:
    """Bytes that the link of a place sends and receives in one call.

    The place is the one of ``level`` that holds ``rank``. ``count`` links look alike, and this is the busiest of them.
    """

    level: str
    rank: int
    count: int
    link: Link
    up: float
    down: float

    @property
    def seconds(self) -> float:
        """Seconds that these bytes take by themselves."""
        return max(self.up / self.link.up, self.down / self.link.down)


@dataclass(frozen=True, slots=True)
class PhaseTime:
    """Seconds of one phase by itself, with the whole buffer as one segment; its longest ring has ``members``."""

    kind: str
    level: str
    method: str
    members: int
    steps: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """The seconds of a call, its segments, of which ``window`` are in flight, and what each phase and link has of them.

    In every phase each link between hosts passes at once the bytes that take ``burst_seconds`` at its rate.
    """

    seconds: float
    segment_bytes: int
    segments: int
    window: int
    phases: tuple[PhaseTime, ...]
    links: tuple[LinkLoad, ...]
    burst_seconds: float = 0.0
