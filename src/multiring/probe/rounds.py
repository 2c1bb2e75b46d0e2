"""What is measured, round by round: pure, so that the same survey runs on a network and on an imagined one.

::

    all     every host sends to every other, so that each link which all-to-all traffic fills shows itself: hosts
            behind a full uplink get more from one another than from the rest
    host    one host sends to all others, to see what its card, or whatever is as narrow, lets out; and all others send
            to another host
    group   hosts that seem to share an uplink send to the rest; or the rest to them

Last, through each link found one host sends another as much as passes between them in a millisecond, after a rest.
Where that is there much sooner than at the link's rate, a token bucket had saved it up: a *burst*.

A flow's own rate is left to TCP's moods. What passes a full link together is not, so only sums are believed. On a busy
machine a sum may come out too low, and after a pause a little too high: what no other value confirms is measured
again. No link is filled both ways at once, but where everyone sends to everyone: the words of receipt would wait in the
queue of the other way, and the wider way would look like the narrower.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from multiring.probe import classes
from multiring.probe.tree import Capacity, Group, Seconds, needed, suspects

_Found = TypeVar("_Found")

Flow = tuple[int, int]
"""From one host to another, by their numbers."""

Rates = Mapping[Flow, float]
"""Bytes a second of each flow of a round."""

ALL_ROUNDS = 2
WARM_SECONDS, WARM_TRIPS = 0.02, 3.0
"""Before a round is measured, its streams get so long, and so many round trips, to reach their speed."""

WINDOW_SECONDS, LONG_WINDOW_SECONDS = 0.05, 0.15
"""25 times as long as the burst that a shaper usually lets through at once; and where that is not enough."""

CONFIRMED = 3
"""So many values that are alike believe each other; fewer are measured again, for longer."""

MUCH_LOWER = 0.9
"""Measured again as so much less, a value was held up the second time."""

IN_FLIGHT, FASTEST = 1 << 19, 1.25e8
"""What is in flight for each link that a round is to fill: bytes, and as much as a round trip holds at so many bytes a
second. Less would not fill a link; more only fills queues, which must drain before the next round."""

LEAST_IN_FLIGHT = 1 << 14
"""Of a stream."""

BURST_SECONDS, LEAST_BURST, MOST_BURST = 1e-3, 1 << 10, 1 << 20
"""A link is tried with what it passes in that time, of so many bytes."""

BURST_TRIALS = 3
"""So often a link may be held up by something else."""

SOONER = 0.5
"""What has come in so much of the time that it takes at the link's rate, or less, came at once."""


@dataclass(frozen=True)
class Burst:
    """One host sends another so many bytes, after a rest; its answer is the seconds until they are acknowledged."""

    flow: Flow
    nbytes: int


@dataclass(frozen=True)
class Round:
    """Flows at the same time, measured for ``window`` seconds after ``warm`` ones; a stream has ``in_flight`` bytes."""

    about: str
    flows: tuple[Flow, ...]
    warm: float
    window: float
    in_flight: int


@dataclass(frozen=True)
class Findings:
    """What a survey found: round trips, what each host can send and receive, and what suspected groups can; the bytes
    that the links of hosts and groups pass at once, if all do."""

    seconds: Seconds
    hosts: tuple[Capacity, ...]
    groups: Mapping[Group, Capacity]
    bursts: Mapping[Group, float] = field(default_factory=dict)


Survey = Generator[Round | Burst, Mapping[Flow, float], _Found]
"""Yields what is to be measured and is sent the answer: the rates of a round's flows, the seconds of a burst's."""


def survey(hosts: int, seconds: Seconds) -> Survey[Findings]:
    """The rounds that find the links of so many hosts, 2 or more, whose round trips are known."""
    everyone = [(a, b) for a in range(hosts) for b in range(hosts) if a != b]
    mean: Counter[Flow] = Counter()
    for _ in range(ALL_ROUNDS):
        rates = yield _round("all", everyone, hosts, seconds)
        mean.update({flow: rate / ALL_ROUNDS for flow, rate in rates.items()})

    of_hosts = yield from _cards(hosts, seconds)
    for host in _doubtful(of_hosts):
        of_hosts[host] = _settled(of_hosts[host], (yield from _again({host}, hosts, seconds)))

    groups: dict[Group, Capacity] = {}
    for group in suspects(mean, seconds, of_hosts):
        groups[group] = yield from _both_ways(group, hosts, seconds)
    links = needed(of_hosts, groups, seconds)
    for number in _doubtful([groups[link] for link in links]):
        group = links[number]
        groups[group] = _settled(groups[group], (yield from _again(group, hosts, seconds)))
    found = Findings(seconds, tuple(of_hosts), groups)
    return replace(found, bursts=(yield from _bursts(found)))


def _bursts(found: Findings) -> Survey[dict[Group, float]]:
    """What the links of all hosts, and of the groups that have one, pass at once, both ways; nothing if one does
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


def _cards(hosts: int, seconds: Seconds) -> Survey[list[Capacity]]:
    """What every host can send and receive: in each round one sends and the next receives."""
    out, into = [0.0] * hosts, [0.0] * hosts
    for host in range(hosts):
        other = (host + 1) % hosts
        sent = [(host, peer) for peer in range(hosts) if peer != host]
        received = [(peer, other) for peer in range(hosts) if peer != other]
        rates = yield _round("host", list(dict.fromkeys(sent + received)), 2, seconds)
        out[host], into[other] = _sum(rates, sent), _sum(rates, received)
    return [Capacity(*each) for each in zip(out, into, strict=True)]


def _both_ways(
    group: Collection[int], hosts: int, seconds: Seconds, window: float = WINDOW_SECONDS
) -> Survey[Capacity]:
    """What some hosts can send to all others, and then what they can receive from them."""
    outwards = [(a, b) for a in group for b in range(hosts) if b not in group]
    out = yield _round("group", outwards, 1, seconds, window)
    into = yield _round("group", [(b, a) for a, b in outwards], 1, seconds, window)
    return Capacity(_sum(out, out), _sum(into, into))


def _sum(rates: Rates, flows: Iterable[Flow]) -> float:
    """What flows carry together; at least something, since it is to be divided by."""
    return max(sum(rates[flow] for flow in flows), 1.0)


def _again(group: Collection[int], hosts: int, seconds: Seconds) -> Survey[Capacity]:
    return _both_ways(group, hosts, seconds, LONG_WINDOW_SECONDS)


def _round(about: str, flows: Sequence[Flow], links: int, seconds: Seconds, window: float = WINDOW_SECONDS) -> Round:
    """A round that is to fill so many links."""
    longest = max(seconds[flow] for flow in flows)
    total = links * max(IN_FLIGHT, FASTEST * longest)
    in_flight = max(round(total / len(flows)), LEAST_IN_FLIGHT)
    return Round(about, tuple(flows), WARM_SECONDS + WARM_TRIPS * longest, window, in_flight)


def _doubtful(capacities: Sequence[Capacity]) -> list[int]:
    """The numbers of those of which a value is not confirmed by others."""
    found = classes.rates([rate for each in capacities for rate in (each.out, each.into)])
    count = Counter(found)
    return [
        number
        for number in range(len(capacities))
        if min(count[found[2 * number]], count[found[2 * number + 1]]) < CONFIRMED
    ]


def _settled(first: Capacity, again: Capacity) -> Capacity:
    """The value of the longer window, unless it was held up."""
    out, into = (
        longer if longer > MUCH_LOWER * shorter else shorter
        for shorter, longer in ((first.out, again.out), (first.into, again.into))
    )
    return Capacity(out, into)
