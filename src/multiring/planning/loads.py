"""Loads of a plan's stages on the links.

Every ring of a phase has one member in each child of a unit, and the rings of a unit together cover the buffer once.
What crosses the link of a child therefore follows from the method and the share of that child alone. A link further
down carries a fraction of it: what the ranks behind that link own. Links that look alike are one class, so that no ring
need be made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil

from .balance import fastest_shares
from .layout import Shape
from .stages import ALL, LEAD, Stage
from .topology import Link
from .traffic import crossing, meets_all, partners

ShapePath = tuple[int, ...]
"""Path to a shape in an arrangement: the number of the child to descend to at each depth, outermost first."""

LinkKey = tuple[ShapePath, int]
"""Names a class of links that look alike, by the first of them: the path of its shape, and the number of its edge."""

Loads = dict[LinkKey, tuple[float, float]]
"""Bytes (out, in) that the busiest link of each class carries for each byte of the buffer."""


@dataclass(frozen=True, slots=True)
class LinkClass:
    """``count`` links that look alike; the first is around the rank at ``position``."""

    level: str
    link: Link
    count: int
    position: int


class LinkMap:
    """The links of an arrangement, and what stages put on them.

    ``in_blocks``: the buffer is a block for each rank. ``led``: some stage has mode lead, so the links of the first
    child of a unit, its leader, are not like those of the others.
    """

    def __init__(self, shape: Shape, in_blocks: bool, led: bool):
        self.links: dict[LinkKey, LinkClass] = {}
        self._in_blocks = in_blocks
        self._led = led
        self._whole = shape
        self._size = shape.size
        self._shapes: list[tuple[ShapePath, Shape]] = []  # one for each class of units
        self._counts: dict[ShapePath, int] = {}  # the number of units in the class
        # Numbers of ranks by depth: in the first children of all units, in the second, and so on.
        self._ranks_in_children: dict[int, list[int]] = {}
        self._walk(shape, (), 1, 0)

    def _walk(self, shape: Shape, path: ShapePath, count: int, position: int) -> None:
        self._shapes.append((path, shape))
        self._counts[path] = count
        for number, alike in self._edge_classes(shape):
            edge = shape.edges[number]
            first = position + shape.offsets[edge.first]
            self.links[path, number] = LinkClass(edge.level, edge.link, count * len(alike), first)
        ranks = self._ranks_in_children.setdefault(shape.depth, [])
        ranks += [0] * (len(shape.children) - len(ranks))
        for number, child in enumerate(shape.children):
            ranks[number] += count * child.size
        for number, alike in self._child_classes(shape):
            self._walk(shape.children[number], (*path, number), count * len(alike), position + shape.offsets[number])

    def shapes(self, depth: int) -> list[Shape]:
        """The different shapes of a depth that have rings."""
        found = (shape for _, shape in self._shapes if shape.depth == depth and len(shape.children) > 1)
        return list(dict.fromkeys(found))

    def fraction_in_rings(self, depth: int, stages: Sequence[Stage]) -> float:
        """The ranks that are in a ring of a depth, as a fraction of all ranks."""
        shapes = ((self._counts[path], shape) for path, shape in self._shapes if shape.depth == depth)
        members = sum(count * sum(_owners(child, stages) for child in shape.children) for count, shape in shapes)
        return members / self._size

    def loads(self, depth: int, kind: str, stages: Sequence[Stage]) -> Loads:
        """Return the loads of a phase of a kind on every link, in the dimension of a depth."""
        loads: Loads = {}
        method = stages[depth - 1].method
        for path, shape in self._shapes:
            if shape.depth == depth and len(shape.children) > 1:
                shares = self._shares(shape, stages)
                holders = _holders(shape.children[0], stages)
                crossings = [
                    _scaled(holders, crossing(kind, method, shares, edge.first, edge.last)) for edge in shape.edges
                ]
                self._keep_busiest(loads, path, shape, crossings)
                for number, alike in self._child_classes(shape):
                    each = [_scaled(holders, crossing(kind, method, shares, i, i + 1)) for i in alike]
                    self._spread_load(loads, (*path, number), shape.children[number], _busiest(each), stages)
        return loads

    def message_counts(self, depth: int, kind: str, stages: Sequence[Stage]) -> Loads:
        """The messages (between hosts, within one host) that the busiest rank of each class sends and receives in a
        phase, by the class of the rank's link."""
        found: Loads = {}
        method = stages[depth - 1].method
        for path, shape in self._shapes:
            if shape.depth == depth and len(shape.children) > 1:
                per_share = self.messages_per_share(shape, stages)
                hosts = _hosts(shape, stages[depth - 1].dimension.levels)
                each = [_scaled(per_share, counts) for counts in self._member_messages(hosts, kind, method)]
                self._spread_messages(found, path, shape, each, stages)
        return {key: counts for key, counts in found.items() if self.links[key].level == "rank"}

    def _member_messages(self, hosts: Sequence[Hashable], kind: str, method: str) -> Iterator[tuple[float, float]]:
        """The messages (between hosts, within one host) of each member of a ring; ``hosts`` are the members' hosts."""
        size, together = len(hosts), Counter(hosts)
        for member, host in enumerate(hosts):
            if meets_all(kind, method):
                all_, within = 2 * (size - 1), 2 * (together[host] - 1)
            else:
                met = partners(kind, method, size, member, self._in_blocks)
                all_, within = met.total(), sum(n for other, n in met.items() if hosts[other] == host)
            yield float(all_ - within), float(within)

    def _spread_messages(
        self, found: Loads, path: ShapePath, shape: Shape, each: Sequence[tuple[float, float]], stages: Sequence[Stage]
    ) -> None:
        """Count the messages of each child for the ranks in it that own a part of its sum."""
        self._keep_busiest(found, path, shape, [_busiest(each[edge.first : edge.last]) for edge in shape.edges])
        for number, alike in self._child_classes(shape):
            child, most = shape.children[number], _busiest([each[i] for i in alike])
            if child.children:
                leading = stages[child.depth - 1].mode == LEAD
                owners = [_scaled(float(i == 0 or not leading), most) for i in range(len(child.children))]
                self._spread_messages(found, (*path, number), child, owners, stages)

    def _spread_load(
        self, loads: Loads, path: ShapePath, shape: Shape, load: tuple[float, float], stages: Sequence[Stage]
    ) -> None:
        """Spread what crosses the link of a shape over the links within, by what the ranks behind them own."""
        if not shape.children:
            return
        fractions = self._fractions(shape, stages)
        self._keep_busiest(loads, path, shape, [_scaled(sum(fractions[e.first : e.last]), load) for e in shape.edges])
        for number, alike in self._child_classes(shape):
            most = max(fractions[i] for i in alike)
            self._spread_load(loads, (*path, number), shape.children[number], _scaled(most, load), stages)

    def _keep_busiest(self, loads: Loads, path: ShapePath, shape: Shape, each: Sequence[tuple[float, float]]) -> None:
        """Note the load of each edge of a shape where its class has no larger one yet."""
        for number, alike in self._edge_classes(shape):
            loads[path, number] = _busiest([loads.get((path, number), (0.0, 0.0)), *(each[i] for i in alike)])

    def _shares(self, shape: Shape, stages: Sequence[Stage]) -> tuple[float, ...]:
        """The fraction of the sum of a shape that each child owns after a reduce_scatter."""
        if self._in_blocks:
            # A block goes to the child with the number that its rank's child has in its own unit, modulo the children
            # here: this is the rule of `compose` for blocks.
            owned = [0] * len(shape.children)
            for number, ranks in enumerate(self._ranks_in_children[shape.depth]):
                owned[number % len(owned)] += ranks
            return tuple(ranks / self._size for ranks in owned)
        shares = fastest_shares(shape, self._whole) if stages[shape.depth - 1].weighted else None
        if shares is None:
            return (1 / len(shape.children),) * len(shape.children)
        return tuple(share / sum(shares) for share in shares)

    def _fractions(self, shape: Shape, stages: Sequence[Stage]) -> tuple[float, ...]:
        """The fraction of what crosses the link of a shape that comes from or goes to each child."""
        mode = stages[shape.depth - 1].mode
        if mode == LEAD:
            return (1.0,) + (0.0,) * (len(shape.children) - 1)
        if mode == ALL:
            return (1 / len(shape.children),) * len(shape.children)
        return self._shares(shape, stages)

    def _child_classes(self, shape: Shape) -> list[tuple[int, list[int]]]:
        """The children of a shape by class: those that look alike and get equal shares; (first, all) of each class."""
        leads = [self._led and number == 0 for number in range(len(shape.children))]
        return _classes(zip(shape.children, shape.bandwidths, leads, strict=True))

    def _edge_classes(self, shape: Shape) -> list[tuple[int, list[int]]]:
        """The edges of a shape by class: those that look alike, with all behind them; (first, all) of each class."""
        return _classes(
            (
                edge.level,
                edge.link,
                shape.children[edge.first : edge.last],
                shape.bandwidths[edge.first : edge.last],
                self._led and edge.first == 0,
            )
            for edge in shape.edges
        )

    def messages_per_share(self, shape: Shape, stages: Sequence[Stage]) -> int:
        """The most messages that carry one share in the rings of a shape.

        A share is several blocks where the buffer is in blocks; else several spans where units are not cut alike.
        """
        if self._in_blocks:
            return ceil(self._size / shape.size)
        return ceil(_spans_between_cuts(shape, stages) / min(_pieces(child, stages) for child in shape.children))


