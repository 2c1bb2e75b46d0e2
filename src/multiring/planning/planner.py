"""Choosing a plan for a topology, a collective and a size.

A candidate says which levels are merged, how a level is cut in dimensions, the mode and method of each dimension, and
whether shares follow bandwidths (`space`). The cost model predicts the time of each, with the best segments for it, and
the cheapest is chosen. The choice is the same on every machine: it looks at no clock, and ties have an order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial

from .bound import cut_bound
from .choice import TIE, Candidate, Choice
from .compose import compose
from .cost import CostModel, Estimate
from .layout import canonical, rooted, shape_in, unnamed
from .plan import COLLECTIVES, REDUCING, ROOTED, SENT_FRACTION, WIRES, Plan
from .prediction import Prediction
from .space import Options, grids, options
from .speeds import NATIVE, Speeds
from .stages import LEAD, Stage
from .topology import LEVELS, Link, Place, Topology

AUTO = "auto"
"""The wire that is bfloat16 in the outer levels where that is worth it, and else as wide as the buffer."""

WORTH_NARROWING = 0.9
"""Part of the predicted time to which a narrow wire, or a further narrow level, must bring it down: bits are given up
for no less."""

MOST_KEPT = 16
"""Most pairs of a tree and a collective whose stages are kept: a job that loses and replaces ranks comes back to a few
trees, with some collectives on each, and these with some sizes."""

Wire = Mapping[str, str] | str
"""The format in which float32 travels between the places of a level, by level; or ``AUTO``; or "" for no narrowing."""


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

    ``wire`` concerns all_reduce alone; the bound counts the bytes as they are sent. A candidate whose plan has the id
    ``forced`` is chosen, whatever it is predicted to take; if there is none, the choice is as usual. ``ordered`` plans
    sum every element in one step, in the order of the ranks, the root before them, so that the bits depend on no plan;
    they have no narrow wire. ``speeds`` are those of the ranks.
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
    """The topology from which the bound of a plan with a narrow wire is found.

    A link that carries half the bytes counts as twice as fast. The links inside a place of a narrow level carry narrow
    bytes too.
    """
    if not plan.wire:
        return topology
    outermost = max(topology.levels.index(level) for level in wire)

    def widened(places: Sequence[Place], levels: Sequence[str]) -> tuple[Place, ...]:
        factor = 1 / SENT_FRACTION[plan.wire] if len(levels) <= outermost + 1 else 1.0
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
    """Every plan that is considered for a buffer of ``nbytes``, with its prediction, cheapest first.

    Each grid with each choice of modes gives the cheapest combination of methods, and the plans that have one method in
    all dimensions. ``wire`` is by level; ``ordered`` and ``speeds`` are as in `choose`.
    """
    if collective not in COLLECTIVES:
        raise ValueError(f"unknown collective {collective!r}; known are {', '.join(COLLECTIVES)}")
    if nbytes < 0:
        raise ValueError(f"nbytes is {nbytes}; it must be 0 or more")
    if not 0 <= root < topology.world_size:
        raise ValueError(f"root is {root}; the world has ranks 0 to {topology.world_size - 1}")
    seen = rooted(topology, root) if collective in ROOTED else topology
    narrow = tuple(sorted((wire or {}).items())) if collective == "all_reduce" else ()
    # A job that loses and replaces ranks comes back to trees that look alike.
    tree = _known(unnamed(seen))
    ranked = _ranked(tree, collective, nbytes, narrow, ordered and collective in REDUCING, speeds)
    order = tuple(rank for place in seen.places for rank in place.ranks())
    return [
        Candidate(
            each.stages,
            partial(each.prediction, order),
            partial(_composed, topology, collective, root, each.stages),
        )
        for each in ranked
    ]


@lru_cache(maxsize=MOST_KEPT)
def _known(tree: Topology) -> Topology:
    """The first of equal trees, so that what is kept for a tree keeps it once."""
    return tree


@lru_cache(maxsize=8 * MOST_KEPT)
def _ranked(
    topology: Topology, collective: str, nbytes: int, wire: tuple[tuple[str, str], ...], ordered: bool, speeds: Speeds
) -> tuple[Estimate, ...]:
    """Every plan that is considered, cheapest first."""
    to_choose_from = _stages_to_choose_from(topology, collective, wire, ordered, speeds)
    found = [best for model, by_dimension in to_choose_from for best in _best(model, by_dimension, nbytes)]
    limit = TIE * min(each.seconds for each in found)
    return tuple(sorted(found, key=lambda each: _preference(each, limit)))


@lru_cache(maxsize=MOST_KEPT)
def _stages_to_choose_from(
    topology: Topology, collective: str, wire: tuple[tuple[str, str], ...], ordered: bool, speeds: Speeds
) -> list[tuple[CostModel, Options]]:
    """The stages to choose from, which no size changes, each with the model that predicts them."""
    tree = canonical(topology)
    found = []
    for grid in grids(tree, topology.levels, collective, ordered):
        shape = shape_in(tree, topology.levels, grid)
        models = {led: CostModel(shape, collective, led, speeds) for led in (False, True)}
        for by_dimension in options(grid, shape, collective, dict(wire), ordered):
            found.append((models[any(stages[0].mode == LEAD for stages in by_dimension)], by_dimension))
    return found


def _preference(estimate: Estimate, limit: float) -> tuple[float, float]:
    """Sorts by time; among those within the limit, by how little they rely on segments that overlap."""
    if estimate.seconds <= limit:
        return 0.0, estimate.unpipelined
    return estimate.seconds, 0.0


def _composed(
    topology: Topology, collective: str, root: int, stages: tuple[Stage, ...], prediction: Prediction
) -> Plan:
    return _plan_of(topology, collective, stages, prediction.segment_bytes, root, prediction.window)


@lru_cache(maxsize=16)
def _plan_of(
    topology: Topology, collective: str, stages: tuple[Stage, ...], segment_bytes: int, root: int, window: int
) -> Plan:
    """The plan of these stages, which most sizes have in common with others."""
    return compose(topology, collective, stages, segment_bytes, root, window)


def _best(model: CostModel, by_dimension: Options, nbytes: int) -> list[Estimate]:
    """The cheapest choice of one stage for each dimension, and those with one method in all, to compare with.

    One dimension after another takes its cheapest stage, the others left as they are.
    """

    known: dict[tuple[Stage, ...], Estimate] = {}

    def tried(stages: Sequence[Stage]) -> Estimate:
        key = tuple(stages)
        if key not in known:
            known[key] = model.estimate(key, nbytes)
        return known[key]

    best = tried([stages[0] for stages in by_dimension])
    for dimension, stages in enumerate(by_dimension):
        for stage in stages[1:]:
            other = tried([*best.stages[:dimension], stage, *best.stages[dimension + 1 :]])
            if other.is_below(best):
                best = other
    plain = [tried(stages) for stages in zip(*by_dimension, strict=False) if len({s.method for s in stages}) == 1]
    return [best, *(each for each in plain if each.stages != best.stages)]
