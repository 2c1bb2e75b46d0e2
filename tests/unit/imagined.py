"""Networks that exist only as numbers, and what bounds every set of their hosts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations

from multiring.planning.balance import shortest_time
from multiring.planning.topology import Link, Place, Topology
from multiring.probe.found import ProbedHost
from multiring.probe.rounds import Burst, Findings, Flow, ProbeRound, Rates, survey
from multiring.simulate.flows import Use, fair_rates


class Network:
    """Performs the rounds of a survey on a topology: flows share its links fairly.

    ``held_up`` gives the part of its fair rate that a flow gets in a round, by the round's number and the flow.
    """

    def __init__(self, topology: Topology, held_up: Callable[[int, Flow], float] = lambda number, flow: 1.0):
        self._capacity: list[float] = []
        self._paths: list[list[tuple[int, Link]]] = []
        self._held_up = held_up
        self.hosts: list[ProbedHost] = []
        self.rounds = 0
        self._place(topology.places, len(topology.levels) - 1, [])

    def _place(self, places: Sequence[Place], height: int, around: list[tuple[int, Link]]) -> None:
        for place in places:
            path = [*around, (len(self._capacity), place.link)]
            self._capacity += [place.link.up, place.link.down]
            if height > 1:
                self._place(place.places, height - 1, path)
            else:
                self.hosts.append(ProbedHost(place.name, tuple(place.ranks()), place.cards))
                self._paths.append(path)

    def _passed(self, sender: int, receiver: int) -> tuple[list[tuple[int, Link]], list[tuple[int, Link]]]:
        """The links that lead out of the sender, and those that lead to the receiver."""
        up, down = self._paths[sender], self._paths[receiver]
        shared = sum(here == there for here, there in zip(up, down, strict=False))
        return up[shared:], down[shared:]

    def _use(self, flow: Flow) -> Use:
        up, down = self._passed(*flow)
        return Use(tuple((number, 1.0) for number in [*(n for n, _ in up), *(n + 1 for n, _ in down)]))

    def survey(self) -> Findings:
        """Findings of a survey of this network."""
        pairs = [(a, b) for a in range(len(self.hosts)) for b in range(len(self.hosts)) if a != b]
        trips = {pair: 2 * max(link.latency for links in self._passed(*pair) for _, link in links) for pair in pairs}
        rounds = survey(len(self.hosts), trips)
        asked = next(rounds)
        while True:
            answer = self._passes(asked, trips) if isinstance(asked, Burst) else self._carries(asked)
            try:
                asked = rounds.send(answer)
            except StopIteration as finished:
                findings: Findings = finished.value
                return findings

    def _carries(self, asked: ProbeRound) -> Rates:
        self.rounds += 1
        fair = fair_rates([self._use(flow) for flow in asked.flows], self._capacity)
        return {f: rate * self._held_up(self.rounds, f) for f, rate in zip(asked.flows, fair, strict=True)}

    def _passes(self, asked: Burst, trips: dict[Flow, float]) -> Rates:
        up, down = self._passed(*asked.flow)
        rates = [(link.burst, link.up) for _, link in up] + [(link.burst, link.down) for _, link in down]
        late = max(max(asked.nbytes - burst, 0) / rate for burst, rate in rates)
        return {asked.flow: trips[asked.flow] + late}


def sets_of_hosts(topology: Topology) -> Iterator[list[int]]:
    """The ranks of every set of two or more hosts."""
    hosts = list(dict.fromkeys(topology.hosts))
    for count in range(2, len(hosts) + 1):
        for chosen in combinations(hosts, count):
            yield [rank for rank, host in enumerate(topology.hosts) if host in chosen]


def tightest_bound(topology: Topology) -> float:
    """Seconds a byte that an all-reduce takes at least, whichever switches are looked at as one.

    The cut bound looks at one switch after the other; where the link between two of them never binds, both together
    bound more.
    """
    outer = [place for place in _walk(topology.places) if place.places and place.places[0].places]
    subsets = (chosen for count in range(len(outer) + 1) for chosen in combinations(outer, count))
    return max(_bound(topology, {id(place) for place in joined}) for joined in subsets)


def _walk(places: Sequence[Place]) -> Iterator[Place]:
    for place in places:
        yield place
        yield from _walk(place.places)


def _bound(topology: Topology, joined: set[int]) -> float:
    """The cut bound where the switches of some places are one with those around them."""
    hosts = set(topology.hosts)

    def legs(places: Sequence[Place]) -> Iterator[Place]:
        for place in places:
            if id(place) in joined:
                yield from legs(place.places)
            else:
                yield place

    def below(places: Sequence[Place], outside: Link | None) -> float:
        around = list(legs(places))
        links = [place.link for place in around] + ([Link(outside.down, outside.up, 0)] if outside else [])
        worst = max(shortest_time([link.up for link in links]), shortest_time([link.down for link in links]))
        for place in around:
            if {topology.hosts[rank] for rank in place.ranks()} != hosts:
                worst = max(worst, 1 / place.link.up, 1 / place.link.down)
                inside: Link | None = place.link
            else:
                inside = None
            if place.places[0].places:
                worst = max(worst, below(place.places, inside))
        return worst

    return below(topology.places, None)
