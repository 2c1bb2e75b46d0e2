"""The proof by classes of symmetric ranks, for worlds too large to run message by message.

Two facts carry it, each proved by running all messages where that is small. A ring of n members by one method does
what its kind says whichever ranks they are: it is run once for each (kind, method, n). And in a plan the same pattern
of rings stands over many units of ranks: if what the ranks of two units hold before a phase differs in names only, so
does what they hold after it, and one unit stands for its class.

A *unit* is a set of ranks whose contributions have met; each of its positions holds the unit's sum on some
spans. A phase on the way out joins units: sound if every ring has one member from each of them, who
holds the ring's spans. The way back is the way out in reverse: an all_gather by which one owner's span
reaches everybody once is, read backwards, a reduce_scatter by which everybody's contribution reaches the owner once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import pairwise

from ..methods import Store, steps
from ..plan import WHOLE, Phase, Plan, Ring, Span, joined, shortened
from .full import prove_in_full

_Spans = tuple[Span, ...]
_Held = tuple[_Spans, ...]
"""The spans on which each position of a unit holds the unit's sum."""

_OUT = {"reduce_scatter": "reduce_scatter", "reduce": "reduce", "all_reduce": "all_reduce"}
_BACK = {"all_gather": "reduce_scatter", "broadcast": "reduce"}
"""The kinds of the way back, and what they are when read backwards."""


def prove_by_classes(plan: Plan) -> None:
    """Prove a plan over classes of symmetric ranks; ValueError naming phase, ring and rank where it fails."""
    if plan.collective == "all_to_all":
        _prove_exchange(plan)
        return
    _prove_rings(plan)
    out = [number for number, phase in enumerate(plan.phases) if phase.kind in _OUT]
    back = [number for number, phase in enumerate(plan.phases) if phase.kind in _BACK]
    if out + back != list(range(len(plan.phases))):
        raise ValueError(f"plan {plan.id}: phases {out} reduce, {back} gather; all reductions must come first")
    _CLOSINGS[plan.collective](plan, _join(plan, out, _OUT), _join(plan, back[::-1], _BACK))


def _prove_rings(plan: Plan) -> None:
    for phase in plan.phases:
        for size in sorted({len(ring.members) for pattern, _ in phase.tiles() for ring in pattern}):
            _prove_ring(phase.kind, phase.method, size)


@cache
def _prove_ring(kind: str, method: str, size: int) -> None:
    ring = Ring(tuple(range(size)), (WHOLE,))
    prove_in_full(Plan(kind, size, (Phase(kind, "ring", method, (ring,)),), segment_bytes=64))


@dataclass(eq=False, slots=True)
class _Unit:
    ranks: tuple[int, ...]
    held: _Held


def _join(plan: Plan, numbers: Sequence[int], kinds: dict[str, str]) -> list[_Unit]:
    """The unit of each rank after these phases have joined what were single ranks."""
    alone: _Held = ((WHOLE,),)
    unit_of = [_Unit((rank,), alone) for rank in range(plan.world_size)]
    position_of = [0] * plan.world_size
    for number in numbers:
        phase = plan.phases[number]
        joined_like: dict[object, _Held] = {}
        for pattern, ranks in _units(phase, unit_of):
            inner = list(dict.fromkeys([unit_of[rank] for rank in ranks]))
            index = {unit: i for i, unit in enumerate(inner)}
            origin = [index[unit_of[rank]] for rank in ranks]
            likeness = (
                id(pattern),
                *[id(unit.held) for unit in inner],
                *origin,
                *[position_of[rank] for rank in ranks],
            )
            if likeness not in joined_like:
                held = [unit_of[rank].held[position_of[rank]] for rank in ranks]
                try:
                    _check_whole(inner, ranks)
                    joined_like[likeness] = _joined(kinds[phase.kind], pattern, ranks, origin, held)
                except ValueError as error:
                    where = f"phase {number} ({phase.kind}, level {phase.level})"
                    raise ValueError(f"plan {plan.id}, {where}, {error}") from None
            unit = _Unit(ranks, joined_like[likeness])
            for position, rank in enumerate(ranks):
                unit_of[rank], position_of[rank] = unit, position
    return unit_of


