"""Choosing a plan for a topology, a collective and a size.

Enumerates which levels to keep apart, factorisations inside a level, a mode and a method per dimension, equal shares or
shares by bandwidth, and segments; predicts each; returns the cheapest with what it rejected. The same on
every machine: no clocks, and ties have an order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from .bound import cut_bound
from .compose import LEAD, Stage, compose
from .cost import CostModel, Prediction
from .explain import text
from .layout import Layout, arranged, canonical, rooted
from .plan import COLLECTIVES, Plan
from .space import Options, grids, options
from .topology import Topology

TIE = 1.02
"""Predictions within this factor of the cheapest are ties: the model is not finer, and noise must not choose."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan that was considered, as the stages to compose it from, with its prediction."""

    stages: tuple[Stage, ...]
    prediction: Prediction

    @property
    def name(self) -> str:
        """Its phases in words, with the number of members of their rings."""
        phases = self.prediction.phases
        return ", ".join(f"{p.kind} {p.level} {p.members} {p.method}" for p in phases) or "nothing to do"


@dataclass(frozen=True)
class Choice:
    """The plan chosen; the candidates that were not, cheapest first; the bound that no plan can beat, in seconds.

    Printed, it explains itself.
    """

    plan: Plan
    chosen: Candidate
    rejected: tuple[Candidate, ...]
    bound: float
    nbytes: int

    def __str__(self) -> str:
        return text(self)


def plan(topology: Topology, collective: str, nbytes: int, root: int = 0) -> Plan:
    """The plan for a buffer of ``nbytes``, all blocks together."""
    return choose(topology, collective, nbytes, root).plan


def choose(topology: Topology, collective: str, nbytes: int, root: int = 0) -> Choice:
    """Choose the plan for a buffer of ``nbytes``, all blocks together."""
    ranked = candidates(topology, collective, nbytes, root)
    best = ranked[0]
    chosen = compose(topology, collective, best.stages, best.prediction.segment_bytes, root)
    return Choice(chosen, best, tuple(ranked[1:]), cut_bound(topology, collective, nbytes, root), nbytes)


def candidates(topology: Topology, collective: str, nbytes: int, root: int = 0) -> list[Candidate]:
    """All plans that are considered, cheapest first."""
    if collective not in COLLECTIVES:
        raise ValueError(f"unknown collective {collective!r}; known are {', '.join(COLLECTIVES)}")
    if nbytes < 0:
        raise ValueError(f"nbytes is {nbytes}; it must be 0 or more")
    if not 0 <= root < topology.world_size:
        raise ValueError(f"root is {root}; the world has ranks 0 to {topology.world_size - 1}")
    seen = rooted(topology, root) if collective in ("broadcast", "reduce") else topology
    found = [best for model, choice in _choices(seen, collective) for best in _best(model, choice, nbytes)]
    limit = TIE * min(candidate.prediction.seconds for candidate in found)
    return sorted(found, key=lambda candidate: _preference(candidate.prediction, limit))


@lru_cache(maxsize=8)
def _choices(topology: Topology, collective: str) -> list[tuple[CostModel, Options]]:
    """What there is to choose from, whatever the size, and the models to predict it with."""
    order = tuple(rank for place in topology.places for rank in place.ranks())
    tree = canonical(topology)
    found = []
    for grid in grids(tree, topology.levels, collective):
        arrangement = Layout(grid, order, arranged(tree, topology.levels, grid))
        models = {led: CostModel(arrangement, collective, led) for led in (False, True)}
        for choice in options(grid, arrangement.shape, collective):
            found.append((models[any(stages[0].mode == LEAD for stages in choice)], choice))
    return found


def _preference(prediction: Prediction, limit: float) -> tuple[float, float]:
    """Time; of those within the limit, the one that relies least on segments overlapping."""
    if prediction.seconds <= limit:
        return 0.0, prediction.unpipelined
    return prediction.seconds, 0.0


def _best(model: CostModel, choice: Options, nbytes: int) -> list[Candidate]:
    """The cheapest choice of one stage per dimension; and those of one method throughout, to compare with."""

    def tried(stages: Sequence[Stage]) -> Candidate:
        return Candidate(tuple(stages), model.predict(stages, nbytes))

    best = tried([stages[0] for stages in choice])
    for dimension, stages in enumerate(choice):
        for stage in stages[1:]:
            other = tried([*best.stages[:dimension], stage, *best.stages[dimension + 1 :]])
            if other.prediction.seconds < best.prediction.seconds:
                best = other
    plain = [tried(stages) for stages in zip(*choice, strict=False) if len({s.method for s in stages}) == 1]
    return [best, *(candidate for candidate in plain if candidate.stages != best.stages)]
