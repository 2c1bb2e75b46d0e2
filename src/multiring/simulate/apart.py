"""Groups that train apart and average their parameters once in some steps, as `multiring.torch.Outer` does."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from multiring.planning.layout import canonical
from multiring.planning.strategies import EXCHANGES_ON_THE_WAY, OUTER
from multiring.planning.topology import LEVELS, Topology

from .calls import Outcome
from .training import TrainingStep

_MOST_FRAGMENTS = 10_000

_ROUNDS = 48
"""Rounds of exchanges that are predicted; a step counts in their second half, as those before fill the links.

Its 24 rounds are whole cycles of the 1 to 4 rounds after which a wait may repeat.
"""


@dataclass(frozen=True, slots=True)
class Exchanges:
    """The words of ``outer:rack:50:4:5``: the level whose places are the groups, the steps from one exchange of all
    parameters to the next, the fragments that take turns in them, and the steps after which one is applied."""

    level: str
    every: int
    fragments: int = 1
    delay: int = 0


def parse_exchanges(name: str) -> Exchanges | None:
    """None for a name that begins otherwise; ValueError for numbers that `multiring.torch.Outer` would refuse."""
    base, *given = name.split(":")
    if base != OUTER:
        return None
    level, *numbers = given or [""]
    few = 1 <= len(numbers) <= 3 and all(re.fullmatch("[0-9]{1,9}", number) for number in numbers)
    if level not in LEVELS or not few:
        raise ValueError(
            f"strategy {name!r}: give a level ({', '.join(LEVELS)}) and the steps between exchanges, and if you like "
            "the fragments and the delay, as in outer:rack:50 or outer:rack:50:4:5"
        )
    found = Exchanges(level, *map(int, numbers))
    if not found.every:
        raise ValueError(f"strategy {name!r}: {found.every} steps between exchanges; 1 or more are needed")
    if not 1 <= found.fragments <= found.every:
        raise ValueError(
            f"strategy {name!r}: {found.fragments} fragments in {found.every} steps; one is sent in a step, so there "
            f"are 1 to {found.every}"
        )
    if found.fragments > _MOST_FRAGMENTS:
        raise ValueError(f"strategy {name!r}: {found.fragments} fragments; {_MOST_FRAGMENTS} at most are predicted")
    if found.delay >= EXCHANGES_ON_THE_WAY * found.every:
        raise ValueError(
            f"strategy {name!r}: a delay of {found.delay} steps; at most {EXCHANGES_ON_THE_WAY} exchanges of a "
            f"fragment are under way, so it is 0 to {EXCHANGES_ON_THE_WAY * found.every - 1}"
        )
    return found


class SharedLinks:
    """Exchanges that are on their way over the same links, whose rate they share evenly.

    Each takes ``work`` seconds of the whole rate, and ``latency`` seconds more in which it needs no link.
    """

    def __init__(self, work: float, latency: float) -> None:
        self._work, self._latency = work, latency
        self._now = self._served = 0.0
        """The present, and the seconds of work that an exchange that was always there would have been given."""
        self._left: deque[tuple[int, float]] = deque()
        """Exchanges, oldest first, each with what is to be served when its work is done."""
        self._done: dict[int, float] = {}

    def begin(self, exchange: int, now: float) -> None:
        """Begin an exchange; ``now`` may not go back."""
        while self._left and self._next() <= now:
            self._complete()
        if self._left:
            self._served += (now - self._now) / len(self._left)
        self._now = now
        self._left.append((exchange, self._served + self._work))

    def end(self, exchange: int) -> float:
        """The end of an exchange, if no other begins before it."""
        while exchange not in self._done:
            self._complete()
        return self._done.pop(exchange) + self._latency

    def _next(self) -> float:
        return self._now + (self._left[0][1] - self._served) * len(self._left)

    def _complete(self) -> None:
        self._now = self._next()
        exchange, self._served = self._left.popleft()
        self._done[exchange] = self._now


def mean_step(exchanges: Exchanges, step: float, alone: float, work: float) -> float:
    """Seconds of a step of ``step`` seconds with its part of what ranks wait for exchanges, in the long run.

    ``alone``: seconds of an exchange by itself; ``work``: seconds by which one more at the same time prolongs it.
    """
    links = SharedLinks(work, alone - work)
    now, made = 0.0, 0
    on_their_way: deque[tuple[int, int]] = deque()
    """Exchanges, oldest first, each with the step after which it is applied."""

    def go_to(number: int) -> None:
        nonlocal now, made
        now, made = now + (number - made) * step, number

    ends = []
    for turn in range(_ROUNDS * exchanges.fragments):
        sent = (turn + 1) * exchanges.every // exchanges.fragments
        while on_their_way and on_their_way[0][1] <= sent:
            first, due = on_their_way.popleft()
            go_to(due)
            now = max(now, links.end(first))
        go_to(sent)
        links.begin(turn, now)
        on_their_way.append((turn, sent + exchanges.delay))
        if (turn + 1) % exchanges.fragments == 0:
            ends.append(now)
    return (ends[-1] - ends[_ROUNDS // 2 - 1]) / (exchanges.every * _ROUNDS // 2)


@dataclass(frozen=True, slots=True)
class StepApart:
    """The mean step of groups that train apart: that of the slowest group, and what all wait for exchanges."""

    step: TrainingStep
    exchange: Outcome
    """One fragment on its way, by itself."""
    seconds: float
    """Seconds of a step, with its part of the exchanges."""


def groups_of(topology: Topology, level: str) -> list[Topology]:
    """The topologies of the groups, those that are alike once; ValueError where there are no two groups."""
    if level not in topology.levels:
        raise ValueError(f"the topology has the levels {', '.join(topology.levels)}, and no {level}")
    groups = [topology.restrict(ranks) for ranks in topology.ranks_by(level)]
    if len(groups) == 1:
        raise ValueError(f"all ranks are on one {level}, so there is nobody to exchange parameters with")
    return list({canonical(group): group for group in groups}.values())


def step_apart(
    topology: Topology,
    nbytes: int,
    exchanges: Exchanges,
    step_of: Callable[[Topology], TrainingStep],
    exchanges_of: Callable[[int, int], Outcome],
) -> StepApart:
    """A step on groups of the topology, whose parameters are as many bytes as their gradients.

    ``step_of`` simulates a step of a group by itself, ``exchanges_of`` all-reduces of so many bytes over all ranks, a
    number of them at the same time. While a fragment is on its way it shares links with the sums within the groups:
    that is left out.
    """
    steps = [step_of(group) for group in groups_of(topology, exchanges.level)]
    slowest = max(steps, key=lambda step: step.seconds)
    size = -(-nbytes // exchanges.fragments)
    alone = exchanges_of(size, 1)
    work = alone.seconds
    if exchanges.delay * exchanges.fragments > exchanges.every:  # several are on their way
        busiest = max((load.seconds for load in alone.loads), default=0.0)
        work = min(work, max(busiest, exchanges_of(size, 2).seconds - alone.seconds))
    return StepApart(slowest, alone, mean_step(exchanges, slowest.seconds, alone.seconds, work))
