"""Every rank runs its own schedule, message by message: for small clusters, however irregular."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

from multiring.planning.plan import SENT_FRACTION, Plan
from multiring.planning.schedule import REDUCE, SEND, Schedule, cut, schedule
from multiring.planning.speeds import NATIVE, Speeds
from multiring.planning.topology import Topology

from .calls import Load, Outcome, SimulatedCall, check_world
from .flows import Flow, Simulation, Use
from .links import SimulatedLinks


def simulate_exactly(topology: Topology, calls: Sequence[SimulatedCall], speeds: Speeds = NATIVE) -> Outcome:
    """Run the calls on every rank; they start in their order, at most ``speeds.lanes`` at a time."""
    check_world(calls, topology.world_size)
    links = SimulatedLinks(topology)
    cluster = _ExactCluster(links, calls, speeds)
    cluster.run()
    simulation = cluster.simulation
    loads = [
        Load(links.name(link), 1, nbytes, nbytes / links.capacity[link])
        for link, nbytes in enumerate(simulation.carried[: links.of_places])
        if nbytes
    ]
    loads.sort(key=lambda load: -load.seconds)
    return Outcome(tuple(cluster.begun), tuple(cluster.ended), tuple(loads))


@dataclass(frozen=True, slots=True)
class _Send:
    """One message to each peer, with its number among those to that peer in a segment."""

    nbytes: float
    messages: tuple[tuple[int, int], ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class _Wait:
    """Waits until each (peer, number) of ``messages`` has arrived in a segment, then works for ``seconds``.

    ``number`` is the position of the message among that peer's.
    """

    messages: tuple[tuple[int, int], ...]
    seconds: float


_Program = list[_Send | _Wait]


class _RankSegment:
    """A segment in flight on a rank."""

    __slots__ = ("arrived", "call", "number", "program", "segment", "waits")

    def __init__(self, call: int, segment: int):
        self.call = call
        self.segment = segment
        self.number = 0
        self.program: _Program = []
        self.arrived: Counter[int] = Counter()
        self.waits = False


class _ExactCluster:
    """All ranks, and the network between them."""

    def __init__(self, links: SimulatedLinks, calls: Sequence[SimulatedCall], speeds: Speeds):
        self.links = links
        self.calls = calls
        self.speeds = speeds
        self.simulation = Simulation(links.capacity)
        self.begun = [0.0] * len(calls)
        self.ended = [0.0] * len(calls)
        self.ranks = [_Rank(self, rank) for rank in range(links.world_size)]
        self._turns = lru_cache(maxsize=None)(links.turns)
        self._connections = lru_cache(maxsize=None)(self._connection)
        self._schedules = lru_cache(maxsize=None)(self._schedule)

    def run(self) -> None:
        for rank in self.ranks:
            for number in range(min(self.speeds.lanes, len(self.calls))):
                rank.begin_when_ready(number)
        self.simulation.run()

    def connection_of(self, source: int, target: int, number: int) -> tuple[Flow, Use, float]:
        """Return the connection of message ``number`` to a rank, with its links and its latency."""
        return self._connections(source, target, number % self._turns(source, target))

    def _connection(self, source: int, target: int, turn: int) -> tuple[Flow, Use, float]:
        use = Use(tuple((link, 1.0) for link in self.links.path_of(source, target, turn)))
        return Flow(), use, max(0.0, self.links.delay(source, target) - self.overhead(source, target))

    def overhead(self, source: int, target: int) -> float:
        """Seconds that both sides together spend on a message."""
        return self.speeds.local_overhead if self.links.are_local(source, target) else self.speeds.wire_overhead

    def schedule_of(self, plan: Plan, rank: int) -> Schedule:
        """One a plan and rank: calls share plans."""
        return self._schedules(id(plan), rank)

    def _schedule(self, plan_id: int, rank: int) -> Schedule:
        return schedule(next(call.plan for call in self.calls if id(call.plan) == plan_id), rank)


class _Rank:
    """A rank: one thread, and the segments in flight of each call."""

    def __init__(self, cluster: _ExactCluster, rank: int):
        self._cluster = cluster
        self._rank = rank
        self._free_at = 0.0
        self._rows: dict[tuple[int, int], _RankSegment] = {}
        self._begun: Counter[int] = Counter()
        self._left = [call.segments for call in cluster.calls]
        self._first = [0] * len(cluster.calls)
        self._done: list[set[int]] = [set() for _ in cluster.calls]
        self._program = lru_cache(maxsize=None)(self._compile)

    def begin_when_ready(self, number: int) -> None:
        simulation = self._cluster.simulation
        ready = self._cluster.calls[number].ready
        simulation.at(max(simulation.now, ready), lambda: self._begin(number))

    def _begin(self, number: int) -> None:
        self._cluster.begun[number] = max(self._cluster.begun[number], self._cluster.simulation.now)
        if self._cluster.calls[number].plan.phases:
            self._fill_window(number)
        else:
            self._end(number)

    def _fill_window(self, number: int) -> None:
        call = self._cluster.calls[number]
        while self._begun[number] < min(self._first[number] + call.plan.window, call.segments):
            segment = self._begun[number]
            self._begun[number] += 1
            row = self._row(number, segment)
            row.program = self._program(number, call.bytes_of(segment))
            self._advance(row)

    def _row(self, call: int, segment: int) -> _RankSegment:
        return self._rows.setdefault((call, segment), _RankSegment(call, segment))

    def _advance(self, row: _RankSegment) -> None:
        """Go on with a segment until it waits for a message, or for the thread's work."""
        now = self._cluster.simulation.now
        while row.number < len(row.program):
            step = row.program[row.number]
            if isinstance(step, _Wait) and not all(row.arrived[peer] >= number for peer, number in step.messages):
                row.waits = True
                return
            row.number += 1
            if step.seconds or self._free_at > now:
                self._free_at = max(self._free_at, now) + step.seconds
                self._cluster.simulation.at(self._free_at, partial(self._go_on, row, step))
                return
            self._send(row, step)
        self._finish(row)

    def _go_on(self, row: _RankSegment, step: _Send | _Wait) -> None:
        self._send(row, step)
        self._advance(row)

    def _send(self, row: _RankSegment, step: _Send | _Wait) -> None:
        if isinstance(step, _Send):
            for peer, number in step.messages:
                connection, use, latency = self._cluster.connection_of(self._rank, peer, row.segment + number)
                arrived = self._cluster.ranks[peer].receiver(row.call, row.segment, self._rank)
                self._cluster.simulation.send(connection, use, step.nbytes, latency, arrived)

    def receiver(self, call: int, segment: int, source: int) -> Callable[[], None]:
        """Return the function that runs when a message arrives."""

        def arrived() -> None:
            row = self._row(call, segment)
            row.arrived[source] += 1
            if row.waits:
                row.waits = False
                self._advance(row)

        return arrived

    def _finish(self, row: _RankSegment) -> None:
        number = row.call
        done = self._done[number]
        done.add(row.segment)
        del self._rows[number, row.segment]
        while self._first[number] in done:
            done.remove(self._first[number])
            self._first[number] += 1
        if self._first[number] < self._cluster.calls[number].segments:
            self._fill_window(number)
        else:
            self._end(number)

    def _end(self, number: int) -> None:
        cluster = self._cluster
        cluster.ended[number] = max(cluster.ended[number], cluster.simulation.now)
        following = number + cluster.speeds.lanes
        if following < len(cluster.calls):
            self.begin_when_ready(following)

    def _compile(self, number: int, nbytes: int) -> _Program:
        """The instructions for a segment of so many bytes; spans that are empty in it are left out."""
        plan = self._cluster.calls[number].plan
        program: _Program = []
        awaited: Counter[int] = Counter()
        sent_to: Counter[int] = Counter()
        for instruction in self._cluster.schedule_of(plan, self._rank).instructions:
            if not instruction.peers:
                continue  # it serves residuals, and these calls have none
            block = nbytes // plan.blocks
            size = cut(instruction.hi, block, 1, plan.grain) - cut(instruction.lo, block, 1, plan.grain)
            peers = tuple(peer for peer in instruction.peers if peer != self._rank)
            if instruction.kind == SEND:
                messages = tuple((peer, sent_to[peer]) for peer in peers)
                sent_to.update(peers)
            if size == 0:
                continue
            seconds = sum(self._cluster.overhead(self._rank, peer) for peer in peers) / 2
            if instruction.kind == SEND:
                program.append(_Send(size * SENT_FRACTION[instruction.wire], messages, seconds))
                continue
            if instruction.kind == REDUCE:
                seconds += self._cluster.speeds.gamma * size * (len(instruction.peers) - 1)
            awaited.update(peers)
            program.append(_Wait(tuple((peer, awaited[peer]) for peer in peers), seconds))
        return program
