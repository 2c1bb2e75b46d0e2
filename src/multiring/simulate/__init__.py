"""Predicting time by executing plans on a topology that need not exist.

::

    calls.py      what is simulated, and what comes out
    links.py      the links of a topology, and the way from rank to rank
    flows.py      a clock, and messages that share links
    exact.py      every rank runs its own schedule
    rounds.py     what all ranks do in one step, added up by link
    symmetry.py   links and ranks that cannot be told apart
    lockstep.py   all ranks take each step together: any number of them
    prediction.py one call by itself, as the cost model describes it
    training.py   a training step whose backward pass overlaps with its calls
    asynchronous.py   workers that exchange with parameter servers, each at its own pace
    compare.py    the same training by several strategies
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from multiring.planning.schedule import SEND, schedule
from multiring.planning.speeds import NATIVE, Speeds
from multiring.planning.topology import Topology

from .calls import Load, Outcome, SimulatedCall
from .exact import simulate_exactly
from .lockstep import simulate_in_lockstep, with_fastest_segments

__all__ = [
    "Load",
    "Outcome",
    "SimulatedCall",
    "Speeds",
    "simulate",
    "simulate_exactly",
    "simulate_in_lockstep",
    "with_fastest_segments",
]

PATIENCE = 10.0
"""Seconds of a processor up to which an irregular cluster is simulated rank by rank."""

_MESSAGE_SECONDS = 8e-6
_RANK_SECONDS = 1e-6
"""Seconds of a message, and seconds more for each rank whose messages share the links with it."""


def simulate(
    topology: Topology, calls: Sequence[SimulatedCall], speeds: Speeds = NATIVE, patience: float = PATIENCE
) -> Outcome:
    """Run calls of collectives on a topology, all of them in their order and overlapping where they do.

    All ranks in lockstep where they do not differ, which is nearly as exact. Else rank by rank, if that takes about
    ``patience`` seconds at most; beyond, in lockstep too, and the outcome says that it is approximate.
    """
    if _is_regular(topology):
        return simulate_in_lockstep(topology, calls, speeds)
    if _messages(calls) * (_MESSAGE_SECONDS + _RANK_SECONDS * topology.world_size) <= patience:
        return simulate_exactly(topology, calls, speeds)
    return replace(simulate_in_lockstep(topology, calls, speeds), approximate=True)


def _is_regular(topology: Topology) -> bool:
    """True if all places of a level have the same link, in one card, and hold as many places."""
    places = topology.places
    while places:
        if len({(place.link, len(place.places)) for place in places}) > 1 or any(place.cards > 1 for place in places):
            return False
        places = tuple(inner for place in places for inner in place.places)
    return True


def _messages(calls: Sequence[SimulatedCall]) -> int:
    """About as many as all ranks send, if all send as many as rank 0."""
    sent = {}
    for call in calls:
        if id(call.plan) not in sent:
            program = schedule(call.plan, 0).instructions
            sent[id(call.plan)] = sum(len(each.peers) for each in program if each.kind == SEND)
    return sum(call.plan.world_size * sent[id(call.plan)] * call.segments for call in calls)