def _pieces(shape: Shape, stages: Sequence[Stage]) -> int:
    """The most spans into which a shape's sum is cut, each with one owner."""
    if not shape.children or stages[shape.depth - 1].mode == LEAD:
        return 1
    return _spans_between_cuts(shape, stages) * (1 if stages[shape.depth - 1].mode == ALL else len(shape.children))


def _spans_between_cuts(shape: Shape, stages: Sequence[Stage]) -> int:
    """The most spans into which the cuts of all children together divide the buffer."""
    return 1 + sum(_pieces(child, stages) - 1 for child in set(shape.children))


def _owners(shape: Shape, stages: Sequence[Stage]) -> int:
    """The number of ranks of a shape that own a part of its sum."""
    if not shape.children:
        return 1
    leading = stages[shape.depth - 1].mode == LEAD
    return sum(_owners(child, stages) for child in (shape.children[:1] if leading else shape.children))


def _hosts(shape: Shape, levels: tuple[str, ...]) -> Sequence[Hashable]:
    """A label of the host of each child of a shape whose rings run between these levels."""
    if levels[0] != "rank":
        return range(len(shape.children))
    return shape.hosts if len(levels) > 1 else (None,) * len(shape.children)


def _holders(shape: Shape, stages: Sequence[Stage]) -> int:
    """The number of ranks of a shape that hold the same part of its sum; mode all leaves several, each with a ring."""
    if not shape.children:
        return 1
    here = len(shape.children) if stages[shape.depth - 1].mode == ALL else 1
    return here * _holders(shape.children[0], stages)


def _classes(looks: Iterable[Hashable]) -> list[tuple[int, list[int]]]:
    """The numbers of what looks alike, by class: (first, all)."""
    classes: dict[Hashable, list[int]] = {}
    for number, look in enumerate(looks):
        classes.setdefault(look, []).append(number)
    return [(alike[0], alike) for alike in classes.values()]


def _scaled(factor: float, load: tuple[float, float]) -> tuple[float, float]:
    return factor * load[0], factor * load[1]


def _busiest(loads: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return max(out for out, _ in loads), max(in_ for _, in_ in loads)
