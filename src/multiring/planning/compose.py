"""From a layout and a method per dimension to a plan: the multi-ring algorithms.

A stage for each dimension says which mode and method it has (`stages`). From the inside out, each unit's rings join the
ranks that own the same span in its children; what the mode leaves with whom is where the next dimension begins.

::

    2 hosts of 2 ranks, rank split, host all
      reduce_scatter rank   (0 1) [0,1)     (2 3) [0,1)        rank 0 owns [0,1/2) of its host's sum, rank 1 [1/2,1)
      all_reduce     host   (0 2) [0,1/2)   (1 3) [1/2,1)
      all_gather     rank   (0 1) [0,1)     (2 3) [0,1)

Where units have different sizes, rings are cut wherever the sum of any unit is: between a host of 3 ranks and a host of
2 there are four rings, over [0,1/3) [1/3,1/2) [1/2,2/3) [2/3,1).

Cho et al. 2017 (arXiv 1708.02188), Cho et al. 2019 (BlueConnect).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from itertools import starmap

from .balance import fastest_shares
from .layout import Layout, Shape, layout
from .plan import IN_BLOCKS, ROOTED, WHOLE, Phase, Plan, Ring, Span, Tiling, joined
from .stages import ALL, LEAD, Stage, phase_kinds, phase_wire
from .topology import Topology


def compose(
    topology: Topology,
    collective: str,
    stages: Sequence[Stage],
    segment_bytes: int,
    root: int = 0,
    window: int = Plan.window,
) -> Plan:
    """The plan of a collective that runs through ``stages``, innermost first, ``window`` segments at a time."""
    rooted = collective in ROOTED
    arrangement = layout(topology, [stage.dimension for stage in stages], root if rooted else None)
    if collective == "all_to_all":
        patterns = _exchange_patterns(arrangement)
    elif collective in IN_BLOCKS:
        patterns = _block_patterns(arrangement)
    else:
        patterns = _ownership_patterns(arrangement, stages)
    if any(stage.ordered for stage in stages):
        first = root if rooted else None
        patterns = {s: tuple(_by_rank(ring, arrangement.order, first) for ring in p) for s, p in patterns.items()}
    phases = []
    for depth, kind in phase_kinds(collective, stages):
        tiles = [
            (patterns[shape], [arrangement.ranks(shape, offset) for offset in offsets])
            for shape, offsets in arrangement.units(depth).items()
            if len(shape.children) > 1
        ]
        if tiles:
            stage = stages[depth - 1]
            wire = phase_wire(kind, stage, stages)
            phases.append(Phase(kind, stage.dimension.level, stage.method, Tiling(tiles), wire))
    return Plan(collective, topology.world_size, tuple(phases), segment_bytes, root, window)


def _by_rank(ring: Ring, order: Sequence[int], first: int | None) -> Ring:
    """The ring of all ranks with its members by ascending rank, ``first`` before them, each with the share it had."""
    positions = sorted(
        range(len(ring.members)), key=lambda i: (order[ring.members[i]] != first, order[ring.members[i]])
    )
    pieces = ring.pieces()
    shares = tuple(ring.shares[i] for i in positions) if ring.shares else None
    spans = tuple(span for i in positions for span in pieces[i])
    return Ring(
        tuple(ring.members[i] for i in positions), spans if positions != sorted(positions) else ring.spans, shares
    )


_Pattern = tuple[Ring, ...]
_Ownership = tuple[tuple[Span, int], ...]
"""Owners in a unit of the spans of its sum: adjoining spans from 0 to 1, each with its owner's position in the unit."""


def _ownership_patterns(arrangement: Layout, stages: Sequence[Stage]) -> dict[Shape, _Pattern]:
    """The rings of each shape where the plan is free to say who owns what."""
    patterns: dict[Shape, _Pattern] = {}
    owned: dict[Shape, tuple[_Ownership, ...]] = {}  # one for each copy of the sum: mode all leaves several

    def visit(shape: Shape) -> None:
        if shape in owned:
            return
        if not shape.children:
            owned[shape] = (((WHOLE, 0),),)
            return
        for child in shape.children:
            visit(child)
        stage = stages[shape.depth - 1]
        shares = fastest_shares(shape, arrangement.shape) if stage.weighted else None
        if len({len(owned[child]) for child in shape.children}) > 1:
            raise ValueError(f"mode all in {stage.dimension.level} and within needs units of one size")
        by_copy = zip(*(owned[child] for child in shape.children), strict=True)
        rings_by_copy = [_meeting_rings(ownerships, shape.offsets, shares) for ownerships in by_copy]
        patterns[shape] = tuple(ring for rings in rings_by_copy for ring in rings)
        if len(rings_by_copy) > 1 and stage.mode != ALL:
            raise ValueError(f"mode {stage.mode} stands around mode all; only the outermost dimensions can be all")
        if shape is not arrangement.shape:  # no stage lies around the whole
            owned[shape] = _owned_after(stage.mode, rings_by_copy)

    visit(arrangement.shape)
    return patterns


