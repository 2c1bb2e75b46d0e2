"""Start and promise of each collective, as data.

The value of an element on a rank is the set of ranks whose contribution it holds, as a bit mask; ``UNDEFINED`` where it
holds nothing that may be used; in an all_to_all, which moves blocks, the pair (rank, block) that it came from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..plan import Plan

Value = int | tuple[int, int]
UNDEFINED: Value = 0
ANYTHING: Value = -1
"""The promise of a place of which nothing is promised."""


@dataclass(frozen=True)
class Condition:
    """The value of the elements of a block on a rank, before and after: functions of (plan, rank, block)."""

    before: Callable[[Plan, int, int], Value]
    after: Callable[[Plan, int, int], Value]


def _own(plan: Plan, rank: int, block: int) -> Value:
    return 1 << rank


def _everybodys(plan: Plan, rank: int, block: int) -> Value:
    return (1 << plan.world_size) - 1


_SUM_EVERYWHERE = Condition(before=_own, after=_everybodys)

CONDITIONS = {
    "all_reduce": _SUM_EVERYWHERE,
    "barrier": _SUM_EVERYWHERE,
    "reduce": Condition(_own, lambda p, rank, block: _everybodys(p, rank, block) if rank == p.root else ANYTHING),
    "reduce_scatter": Condition(
        _own, lambda p, rank, block: _everybodys(p, rank, block) if rank == block else ANYTHING
    ),
    "all_gather": Condition(
        before=lambda p, rank, block: 1 << rank if rank == block else UNDEFINED, after=lambda p, rank, block: 1 << block
    ),
    "broadcast": Condition(
        before=lambda p, rank, block: 1 << rank if rank == p.root else UNDEFINED,
        after=lambda p, rank, block: 1 << p.root,
    ),
    "all_to_all": Condition(before=lambda p, rank, block: (rank, block), after=lambda p, rank, block: (block, rank)),
}
"""A barrier is an all_reduce of one element: nobody has everybody's contribution before everybody has come."""
