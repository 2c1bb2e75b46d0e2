"""One launch: every rank runs this, and all end with the same figures."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multiring.bench import BARRIER_BYTES
from multiring.bench.contestants import Contestant

WARM_UP_CALLS = 5
FEWEST_CALLS, MOST_CALLS = 7, 20_000


@dataclass(frozen=True)
class Figure:
    """``seconds``: what one all-reduce of ``nbytes`` took the slowest rank."""

    nbytes: int
    buffer: str
    seconds: float


def measure(contestant: Contestant, nbytes: int, kind: str, budget: float) -> Figure:
    """Measure one size for about ``budget`` seconds."""
    buffer, array = contestant.buffer(max(1, nbytes // 4), kind)
    _check(contestant, buffer, array)
    array[:] = 0  # sums of zeros stay finite however often they are taken

    def call() -> None:
        contestant.all_reduce(buffer)

    calls = _calls_within(budget, contestant, call)
    if nbytes < BARRIER_BYTES:
        contestant.barrier()
        times = np.array([_seconds(call, calls)])
    else:
        times = np.array([_seconds_after_barrier(contestant, call) for _ in range(calls)])
    return Figure(array.nbytes, kind, float(np.median(contestant.maximum(times))))


def _check(contestant: Contestant, buffer: Any, array: NDArray[np.float32]) -> None:
    n = contestant.world_size
    index = np.arange(len(array)) % 251
    array[:] = index + contestant.rank
    contestant.all_reduce(buffer)
    expected = index * n + n * (n - 1) // 2
    if not np.array_equal(array, expected):
        wrong = int(np.argmax(array != expected))
        raise RuntimeError(f"a wrong sum: element {wrong} of {len(array)} is {array[wrong]}, not {expected[wrong]}")


def _calls_within(budget: float, contestant: Contestant, call: Callable[[], None]) -> int:
    _seconds(call, WARM_UP_CALLS)
    slowest = contestant.maximum(np.array([_seconds(call, WARM_UP_CALLS)]))[0]
    return int(np.clip(budget / slowest, FEWEST_CALLS, MOST_CALLS))


def _seconds_after_barrier(contestant: Contestant, call: Callable[[], None]) -> float:
    contestant.barrier()
    return _seconds(call)


def _seconds(call: Callable[[], None], times: int = 1) -> float:
    start = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - start) / times
