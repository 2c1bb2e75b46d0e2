"""Predicting how long a plan takes.

The time of a phase for a segment of s bytes is the sum of four terms, in seconds:

    steps x alpha                     alpha: the latency of the slowest link that a message of the step may cross, and
                                      the wait for a core where ranks share cores
    (messages - steps) x overhead     messages: those of the busiest rank, or of all ranks on its core; overhead: the
                                      seconds of each message after the first of a step
    s x (fraction carried) x beta     fraction carried: of the segment, by the busiest link; beta: its seconds a byte.
                                      Where members pass on all that they receive, beta is summed over the steps
    s x (fraction worked) x gamma     fraction worked: of the segment, summed by the busiest rank, or taken in from
                                      other ranks of its host; gamma: the seconds of that a byte

Latencies and rates are those of the topology's links; the rest is in `Speeds`.

Segments follow one another through the phases. The first takes the sum over the phases. After it, a segment comes out
each time that the busiest link or rank has done its part of *all* phases, since many rings and all phases share a
card, an uplink, a core. A large message therefore costs about the largest sum over one link, a small one the sum of the
latencies. Links with bursts pass a small message at once, in every phase, but they collect credit only while they are
idle, so no call is faster than its busiest link carries its bytes at the link's rate. Nor is a call faster than its
busiest rank handles its messages: ranks that share a core have equal parts of it, and a rank that waits uses up its
part. Hockney 1994 for alpha and beta; Culler et al. 1993 (LogP) for the overhead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import ceil

from .layout import Shape
from .loads import LinkKey, LinkMap, Loads
from .plan import IN_BLOCKS, REDUCING, SENT_FRACTION
from .prediction import LinkLoad, PhaseTime, Prediction
from .speeds import NATIVE, Speeds
from .stages import Stage, phase_kinds, phase_wire
from .topology import Link
from .traffic import hands_on, mean_messages, messages, pairs

SEGMENT_TIE = 1.02
"""Segment sizes predicted to take at most this factor of the best one's time count as equal, and the largest of them
is taken: it needs the fewest messages."""

SMALLEST_SLICE_BYTES = 4 << 10
"""Fewest bytes that a segment takes of a block."""

LOCAL_WINDOW_BYTES = 1 << 20
"""Most bytes of one call in flight within a host, unless latencies ask for more: they stay in the cache."""

OUT_OF_CACHE_BYTES = 16 << 20
"""Bytes from which on a buffer does not stay in the cache: what a step exchanges goes to memory and back. Measured:
benchmarks/results/2026-11-25-engine-choices.md, Two ranks in one step."""

WIRE_WINDOW_BYTES = 4 << 20
"""Most bytes of one call in flight between hosts, unless latencies ask for more.
Measured: benchmarks/results/2026-11-28-constants.md, Planning."""

HELD_UP_SECONDS = 20e-3
"""Seconds of work that the busiest link should have left when a host is late.
Measured: benchmarks/results/2026-11-28-constants.md, Planning."""

FEWEST_SEGMENTS, MOST_SEGMENTS = 2, 32
"""Fewest and most segments of one call in flight, however large or small they are."""

HEADER_FACTOR = 1.1
"""Time that small messages take of a link, as a multiple of what their bytes alone take.
Measured: benchmarks/results/2026-11-28-constants.md, Planning."""


@dataclass(frozen=True, slots=True)
class _PhaseCost:
    """Time that a phase adds to a segment, and work that it adds to each link and rank.

    ``latency`` is in seconds: the first two terms of the formula. ``hops`` are the seconds a byte on the links that a
    segment crosses one after another: one entry, that of the busiest link, unless members pass on all that they
    receive. ``loads`` are the bytes on each link for a byte of the buffer. By the class of a rank's link, ``work`` is
    the seconds a byte in which the rank sums or stores, ``most_work`` the most of them, and ``message_seconds`` the
    seconds that the messages of a segment take the rank.
    """

    kind: str
    stage: Stage
    members: int
    steps: int
    latency: float
    message_seconds: dict[LinkKey, float]
    hops: tuple[float, ...]
    loads: Loads
    work: dict[LinkKey, float]
    most_work: float
    is_local: bool

    def seconds(self, nbytes: float, burst_seconds: float) -> float:
        """Seconds to send ``nbytes`` over links whose token buckets hold ``burst_seconds`` of credit, and to work on
        them."""
        if self.is_local:
            burst_seconds = 0.0
        travelling = 0.0
        for per_byte in self.hops:  # most of the planner's time: a generator takes longer, and so does max
            if (taken := per_byte * nbytes - burst_seconds) > 0.0:
                travelling += taken
        return self.latency + travelling + self.most_work * nbytes


@dataclass(frozen=True, slots=True)
class _Pipeline:
    """Pipeline of segments through ``phases``, over links whose token buckets hold ``burst_seconds`` of
    credit.

    A segment keeps the busiest link for ``link_per_byte`` seconds a byte, and the busiest rank for ``core`` seconds and
    ``core_per_byte`` seconds a byte.
    """

    phases: Sequence[_PhaseCost]
    burst_seconds: float
    link_per_byte: float
    core: float
    core_per_byte: float
    window_bytes: int

    def first_seconds(self, size: float, burst_seconds: float) -> float:
        """Seconds until the first segment, of ``size`` bytes, is through all phases."""
        total = 0.0
        for phase in self.phases:
            total += phase.seconds(size, burst_seconds)
        return total

    def busy_seconds(self, size: float) -> float:
        """Seconds that a segment of ``size`` bytes keeps the busiest link or rank."""
        return max(self.link_per_byte * size, self.core + self.core_per_byte * size)

    def window(self, size: float) -> int:
        """The number of segments of ``size`` bytes that may be in flight.

        They fill all phases twice, and leave the busiest link ``HELD_UP_SECONDS`` of work for when a host is late. They
        are ``window_bytes`` at most, or as many as fill the phases once where these are more.
        """
        first, busy = self.first_seconds(size, self.burst_seconds), self.busy_seconds(size)
        if not busy or not size:
            return FEWEST_SEGMENTS
        wanted = (2 * first + HELD_UP_SECONDS) / busy
        allowed = max(self.window_bytes / size, first / busy)
        return ceil(min(max(min(wanted, allowed), FEWEST_SEGMENTS), MOST_SEGMENTS))

    def seconds(self, nbytes: int, segments: int) -> float:
        """Seconds of a call with ``nbytes`` in ``segments`` segments; credit in token buckets makes none slower."""
        size = nbytes / segments

        def over_links(burst_seconds: float) -> float:
            first = self.first_seconds(size, burst_seconds)
            if segments == 1:
                return max(first, self.core)
            between = max(self.busy_seconds(size), first / self.window(size))
            return max(first + (segments - 1) * between, segments * self.core)

        if not self.burst_seconds:
            return over_links(0.0)
        return min(over_links(0.0), max(over_links(self.burst_seconds), HEADER_FACTOR * self.link_per_byte * nbytes))


@dataclass(frozen=True, slots=True)
class _PlanCost:
    """Cost of a plan, whatever the size of the call: its pipeline, with a buffer that stays in the cache and with a
    larger one, and the bytes on each link for a byte of the buffer.

    ``bursts`` are of each link between hosts and direction that is used: the bytes that the link passes at once, the
    bytes that it carries for a byte of the buffer, and its rate.
    """

    in_cache: _Pipeline
    out_of_cache: _Pipeline
    loads: Loads
    bursts: tuple[tuple[float, float, float], ...]

    def pipeline(self, nbytes: int) -> _Pipeline:
        """The pipeline of a call with ``nbytes``."""
        found = self.out_of_cache if nbytes >= OUT_OF_CACHE_BYTES else self.in_cache
        credit = self._burst_seconds(nbytes)
        return replace(found, burst_seconds=credit) if credit else found

    def _burst_seconds(self, nbytes: int) -> float:
        """Seconds of credit that every link between hosts still has when it has passed the whole call.

        It is the least over all links and the directions that are used, and at least 0.
        """
        spare = ((burst - load * nbytes) / rate for burst, load, rate in self.bursts)
        return max(min(spare, default=0.0), 0.0)


@dataclass(frozen=True, slots=True)
class Estimate:
    """The seconds of a call with ``nbytes`` by a plan, in ``segments`` that take ``slice_bytes`` of each block."""

    model: CostModel
    stages: tuple[Stage, ...]
    nbytes: int
    pipeline: _Pipeline
    seconds: float
    slice_bytes: int
    segments: int

    def prediction(self, order: Sequence[int]) -> Prediction:
        """All that the model says of the call; ``order`` has the rank at each position of the shape."""
        return self.model._prediction(self, order)

    def is_below(self, other: Estimate) -> bool:
        """True if its seconds are fewer to the nanosecond, or those without pipelining where they are equal."""
        here, there = round(self.seconds, 9), round(other.seconds, 9)
        return here < there or (here == there and self.unpipelined < other.unpipelined)

    @property
    def unpipelined(self) -> float:
        """Seconds with the whole buffer as one segment."""
        return sum(phase.seconds(self.nbytes, self.pipeline.burst_seconds) for phase in self.pipeline.phases)


class CostModel:
    """Predicts the plans of one collective over a shape, whichever ranks stand in it.

    ``led`` is True for the plans that have a stage in mode lead.

    What a phase costs depends on few of the stages, and is kept from plan to plan; what a plan costs is kept from size
    to size.
    """

    def __init__(self, shape: Shape, collective: str, led: bool, speeds: Speeds = NATIVE):
        self._speeds = speeds
        self._collective = collective
        self._blocks = shape.size if collective in IN_BLOCKS else 1
        self._slices = [max(size // self._blocks // 64 * 64, SMALLEST_SLICE_BYTES) for size in speeds.segments]
        self._map = LinkMap(shape, collective in IN_BLOCKS, led)
        self._costs: dict[Hashable, _PhaseCost | None] = {}
        self._works: dict[tuple[Stage, ...], _PlanCost] = {}

    def estimate(self, stages: tuple[Stage, ...], nbytes: int) -> Estimate:
        """The time of a call with ``nbytes`` (all blocks together), with the best segments for it."""
        pipeline = self._work_of(stages).pipeline(nbytes)
        counts = [max(1, -(-nbytes // (self._blocks * size))) for size in self._slices]
        taken = {count: pipeline.seconds(nbytes, count) for count in set(counts)}
        limit = SEGMENT_TIE * min(taken.values())
        best = max(i for i, count in enumerate(counts) if taken[count] <= limit)
        return Estimate(self, stages, nbytes, pipeline, taken[counts[best]], self._slices[best], counts[best])

    def _prediction(self, of: Estimate, order: Sequence[int]) -> Prediction:
        nbytes, pipeline = of.nbytes, of.pipeline
        return Prediction(
            of.seconds,
            of.slice_bytes,
            of.segments,
            pipeline.window(of.slice_bytes * self._blocks),
            tuple([_phase_time(phase, nbytes, pipeline.burst_seconds) for phase in pipeline.phases]),
            tuple([self._link_load(key, load, nbytes, order) for key, load in self._work_of(of.stages).loads.items()]),
            pipeline.burst_seconds,
        )

    def _work_of(self, stages: tuple[Stage, ...]) -> _PlanCost:
        """The cost of a plan, whatever the size of the call, computed once."""
        if stages not in self._works:
            kinds = phase_kinds(self._collective, stages)
            phases = [cost for cost in (self._cost(depth, kind, stages) for depth, kind in kinds) if cost is not None]
            self._works[stages] = self._plan_cost(phases, _sum(phase.loads for phase in phases))
        return self._works[stages]

    def _plan_cost(self, phases: Sequence[_PhaseCost], loads: Loads) -> _PlanCost:
        """Return the cost of a plan, from the work of all its phases together."""
        work: Counter[LinkKey] = Counter()
        message_seconds: Counter[LinkKey] = Counter()
        for phase in phases:
            work.update(phase.work)
            message_seconds.update(phase.message_seconds)
        working = max(work.values(), default=0.0)
        copying, wires = self._busiest(loads, is_local=True), self._busiest(loads, is_local=False)
        cores_copy = self._speeds.copy_seconds_per_byte > 0
        in_cache = _Pipeline(
            phases,
            0.0,
            link_per_byte=wires if cores_copy else max(copying, wires),
            core=max(message_seconds.values(), default=0.0),
            core_per_byte=working + copying if cores_copy else working,
            window_bytes=LOCAL_WINDOW_BYTES if all(phase.is_local for phase in phases) else WIRE_WINDOW_BYTES,
        )
        out_of_cache = in_cache
        if cores_copy:
            exchanges = (phase for phase in phases if phase.is_local and phase.kind == "all_reduce")
            working += sum(phase.most_work for phase in exchanges)
            out_of_cache = replace(in_cache, core_per_byte=working + copying)
        links = ((self._map.links[key], load) for key, load in loads.items())
        bursts = tuple(
            (like.link.burst, carried, rate)
            for like, both in links
            if like.level != "rank"
            for carried, rate in zip(both, (like.link.up, like.link.down), strict=True)
            if carried
        )
        return _PlanCost(in_cache, out_of_cache, loads, bursts)

    def _cost(self, depth: int, kind: str, stages: Sequence[Stage]) -> _PhaseCost | None:
        """Return the cost of the phase of a kind in the dimension of a depth, computed once; None without a ring."""
        inner = tuple((stage.mode, stage.weighted) for stage in stages[:depth])
        stage = stages[depth - 1]
        key = (depth, kind, stage.method, phase_wire(kind, stage, stages), inner)
        if key not in self._costs:
            self._costs[key] = self._computed(depth, kind, stages) if self._map.shapes(depth) else None
        return self._costs[key]

    def _computed(self, depth: int, kind: str, stages: Sequence[Stage]) -> _PhaseCost:
        """The terms of the formula for a phase: the most of any shape that has rings in this dimension."""
        stage = stages[depth - 1]
        is_local = stage.dimension.levels == ("rank",)
        sent = SENT_FRACTION[phase_wire(kind, stage, stages)]
        whole = self._map.loads(depth, kind, stages)
        loads = {key: (sent * out, sent * in_) for key, (out, in_) in whole.items()}
        if is_local and self._speeds.copy_seconds_per_byte:
            work = self._work(loads, self._speeds.copy_seconds_per_byte)
        else:
            work = self._work(whole, self._speeds.gamma) if kind in REDUCING else {}  # as wide as it is summed
        message_counts = self._map.message_counts(depth, kind, stages)
        shapes = self._map.shapes(depth)
        crossed = [self._crossed(shape, kind, stage.method) for shape in shapes]
        hops = [[max(self._link_seconds(key, load) for key, load in loads.items())]]
        if hands_on(kind, stage.method):
            slowdown = self._speeds.ranks_per_core if is_local else 1.0
            hops += [
                [sent * slowdown / min(min(link.up, link.down) for link in step) for step in by_step]
                for by_step in crossed
            ]
        return _PhaseCost(
            kind,
            stage,
            members=max(len(shape.children) for shape in shapes),
            steps=max(map(len, crossed)),
            latency=max(
                self._latency(shape, depth, kind, stages, by_step)
                for shape, by_step in zip(shapes, crossed, strict=True)
            ),
            message_seconds={key: self._speeds.message_seconds(*counts) for key, counts in message_counts.items()},
            hops=tuple(max(hops, key=sum)),
            loads=loads,
            work=work,
            most_work=max(work.values(), default=0.0),
            is_local=is_local,
        )

    def _latency(
        self, shape: Shape, depth: int, kind: str, stages: Sequence[Stage], crossed: Sequence[frozenset[Link]]
    ) -> float:
        """Seconds that the rings of a shape take however few the bytes are: alpha for each step, and the overhead of
        each further message of the busiest rank."""
        stage = stages[depth - 1]
        ring = (kind, stage.method, len(shape.children), self._blocks > 1)
        in_rings = self._map.fraction_in_rings(depth, stages)
        delay = self._speeds.scheduling_delay(in_rings)
        alpha = sum(max(link.latency for link in links) + delay for links in crossed)
        of_rank = sum(messages(*ring))
        of_core = mean_messages(*ring) * in_rings * self._speeds.ranks_per_core
        carried = max(of_rank, of_core) * self._map.messages_per_share(shape, stages)
        return alpha + (carried - len(crossed)) * self._speeds.overhead(stage.dimension.levels == ("rank",))

    def _crossed(self, shape: Shape, kind: str, method: str) -> list[frozenset[Link]]:
        """The links that a message may cross in each step of a shape's rings: all of them where all members send."""
        size = len(shape.children)
        if method != "halving" and not hands_on(kind, method):
            return [shape.crossed] * len(messages(kind, method, size, False))
        return [frozenset().union(*(shape.between(*pair) for pair in met)) for met in pairs(kind, method, size)]

    def _link_seconds(self, key: LinkKey, load: tuple[float, float]) -> float:
        like = self._map.links[key]
        slowdown = self._speeds.ranks_per_core if like.level == "rank" else 1.0
        return slowdown * max(load[0] / like.link.up, load[1] / like.link.down)

    def _busiest(self, loads: Loads, *, is_local: bool) -> float:
        """Seconds a byte on the busiest link within hosts, or between them."""
        chosen = (item for item in loads.items() if (self._map.links[item[0]].level == "rank") == is_local)
        return max((self._link_seconds(key, load) for key, load in chosen), default=0.0)

    def _work(self, loads: Loads, each: float) -> dict[LinkKey, float]:
        """Seconds of work for each byte of the buffer, by the class of a rank's link: ``each`` seconds for a byte that
        the rank receives."""
        each *= self._speeds.ranks_per_core
        return {key: each * load[1] for key, load in loads.items() if self._map.links[key].level == "rank"}

    def _link_load(self, key: LinkKey, load: tuple[float, float], nbytes: int, order: Sequence[int]) -> LinkLoad:
        like = self._map.links[key]
        up, down = load[0] * nbytes, load[1] * nbytes
        return LinkLoad(like.level, order[like.position], like.count, like.link, up, down)


def _sum(each: Iterable[Loads]) -> Loads:
    total: Loads = {}
    for loads in each:
        for key, (out, in_) in loads.items():
            before = total.get(key, (0.0, 0.0))
            total[key] = (before[0] + out, before[1] + in_)
    return total


def _phase_time(phase: _PhaseCost, nbytes: int, burst_seconds: float) -> PhaseTime:
    stage = phase.stage
    return PhaseTime(
        phase.kind,
        stage.dimension.level,
        stage.method,
        phase.members,
        phase.steps,
        phase.seconds(nbytes, burst_seconds),
    )