def _units(phase: Phase, unit_of: Sequence[_Unit]) -> Iterator[tuple[Sequence[Ring], tuple[int, ...]]]:
    """Each pattern of a phase with each unit that it stands over; single rings are put together where they touch."""
    for pattern, units in phase.tiles():
        for ranks in units if units is not None else ():
            yield pattern, ranks
        if units is None:
            yield from _touching(pattern, unit_of)


def _touching(rings: Sequence[Ring], unit_of: Sequence[_Unit]) -> list[tuple[Sequence[Ring], tuple[int, ...]]]:
    groups: dict[_Unit, list[_Unit]] = {}
    for ring in rings:
        met = list(dict.fromkeys(unit for m in ring.members for unit in groups.get(unit_of[m], [unit_of[m]])))
        groups.update((unit, met) for unit in met)
    result: list[tuple[Sequence[Ring], tuple[int, ...]]] = []
    for group in {id(group): group for group in groups.values()}.values():
        ranks = tuple(rank for unit in group for rank in unit.ranks)
        position = {rank: i for i, rank in enumerate(ranks)}
        inside = [ring for ring in rings if ring.members[0] in position]
        pattern = [Ring(tuple(position[m] for m in ring.members), ring.spans, ring.shares) for ring in inside]
        result.append((pattern, ranks))
    return result


def _check_whole(inner: Sequence[_Unit], ranks: Sequence[int]) -> None:
    missing = {rank for unit in inner for rank in unit.ranks} - set(ranks)
    if missing:
        raise ValueError(f"rank {min(missing)}: its unit has other ranks in this phase's rings, but not this one")


def _joined(
    kind: str, pattern: Sequence[Ring], ranks: Sequence[int], origin: Sequence[int], held: Sequence[_Spans]
) -> _Held:
    """Return what each position holds after the rings of a pattern have joined its units."""
    used: list[list[_Spans]] = [[] for _ in ranks]
    result: list[list[Span]] = [[] for _ in ranks]
    for number, ring in enumerate(pattern):
        name = f"ring {number} {shortened([ranks[m] for m in ring.members])}"
        if sorted(origin[m] for m in ring.members) != list(range(max(origin) + 1)):
            raise ValueError(
                f"{name}, rank {ranks[ring.members[0]]}: it must have one member from each unit that meets"
            )
        spans = joined(sorted(ring.spans))
        for member in ring.members:
            if not _covers(held[member], spans):
                raise ValueError(f"{name}, rank {ranks[member]}: does not hold {_shown(spans)}")
            used[member].append(spans)
        for member, left in _left_by(kind, ring):
            result[member] += left
    for member, reduced in enumerate(used):
        if len(reduced) > 1 and _overlap(span for spans in reduced for span in spans):
            raise ValueError(f"rank {ranks[member]}: is in two rings with the same span")
    return tuple(joined(sorted(spans)) for spans in result)


def _left_by(kind: str, ring: Ring) -> Iterable[tuple[int, _Spans]]:
    """Return the holders in a ring of each span after a phase of a kind."""
    if kind == "reduce_scatter":
        return zip(ring.members, ring.pieces(), strict=True)
    if kind == "reduce":
        return [(ring.members[0], ring.spans)]
    return [(member, ring.spans) for member in ring.members]


def _covers(held: _Spans, spans: _Spans) -> bool:
    """True if every span lies in one of ``held``; both are sorted and do not touch."""
    if held == spans:
        return True
    starts = [span.lo for span in held]
    for span in spans:
        i = bisect_right(starts, span.lo) - 1
        if i < 0 or held[i].hi < span.hi:
            return False
    return True


def _overlap(spans: Iterable[Span]) -> bool:
    return any(b.lo < a.hi for a, b in pairwise(sorted(spans)))


