"""Stages of a plan, one for each dimension of a grid, and the phases that follow from them.

A stage has a *mode*. ``split``: a reduce_scatter on the way out and an all_gather on the way back; in between, each
rank of a unit owns a part of the unit's sum. ``lead``: a reduce and a broadcast; in between, the first rank of a unit
has the whole sum. ``all``: one all_reduce, after which every rank has the sum; only the outermost dimensions can have
this mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .layout import Dimension

SPLIT, LEAD, ALL = "split", "lead", "all"


@dataclass(frozen=True, slots=True)
class Stage:
    """Stage of a plan in one dimension: its mode, its method, True if shares follow the bandwidths, its wire.

    ``ordered``: members of its rings, and the terms of every sum, stand by ascending rank, the root before them.
    """

    dimension: Dimension
    mode: str
    method: str
    weighted: bool = False
    wire: str = ""
    ordered: bool = False

    def __str__(self) -> str:
        size = f":{self.dimension.size}" if self.dimension.size else ""
        words = [
            f"{self.dimension.level}{size}",
            self.mode,
            self.method,
            "weighted" if self.weighted else "",
            self.wire,
        ]
        return " ".join(filter(None, words))


_OUT = {
    "all_reduce": {SPLIT: "reduce_scatter", LEAD: "reduce", ALL: "all_reduce"},
    "reduce_scatter": {SPLIT: "reduce_scatter"},
    "reduce": {LEAD: "reduce"},
    "all_to_all": {ALL: "all_to_all"},
    "barrier": {SPLIT: "reduce_scatter", LEAD: "reduce", ALL: "all_reduce"},
}
_BACK = {
    "all_reduce": {SPLIT: "all_gather", LEAD: "broadcast"},
    "barrier": {SPLIT: "all_gather", LEAD: "broadcast"},
    "all_gather": {SPLIT: "all_gather"},
    "broadcast": {LEAD: "broadcast"},
}


def phase_kinds(collective: str, stages: Sequence[Stage]) -> list[tuple[int, str]]:
    """The phases of a collective, as (depth, kind): out through the stages from depth 1, and back."""
    out, back = _OUT.get(collective, {}), _BACK.get(collective, {})
    modes = [(depth, stage.mode) for depth, stage in enumerate(stages, start=1)]
    return [(depth, out[mode]) for depth, mode in modes if mode in out] + [
        (depth, back[mode]) for depth, mode in reversed(modes) if mode in back
    ]


def phase_wire(kind: str, stage: Stage, stages: Sequence[Stage]) -> str:
    """The format in which a phase of a stage sends.

    Results that are spread between hosts have been rounded to the narrow format of any stage, and travel in it.
    """
    if kind in ("all_gather", "broadcast") and stage.dimension.levels != ("rank",):
        return max(other.wire for other in stages)
    return stage.wire
