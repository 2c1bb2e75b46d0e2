"""From measurements to the tree of links: pure.

Hosts that share a narrow link are found in two steps. Where everyone sends to everyone, or in the round trips, they
are nearer to one another than to the rest: these groups are *suspects*. Then what leaves and enters a suspect is
compared with what the links already known would let through: where it is less, there is a link.

Only what binds can be found. Of links in series the narrowest shows, and of a link that others never let fill, nothing.
So the tree is canonical: it has no more links than the measurements need, and none is wider than what can reach it. It
has no root either: it is hung up by its middle.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import inf

from multiring.simulate.flows import Use, fair_rates

HostSet = frozenset[int]
"""Hosts, by their numbers."""

Seconds = Mapping[tuple[int, int], float]
"""The round trip between two hosts, for both orders."""

RATE_CONTRAST = 1.3
"""A group is suspected if its hosts get more from one another than from the next host by this factor, on average. Less
is the noise of TCP, and of no use: with m of n hosts behind a link of 1/r of their cards' rates it is
(r-1)(n-m)/(m-1)."""

TRIP_CONTRAST, TRIP_SECONDS = 3.0, 200e-6
"""Factor and difference by which the round trip to the next host must be longer, for a group to count as far apart."""

NARROWER = 1.15
"""A link is there if less passes than the others would let through by this factor. A class of rates is 1.12."""


@dataclass(frozen=True)
class Capacity:
    """Bytes a second that leave and enter a host or group."""

    out: float
    into: float


UNBOUND = Capacity(inf, inf)


@dataclass(frozen=True)
class Branch:
    """Hosts that hang together from one link: a single one, or a switch with ``branches`` below it."""

    capacity: Capacity
    hosts: HostSet
    branches: tuple[Branch, ...] = ()

    @property
    def height(self) -> int:
        """Number of switches on the longest way down."""
        return 1 + max(branch.height for branch in self.branches) if self.branches else 0


def suspects(rates: Mapping[tuple[int, int], float], seconds: Seconds, hosts: Sequence[Capacity]) -> list[HostSet]:
    """Groups of at least two hosts that may share a link. No two overlap in part, and of a group and its complement
    one is kept. All hosts but one are no group: what they would share is the link of that one.

    ``rates`` are those of all flows at once, and are compared with what the links of the hosts alone would give them.
    """
    everyone = frozenset(range(len(hosts)))
    alone = _shared_alone(list(rates), hosts)
    much = {(a, b): min(rates[a, b] / alone[a, b], rates[b, a] / alone[b, a]) for a, b in rates}
    found: list[HostSet] = []
    for group in [*far_apart(seconds, len(hosts)), *_clusters(much, len(hosts), lambda a, b: a >= RATE_CONTRAST * b)]:
        if len(group) == len(hosts) - 1:
            continue
        if group not in found and everyone - group not in found and not any(_cross(group, other) for other in found):
            found.append(group)
    return found


def far_apart(seconds: Seconds, hosts: int) -> list[HostSet]:
    """The groups that are far from the rest: their links are shown whether they bind or not."""
    near = {pair: 1 / trip for pair, trip in seconds.items()}
    return _clusters(near, hosts, lambda a, b: a / b >= TRIP_CONTRAST and 1 / b - 1 / a >= TRIP_SECONDS)


def _shared_alone(flows: Sequence[tuple[int, int]], hosts: Sequence[Capacity]) -> dict[tuple[int, int], float]:
    """The fair rates of flows that share the links of the hosts and nothing else."""
    uses = [Use(((sender, 1.0), (len(hosts) + receiver, 1.0))) for sender, receiver in flows]
    rates = fair_rates(uses, [each.out for each in hosts] + [each.into for each in hosts])
    return dict(zip(flows, rates, strict=True))


def _cross(one: HostSet, other: HostSet) -> bool:
    return bool(one & other and one - other and other - one)


def _clusters(
    near: Mapping[tuple[int, int], float], hosts: int, apart: Callable[[float, float], bool]
) -> list[HostSet]:
    """Clusters by average linkage that are ``apart`` from what they are merged with next, by their nearness."""
    within = {frozenset([host]): 0.0 for host in range(hosts)}
    between = {
        frozenset([frozenset([a]), frozenset([b])]): max(near[a, b], 1e-9) for a, b in combinations(range(hosts), 2)
    }
    found = []
    while len(within) > 1:
        (one, other), nearness = max(((tuple(pair), value) for pair, value in between.items()), key=lambda p: p[1])
        for group in (one, other):
            if len(group) > 1 and apart(within[group], nearness):
                found.append(group)
        for third in within:
            if third not in (one, other):
                sizes = len(one), len(other)
                values = between.pop(frozenset([one, third])), between.pop(frozenset([other, third]))
                mean = (sizes[0] * values[0] + sizes[1] * values[1]) / sum(sizes)
                between[frozenset([one | other, third])] = mean
        del between[frozenset([one, other])], within[one], within[other]
        within[one | other] = nearness
    return found


def needed(hosts: Sequence[Capacity], groups: Mapping[HostSet, Capacity], seconds: Seconds) -> list[HostSet]:
    """The groups that are far apart, and those whose missing link would let more through than was measured.

    The largest excess comes first, and none is redundant.
    """
    far = far_apart(seconds, len(hosts))
    found = [group for group in groups if group in far]

    def excess(group: HostSet) -> float:
        return _excess(group, hosts, groups, found)

    while True:
        worst = max((group for group in groups if group not in found), key=excess, default=None)
        if worst is None or excess(worst) < NARROWER:
            break
        found.append(worst)
    for group in [each for each in found if each not in far]:
        found.remove(group)
        if any(excess(each) >= NARROWER for each in groups if each not in found):
            found.append(group)
    return found


def _excess(
    group: HostSet, hosts: Sequence[Capacity], groups: Mapping[HostSet, Capacity], links: Collection[HostSet]
) -> float:
    """Return the factor by which links of the hosts, and of some groups, would let more through than was measured."""
    capacities = {**{frozenset([host]): capacity for host, capacity in enumerate(hosts)}, **groups}
    leaving = _Flow({each: (capacity.out, capacity.into) for each, capacity in capacities.items()}, links, len(hosts))
    entering = _Flow({each: (capacity.into, capacity.out) for each, capacity in capacities.items()}, links, len(hosts))
    return max(leaving.through(group) / groups[group].out, entering.through(group) / groups[group].into)


class _Flow:
    """Flow through links one way: ``capacities`` are (with the flow, against it) for what leaves a group."""

    def __init__(self, capacities: Mapping[HostSet, tuple[float, float]], links: Collection[HostSet], hosts: int):
        self._capacities = capacities
        self._links = links
        self._everyone = frozenset(range(hosts))

    def through(self, group: HostSet) -> float:
        """Return the rate from a group to the rest, its own link left out: the least cut of a tree."""
        return min(sum(self._let_out(part) for part in self.parts(group)), self._beyond(group))

    def _let_out(self, part: HostSet) -> float:
        own = self._capacities[part][0]
        return own if len(part) == 1 else min(own, sum(map(self._let_out, self.parts(part))))

    def _let_in(self, part: HostSet) -> float:
        own = self._capacities[part][1]
        return own if len(part) == 1 else min(own, sum(map(self._let_in, self.parts(part))))

    def _beyond(self, group: HostSet) -> float:
        """Return the rate that all others can take from a group."""
        around = min((link for link in self._links if link > group), key=len, default=self._everyone)
        beside = sum(self._let_in(part) for part in self.parts(around) if not part & group)
        further = min(self._capacities[around][0], self._beyond(around)) if around != self._everyone else 0.0
        return beside + further

    def parts(self, group: HostSet) -> Iterator[HostSet]:
        """The links right below a group: those of the largest groups in it, and of its other hosts."""
        inside = [link for link in self._links if link < group]
        largest = [link for link in inside if not any(link < other for other in inside)]
        yield from largest
        yield from (frozenset([host]) for host in group if not any(host in link for link in largest))


def tree(
    hosts: Sequence[Capacity], groups: Mapping[HostSet, Capacity], links: Sequence[HostSet], height: int
) -> Branch:
    """The tree of the links of hosts and of some groups, hung up by its middle, at most so high.

    If it is higher, the last of ``links`` are left out.
    """
    capacities = {**{frozenset([host]): capacity for host, capacity in enumerate(hosts)}, **groups}

    def branch(group: HostSet, parts: Iterator[HostSet]) -> Branch:
        inner = sorted(parts, key=min)
        below = [branch(part, flow.parts(part)) if len(part) > 1 else Branch(capacities[part], part) for part in inner]
        return Branch(capacities.get(group, UNBOUND), group, tuple(below))

    flow = _Flow({}, links, len(hosts))
    everyone = frozenset(range(len(hosts)))
    found = _hung(branch(everyone, flow.parts(everyone)))
    return found if found.height <= height else tree(hosts, groups, links[:-1], height)


def _hung(root: Branch) -> Branch:
    """The same tree from its middle, which may be a link: then two switches hang from a new one."""
    ordered = sorted(root.branches, key=lambda branch: branch.height)
    tallest, next_height = ordered[-1], ordered[-2].height if len(ordered) > 1 else 0
    if tallest.height <= next_height:
        return root
    back = Capacity(tallest.capacity.into, tallest.capacity.out)
    rest = Branch(back, root.hosts - tallest.hosts, tuple(branch for branch in root.branches if branch is not tallest))
    if tallest.height == next_height + 1:
        return Branch(UNBOUND, root.hosts, tuple(sorted((tallest, rest), key=lambda branch: min(branch.hosts))))
    branches = sorted((*tallest.branches, rest), key=lambda branch: min(branch.hosts))
    return _hung(Branch(UNBOUND, root.hosts, tuple(branches)))
