"""A strategy in the place of the planner's choice."""

from __future__ import annotations

from dataclasses import replace

from multiring.planning.bound import cut_bound
from multiring.planning.choice import Candidate, Choice
from multiring.planning.plan import is_id
from multiring.planning.planner import candidates
from multiring.planning.speeds import NATIVE, Speeds
from multiring.planning.strategies import Strategy, strategy
from multiring.planning.topology import Topology

from .prediction import predict


def wanted(name: str, wire: str) -> Strategy | None:
    """The strategy that MULTIRING_PLAN names, where it is not empty, the id of a plan, or the planner's own.

    ValueError for one that is none, or that MULTIRING_WIRE forbids.
    """
    if not name or is_id(name) or name == "multiring":
        return None
    try:
        found = strategy(name)
    except ValueError as error:
        raise ValueError(f"MULTIRING_PLAN: {error}") from None
    if wire:
        raise ValueError(
            f"MULTIRING_PLAN={name} sends float32 as it is, which MULTIRING_WIRE={wire} forbids: unset one"
        )
    return found


def choose(topology: Topology, strategy: Strategy, nbytes: int, speeds: Speeds = NATIVE) -> Choice:
    """The plan of a strategy for an all_reduce of ``nbytes``, as the simulator predicts it, beside the planner's
    candidates, which are all rejected; ``speeds`` are those of the ranks. ValueError where the topology cannot have it,
    or where it sends more messages than can be simulated."""
    speeds = replace(speeds, ranks_per_core=1.0)  # the simulator knows no other: so all predictions are of one kind
    plan = strategy.plan(topology, nbytes)
    predicted = predict(topology, plan, nbytes, speeds)
    chosen = Candidate((), lambda: predicted, lambda _: plan)
    rejected = tuple(candidates(topology, plan.collective, nbytes, speeds=speeds))
    bound = cut_bound(topology, plan.collective, nbytes)
    return Choice(plan, chosen, rejected, bound, nbytes, topology, speeds=speeds)
