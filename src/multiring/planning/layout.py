"""A plan's view of a topology: its ranks arranged in the dimensions that the plan runs over.

A *grid* lists dimensions from the inside out. ``rank`` and ``host`` kept apart are two dimensions; merged
(``rank+host``) they are one, over all ranks; 64 hosts may be two dimensions of level ``host``, 8x8.

A *unit* of a dimension is a set of ranks among which the dimension's rings run. With the dimensions ``rank`` and
``host``, each host is a unit of the first, and all ranks together are the one unit of the second. The children of a
unit are the units of the next dimension inwards (or single ranks), and a ring has one member in each child. Units that
look alike share one ``Shape``, whatever ranks they hold: 1,280 equal hosts are one shape at 1,280 offsets, so that what
follows from the shape alone is found once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from math import inf

from .topology import Link, Place, Topology


@dataclass(frozen=True, slots=True)
class Dimension:
    """One dimension of a grid: the levels that its rings run between, and the most members that a ring has (None: no
    limit)."""

    levels: tuple[str, ...]
    size: int | None = None

    @property
    def level(self) -> str:
        """The level as a phase names it."""
        return "+".join(self.levels)


Grid = tuple[Dimension, ...]


@dataclass(frozen=True, slots=True)
class Edge:
    """The link that leads out of the children [first, last) of a shape, which share it."""

    first: int
    last: int
    level: str
    link: Link


@dataclass(frozen=True, eq=False)
class Shape:
    """A kind of unit: its children by position and the links around them, which all units of the kind have alike.

    A single rank has no children and depth 0; ``depth`` is the number of the shape's dimension, from 1.
    """

    children: tuple[Shape, ...] = ()
    edges: tuple[Edge, ...] = ()
    depth: int = 0

    @cached_property
    def size(self) -> int:
        """Number of ranks."""
        return sum(child.size for child in self.children) or 1

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """The position at which each child begins."""
        return tuple(accumulate((child.size for child in self.children[:-1]), initial=0))

    @cached_property
    def by_depth(self) -> tuple[tuple[Shape, ...], ...]:
        """The different shapes within, itself included, by depth from 1."""
        depths: list[dict[Shape, None]] = [{} for _ in range(self.depth)]

        def walk(shape: Shape) -> None:
            if shape.children and shape not in depths[shape.depth - 1]:
                depths[shape.depth - 1][shape] = None
                for child in shape.children:
                    walk(child)

        walk(self)
        return tuple(tuple(shapes) for shapes in depths)

    @cached_property
    def bandwidths(self) -> tuple[float, ...]:
        """Bytes a second that each child can both send and receive."""
        own = {edge.first: edge.link for edge in self.edges if edge.last == edge.first + 1}
        limits = []
        for number, child in enumerate(self.children):
            link = min(own[number].up, own[number].down) if number in own else inf
            limits.append(min(link, sum(child.bandwidths) if child.children else inf))
        return tuple(limits)

    @cached_property
    def crossed(self) -> frozenset[Link]:
        """The different links that messages between the children may cross."""
        own = frozenset(edge.link for edge in self.edges if edge.last - edge.first < len(self.children))
        return own.union(*(child._within for child in self.children))

    def between(self, a: int, b: int) -> frozenset[Link]:
        """The different links that a message between two of the children may cross."""
        own = frozenset(self.edges[number].link for number in self._around[a] ^ self._around[b])
        return own.union(self.children[a]._within, self.children[b]._within)

    @cached_property
    def hosts(self) -> tuple[frozenset[int], ...]:
        """Numbers of the edges above level rank around each child, where children are ranks: equal for ranks of one
        host."""
        return tuple(frozenset(n for n in around if self.edges[n].level != "rank") for around in self._around)

    @cached_property
    def _around(self) -> tuple[frozenset[int], ...]:
        """The numbers of the edges around each child."""
        around: list[list[int]] = [[] for _ in self.children]
        for number, edge in enumerate(self.edges):
            for child in range(edge.first, edge.last):
                around[child].append(number)
        return tuple(map(frozenset, around))

    @cached_property
    def _within(self) -> frozenset[Link]:
        return frozenset(edge.link for edge in self.edges).union(*(child._within for child in self.children))


@dataclass(frozen=True)
class Layout:
    """A topology arranged in a grid: ``order[i]`` is the rank at position i.

    The rings of ``grid[d]`` run between the children of shapes of depth d + 1.
    """

    grid: Grid
    order: tuple[int, ...]
    shape: Shape

    def units(self, depth: int) -> dict[Shape, list[int]]:
        """The units of a depth by shape, each as the position at which it begins."""
        found: dict[Shape, list[int]] = {}

        def walk(shape: Shape, offset: int) -> None:
            if shape.depth == depth:
                found.setdefault(shape, []).append(offset)
                return
            for child, start in zip(shape.children, shape.offsets, strict=True):
                walk(child, offset + start)

        walk(self.shape, 0)
        return found

    def ranks(self, shape: Shape, offset: int) -> tuple[int, ...]:
        """The ranks of the unit of a shape at an offset."""
        return self.order[offset : offset + shape.size]


def layout(topology: Topology, grid: Sequence[Dimension], root: int | None = None) -> Layout:
    """Arrange a topology in the dimensions of a grid; a ``root`` stands first in every unit that holds it."""
    if root is not None:
        topology = rooted(topology, root)
    order = tuple(rank for place in topology.places for rank in place.ranks())
    return Layout(tuple(grid), order, shape_in(canonical(topology), topology.levels, tuple(grid)))


def rooted(topology: Topology, root: int) -> Topology:
    """The same tree, ``root`` and every place that holds it standing before their neighbours."""

    def first(places: tuple[Place, ...]) -> tuple[Place, ...]:
        for place in places:
            if root in place.ranks():
                return (replace(place, places=first(place.places)), *(other for other in places if other is not place))
        return places

    return Topology(topology.levels, first(topology.places))


def unnamed(topology: Topology) -> Topology:
    """The same tree without names, its ranks numbered from left to right: all that look alike become equal."""
    ranks = iter(range(topology.world_size))

    def of(places: tuple[Place, ...]) -> tuple[Place, ...]:
        return tuple(
            [Place("", p.link, of(p.places)) if p.places else Place("", p.link, rank=next(ranks)) for p in places]
        )

    return Topology(topology.levels, of(topology.places))


def canonical(topology: Topology) -> Shape:
    """The shape of the topology with every level a dimension of its own."""
    shape = _interner()

    def of(places: tuple[Place, ...], levels: tuple[str, ...]) -> Shape:
        children = tuple([of(place.places, levels[:-1]) if place.places else shape((), (), 0) for place in places])
        edges = tuple([Edge(i, i + 1, levels[-1], place.link) for i, place in enumerate(places)])
        return shape(children, edges, len(levels))

    return of(topology.places, topology.levels)


def shape_in(tree: Shape, levels: tuple[str, ...], grid: Grid) -> Shape:
    """A ``canonical`` shape in the dimensions of a grid: levels merged, runs of children made units."""
    if tuple(dict.fromkeys(level for dimension in grid for level in dimension.levels)) != levels:
        raise ValueError(f"the grid {' '.join(d.level for d in grid)} does not fit the levels {' '.join(levels)}")
    shape = _interner()
    units: dict[Shape, Shape] = {}
    ends = {dimension.levels[-1] for dimension in grid}

    def unit(place: Shape) -> Shape:
        """Return the unit for a place of the canonical tree where a dimension ends below it."""
        if place not in units:
            children, edges = contents(place)
            for depth, dimension in enumerate(grid, start=1):
                if dimension.levels[-1] == levels[place.depth - 1]:
                    runs = _runs(len(children), dimension.size)
                    within = zip(runs, _by_run(edges, runs), strict=True)
                    children = [shape(tuple(children[a:b]), inner, depth) for (a, b), inner in within]
                    edges = []
            (units[place],) = children
        return units[place]

    def contents(place: Shape) -> tuple[list[Shape], list[Edge]]:
        """The members of the innermost rings below a place, and the links around them."""
        children: list[Shape] = []
        edges: list[Edge] = []
        for child, edge in zip(place.children, place.edges, strict=True):
            start = len(children)
            if not child.children:
                children.append(shape((), (), 0))
            elif levels[child.depth - 1] in ends:
                children.append(unit(child))
            else:
                inner, within = contents(child)
                children += inner
                edges += [replace(e, first=start + e.first, last=start + e.last) for e in within]
            edges.append(replace(edge, first=start, last=len(children)))
        return children, edges

    return unit(tree)


def _interner() -> Callable[[tuple[Shape, ...], tuple[Edge, ...], int], Shape]:
    """Makes shapes, one for all that look alike."""
    made: dict[object, Shape] = {}

    def shape(children: tuple[Shape, ...], edges: tuple[Edge, ...], depth: int) -> Shape:
        return made.setdefault((children, edges, depth), Shape(children, edges, depth))

    return shape


def _runs(count: int, size: int | None) -> list[tuple[int, int]]:
    """Cut ``count`` children into as few runs as sizes up to ``size`` allow, as equal as can be."""
    number = -(-count // size) if size else 1
    return list(pairwise(count * i // number for i in range(number + 1)))


def _by_run(edges: Sequence[Edge], runs: Sequence[tuple[int, int]]) -> list[tuple[Edge, ...]]:
    """The edges around children of one run each, by run, numbered within it."""
    found: list[list[Edge]] = [[] for _ in runs]
    starts = [first for first, _ in runs]
    for edge in edges:
        number = bisect_right(starts, edge.first) - 1
        first, last = runs[number]
        if edge.last <= last:
            found[number].append(replace(edge, first=edge.first - first, last=edge.last - first))
    return [tuple(inner) for inner in found]
