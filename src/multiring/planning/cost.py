"""Predicting how long a plan takes.

A phase of a segment of s bytes takes

    steps x alpha + (messages - steps) x overhead + s x (part on its busiest link) x beta + s x (part reduced) x gamma.

Segments follow one another through the phases. The first takes the sum over the phases; after it, one comes out
whenever the busiest link or rank has done its part of *all* phases, since many rings and all phases share a
card, an uplink, a core. So a big message costs about the largest sum over one link, a small one the sum of the
latencies. Links with bursts pass a small message at once, in every phase; but they save only while they are idle, so no
call is faster than its busiest link. Nor is a call faster than its busiest rank handles its messages: ranks that share
a core have equal parts of it, and those that wait use theirs up.
Hockney 1994 for alpha and beta; Culler et al. 1993 (LogP) for the overhead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from math import ceil

from .layout import Layout, Shape
from .loads import Key, LinkMap, Loads
from .plan import BLOCKED, REDUCING, SENT_PART
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
"""Bytes from which on a buffer does not stay in the cache: what a step exchanges, copied wherever the buffer lies, goes
to memory and back. 16 MB took two ranks 1.83 ms in one step and 1.63 in two; 8 MB 0.65 and 0.75."""

WIRE_WINDOW_BYTES = 4 << 20
"""Most bytes of one call in flight between hosts, unless latencies ask for more. 64 MB over cards of 5 Gbit/s took 208
ms with 1 MB in flight, 154 with 2 and 131 with 4 or 8, and eight calls at once may each need as much for their
staging."""

HELD_UP_SECONDS = 20e-3
"""Seconds of work that the busiest link should have left when a host is late. Longer windows delay the first segments,
which queue behind the later ones: at 200 Mbit/s 8 MB took 382 ms with 4 MB (160 ms) in flight, 364 with 1 MB or 3/4."""

FEWEST_SEGMENTS, MOST_SEGMENTS = 2, 32
"""Fewest and most segments of one call in flight, however large or small they are."""

HEADER_FACTOR = 1.1
"""Time that small messages take of a link, as a multiple of what their bytes alone take: calls of 4 KB took 362 to 367
us back to back where the bytes alone take the busiest link 328."""


@dataclass(frozen=True, slots=True)
class _Phase:
    """What a phase adds to a segment's time: ``latency`` seconds, and the seconds a byte on each of its ``hops``, one
    after the other. ``loads`` are the bytes on its links. By the class of the ranks' links, ``work`` is the seconds a
    byte in which ranks reduce or store, ``most_work`` the most of them, and ``message_seconds`` the seconds that a
    segment's messages take them."""

    kind: str
    stage: Stage
    members: int
    steps: int
    latency: float
    message_seconds: dict[Key, float]
    hops: tuple[float, ...]
    loads: Loads
    work: dict[Key, float]
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
    """How segments follow one another. A segment takes the ``phases``, over links whose token buckets hold
    ``burst_seconds`` of credit. It keeps the busiest link for ``link_per_byte`` seconds a byte, and the busiest rank
    for ``core`` seconds and ``core_per_byte`` seconds a byte."""

    phases: Sequence[_Phase]
    burst_seconds: float
    link_per_byte: float
    core: float
    core_per_byte: float
    window_bytes: int

    def first(self, size: float, burst_seconds: float) -> float:
        total = 0.0
        for phase in self.phases:
            total += phase.seconds(size, burst_seconds)
        return total

    def busy(self, size: float) -> float:
        return max(self.link_per_byte * size, self.core + self.core_per_byte * size)

    def window(self, size: float) -> int:
        """How many segments of a size should be in flight: enough to fill the phases twice and to keep the busiest link
        busy while a host is late, within reason."""
        first, busy = self.first(size, self.burst_seconds), self.busy(size)
        if not busy:
            return FEWEST_SEGMENTS
        most = max(self.window_bytes / size, first / busy)
        return ceil(min(max(min((2 * first + HELD_UP_SECONDS) / busy, most), FEWEST_SEGMENTS), MOST_SEGMENTS))

    def seconds(self, nbytes: int, segments: int) -> float:
        """Seconds of a call with ``nbytes`` in ``segments`` segments; credit in token buckets makes none slower."""
        size = nbytes / segments

        def over_links(burst_seconds: float) -> float:
            first = self.first(size, burst_seconds)
            return max(first + (segments - 1) * max(self.busy(size), first / self.window(size)), segments * self.core)

        if not self.burst_seconds:
            return over_links(0.0)
        return min(over_links(0.0), max(over_links(self.burst_seconds), HEADER_FACTOR * self.link_per_byte * nbytes))


