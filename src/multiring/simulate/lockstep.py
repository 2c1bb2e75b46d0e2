"""All ranks take each step together: for clusters of any size, in which many ranks do the same.

A segment passes through the rounds of its plan: the ranks hand over their messages, these share the links with those of
other segments and calls, arrive a latency later, and are reduced. Links and ranks that look alike are simulated
once.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil

import numpy as np

from multiring.planning.cost import FEWEST_SEGMENTS, MOST_SEGMENTS
from multiring.planning.plan import Plan
from multiring.planning.speeds import NATIVE, Speeds
from multiring.planning.topology import Topology

from .calls import Load, Outcome, SimulatedCall, check_world
from .flows import Flow, Simulation, Use
from .links import SimulatedLinks
from .rounds import Round, how_many, rounds
from .symmetry import Classes

MOST_STEPS = 100_000
"""Steps of all segments together; beyond, steps of long rings are taken several at a time."""

TRIAL_STEPS = 2_000
"""The same where segment sizes are only compared."""

MOST_SECONDS = 10.0
"""Seconds of a processor that a call may take here by itself, in the smallest segments that are tried."""

MOST_BYTES = 1 << 30
"""Bytes of memory that the different steps of a call may need."""

_STRIDE_SECONDS = 8e-6
_SHARE_SECONDS = 1e-6
"""Seconds that it takes to simulate a stride, and more for each other one that may share the links with it."""

_LINK_BYTES = 8
_RANK_BYTES = 24
"""Bytes that a step keeps for each link and for each rank."""


def check_patience(call: SimulatedCall, links: SimulatedLinks) -> None:
    """ValueError for a call with more messages than can be simulated in ``MOST_SECONDS`` and ``MOST_BYTES``, about."""
    several = how_many(call.plan)
    seconds = call.segments * several * (_STRIDE_SECONDS + several * _SHARE_SECONDS)
    nbytes = several * (len(links.capacity) * _LINK_BYTES + links.world_size * _RANK_BYTES)
    if seconds > MOST_SECONDS or nbytes > MOST_BYTES:
        raise ValueError(
            f"too many messages to simulate: {call.segments} x {several} different steps of {links.world_size} ranks"
        )


def simulate_in_lockstep(topology: Topology, calls: Sequence[SimulatedCall], speeds: Speeds = NATIVE) -> Outcome:
    """Run the calls; they start in their order, at most ``speeds.lanes`` at a time.

    ValueError for one that would take longer than about ``MOST_SECONDS``, or more than ``MOST_BYTES``.
    """
    return _Lockstep(_Cluster(topology, calls, speeds), calls, MOST_STEPS).run()


def with_fastest_segments(topology: Topology, plan: Plan, nbytes: int, speeds: Speeds = NATIVE) -> Plan:
    """The plan with the segments that are fastest for a call by itself: its own, or one of those
    that the ranks can be given, as many bytes in flight. ValueError for more messages than can be simulated."""
    if not plan.phases:
        return plan
    sizes = {min(size, max(nbytes, 64)) for size in (plan.segment_bytes, *speeds.segments)}
    plans = [replace(plan, segment_bytes=size, window=_window(plan, size)) for size in sorted(sizes)]
    calls = [SimulatedCall(each, nbytes) for each in plans]
    cluster = _Cluster(topology, calls, speeds)
    return min(calls, key=lambda call: _Lockstep(cluster, [call], TRIAL_STEPS).run().seconds).plan


def _window(plan: Plan, segment_bytes: int) -> int:
    in_flight = plan.window * plan.segment_bytes // segment_bytes
    return min(max(in_flight, FEWEST_SEGMENTS), MOST_SEGMENTS)


class _Cluster:
    """Links and ranks by what the plans of some calls have them do; plans that differ in segments only are one."""

    def __init__(self, topology: Topology, calls: Sequence[SimulatedCall], speeds: Speeds):
        check_world(calls, topology.world_size)
        self.links = SimulatedLinks(topology)
        self.speeds = speeds
        self.rounds: dict[int, list[Round]] = {}
        for call in calls:
            check_patience(call, self.links)
            if id(call.plan.phases) not in self.rounds:
                self.rounds[id(call.plan.phases)] = list(rounds(call.plan, self.links, speeds))
        found = [each for several in self.rounds.values() for each in several]
        self.link_classes = Classes([np.array(self.links.capacity), *(each.flows for each in found)])
        work = [values for each in found for values in (each.before, each.after, each.reduced)]
        self.rank_classes = Classes([np.zeros(topology.world_size), *work])


@dataclass(frozen=True, slots=True)
class _Work:
    """Work of the ranks of a class in a stride: seconds before and after, and the part that they reduce."""

    ranks: int
    before: float
    after: float
    reduced: float


@dataclass(frozen=True, slots=True)
class _Stride:
    """A step of a segment, or several at a time; ``message`` is a part of its bytes."""

    steps: float
    connection: Flow
    use: Use
    message: float
    latency: float
    slack: float
    slack_per_byte: float
    work: tuple[_Work, ...]


@dataclass(slots=True)
class _Row:
    """A segment in flight."""

    call: int
    nbytes: int
    number: int = 0


class _Lockstep:
    def __init__(self, cluster: _Cluster, calls: Sequence[SimulatedCall], most_steps: int):
        self._cluster = cluster
        self._calls = calls
        self._speeds = cluster.speeds
        steps = {key: sum(each.times for each in several) for key, several in cluster.rounds.items()}
        self._at_once = max(1.0, sum(call.segments * steps[id(call.plan.phases)] for call in calls) / most_steps)
        self._connections: defaultdict[Hashable, Flow] = defaultdict(Flow)
        self._strides = {
            key: [stride for each in several for stride in self._cut(each)] for key, several in cluster.rounds.items()
        }
        self._simulation = Simulation([cluster.links.capacity[link] for link in cluster.link_classes.first])
        self._free_at = [0.0] * len(cluster.rank_classes.first)
        self._begun = [0] * len(calls)
        self._flying: list[deque[_Row]] = [deque() for _ in calls]
        self._times = [(0.0, 0.0)] * len(calls)

    def run(self) -> Outcome:
        for number in range(min(self._speeds.lanes, len(self._calls))):
            self._begin_when_ready(number)
        self._simulation.run()
        begun, ended = zip(*self._times, strict=True) if self._times else ((), ())
        return Outcome(begun, ended, self._loads())

    def _cut(self, each: Round) -> list[_Stride]:
        """Split a round into strides of ``_at_once`` steps."""
        count = ceil(each.times / self._at_once)
        flows = each.flows[self._cluster.link_classes.first]
        amounts = np.stack([each.before, each.after, each.reduced])[:, self._cluster.rank_classes.first]
        work = (_Work(ranks, *does) for ranks, does in enumerate(amounts.T.tolist()) if any(does))
        use = Use(tuple((link, times) for link, times in enumerate(flows.tolist()) if times))
        stride = _Stride(
            each.times / count,
            self._connections[each.pairs],
            use,
            each.message,
            each.latency,
            each.slack,
            each.slack_per_byte,
            tuple(work),
        )
        return [stride] * count

    def _strides_of(self, number: int) -> list[_Stride]:
        return self._strides[id(self._calls[number].plan.phases)]

    def _begin_when_ready(self, number: int) -> None:
        now = self._simulation.now
        self._simulation.at(max(now, self._calls[number].ready), partial(self._begin, number))

    def _begin(self, number: int) -> None:
        now = self._simulation.now
        self._times[number] = (now, now)
        if self._strides_of(number):
            self._fill_window(number)
        else:
            self._end(number)

    def _fill_window(self, number: int) -> None:
        call, flying = self._calls[number], self._flying[number]
        while len(flying) < call.plan.window and self._begun[number] < call.segments:
            row = _Row(number, call.bytes_of(self._begun[number]))
            self._begun[number] += 1
            flying.append(row)
            self._step(row)

    def _step(self, row: _Row) -> None:
        """Hand over the messages of the next stride."""
        stride = self._strides_of(row.call)[row.number]
        slack = (stride.slack + stride.slack_per_byte * stride.message * row.nbytes) * stride.steps
        seconds = [(work.ranks, work.before * stride.steps) for work in stride.work]
        slack, ready_at = self._work(seconds, slack)
        self._simulation.at(ready_at, partial(self._send, row, stride, slack))

    def _send(self, row: _Row, stride: _Stride, slack: float) -> None:
        latency = stride.latency * stride.steps
        arrived = partial(self._take, row, stride, max(0.0, slack - latency))
        nbytes = stride.message * row.nbytes * stride.steps
        self._simulation.send(stride.connection, stride.use, nbytes, max(0.0, latency - slack), arrived)

    def _take(self, row: _Row, stride: _Stride, slack: float) -> None:
        gamma = self._speeds.gamma * row.nbytes
        seconds = [(work.ranks, (work.after + gamma * work.reduced) * stride.steps) for work in stride.work]
        _, ready_at = self._work(seconds, slack)
        self._simulation.at(ready_at, partial(self._go_on, row))

    def _go_on(self, row: _Row) -> None:
        row.number += 1
        if row.number < len(self._strides_of(row.call)):
            self._step(row)
        else:
            self._finish(row)

    def _work(self, seconds: Sequence[tuple[int, float]], slack: float) -> tuple[float, float]:
        """Occupy the threads of some classes of ranks: the slack that is left, and when all have done their part."""
        now = ready_at = self._simulation.now
        longest = 0.0
        for ranks, duration in seconds:
            longest = max(longest, duration)
            if duration > slack:
                self._free_at[ranks] = max(self._free_at[ranks], now) + duration - slack
                ready_at = max(ready_at, self._free_at[ranks])
        return max(0.0, slack - longest), ready_at

    def _finish(self, row: _Row) -> None:
        number = row.call
        flying = self._flying[number]
        while flying and flying[0].number == len(self._strides_of(number)):
            flying.popleft()
        self._fill_window(number)
        if not flying:
            self._end(number)

    def _end(self, number: int) -> None:
        self._times[number] = (self._times[number][0], self._simulation.now)
        following = number + self._speeds.lanes
        if following < len(self._calls):
            self._begin_when_ready(following)

    def _loads(self) -> tuple[Load, ...]:
        links, classes = self._cluster.links, self._cluster.link_classes
        loads = [
            Load(links.name(link), count, nbytes, nbytes / links.capacity[link])
            for link, count, nbytes in zip(classes.first, classes.count, self._simulation.carried, strict=True)
            if nbytes
        ]
        return tuple(sorted(loads, key=lambda load: -load.seconds))