def _close_all_reduce(plan: Plan, out: list[_Unit], back: list[_Unit]) -> None:
    world = _world(plan, out)
    complete = dict(zip(world.ranks, world.held, strict=True))
    for unit in dict.fromkeys(back):
        for rank, spans in zip(unit.ranks, unit.held, strict=True):
            if not _covers(complete[rank], spans):
                raise ValueError(f"plan {plan.id}, rank {rank}: gathers from {_shown(spans)}, not its sums")
        _check_owned(plan, unit.ranks[0], sorted(span for spans in unit.held for span in spans), WHOLE)


def _close_reduce_scatter(plan: Plan, out: list[_Unit], back: list[_Unit]) -> None:
    _refuse(plan, back)
    world = _world(plan, out)
    for rank, spans in zip(world.ranks, world.held, strict=True):
        _check_owned(plan, rank, spans, _block(plan, rank))


def _close_reduce(plan: Plan, out: list[_Unit], back: list[_Unit]) -> None:
    _refuse(plan, back)
    world = _world(plan, out)
    _check_owned(plan, plan.root, world.held[world.ranks.index(plan.root)], WHOLE)


_CLOSINGS: dict[str, Callable[[Plan, list[_Unit], list[_Unit]], None]] = {
    "all_reduce": _close_all_reduce,
    "barrier": _close_all_reduce,
    "reduce_scatter": _close_reduce_scatter,
    "reduce": _close_reduce,
    "all_gather": lambda plan, out, back: _close_reduce_scatter(plan, back, out),
    "broadcast": lambda plan, out, back: _close_reduce(plan, back, out),
}
"""State that the units must have reached: out is the way out, back the way back read backwards."""


def _world(plan: Plan, unit_of: list[_Unit]) -> _Unit:
    met = set(unit_of[0].ranks)
    if len(met) < plan.world_size:
        stranger = next(rank for rank in range(plan.world_size) if rank not in met)
        raise ValueError(f"plan {plan.id} ({plan.collective}): ranks {unit_of[0].ranks[0]} and {stranger} never meet")
    return unit_of[0]


def _refuse(plan: Plan, unit_of: list[_Unit]) -> None:
    if len(unit_of[0].ranks) > 1:
        raise ValueError(f"plan {plan.id}: a {plan.collective} has no such phases: {[p.kind for p in plan.phases]}")


def _block(plan: Plan, rank: int) -> Span:
    return Span(Fraction(rank, plan.world_size), Fraction(rank + 1, plan.world_size))


def _check_owned(plan: Plan, rank: int, held: Sequence[Span], wanted: Span) -> None:
    if not _covers(joined(held), (wanted,)):
        raise ValueError(
            f"plan {plan.id} ({plan.collective}), rank {rank}: {wanted} is not all there, but {_shown(held)}"
        )


def _prove_exchange(plan: Plan) -> None:
    """An all_to_all is one ring of all ranks in order; its members differ by a rotation only."""
    size = plan.world_size
    if size == 1 and not plan.phases:
        return
    rings = [(phase, ring) for phase in plan.phases for ring in phase.rings]
    if len(rings) != 1 or rings[0][1].members != tuple(range(size)) or rings[0][1].spans != (WHOLE,):
        raise ValueError(f"plan {plan.id}: an all_to_all is one ring of all ranks in order")
    ((phase, _),) = rings
    for position in {0, 1, size // 2, size - 1}:
        (step,) = steps(phase.kind, phase.method, size, position)
        others = [peer for peer in range(size) if peer != position]
        if sorted((send.shares.start, *send.peers) for send in step.sends) != [(peer, peer) for peer in others]:
            raise ValueError(f"plan {plan.id}, rank {position}: does not send every block to its rank once")
        if sorted((wait.shares.start, wait.peer) for wait in step.waits if isinstance(wait, Store)) != [
            (peer, peer) for peer in others
        ]:
            raise ValueError(f"plan {plan.id}, rank {position}: does not store every rank's block once")


def _shown(spans: Sequence[Span]) -> str:
    return " ".join(map(str, spans[:8]))
