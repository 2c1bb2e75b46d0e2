"""A collective algorithm as a value: spans, rings, phases, plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

KINDS = ("reduce_scatter", "all_gather", "all_reduce", "broadcast", "reduce", "all_to_all")
METHODS = ("ring", "direct", "halving", "tree")
SHARE_UNITS = 64


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """A half-open fraction [lo, hi) of the buffer, exact."""

    lo: Fraction
    hi: Fraction


@dataclass(frozen=True, slots=True)
class Ring:
    """Ranks that reduce or gather ``spans`` together, in the order of ``members``."""

    members: tuple[int, ...]
    spans: tuple[Span, ...]
    shares: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Phase:
    """Rings that run side by side: one kind of collective, one level, one method."""

    kind: str
    level: str
    method: str
    rings: Sequence[Ring]


@dataclass(frozen=True)
class Plan:
    """The phases of one collective, in order."""

    collective: str
    world_size: int
    phases: tuple[Phase, ...]
    segment_bytes: int
    root: int = field(default=0)
