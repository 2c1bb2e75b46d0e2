"""Choosing a plan for a topology, a collective and a size.

Enumerates which levels to keep apart, factorisations inside a level, a mode and a method per dimension, equal shares or
shares by bandwidth, and segments; predicts each; returns the cheapest with what it rejected. The same on
every machine: no clocks, and ties have an order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial

from .bound import cut_bound
from .choice import TIE, Candidate, Choice
from .compose import compose
from .cost import CostModel
from .layout import Layout, canonical, rooted, shape_in
from .plan import COLLECTIVES, REDUCING, ROOTED, SENT_PART, WIRES, Plan
from .prediction import Prediction
from .space import Options, grids, options
from .speeds import NATIVE, Speeds
from .stages import LEAD, Stage
from .topology import LEVELS, Link, Place, Topology

AUTO = "auto"
"""The wire that is as wide as the buffer, or bfloat16 in the outer levels where that is worth it."""

WORTH_NARROWING = 0.9
"""A narrow wire, or a further narrow level, must bring the predicted time down to this part of what it was: bits are
given up for no less."""

Wire = Mapping[str, str] | str
"""The format in which float32 travels between the places of a level, by level; or ``AUTO``; or empty, and it travels
as it is."""


def size_class(nbytes: int) -> int:
    """The size that a job plans for: the power of two at or below ``nbytes``, so that buffers share their plans."""
    return 1 << max(nbytes.bit_length() - 1, 0)


def plan(
    topology: Topology, collective: str, nbytes: int, root: int = 0, wire: Wire = "", speeds: Speeds = NATIVE
) -> Plan:
    """The plan for a buffer of ``nbytes``, all blocks together."""
    return choose(topology, collective, nbytes, root, wire, speeds=speeds).plan


def choose(
    topology: Topology,
    collective: str,
    nbytes: int,
    root: int = 0,
    wire: Wire = "",
    forced: str = "",
    *,
    ordered: bool = False,
    speeds: Speeds = NATIVE,
) -> Choice:
    """Choose the plan for a buffer of ``nbytes``, all blocks together.

    ``wire`` concerns all_reduce alone. The bound is that of what is sent. A candidate whose plan has the id ``forced``
    is chosen whatever it is predicted to take; without one, the choice is as usual. ``ordered`` plans sum every element
    at once, in the order of the ranks, the root before them: the bits depend on no plan. They send no narrow wire.
    ``speeds`` are those of the ranks.
    """
    check_wire(wire, topology)
    if ordered and wire:
        raise ValueError(f"wire {wire!r}: what is rounded depends on the plan, and ordered sums must not")
    by_level = dict(wire) if isinstance(wire, Mapping) else {}
    ranked = candidates(topology, collective, nbytes, root, by_level, ordered=ordered, speeds=speeds)
    if wire == AUTO and collective == "all_reduce":
        for first in range(len(topology.levels) - 1, 0, -1):
            narrow = dict.fromkeys(topology.levels[first:], WIRES[0])
            others = candidates(topology, collective, nbytes, root, narrow, speeds=speeds)
            if others[0].prediction.seconds <= WORTH_NARROWING * ranked[0].prediction.seconds:
                by_level, ranked = narrow, others
    wanted = (c for c in ranked if c.plan.id == forced) if forced else iter(())
    best = next(wanted, ranked[0])
    bound = cut_bound(_as_if_wider(topology, best.plan, by_level), collective, nbytes, root)
    return Choice(best.plan, best, tuple(c for c in ranked if c is not best), bound, nbytes, topology, speeds=speeds)


def check_wire(wire: Wire, topology: Topology) -> None:
    """ValueError unless it names levels between hosts of the topology, and one format."""
    if not isinstance(wire, Mapping):
        if wire not in ("", AUTO):
            raise ValueError(f"wire={wire!r}: expected formats by level, such as {{'rack': 'bfloat16'}}, or {AUTO!r}")
        return
    levels = topology.levels[1:]
    for level in wire:
        if level not in levels:
            raise ValueError(f"wire for level {level!r}: the topology has {', '.join(levels)}")
    check_wire_words(wire)


def check_wire_words(wire: Mapping[str, str]) -> None:
    """ValueError unless it names levels between hosts that some topology has, and one format."""
    for level, format in wire.items():
        if level not in LEVELS[1:]:
            raise ValueError(f"wire for level {level!r}: known are {', '.join(LEVELS[1:])}")
        if format not in WIRES:
            raise ValueError(f"wire {format!r} for level {level}: known are {', '.join(WIRES)}")
    if len(set(wire.values())) > 1:
        raise ValueError(f"wire {dict(wire)}: the sum can be rounded to one format only")


def _as_if_wider(topology: Topology, plan: Plan, wire: Mapping[str, str]) -> Topology:
    """The topology by which the bound of a plan with narrow wires is found: half the bytes are as good as twice the
    rate. What crosses a narrow level is narrow on the links within as well, so these count as wider too."""
    if not plan.wire:
        return topology
    outermost = max(topology.levels.index(level) for level in wire)

    def widened(places: Sequence[Place], levels: Sequence[str]) -> tuple[Place, ...]:
        factor = 1 / SENT_PART[plan.wire] if len(levels) <= outermost + 1 else 1.0
        return tuple(
            replace(
                place,
                link=_scaled(place.link, factor),
                places=widened(place.places, levels[:-1]) if place.places else (),
            )
            for place in places
        )

    return Topology(topology.levels, widened(topology.places, topology.levels))


def _scaled(link: Link, factor: float) -> Link:
    """The link with its rates and burst multiplied by ``factor``."""
    return Link(factor * link.up, factor * link.down, link.latency, factor * link.burst)


def candidates(
    topology: Topology,
    collective: str,
    nbytes: int,
    root: int = 0,
    wire: Mapping[str, str] | None = None,
    *,
    ordered: bool = False,
    speeds: Speeds = NATIVE,
) -> list[Candidate]:
    """All plans that are considered, cheapest first; ``ordered`` and ``speeds`` as in `choose`."""
    if collective not in COLLECTIVES:
        raise ValueError(f"unknown collective {collective!r}; known are {', '.join(COLLECTIVES)}")
    if nbytes < 0:
        raise ValueError(f"nbytes is {nbytes}; it must be 0 or more")
    if not 0 <= root < topology.world_size:
        raise ValueError(f"root is {root}; the world has ranks 0 to {topology.world_size - 1}")
    seen = rooted(topology, root) if collective in ROOTED else topology
    narrow = tuple(sorted((wire or {}).items())) if collective == "all_reduce" else ()
    choices = _choices(seen, collective, narrow, ordered and collective in REDUCING, speeds)
    composed = partial(_composed, topology, collective, root)
    found = [best for model, choice in choices for best in _best(model, choice, nbytes, composed)]
    limit = TIE * min(candidate.prediction.seconds for candidate in found)
    return sorted(found, key=lambda candidate: _preference(candidate.prediction, limit))


@lru_cache(maxsize=8)
def _choices(
    topology: Topology, collective: str, wire: tuple[tuple[str, str], ...], ordered: bool, speeds: Speeds
) -> list[tuple[CostModel, Options]]:
    """What there is to choose from, whatever the size, and the models to predict it with."""
    order = tuple(rank for place in topology.places for rank in place.ranks())
    tree = canonical(topology)
    found = []
    for grid in grids(tree, topology.levels, collective, ordered):
        arrangement = Layout(grid, order, shape_in(tree, topology.levels, grid))
        models = {led: CostModel(arrangement, collective, led, speeds) for led in (False, True)}
        for by_dimension in options(grid, arrangement.shape, collective, dict(wire), ordered):
            found.append((models[any(stages[0].mode == LEAD for stages in by_dimension)], by_dimension))
    return found


def _preference(prediction: Prediction, limit: float) -> tuple[float, float]:
    """Time; of those within the limit, the one that relies least on segments and calls overlapping."""
    if prediction.seconds <= limit:
        return 0.0, prediction.unpipelined
    return prediction.seconds, 0.0


def _time(candidate: Candidate) -> tuple[float, float]:
    """What a candidate takes, to the nanosecond; equals are told apart by what they take without pipelining."""
    return round(candidate.prediction.seconds, 9), candidate.prediction.unpipelined


def _composed(topology: Topology, collective: str, root: int, stages: Sequence[Stage], prediction: Prediction) -> Plan:
    return compose(topology, collective, stages, prediction.segment_bytes, root, prediction.window)


def _best(
    model: CostModel, by_dimension: Options, nbytes: int, composed: Callable[[Sequence[Stage], Prediction], Plan]
) -> list[Candidate]:
    """The cheapest choice of one stage per dimension; and those of one method throughout, to compare with."""

    def tried(stages: Sequence[Stage]) -> Candidate:
        prediction = model.predict(stages, nbytes)
        return Candidate(tuple(stages), prediction, partial(composed, stages, prediction))

    best = tried([stages[0] for stages in by_dimension])
    for dimension, stages in enumerate(by_dimension):
        for stage in stages[1:]:
            other = tried([*best.stages[:dimension], stage, *best.stages[dimension + 1 :]])
            if _time(other) < _time(best):
                best = other
    plain = [tried(stages) for stages in zip(*by_dimension, strict=False) if len({s.method for s in stages}) == 1]
    return [best, *(candidate for candidate in plain if candidate.stages != best.stages)]
