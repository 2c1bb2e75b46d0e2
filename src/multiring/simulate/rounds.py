"""Rounds: the messages of all rings of a phase in one step, added up by link.

Where a plan is the same for many ranks, so are these sums, and one link stands for all that look alike
(``symmetry.py``). Amounts are parts of a segment.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from multiring.planning.methods import Reduce, steps
from multiring.planning.plan import SENT_FRACTION, Phase, Plan
from multiring.planning.speeds import Speeds

from .links import SimulatedLinks

Floats = NDArray[np.float64]
Ranks = NDArray[np.int64]

_ROUNDING = 1e-9
"""Part of a message below which a link carries nothing: what rounding leaves."""

_ALL_PAIRS = ("reduce_scatter", "all_gather", "all_reduce", "all_to_all")


@dataclass(frozen=True, slots=True, eq=False)
class Round:
    """A step that all ranks take ``times`` times, one after the other.

    Messages of rounds with the same ``pairs`` follow one another. Where shares are weighted, scattering fills other
    connections than gathering does, and the two pass each other.

    ``message`` is the largest message and ``flows[link]`` how many messages of that size the link carries.
    ``latency`` is the time from the last byte sent to the message's arrival. Of each rank: seconds spent on its
    messages before and after, and the part that it reduces.

    Around a ring whose hops differ, a share waits at the slow hops and makes up for it at the others: its next
    step follows ``slack`` seconds, and ``slack_per_byte`` of the message, sooner.
    """

    times: int
    pairs: Hashable
    message: float
    flows: Floats
    latency: float
    slack: float
    slack_per_byte: float
    before: Floats
    after: Floats
    reduced: Floats


def rounds(plan: Plan, links: SimulatedLinks, speeds: Speeds) -> Iterator[Round]:
    """The rounds of a plan, in order."""
    for phase in plan.phases:
        rings = [_Rings(phase, *like, members) for like, members in _placed(phase, plan.world_size)]
        ends = sorted({end for ring in rings for end in ring.ends})
        begin = 0
        for end in ends:
            running = [(ring, ring.at(begin)) for ring in rings if begin < ring.ends[-1]]
            summed = _Sum(links, speeds, running).round(end - begin)
            yield replace(summed, message=SENT_FRACTION[phase.wire] * summed.message) if phase.wire else summed
            begin = end


def how_many(plan: Plan) -> int:
    """Return the number of a plan's rounds, without making them."""
    return sum(map(_rounds_of, plan.phases))


def _rounds_of(phase: Phase) -> int:
    sizes = {len(ring.members) for pattern, _ in phase.tiles() for ring in pattern}
    return len({end for size in sizes for end in _ends(phase.kind, phase.method, size)})


def _ends(kind: str, method: str, size: int) -> list[int]:
    """The different steps of a ring of ``size`` members: after how many steps each of them ends."""
    if _is_circular(kind, method):
        return [size - 1]
    if method == "direct":
        return [1]
    return list(range(1, 1 + len(steps(kind, method, size, 0))))


def _is_circular(kind: str, method: str) -> bool:
    """True if all steps of a ring are alike."""
    return method == "ring" and kind in ("reduce_scatter", "all_gather")


def _placed(phase: Phase, world_size: int) -> Iterator[tuple[tuple[float, tuple[int, ...]], Ranks]]:
    """Rings that are alike, by their part of the buffer and their shares, with the ranks of all of them."""
    found: dict[tuple[float, tuple[int, ...]], list[Ranks]] = {}
    for pattern, units in phase.tiles():
        places = np.arange(world_size)[None, :] if units is None else np.array(units, np.int64)
        for ring in pattern:
            part = float(sum(span.hi - span.lo for span in ring.spans))
            shares = ring.shares or (1,) * len(ring.members)
            found.setdefault((part, shares), []).append(places[:, list(ring.members)])
    return ((like, np.concatenate(members)) for like, members in found.items())


@dataclass(frozen=True, slots=True)
class _Pairs:
    """Messages from ``sources`` to ``targets`` (positions), each with its part of the ring's spans."""

    sources: Ranks
    targets: Ranks
    parts: Floats
    circular: bool = False


@dataclass(frozen=True, slots=True)
class _Everyone:
    """Messages from everybody to everybody: from i to j, ``sent[i] * taken[j]`` of the ring's spans."""

    sent: Floats
    taken: Floats


