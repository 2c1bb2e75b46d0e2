"""Messages that share links, and the clock they move by.

A connection carries one message at a time, in order, as a TCP stream does. All connections that have something to carry
share the links that they use by max-min fairness: no one can be given more without taking from one that has no more.
Between two events the rates are constant.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from math import inf

INSTANT = 1e-12
"""Seconds within which events are one: far below any latency, above the rounding of a clock that reads minutes."""

_CACHED_RATES = 4096

Action = Callable[[], None]


@dataclass(frozen=True, slots=True, eq=False)
class Use:
    """Uses of each link: one by a single message, more by one that stands for many that move alike."""

    links: tuple[tuple[int, float], ...]


@dataclass(slots=True)
class _QueuedMessage:
    use: Use
    nbytes: float
    latency: float
    arrived: Action


class Flow:
    """Messages from one side to the other, one after the other."""

    __slots__ = ("left", "queue")

    def __init__(self) -> None:
        self.queue: deque[_QueuedMessage] = deque()
        self.left = 0.0


def fair_rates(uses: Sequence[Use], capacity: Sequence[float]) -> list[float]:
    """Max-min fair bytes a second of flows that use links, by progressive filling (Bertsekas and Gallager 1992)."""
    users: dict[int, dict[int, float]] = {}
    for number, use in enumerate(uses):
        for link, times in use.links:
            users.setdefault(link, {})[number] = times
    left = {link: capacity[link] for link in users}
    rates = [inf] * len(uses)
    rate = 0.0
    while users:
        shares = {link: left[link] / sum(flows.values()) for link, flows in users.items()}
        tightest = min(shares, key=shares.__getitem__)
        rate = max(rate, shares[tightest])  # it never falls, but for rounding
        for number in users.pop(tightest):
            rates[number] = rate
            for link, times in uses[number].links:
                if link in users:
                    left[link] -= rate * times
                    del users[link][number]
                    if not users[link]:
                        del users[link]
    return rates


class Simulation:
    """A clock, actions at times, and messages over links. ``carried[link]`` counts the bytes."""

    def __init__(self, capacity: Sequence[float]):
        self.now = 0.0
        self.carried = [0.0] * len(capacity)
        self._capacity = capacity
        self._actions: list[tuple[float, int, Action]] = []
        self._numbers = count()
        self._busy: dict[Flow, None] = {}
        self._rates: dict[Use, float] = {}
        self._known_rates: dict[frozenset[Use], dict[Use, float]] = {}

    def at(self, time: float, action: Action) -> None:
        """Do something at a time, which is not in the past."""
        heapq.heappush(self._actions, (time, next(self._numbers), action))

    def send(self, connection: Flow, use: Use, nbytes: float, latency: float, arrived: Action) -> None:
        """Queue a message; ``arrived`` is called ``latency`` after its last byte has left."""
        for link, times in use.links:
            self.carried[link] += times * nbytes
        connection.queue.append(_QueuedMessage(use, nbytes, latency, arrived))
        if len(connection.queue) == 1:
            connection.left = nbytes
            self._busy[connection] = None
            self._rates = {}

    def run(self) -> None:
        """Until nothing is left to happen."""
        while self._actions or self._busy:
            self._act()
            if self._busy:
                self._move()
            elif self._actions:
                self.now = self._actions[0][0]

    def _act(self) -> None:
        while self._actions and self._actions[0][0] <= self.now + INSTANT:
            heapq.heappop(self._actions)[2]()

    def _move(self) -> None:
        """Move all messages until one has left or an action is due."""
        if not self._rates:
            self._rates = self._share()
        rates = self._rates
        flows = [(connection, rates[connection.queue[0].use]) for connection in self._busy]
        seconds = min([connection.left / rate for connection, rate in flows])
        if self._actions:
            seconds = min(seconds, self._actions[0][0] - self.now)
        self.now += seconds
        for connection, rate in flows:
            connection.left -= rate * seconds
            if connection.left <= rate * INSTANT:
                self._next_message(connection)

    def _next_message(self, connection: Flow) -> None:
        gone = connection.queue.popleft()
        self.at(self.now + gone.latency, gone.arrived)
        if not connection.queue:
            del self._busy[connection]
            self._rates = {}
        else:
            connection.left = connection.queue[0].nbytes
            if connection.queue[0].use is not gone.use:
                self._rates = {}

    def _share(self) -> dict[Use, float]:
        uses = frozenset([connection.queue[0].use for connection in self._busy])
        if uses not in self._known_rates:
            if len(self._known_rates) >= _CACHED_RATES:
                self._known_rates.clear()
            ordered = [connection.queue[0].use for connection in self._busy]
            self._known_rates[uses] = dict(zip(ordered, fair_rates(ordered, self._capacity), strict=True))
        return self._known_rates[uses]
