"""Proving, without a network, that a plan computes what its collective promises."""

from __future__ import annotations

from ..plan import Plan
from .classes import prove_by_classes
from .full import prove_in_full

FULL_PROOF_RANKS = 256
"""Worlds up to this size are proved message by message; a full proof takes about as long as world_size squared."""

__all__ = ["FULL_PROOF_RANKS", "prove", "prove_by_classes", "prove_in_full"]


def prove(plan: Plan) -> None:
    """Prove a plan; ValueError naming phase, ring and rank where it fails.

    A plan whose ranks form no classes, such as a tree over hosts that all differ, is proved in full whatever its size,
    since it has few messages a rank.
    """
    if plan.world_size > FULL_PROOF_RANKS:
        try:
            return prove_by_classes(plan)
        except ValueError:
            pass
    prove_in_full(plan)
