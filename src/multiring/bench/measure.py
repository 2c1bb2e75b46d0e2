"""One launch: every rank runs this, and all end with the same figures."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from multiring.bench import BARRIER_BYTES
from multiring.bench.contestants import Contestant, Task

WARM_UP_CALLS = 5
FEWEST_CALLS, MOST_CALLS = 7, 20_000
SAMPLES = 40
"""Runs of back-to-back calls, each of which counts with its mean."""
PASSES = 15


@dataclass(frozen=True)
class Figure:
    """What one call on ``nbytes`` (all blocks together) took the slowest rank, median and 95th percentile.

    ``cpu_seconds`` are those of all ranks for a call; ``pass_seconds`` what an in-place pass over such buffers of
    all ranks at once takes the slowest; ``predicted`` and ``bound`` are the plan's, None of a library without plans.
    """

    nbytes: int
    buffer: str
    seconds: float
    p95: float
    cpu_seconds: float
    pass_seconds: float
    predicted: float | None
    bound: float | None


def size_of_buffer(nbytes: int, world_size: int) -> int:
    """The bytes that are measured where ``nbytes`` are asked for: whole numbers, equal blocks."""
    return -(-max(1, nbytes // 4) // world_size) * world_size * 4


def measure(contestant: Contestant, collective: str, nbytes: int, kind: str, budget: float) -> Figure:
    """Measure one size for about ``budget`` seconds."""
    count = size_of_buffer(nbytes, contestant.world_size) // 4
    task = contestant.task(collective, count, kind)
    planned = contestant.planned(collective, 4 * count)
    check(contestant.rank, contestant.world_size, collective, task, planned.error if planned else 0.0)
    task.given[:] = 0  # sums of zeros stay finite however often they are taken
    calls = _calls_within(budget, contestant, task.call)
    cpu = time.process_time()
    if 4 * count < BARRIER_BYTES:
        contestant.barrier()
        each = max(1, calls // SAMPLES)
        times = np.array([_seconds(task.call, each) for _ in range(-(-calls // each))])
        cpu_seconds = (time.process_time() - cpu) / (each * len(times))
    else:
        spent = [_seconds_after_barrier(contestant, task.call) for _ in range(calls)]
        times = np.array([seconds for seconds, _ in spent])
        cpu_seconds = float(np.mean([used for _, used in spent]))
    slowest = contestant.maximum(times)
    return Figure(
        4 * count,
        kind,
        float(np.median(slowest)),
        float(np.percentile(slowest, 95)),
        float(contestant.total(np.array([cpu_seconds]))[0]),
        _pass_seconds(contestant, count),
        planned.seconds if planned else None,
        planned.bound if planned else None,
    )


def check(rank: int, n: int, collective: str, task: Task, error: float) -> None:
    """RuntimeError unless every element of the result is right on this rank of ``n``, but for a part of ``error``."""
    index = np.arange(len(task.given), dtype=np.float64) % 251
    task.result[:] = -1
    task.given[:] = index + rank
    task.call()
    if collective == "all_gather":
        expected = np.concatenate([index + peer for peer in range(n)])
    elif collective == "broadcast":
        expected = index
    else:
        expected = index * n + n * (n - 1) // 2
    if collective == "reduce_scatter":
        expected = np.split(expected, n)[rank]
    right = np.abs(task.result - expected) <= error * expected  # none is negative, and NaN is not right
    if not right.all():
        wrong = int(np.argmin(right))
        found = f"element {wrong} of {len(expected)} is {task.result[wrong]}, not {expected[wrong]}"
        raise RuntimeError(f"{collective} is wrong on rank {rank}: {found}")


def _calls_within(budget: float, contestant: Contestant, call: Callable[[], object]) -> int:
    _seconds(call, WARM_UP_CALLS)
    slowest = contestant.maximum(np.array([_seconds(call, WARM_UP_CALLS)]))[0]
    return int(np.clip(budget / slowest, FEWEST_CALLS, MOST_CALLS))


def _seconds_after_barrier(contestant: Contestant, call: Callable[[], object]) -> tuple[float, float]:
    """Seconds of a call, and of its CPU time in all threads."""
    contestant.barrier()
    cpu = time.process_time()
    seconds = _seconds(call)
    return seconds, time.process_time() - cpu


def _seconds(call: Callable[[], object], times: int = 1) -> float:
    start = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - start) / times


def _pass_seconds(contestant: Contestant, count: int) -> float:
    """Median seconds in which the slowest rank reads and writes a buffer in place, all of them at once."""
    array: NDArray[np.float32] = np.zeros(count, np.float32)

    def once() -> object:
        return np.add(array, np.float32(1), out=array)

    once()
    return float(
        np.median(contestant.maximum(np.array([_seconds_after_barrier(contestant, once)[0] for _ in range(PASSES)])))
    )