@dataclass(frozen=True, slots=True)
class _RingStep:
    """One step of a ring: its messages, and the part of the spans that each member reduces."""

    messages: _Pairs | _Everyone
    reduced: Floats


class _Rings:
    """Rings that are alike: ``members[u, i]`` is the rank at position i of ring u."""

    def __init__(self, phase: Phase, part: float, shares: tuple[int, ...], members: Ranks):
        self.members = members
        self.part = part
        self._steps = _steps(phase.kind, phase.method, shares)
        self.ends = _ends(phase.kind, phase.method, len(shares))

    def at(self, number: int) -> _RingStep:
        return next(step for step, end in zip(self._steps, self.ends, strict=True) if number < end)


@lru_cache(maxsize=256)
def _steps(kind: str, method: str, weights: tuple[int, ...]) -> tuple[_RingStep, ...]:
    size = len(weights)
    shares = np.array(weights) / sum(weights)
    ones = np.ones(size)
    if _is_circular(kind, method):
        around = np.arange(size)
        pairs = _Pairs(around, (around + 1) % size, shares, circular=True)
        return (_RingStep(pairs, shares if kind == "reduce_scatter" else 0 * shares),)
    if method == "direct" and kind in _ALL_PAIRS and size > 2:
        sent = shares if kind == "all_gather" else ones
        taken = {"reduce_scatter": shares, "all_to_all": shares}.get(kind, ones)
        reduced = {"reduce_scatter": shares, "all_reduce": ones}.get(kind, 0 * ones)
        return (_RingStep(_Everyone(sent, taken), (size - 1) * reduced),)
    return _listed(kind, method, size, shares)


def _listed(kind: str, method: str, size: int, shares: Floats) -> tuple[_RingStep, ...]:
    """Any method, message by message."""
    programs = [steps(kind, method, size, position) for position in range(size)]
    ends = np.concatenate(([0.0], np.cumsum(shares)))
    result = []
    for together in zip(*programs, strict=True):
        messages = [
            (position, peer, ends[send.shares.stop] - ends[send.shares.start])
            for position, step in enumerate(together)
            for send in step.sends
            for peer in send.peers
        ]
        reduced = np.zeros(size)
        for position, step in enumerate(together):
            for wait in step.waits:
                if isinstance(wait, Reduce):
                    part = ends[wait.shares.stop] - ends[wait.shares.start]
                    reduced[position] += part * (len(wait.peers) - 1)
        sources, targets, parts = (np.array(column) for column in zip(*messages, strict=True))
        result.append(_RingStep(_Pairs(sources, targets, parts), reduced))
    return tuple(result)


