"""Training steps of a recording: sleeping stands for computing, the sums are real.

So what a library costs a training job is measured without its framework, on machines that could not compute it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from rich.table import Table

from multiring.bench.contestants import Contestant
from multiring.simulate.recording import Recording, buckets
from multiring.simulate.training import BUCKET_BYTES
from multiring.units import duration

WARM_UP_STEPS = 1


def replay(contestant: Contestant, recording: Recording, steps: int) -> list[float]:
    """Seconds of each step on the slowest rank; gradients are fused and sent as DistributedDataParallel does it."""
    fused = [
        (bucket.ready, np.zeros(-(-bucket.nbytes // 4), np.float32)) for bucket in buckets(recording, BUCKET_BYTES)
    ]
    spent = []
    for _ in range(WARM_UP_STEPS + steps):
        contestant.barrier()
        start = time.perf_counter()
        waits = []
        for ready, array in fused:
            _sleep_until(start + ready)
            waits.append(contestant.start(array))
        _sleep_until(start + recording.seconds)
        for wait in waits:
            wait()
        spent.append(time.perf_counter() - start)
    return [float(seconds) for seconds in contestant.maximum(np.array(spent[WARM_UP_STEPS:]))]


def _sleep_until(clock: float) -> None:
    left = clock - time.perf_counter()
    if left > 0:
        time.sleep(left)


@dataclass(frozen=True)
class ReplayRow:
    """A system's median step, in seconds; ``efficiency`` is the part of it in which a rank computes."""

    system: str
    seconds: float
    exposed: float
    efficiency: float
    predicted: float | None
    steps: tuple[float, ...]


def rows(
    recording: Recording, launches: Mapping[str, Sequence[Sequence[float]]], predicted: float | None
) -> list[ReplayRow]:
    """A row a system, of the steps of all its launches; ``predicted`` are the seconds of ours."""
    found = []
    for system, each in launches.items():
        steps = tuple(seconds for launch in each for seconds in launch)
        seconds = float(np.median(steps))
        ours = predicted if system.startswith("multiring") else None
        exposed = seconds - recording.seconds
        found.append(ReplayRow(system, seconds, exposed, recording.seconds / seconds, ours, steps))
    return found


def table(found: Sequence[ReplayRow]) -> Table:
    """The rows as people read them."""
    result = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    result.add_column("system")
    for heading in ("step", "exposed", "efficiency", "predicted"):
        result.add_column(heading, justify="right")
    for row in found:
        predicted = duration(row.predicted) if row.predicted is not None else "-"
        result.add_row(row.system, duration(row.seconds), duration(row.exposed), f"{row.efficiency:.1%}", predicted)
    return result
