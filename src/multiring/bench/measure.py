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
    """Seconds of one call on ``nbytes`` (all blocks together) on the slowest rank, median and 95th percentile.

    ``cpu_seconds`` are those of all ranks for a call; ``pass_seconds`` what an in-place pass over such buffers of
    all ranks at once takes the slowest; ``predicted`` and ``bound`` are the plan's, None of a library without plans.

    On a CUDA device a call takes until its result is there, and a pass is the buffer copied out and back;
    ``enqueue_seconds`` is the time after which the call returns, median of the slowest ranks. None on the CPU.
    """

    nbytes: int
    buffer: str
    seconds: float
    p95: float
    cpu_seconds: float
    pass_seconds: float
    predicted: float | None
    bound: float | None
    enqueue_seconds: float | None = None


def size_of_buffer(nbytes: int, world_size: int) -> int:
    """The bytes that are measured where ``nbytes`` are asked for: whole numbers, equal blocks."""
    return -(-max(1, nbytes // 4) // world_size) * world_size * 4


def measure(contestant: Contestant, collective: str, nbytes: int, kind: str, budget: float) -> Figure:
    """Measure one size for about ``budget`` seconds."""
    count = size_of_buffer(nbytes, contestant.world_size) // 4
    task = contestant.task(collective, count, kind)
    planned = contestant.planned(collective, 4 * count)
    off = (planned.error, planned.rounded_together) if planned else (0.0, 1)
    check(contestant.rank, contestant.world_size, collective, task, *off)
    task.given[:] = 0  # sums of zeros stay finite however often they are taken
    calls = _calls_within(budget, contestant, task)
    cpu = time.process_time()
    if 4 * count < BARRIER_BYTES:
        contestant.barrier()
        each = max(1, calls // SAMPLES)
        times = np.array([_seconds(task, each) for _ in range(-(-calls // each))])
        cpu_seconds = (time.process_time() - cpu) / (each * len(times))
    else:
        spent = [_seconds_after_barrier(contestant, task) for _ in range(calls)]
        times = np.array([seconds for seconds, _ in spent])
        cpu_seconds = float(np.mean([used for _, used in spent]))
    slowest, enqueued = np.split(contestant.maximum(np.concatenate(times.T)), 2)
    return Figure(
        4 * count,
        kind,
        float(np.median(slowest)),
        float(np.percentile(slowest, 95)),
        float(contestant.total(np.array([cpu_seconds]))[0]),
        _pass_seconds(contestant, task.bare or _pass_in_place(count)),
        planned.seconds if planned else None,
        planned.bound if planned else None,
        float(np.median(enqueued)) if task.finish else None,
    )


def check(rank: int, n: int, collective: str, task: Task, error: float, together: int = 1) -> None:
    """RuntimeError unless every element of the result is right on this rank of ``n``, but for a part of ``error``: of
    the largest of ``together`` elements."""
    index = np.arange(len(task.given), dtype=np.float64) % 251
    task.result[:] = -1
    task.given[:] = index + rank
    task.call()
    result = np.asarray(task.result)
    if collective == "all_gather":
        expected = np.concatenate([index + peer for peer in range(n)])
    elif collective == "broadcast":
        expected = index
    else:
        expected = index * n + n * (n - 1) // 2
    if collective == "reduce_scatter":
        expected = np.split(expected, n)[rank]
    largest = np.maximum.reduceat(expected, np.arange(0, len(expected), together)).repeat(together)[: len(expected)]
    right = np.abs(result - expected) <= error * largest  # none is negative, and NaN is not right
    if not right.all():
        wrong = int(np.argmin(right))
        found = f"element {wrong} of {len(expected)} is {result[wrong]}, not {expected[wrong]}"
        raise RuntimeError(f"{collective} is wrong on rank {rank}: {found}")


def _calls_within(budget: float, contestant: Contestant, task: Task) -> int:
    _seconds(task, WARM_UP_CALLS)
    slowest = contestant.maximum(np.array([_seconds(task, WARM_UP_CALLS)[0]]))[0]
    return int(np.clip(budget / slowest, FEWEST_CALLS, MOST_CALLS))


def _seconds_after_barrier(contestant: Contestant, task: Task) -> tuple[tuple[float, float], float]:
    """Seconds of a call, and of its CPU time in all threads."""
    contestant.barrier()
    cpu = time.process_time()
    seconds = _seconds(task)
    return seconds, time.process_time() - cpu


def _seconds(task: Task, times: int = 1) -> tuple[float, float]:
    """Seconds of a call until its result is there, and until it returns."""
    call, finish = task.call, task.finish
    start = time.perf_counter()
    if finish is None:
        for _ in range(times):
            call()
        seconds = (time.perf_counter() - start) / times
        return seconds, seconds
    inside = 0.0
    for _ in range(times):
        called = time.perf_counter()
        call()
        inside += time.perf_counter() - called
        finish()
    return (time.perf_counter() - start) / times, inside / times


def _pass_in_place(count: int) -> Callable[[], object]:
    array: NDArray[np.float32] = np.zeros(count, np.float32)
    return lambda: np.add(array, np.float32(1), out=array)


def _pass_seconds(contestant: Contestant, once: Callable[[], object]) -> float:
    """Median seconds in which the slowest rank passes over a buffer once, all of them at once."""
    once()
    spent = []
    for _ in range(PASSES):
        contestant.barrier()
        start = time.perf_counter()
        once()
        spent.append(time.perf_counter() - start)
    return float(np.median(contestant.maximum(np.array(spent))))
