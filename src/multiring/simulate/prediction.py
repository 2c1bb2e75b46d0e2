"""Predictions of the simulator for any plan, in the form of the cost model's for those that it can compose."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from multiring.planning.methods import steps
from multiring.planning.plan import Phase, Plan
from multiring.planning.prediction import LinkLoad, PhaseTime, Prediction
from multiring.planning.speeds import NATIVE, Speeds
from multiring.planning.topology import Topology

from . import simulate
from .calls import SimulatedCall
from .links import SimulatedLinks
from .lockstep import simulate_in_lockstep
from .rounds import rounds
from .symmetry import Classes

_PATIENCE = 2.0
"""Seconds for a prediction: a job that runs may wait for it."""


def predict(topology: Topology, plan: Plan, nbytes: int, speeds: Speeds = NATIVE) -> Prediction:
    """Return the seconds of a call by itself and of each phase alone, and the bytes on its links."""
    call = SimulatedCall(plan, max(nbytes, 1))
    return Prediction(
        simulate(topology, [call], speeds, patience=_PATIENCE).seconds if plan.phases else 0.0,
        plan.segment_bytes,
        call.segments,
        plan.window,
        tuple(_alone(topology, plan, phase, call.nbytes, speeds) for phase in plan.phases),
        tuple(_link_loads(topology, plan, nbytes, speeds)),
    )


def _alone(topology: Topology, plan: Plan, phase: Phase, nbytes: int, speeds: Speeds) -> PhaseTime:
    """A phase by itself, the whole buffer being one segment."""
    only = replace(plan, phases=(phase,), segment_bytes=max(nbytes, 64))
    members = max(len(ring.members) for pattern, _ in phase.tiles() for ring in pattern)
    seconds = simulate_in_lockstep(topology, [SimulatedCall(only, nbytes)], speeds).seconds
    count = len(steps(phase.kind, phase.method, members, 0))
    return PhaseTime(phase.kind, phase.level, phase.method, members, count, seconds)


def _link_loads(topology: Topology, plan: Plan, nbytes: int, speeds: Speeds) -> Iterator[LinkLoad]:
    """The load of one link for each class of places that send and receive alike."""
    links = SimulatedLinks(topology)
    parts = np.zeros(len(links.capacity))
    for each in rounds(plan, links, speeds):
        parts += each.times * each.message * each.flows
    loads, capacity = nbytes * parts.reshape(-1, 2), np.array(links.capacity).reshape(-1, 2)
    levels = np.array([links.levels.index(links.level(2 * place)) for place in range(len(loads))], np.float64)
    alike = Classes([levels, *loads.T, *capacity.T])
    for number, count in zip(alike.first, alike.count, strict=True):
        up, down = loads[number].tolist()
        if up or down:
            level, place = links.place(number)
            yield LinkLoad(level, min(place.ranks()), count, place.link, up, down)
