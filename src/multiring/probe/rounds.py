"""Survey of a network, round by round: pure, so that it runs on a real network and on an imagined one.

::

    all     every host sends to every other, so that each link which all-to-all traffic fills shows itself: hosts
            behind a full uplink get more from one another than from the rest
    host    one host sends to all others, to see what its card, or whatever is as narrow, lets out; and all others send
            to another host
    group   hosts that seem to share an uplink send to the rest; or the rest to them

Last, through each link found one host sends another as much as passes between them in a millisecond, after a rest.
Where that is there much sooner than at the link's rate, a token bucket had saved it up: a *burst*.

The rate of one flow varies with TCP. What passes a full link together does not, so only sums are believed. On a busy
machine a sum may come out too low, and after a pause a little too high: what no other value confirms is measured
again. No link is filled both ways at once, but where everyone sends to everyone: the words of receipt would wait in the
queue of the other way, and the wider way would look like the narrower.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from multiring.probe import classes
from multiring.probe.tree import Capacity, HostSet, Seconds, needed, suspects

_Found = TypeVar("_Found")

Flow = tuple[int, int]
"""From one host to another, by their numbers."""

Rates = Mapping[Flow, float]
"""Bytes a second of each flow of a round."""

ALL_ROUNDS = 2
WARM_SECONDS, WARM_TRIPS = 0.02, 3.0
"""Seconds, and round trips on top of them, that streams get to reach their speed before a round is measured."""

WINDOW_SECONDS, LONG_WINDOW_SECONDS = 0.05, 0.15
"""Seconds for which a round is measured, and for which values in doubt are measured again. The first is 25 times as
long as the burst that a shaper usually lets through at once."""

CONFIRMED = 3
"""Number of alike values that confirm one another; where fewer are alike, each is measured again, for longer."""

MUCH_LOWER = 0.9
"""A second measurement at or below this part of the first was held up, and the first stands."""

IN_FLIGHT, FASTEST = 1 << 19, 1.25e8
"""Bytes in flight for each link that a round is to fill: the larger of ``IN_FLIGHT`` and what a round trip holds at
``FASTEST`` bytes a second. Less would not fill a link; more only fills queues, which must drain before the next
round."""

LEAST_IN_FLIGHT = 1 << 14
"""Fewest bytes in flight from one host to another."""

BURST_SECONDS, LEAST_BURST, MOST_BURST = 1e-3, 1 << 10, 1 << 20
"""Seconds of a link's rate that a trial of its burst sends, and the bytes: at most ``MOST_BURST``; a burst below
``LEAST_BURST`` is not tried."""

BURST_TRIALS = 3
"""Times that a burst is tried on a link before the link is taken to hold it back: something else may delay one."""

SOONER = 0.5
"""A burst passed at once if, beside a round trip, it took at most this part of the time that it needs at the link's
rate."""


@dataclass(frozen=True)
class Burst:
    """One host sends another ``nbytes``, after a rest; its answer is the seconds until they are acknowledged."""

    flow: Flow
    nbytes: int


@dataclass(frozen=True)
class ProbeRound:
    """Flows at the same time, measured for ``window`` seconds after ``warm`` ones; a stream has ``in_flight`` bytes."""

    flows: tuple[Flow, ...]
    warm: float
    window: float
    in_flight: int


@dataclass(frozen=True)
class Findings:
    """Result of a survey: round trips, what each host can send and receive, and what suspected groups can; the bytes
    that the links of hosts and groups pass at once, if all do."""

    seconds: Seconds
    hosts: tuple[Capacity, ...]
    groups: Mapping[HostSet, Capacity]
    bursts: Mapping[HostSet, float] = field(default_factory=dict)


Survey = Generator[ProbeRound | Burst, Mapping[Flow, float], _Found]
"""Yields what is to be measured and is sent the answer: the rates of a round's flows, the seconds of a burst's."""


@dataclass(frozen=True)
class _Direction:
    """Out of a group of hosts into all others, or the other way."""

    group: HostSet
    outwards: bool

    @property
    def other(self) -> _Direction:
        return _Direction(self.group, not self.outwards)

    def flows(self, hosts: int) -> list[Flow]:
        out = [(inside, beyond) for inside in sorted(self.group) for beyond in range(hosts) if beyond not in self.group]
        return out if self.outwards else [flow[::-1] for flow in out]


def survey(hosts: int, seconds: Seconds) -> Survey[Findings]:
    """The rounds that find the links of ``hosts`` hosts, 2 or more, whose round trips are known."""
    everyone = [(a, b) for a in range(hosts) for b in range(hosts) if a != b]
    mean: Counter[Flow] = Counter()
    for _ in range(ALL_ROUNDS):
        # As much in flight as for a host's link each way: more would overflow the queue of one that many share.
        rates = yield _round(everyone, 2, seconds)
        mean.update({flow: rate / ALL_ROUNDS for flow, rate in rates.items()})

    alone = [frozenset([host]) for host in range(hosts)]
    pairs = [
        [_Direction(each, True), _Direction(after, False)]
        for each, after in zip(alone, alone[1:] + alone[:1], strict=True)
    ]
    values = yield from _measured(pairs, hosts, seconds)
    values = yield from _settled(values, hosts, seconds)
    of_hosts = [_capacity(values, each) for each in alone]

    suspected = suspects(mean, seconds, of_hosts)
    values = yield from _measured(
        [[_Direction(group, outwards)] for group in suspected for outwards in (True, False)], hosts, seconds
    )
    links = needed(of_hosts, {group: _capacity(values, group) for group in suspected}, seconds)
    of_links = {direction: value for direction, value in values.items() if direction.group in links}
    values |= yield from _settled(of_links, hosts, seconds)
    found = Findings(seconds, tuple(of_hosts), {group: _capacity(values, group) for group in suspected})
    return replace(found, bursts=(yield from _bursts(found)))


def _bursts(found: Findings) -> Survey[dict[HostSet, float]]:
    """Bytes that the links of all hosts, and of the groups that have one, pass at once, both ways; nothing if one does
    not, as calls wait for that one."""
    everyone = range(len(found.hosts))
    capacities = {frozenset([host]): capacity for host, capacity in enumerate(found.hosts)}
    capacities |= {group: found.groups[group] for group in needed(found.hosts, found.groups, found.seconds)}
    passed = {}
    for group, capacity in capacities.items():
        out = max(
            ((a, b) for a in sorted(group) for b in everyone if b not in group),
            key=lambda flow: min(_rate(found, flow), _rate(found, flow[::-1])),
        )
        both = out, out[::-1]
        nbytes = min(MOST_BURST, *(round(BURST_SECONDS * _rate(found, flow)) for flow in both))
        for flow, rate in zip(both, (capacity.out, capacity.into), strict=True):
            late = found.seconds[flow] + SOONER * nbytes / rate
            for _ in range(BURST_TRIALS if nbytes >= LEAST_BURST else 0):
                if (yield Burst(flow, nbytes))[flow] <= late:
                    break
            else:
                return {}
        passed[group] = float(nbytes)
    return passed


def _rate(found: Findings, flow: Flow) -> float:
    """Bytes a second that pass from one host to another alone."""
    sender, receiver = flow
    left = [capacity.out for group, capacity in found.groups.items() if sender in group and receiver not in group]
    entered = [capacity.into for group, capacity in found.groups.items() if receiver in group and sender not in group]
    return min(found.hosts[sender].out, found.hosts[receiver].into, *left, *entered)


def _capacity(values: Mapping[_Direction, float], group: HostSet) -> Capacity:
    return Capacity(values[_Direction(group, True)], values[_Direction(group, False)])


def _measured(
    rounds: Iterable[Sequence[_Direction]], hosts: int, seconds: Seconds, window: float = WINDOW_SECONDS
) -> Survey[dict[_Direction, float]]:
    """Measure the bytes a second of each direction, those of a round at the same time."""
    values: dict[_Direction, float] = {}
    for directions in rounds:
        flows = dict.fromkeys(flow for direction in directions for flow in direction.flows(hosts))
        rates = yield _round(list(flows), len(directions), seconds, window)
        values |= {each: _sum(rates, each.flows(hosts)) for each in directions}
    return values


def _settled(values: dict[_Direction, float], hosts: int, seconds: Seconds) -> Survey[dict[_Direction, float]]:
    """The values; each doubtful one is measured again, alone and for longer, and replaced unless that was held up."""
    again = yield from _measured([[direction] for direction in _doubtful(values)], hosts, seconds, LONG_WINDOW_SECONDS)
    return values | {each: longer for each, longer in again.items() if longer > MUCH_LOWER * values[each]}


def _doubtful(values: Mapping[_Direction, float]) -> list[_Direction]:
    """Directions whose rate too few others confirm, and those slower than the same hosts' opposite direction where too
    few others show that difference: directions measured together may take from one another."""
    rates = dict(zip(values, classes.rates(list(values.values())), strict=True))
    single = Counter(rates.values())
    pairs = Counter((rates[each], rates[each.other]) for each in values)
    return [
        each
        for each, rate in rates.items()
        if single[rate] < CONFIRMED or (rate < rates[each.other] and pairs[rate, rates[each.other]] < CONFIRMED)
    ]


def _sum(rates: Rates, flows: Iterable[Flow]) -> float:
    """Return the sum of the flows' rates; above 0, as others are divided by it."""
    return max(sum(rates[flow] for flow in flows), 1.0)


def _round(flows: Sequence[Flow], links: int, seconds: Seconds, window: float = WINDOW_SECONDS) -> ProbeRound:
    """A round that is to fill ``links`` links."""
    longest = max(seconds[flow] for flow in flows)
    total = links * max(IN_FLIGHT, FASTEST * longest)
    in_flight = max(round(total / len(flows)), LEAST_IN_FLIGHT)
    return ProbeRound(tuple(flows), WARM_SECONDS + WARM_TRIPS * longest, window, in_flight)