class _Sum:
    """The sum over the rings that run side by side."""

    def __init__(self, links: SimulatedLinks, speeds: Speeds, running: Sequence[tuple[_Rings, _RingStep]]):
        self._links = links
        self._speeds = speeds
        self._bytes = np.zeros(len(links.capacity))
        self._before, self._after, self._reduced = (np.zeros(links.world_size) for _ in range(3))
        self._message = self._latency = 0.0
        self._circular: list[Ranks] = []
        self._pairs: list[Hashable] = []
        for rings, step in running:
            np.add.at(self._reduced, rings.members, np.broadcast_to(rings.part * step.reduced, rings.members.shape))
            if isinstance(step.messages, _Pairs):
                self._add_pairs(rings, step.messages)
            else:
                self._add_everyone(rings, step.messages)

    def round(self, times: int) -> Round:
        flows = self._bytes / self._message
        flows[flows < _ROUNDING] = 0.0
        return Round(
            times,
            tuple(self._pairs),
            self._message,
            flows,
            self._latency,
            min((_excess(self._before[ring], self._after[ring]) for ring in self._circular), default=0.0),
            min((_excess(self._seconds(ring, flows)) for ring in self._circular), default=0.0),
            self._before,
            self._after,
            self._reduced,
        )

    def _add_pairs(self, rings: _Rings, pairs: _Pairs) -> None:
        sources, targets = rings.members[:, pairs.sources], rings.members[:, pairs.targets]
        parts = np.broadcast_to(rings.part * pairs.parts, sources.shape)
        latency = np.zeros(sources.shape)
        for places in self._links.place_of:
            here, there = places[sources], places[targets]
            crosses = here != there
            self._add_bytes(2 * here[crosses], parts[crosses])
            self._add_bytes(2 * there[crosses] + 1, parts[crosses])
            slower = np.maximum(self._links.latency[here], self._links.latency[there])
            latency = np.where(crosses, np.maximum(latency, slower), latency)
        overhead = self._overhead(self._links.place_of[1][sources] == self._links.place_of[1][targets])
        np.add.at(self._before, sources, overhead / 2)
        np.add.at(self._after, targets, overhead / 2)
        latency = np.maximum(latency - overhead, 0.0)
        if pairs.circular:
            latency = latency.mean(axis=1)
            self._circular.append(rings.members)
        self._latency = max(self._latency, float(latency.max()))
        self._message = max(self._message, float(parts.max()))
        self._pairs.append((sources.tobytes(), targets.tobytes(), _proportions(parts)))

    def _add_everyone(self, rings: _Rings, everyone: _Everyone) -> None:
        members = rings.members
        sent, taken = (np.broadcast_to(amount, members.shape) for amount in (everyone.sent, everyone.taken))
        sent_by_all, taken_by_all = everyone.sent.sum(), everyone.taken.sum()
        latency = 0.0
        for places in self._links.place_of:
            groups, index = _groups(places[members])
            out = np.bincount(index.ravel(), weights=sent.ravel())
            in_ = np.bincount(index.ravel(), weights=taken.ravel())
            self._add_bytes(2 * groups, rings.part * out * (taken_by_all - in_))
            self._add_bytes(2 * groups + 1, rings.part * in_ * (sent_by_all - out))
            if len(groups) > len(members):
                latency = max(latency, float(self._links.latency[groups].max()))
        is_local = self._add_overheads(members, sent > 0, taken > 0)
        self._latency = max(self._latency, latency - float(self._overhead(np.array(is_local))), 0.0)
        self._message = max(self._message, float(rings.part * everyone.sent.max() * everyone.taken.max()))
        self._pairs.append((members.tobytes(), _proportions(everyone.sent), _proportions(everyone.taken)))

    def _add_overheads(self, members: Ranks, sends: NDArray[np.bool_], takes: NDArray[np.bool_]) -> bool:
        """Add the ranks' overhead of messages from all that send to all that take. Returns whether each ring is on one
        host."""
        groups, index = _groups(self._links.place_of[1][members])
        for does, others, sums in ((sends, takes, self._before), (takes, sends, self._after)):
            local = np.bincount(index.ravel(), weights=others.ravel())[index] - others
            wire = others.sum(axis=1, keepdims=True) - others - local
            seconds = (local * self._speeds.local_overhead + wire * self._speeds.wire_overhead) / 2
            np.add.at(sums, members, np.where(does, seconds, 0.0))
        return len(groups) == len(members)

    def _overhead(self, local: NDArray[np.bool_]) -> Floats:
        return np.where(local, self._speeds.local_overhead, self._speeds.wire_overhead)

    def _add_bytes(self, links: Ranks, nbytes: Floats) -> None:
        self._bytes += np.bincount(links, weights=nbytes, minlength=len(self._bytes))

    def _seconds(self, ring: Ranks, flows: Floats) -> Floats:
        """Seconds per byte of the largest message on each hop of a ring, alone."""
        after = np.roll(ring, -1, axis=1)
        busy = flows / np.array(self._links.capacity)
        seconds = np.zeros(ring.shape)
        for places in self._links.place_of:
            here, there = places[ring], places[after]
            slower = np.maximum(busy[2 * here], busy[2 * there + 1])
            seconds = np.where(here != there, np.maximum(seconds, slower), seconds)
        return seconds


def _excess(*values: Floats) -> float:
    """Sum of the values' maxima in a ring, less the sum of their means; the minimum over all rings."""
    return float(min(sum(each.max(axis=1) - each.mean(axis=1) for each in values)))


def _proportions(parts: Floats) -> bytes:
    proportions: Floats = np.round(parts / parts.max(), 9)
    return proportions.tobytes()


def _groups(places: Ranks) -> tuple[Ranks, Ranks]:
    """The place of each group of equal numbers in a row, and the group of each entry."""
    units, width = places.shape
    several = int(places.max()) + 1
    keys, index = np.unique(np.arange(units)[:, None] * several + places, return_inverse=True)
    return keys % several, index.reshape(units, width)