def _meeting_rings(owned: Sequence[_Ownership], offsets: Sequence[int], shares: tuple[int, ...] | None) -> list[Ring]:
    """The rings of one copy: for each span, the ranks that own it in each child; cut wherever a child's sum is."""
    spans: dict[tuple[int, ...], list[Span]] = {}
    for span, holders in _refined(owned):
        members = tuple([offset + holder for offset, holder in zip(offsets, holders, strict=True)])
        spans.setdefault(members, []).append(span)
    return [Ring(members, joined(parts), shares) for members, parts in spans.items()]


def _refined(owned: Sequence[_Ownership]) -> list[tuple[Span, tuple[int, ...]]]:
    """Each span between neighbouring cuts of any child, with its holder in each."""
    if all(ownership is owned[0] for ownership in owned):
        return [(span, (holder,) * len(owned)) for span, holder in owned[0]]
    cuts = sorted({span.hi for ownership in owned for span, _ in ownership})
    at = [0] * len(owned)
    result = []
    lo = Fraction(0)
    for hi in cuts:
        result.append((Span(lo, hi), tuple([ownership[i][1] for ownership, i in zip(owned, at, strict=True)])))
        at = [i + (ownership[i][0].hi == hi) for ownership, i in zip(owned, at, strict=True)]
        lo = hi
    return result


def _owned_after(mode: str, rings_by_copy: list[list[Ring]]) -> tuple[_Ownership, ...]:
    """Return the owners of a unit's sum after a phase of a mode, for each copy of the sum that there is then."""
    if mode == ALL:
        positions = range(len(rings_by_copy[0][0].members))
        return tuple(
            _by_span((span, ring.members[i]) for ring in rings for span in ring.spans)
            for rings in rings_by_copy
            for i in positions
        )
    (rings,) = rings_by_copy
    if mode == LEAD:
        return (_by_span((span, ring.members[0]) for ring in rings for span in ring.spans),)
    shares = (share for ring in rings for share in zip(ring.members, ring.pieces(), strict=True))
    return (_by_span((span, member) for member, piece in shares for span in piece),)


def _by_span(held: Iterable[tuple[Span, int]]) -> _Ownership:
    """Return the spans with their holders, in order; adjoining spans of one holder become one."""
    result: list[tuple[Span, int]] = []
    for span, holder in sorted(held):
        if result and result[-1][1] == holder:
            span = Span(result.pop()[0].lo, span.hi)
        result.append((span, holder))
    return tuple(result)


def _block_patterns(arrangement: Layout) -> dict[Shape, _Pattern]:
    """The rings of each shape where block r must end on, or start from, rank r.

    Block b takes the path of rank b: in every unit it is held by the rank that is reached by going down like rank b,
    its position in each dimension taken modulo the number of children there. In equal units that is the rank with b's
    position in its own unit; in b's own unit it is b.
    """
    size = len(arrangement.order)
    blocks = [Span(Fraction(rank, size), Fraction(rank + 1, size)) for rank in arrangement.order]
    numbers = _child_numbers(arrangement)
    patterns: dict[Shape, _Pattern] = {}
    holders: dict[Shape, list[int]] = {}

    def visit(shape: Shape) -> list[int]:
        if shape in holders:
            return holders[shape]
        if not shape.children:
            return holders.setdefault(shape, [0] * size)
        inner = [
            [offset + holder for holder in visit(child)]
            for offset, child in zip(shape.offsets, shape.children, strict=True)
        ]
        owners = [number % len(inner) for number in numbers[shape.depth]]
        owned: dict[tuple[int, ...], list[list[Span]]] = {}
        for members, owner, block in zip(zip(*inner, strict=True), owners, blocks, strict=True):
            owned.setdefault(members, [[] for _ in inner])[owner].append(block)
        patterns[shape] = tuple(starmap(_ring_of_blocks, owned.items()))
        return holders.setdefault(shape, [inner[owner][b] for b, owner in enumerate(owners)])

    visit(arrangement.shape)
    return patterns


def _exchange_patterns(arrangement: Layout) -> dict[Shape, _Pattern]:
    """One ring of all ranks in the order of their numbers, which is that of the blocks."""
    shape = arrangement.shape
    while len(shape.children) == 1:
        (shape,) = shape.children
    positions = range(len(arrangement.order))
    return {shape: (Ring(tuple(sorted(positions, key=arrangement.order.__getitem__)), (WHOLE,)),)}


def _child_numbers(arrangement: Layout) -> list[list[int]]:
    """``[depth][position]``: which child of its unit of a depth a position is in."""
    numbers: list[list[int]] = [[] for _ in range(arrangement.shape.depth + 1)]

    def walk(shape: Shape) -> None:
        for number, child in enumerate(shape.children):
            numbers[shape.depth] += [number] * child.size
            walk(child)

    walk(arrangement.shape)
    return numbers


def _ring_of_blocks(members: tuple[int, ...], owned: list[list[Span]]) -> Ring:
    """A ring whose shares are whole blocks."""
    counts = tuple(map(len, owned))
    spans = tuple(block for blocks in owned for block in blocks)
    return Ring(members, spans, None if min(counts) == max(counts) else counts)
