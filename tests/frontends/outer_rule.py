"""The rule of `Outer` in NumPy, and numbers which depend on the step, the group and the index."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

SHAPES = [(3,), (2, 4), (), (5, 1), (4,)]


def weights(first: float = 0.0) -> list[Array]:
    """Return parameters of several shapes."""
    return [
        np.asarray((np.arange(np.prod(shape, dtype=int)) / 4 + number + first).reshape(shape))
        for number, shape in enumerate(SHAPES)
    ]


def change(step: int, place: int, weight: int, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Return what a step adds in a group: it depends on the step, the group, the parameter and the index."""
    index = np.arange(int(np.prod(shape)), dtype=np.float64)
    return ((index * 3 + step * 5 + place * 7 + weight) % 11 / 8 - place / 2).reshape(shape)


@dataclass
class Rule:
    """The rule in NumPy for all groups at once, turn after turn, with the outer optimizer of DiLoCo.

    Where all take the same time, groups make equal numbers of steps.
    """

    every: int
    fragments: list[list[int]]
    delay: int
    keep: float
    ranks: list[list[int]]
    """Ranks of each group."""
    nanoseconds: Callable[[int, int], int]
    """Nanoseconds that a rank takes for a step."""
    samples: Callable[[int, int], int]
    """Samples of a rank in a step."""
    rate: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        start = weights()
        self.shared = [weight.copy() for weight in start]
        self.velocity = [np.zeros(shape) for shape in SHAPES]
        self.after: list[list[Array]] = []
        """Shared values after each turn."""
        self.counted: list[float] = []
        self.speeds: list[list[int]] = []
        """Nanoseconds of a step of each group, as known after each turn; 0: unknown."""
        self.seen: list[list[tuple[list[Array], int, int]]] = [[] for _ in self.ranks]
        """Values, steps of the round and turns sent of each group, after each step."""
        self.groups = [self._steps(place) for place in range(len(self.ranks))]

    def _period(self, speeds: list[int], place: int) -> int:
        slowest = max(speeds)
        return self.every if 0 in speeds else max(self.every, int(self.every * slowest / speeds[place] + 0.5))

    def _steps(self, place: int) -> Generator[tuple[dict[int, Array], float, int], None, None]:
        """A group: each turn that it sends, as changes times samples, samples, and the speed that it has measured."""
        parts = len(self.fragments)
        own = [weight.copy() for weight in self.shared]
        mine = [weight.copy() for weight in self.shared]
        trained = [0.0] * parts
        waiting: list[tuple[int, int, dict[int, Array]]] = []
        """Turns that are on their way, when they are applied, and the group's own changes in them."""
        known = [0] * len(self.ranks)
        turn = step = begun = 0
        measured: list[list[int]] = [[] for _ in self.ranks[place]]

        def apply(number: int, kept: float) -> None:
            nonlocal known
            for each in self.fragments[number % parts]:
                shared = self.after[number][each]
                if self.delay < self.every:
                    mine[each] = shared
                    own[each] = kept * own[each] + (1 - kept) * shared
                else:
                    apart = own[each] - mine[each]
                    wanted = shared - sum(changes[each] for *_, changes in waiting if each in changes)
                    mine[each] = kept * mine[each] + (1 - kept) * wanted
                    own[each] = mine[each] + apart
            known = self.speeds[number]

        while True:
            period = self._period(known, place)
            for position in range(1, parts + 1):
                while step < begun + position * period // parts:
                    step += 1
                    for rank, lasted in zip(self.ranks[place], measured, strict=True):
                        lasted += [self.nanoseconds(rank, step)] * (step > 1)
                    for each in range(len(SHAPES)):
                        own[each] = own[each] + change(step, place, each, SHAPES[each])
                    trained = [
                        so_far + sum(self.samples(rank, step) for rank in self.ranks[place]) for so_far in trained
                    ]
                    while waiting and waiting[0][1] == step:
                        apply(waiting.pop(0)[0], self.keep)
                    if step != begun + position * period // parts:
                        self.seen[place].append(([weight.copy() for weight in own], period, turn))
                part = turn % parts
                speed = 0
                if position == parts and measured[0]:
                    speed = sum(map(statistics.median_low, measured)) // len(measured)
                    measured = [[] for _ in measured]
                weight, trained[part] = trained[part], 0
                changes = {each: mine[each] - own[each] for each in self.fragments[part]}
                yield {each: moved * weight for each, moved in changes.items()}, weight, speed
                turn += 1
                if self.delay >= self.every:
                    mine = [own[each].copy() if each in changes else weight for each, weight in enumerate(mine)]
                if self.delay:
                    waiting.append((turn - 1, step + self.delay, changes))
                else:
                    apply(turn - 1, 0)
                now = self._period(known, place) if position == parts else period
                self.seen[place].append(([weight.copy() for weight in own], now, turn))
            begun = step

    def turn(self) -> None:
        """All groups come to the next turn, and what they send is summed."""
        part = len(self.after) % len(self.fragments)
        sent = [next(one) for one in self.groups]
        samples = sum(weight for _, weight, _ in sent)
        for each in self.fragments[part]:
            mean = np.sum([changes[each] for changes, _, _ in sent], 0) / samples
            self.velocity[each] = self.momentum * self.velocity[each] + mean
            self.shared[each] = self.shared[each] - self.rate * (mean + self.momentum * self.velocity[each])
        before = self.speeds[-1] if self.speeds else [0] * len(self.ranks)
        self.speeds.append([speed or old for (_, _, speed), old in zip(sent, before, strict=True)])
        self.after.append([weight.copy() for weight in self.shared])
        self.counted.append(samples)
