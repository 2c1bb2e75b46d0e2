"""How a plan sees a topology: its ranks arranged in the dimensions that the plan runs over.

A *grid* lists dimensions from the inside out. ``rank`` and ``host`` kept apart are two dimensions; merged
(``rank+host``) they are one, over all ranks; 64 hosts may be two dimensions of level ``host``, 8x8. Units that look
alike share one ``Shape``, whatever ranks they hold: 1,280 equal hosts are one shape at 1,280 offsets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf

from .topology import Link, Place, Topology


@dataclass(frozen=True, slots=True)
class Dimension:
    """One dimension of a grid: the levels that it runs between, and how many members its rings have (None: all)."""

    levels: tuple[str, ...]
    size: int | None = None

    @property
    def level(self) -> str:
        """The level as a phase names it."""
        return "+".join(self.levels)


@dataclass(frozen=True, slots=True)
class Edge:
    """The link around the children [first, last) of a shape."""

    first: int
    last: int
    level: str
    link: Link


@dataclass(eq=False, slots=True)
class Shape:
    """An arrangement of ranks, by position: what units that look alike have in common. A rank has no children."""

    children: tuple[Shape, ...]
    offsets: tuple[int, ...]
    edges: tuple[Edge, ...]
    size: int
    depth: int


@dataclass(frozen=True)
class Layout:
    """``order[i]`` is the rank at position i; the rings of ``dimensions[d]`` join the children of depth d + 1."""

    dimensions: tuple[Dimension, ...]
    order: tuple[int, ...]
    shape: Shape

    def units(self, depth: int) -> dict[Shape, list[int]]:
        """The offsets of all units of each shape of a depth."""
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


def layout(topology: Topology, dimensions: Sequence[Dimension], first: int | None = None) -> Layout:
    """Arrange a topology in dimensions; rank ``first`` (a root) stands first in every unit that holds it."""
    named = tuple(level for dimension in dimensions for level in dimension.levels)
    if tuple(dict.fromkeys(named)) != topology.levels:
        raise ValueError(f"dimensions over {named} do not fit the levels {topology.levels}")
    arranger = _Arranger(topology, tuple(dimensions), first)
    return Layout(tuple(dimensions), tuple(arranger.order), arranger.shape)


def bandwidths(shape: Shape) -> list[float]:
    """Bytes a second that each child can both send and receive."""
    own = {edge.first: edge.link for edge in shape.edges if edge.last == edge.first + 1}
    result = []
    for number, child in enumerate(shape.children):
        limits = [sum(bandwidths(child))] if child.children else []
        if number in own:
            limits.append(min(own[number].up, own[number].down))
        result.append(min(limits, default=inf))
    return result


class _Arranger:
    def __init__(self, topology: Topology, dimensions: tuple[Dimension, ...], first: int | None):
        self.order: list[int] = []
        self._interned: dict[object, Shape] = {}
        self._dimensions = dimensions
        self._leading = () if first is None else (first,)
        self.shape = self._unit(topology.places, topology.levels)

    def _unit(self, places: tuple[Place, ...], levels: tuple[str, ...]) -> Shape:
        """The shape of everything in ``places``, which are of the last of ``levels``."""
        children, edges = self._children(places, levels)
        for depth, dimension in enumerate(self._dimensions, start=1):
            if dimension.levels[-1] == levels[-1]:
                runs = _runs(len(children), dimension.size)
                children = [self._shape(children[a:b], _within(edges, a, b), depth) for a, b in runs]
                edges = []
        (shape,) = children
        return shape

    def _children(self, places: tuple[Place, ...], levels: tuple[str, ...]) -> tuple[list[Shape], list[Edge]]:
        """What a ring of the innermost dimension of a level joins, and the links around it."""
        children: list[Shape] = []
        edges: list[Edge] = []
        for place in sorted(places, key=self._follows) if self._leading else places:
            start = len(children)
            if not place.places:
                self.order.append(place.rank)
                children.append(self._shape([], [], 0))
            elif any(dimension.levels[-1] == levels[-2] for dimension in self._dimensions):
                children.append(self._unit(place.places, levels[:-1]))
            else:
                inner, within = self._children(place.places, levels[:-1])
                children += inner
                edges += [Edge(start + e.first, start + e.last, e.level, e.link) for e in within]
            edges.append(Edge(start, len(children), levels[-1], place.link))
        return children, edges

    def _follows(self, place: Place) -> bool:
        return not any(rank in self._leading for rank in place.ranks())

    def _shape(self, children: list[Shape], edges: list[Edge], depth: int) -> Shape:
        key = (tuple(map(id, children)), tuple(edges), depth)
        if key not in self._interned:
            offsets, size = [], 0
            for child in children:
                offsets.append(size)
                size += child.size
            self._interned[key] = Shape(tuple(children), tuple(offsets), tuple(edges), size or 1, depth)
        return self._interned[key]


def _runs(count: int, size: int | None) -> list[tuple[int, int]]:
    """Cut ``count`` children into as few runs as sizes up to ``size`` allow, as equal as can be."""
    number = -(-count // size) if size else 1
    cuts = [count * i // number for i in range(number + 1)]
    return list(pairwise(cuts))


def _within(edges: list[Edge], a: int, b: int) -> list[Edge]:
    return [Edge(e.first - a, e.last - a, e.level, e.link) for e in edges if a <= e.first and e.last <= b]
