"""Proving, without a network, that a plan computes what its collective promises."""

from __future__ import annotations

from ..plan import Plan
from .classes import prove_by_classes
from .full import prove_in_full

FULL_PROOF_RANKS = 256
"""Worlds up to this size are proved message by message; a full proof takes about as long as world_size squared."""

__all__ = ["FULL_PROOF_RANKS", "prove", "prove_by_classes", "prove_in_full"]


def prove(plan: Plan) -> None:
    """Prove a plan; ValueError naming phase, ring and rank where it fails."""
    if plan.world_size <= FULL_PROOF_RANKS:
        prove_in_full(plan)
    else:
        prove_by_classes(plan)