class CostModel:
    """Predicts the plans of one collective over one arrangement of a topology; ``led`` are those with leaders."""

    def __init__(self, arrangement: Layout, collective: str, led: bool, speeds: Speeds = NATIVE):
        self._speeds = speeds
        self._order = arrangement.order
        self._collective = collective
        self._blocks = arrangement.shape.size if collective in BLOCKED else 1
        self._map = LinkMap(arrangement.shape, collective in BLOCKED, led)
        self._phases: dict[Hashable, _Phase | None] = {}

    def predict(self, stages: Sequence[Stage], nbytes: int) -> Prediction:
        """The time of a call with ``nbytes`` (all blocks together), with the best segments for it."""
        kinds = phase_kinds(self._collective, stages)
        phases = [phase for phase in (self._phase(depth, kind, stages) for depth, kind in kinds) if phase is not None]
        loads = _sum(phase.loads for phase in phases)
        work: Counter[Key] = Counter()
        message_seconds: Counter[Key] = Counter()
        for phase in phases:
            work.update(phase.work)
            message_seconds.update(phase.message_seconds)
        working = max(work.values(), default=0.0)
        copying, wires = self._busiest(loads, is_local=True), self._busiest(loads, is_local=False)
        cores_copy = self._speeds.copy_seconds_per_byte > 0
        if cores_copy and nbytes >= OUT_OF_CACHE_BYTES:
            exchanges = (phase for phase in phases if phase.is_local and phase.kind == "all_reduce")
            working += sum(phase.most_work for phase in exchanges)
        pipeline = _Pipeline(
            phases,
            self._burst_seconds(loads, nbytes),
            wires if cores_copy else max(copying, wires),
            max(message_seconds.values(), default=0.0),
            working + copying if cores_copy else working,
            LOCAL_WINDOW_BYTES if all(phase.is_local for phase in phases) else WIRE_WINDOW_BYTES,
        )
        slices = [max(size // self._blocks // 64 * 64, SMALLEST_SLICE_BYTES) for size in self._speeds.segments]
        counts = [max(1, -(-nbytes // (self._blocks * size))) for size in slices]
        taken = {count: pipeline.seconds(nbytes, count) for count in set(counts)}
        limit = SEGMENT_TIE * min(taken.values())
        best = max(i for i, count in enumerate(counts) if taken[count] <= limit)
        return Prediction(
            taken[counts[best]],
            slices[best],
            counts[best],
            pipeline.window(slices[best] * self._blocks),
            tuple(_phase_time(phase, nbytes, pipeline.burst_seconds) for phase in phases),
            tuple(self._link_load(key, load, nbytes) for key, load in loads.items()),
            pipeline.burst_seconds,
        )

    def _phase(self, depth: int, kind: str, stages: Sequence[Stage]) -> _Phase | None:
        inner = tuple((stage.mode, stage.weighted) for stage in stages[:depth])
        stage = stages[depth - 1]
        key = (depth, kind, stage.method, phase_wire(kind, stage, stages), inner)
        if key not in self._phases:
            self._phases[key] = self._computed(depth, kind, stages) if self._map.shapes(depth) else None
        return self._phases[key]

    def _computed(self, depth: int, kind: str, stages: Sequence[Stage]) -> _Phase:
        stage = stages[depth - 1]
        is_local = stage.dimension.levels == ("rank",)
        one = self._speeds.overhead(is_local)
        part = SENT_PART[phase_wire(kind, stage, stages)]
        slowdown = self._speeds.ranks_per_core if is_local else 1.0
        whole = self._map.loads(depth, kind, stages)
        loads = {key: (part * out, part * in_) for key, (out, in_) in whole.items()}
        if is_local and self._speeds.copy_seconds_per_byte:
            work = self._work(loads, self._speeds.copy_seconds_per_byte)
        else:
            work = self._work(whole, self._speeds.gamma) if kind in REDUCING else {}  # as wide as it is summed
        steps, latency = 0, 0.0
        message_counts = self._map.message_counts(depth, kind, stages)
        message_seconds = {key: self._speeds.message_seconds(*counts) for key, counts in message_counts.items()}
        hops: list[float] = [max(self._link_seconds(key, load) for key, load in loads.items())]
        involved = self._map.part_in_rings(depth, stages)
        delay = self._speeds.scheduling_delay(involved)
        for shape in self._map.shapes(depth):
            ring = (kind, stage.method, len(shape.children), self._blocks > 1)
            counts = messages(*ring)
            on_core = mean_messages(*ring) * involved * self._speeds.ranks_per_core
            carried = max(sum(counts), on_core) * self._map.messages_per_share(shape, stages)
            steps = max(steps, len(counts))
            crossed = self._crossed(shape, kind, stage.method)
            alpha = sum(max(link.latency for link in links) + delay for links in crossed)
            latency = max(latency, alpha + (carried - len(counts)) * one)
            if hands_on(kind, stage.method):
                row = [part * slowdown / min(min(link.up, link.down) for link in links) for links in crossed]
                hops = max(hops, row, key=sum)
        members = max(len(shape.children) for shape in self._map.shapes(depth))
        most_work = max(work.values(), default=0.0)
        return _Phase(
            kind, stage, members, steps, latency, message_seconds, tuple(hops), loads, work, most_work, is_local
        )

    def _crossed(self, shape: Shape, kind: str, method: str) -> list[frozenset[Link]]:
        """The links that messages may cross in each step of a shape's rings: all of them where all members send."""
        size = len(shape.children)
        if method != "halving" and not hands_on(kind, method):
            return [shape.crossed] * len(messages(kind, method, size, False))
        return [frozenset().union(*(shape.between(*pair) for pair in met)) for met in pairs(kind, method, size)]

    def _burst_seconds(self, loads: Loads, nbytes: int) -> float:
        """Seconds of credit that the token bucket of every link between hosts still holds, in the directions that are
        used, when the link has passed the whole call: the least of all links, at least 0."""
        links = (
            (self._map.links[key].link, load) for key, load in loads.items() if self._map.links[key].level != "rank"
        )
        spare = (
            (link.burst - load * nbytes) / rate
            for link, both in links
            for load, rate in zip(both, (link.up, link.down), strict=True)
            if load
        )
        return max(min(spare, default=0.0), 0.0)

    def _link_seconds(self, key: Key, load: tuple[float, float]) -> float:
        like = self._map.links[key]
        slowdown = self._speeds.ranks_per_core if like.level == "rank" else 1.0
        return slowdown * max(load[0] / like.link.up, load[1] / like.link.down)

    def _busiest(self, loads: Loads, *, is_local: bool) -> float:
        """Seconds a byte on the busiest link within hosts, or between them."""
        chosen = (item for item in loads.items() if (self._map.links[item[0]].level == "rank") == is_local)
        return max((self._link_seconds(key, load) for key, load in chosen), default=0.0)

    def _work(self, loads: Loads, each: float) -> dict[Key, float]:
        """Seconds of work for each byte of the buffer, by the ranks' links: ``each`` seconds a byte that a rank
        receives."""
        each *= self._speeds.ranks_per_core
        return {key: each * load[1] for key, load in loads.items() if self._map.links[key].level == "rank"}

    def _link_load(self, key: Key, load: tuple[float, float], nbytes: int) -> LinkLoad:
        like = self._map.links[key]
        up, down = load[0] * nbytes, load[1] * nbytes
        return LinkLoad(like.level, self._order[like.position], like.count, like.link, up, down)


def _sum(each: Iterable[Loads]) -> Loads:
    total: Loads = {}
    for loads in each:
        for key, (out, in_) in loads.items():
            before = total.get(key, (0.0, 0.0))
            total[key] = (before[0] + out, before[1] + in_)
    return total


def _phase_time(phase: _Phase, nbytes: int, burst_seconds: float) -> PhaseTime:
    stage = phase.stage
    return PhaseTime(
        phase.kind,
        stage.dimension.level,
        stage.method,
        phase.members,
        phase.steps,
        phase.seconds(nbytes, burst_seconds),
    )
