"""Programs for ranks that tune their plans."""

from __future__ import annotations

import logging
import os
import time
from typing import Any

import numpy as np

import multiring as mr
from multiring.runtime.comm import group_of

COUNT = 3000
CALLS = 5600
"""More than any tuning takes."""


def reduce_until_tuned(calls: int = CALLS) -> dict[str, Any]:
    """Call in one native step, where the engine has that, in several, and asynchronously, in turns that differ by rank,
    with right sums throughout; and how the plan was found."""
    logging.basicConfig(level=logging.ERROR)
    communicator = mr.init()
    rank, size = mr.rank(), mr.world_size()
    group = group_of(communicator)
    is_native = os.environ.get("MULTIRING_ENGINE") != "mpi"
    settled = group.tuner.is_settled if group.tuner else lambda *_: False
    before = mr.plan(4 * COUNT)
    tuned_at = 0 if before.tuned else None
    for call in range(calls):
        x = (np.arange(COUNT) % 101 * (rank + 1) + call).astype(np.float32)
        way = (call + rank) % 3
        if way == 0:
            mr.all_reduce(x, async_op=True).wait(20)
        elif way == 1 and is_native:
            assert group.calls.all_reduce_plain(x, "sum")
        else:
            mr.all_reduce(x, timeout=20)  # no float: not plain
        assert (x == np.arange(COUNT) % 101 * (size * (size + 1) // 2) + call * size).all()
        if tuned_at is None and settled(0, 4 * COUNT):
            tuned_at = call
    x = np.full(COUNT, rank, np.float32)  # in flight over the end of a rung, several at once
    works = [mr.broadcast(x[part::10].copy(), root=1, async_op=True) for part in range(10)]
    for work in works:
        work.wait(20)
    mr.all_reduce(x)
    after = mr.plan(4 * COUNT)
    used = {plan: done["calls"] for plan, done in mr.stats()["plans"].items() if done["calls"]}
    found = {
        "tuned_at": tuned_at,
        "plan": after.plan.id,
        "tried": sorted(after.tuned.seconds) if after.tuned else [],
        "candidates": 1 + len(after.rejected),
        "text": str(after),
        "used": used,
        "operations": mr.stats()["operations"],
    }
    mr.shutdown()
    return found


def many_at_once(calls: int) -> list[float]:
    """Asynchronous calls that are waited for at the end only, as a backward pass makes them; in a group of all too."""
    mr.init()
    group = mr.new_group(range(mr.world_size()))
    sums = []
    for communicator in (None, group):
        arrays = [np.full(COUNT, mr.rank() + call, np.float32) for call in range(calls)]
        works = [mr.all_reduce(array, async_op=True, group=communicator) for array in arrays]
        for work in works:
            work.wait(30)
        sums.append(sum(float(array[-1]) for array in arrays))
    mr.shutdown()
    return sums


def miss_the_end_of_a_rung(async_op: bool) -> Any:
    """Rank 1 does not come to the end of the first rung; with ``async_op`` nor to its last call, which others start."""
    tuner = group_of(mr.init()).tuner
    for call in range(CALLS):
        trial_run = tuner._trial_runs.get((0, (4 * COUNT).bit_length(), 0)) if tuner else None
        if mr.rank() == 1 and trial_run and call == trial_run.rung.calls - async_op:
            time.sleep(60)
        x = np.ones(COUNT, np.float32)
        began = time.monotonic()
        try:
            if async_op and trial_run and call < trial_run.rung.calls:
                mr.all_reduce(x, async_op=True)
            else:
                mr.all_reduce(x, timeout=2.0)
        except mr.MultiringError as error:
            raised = type(error).__name__, error.rank, error.collective, str(error), time.monotonic() - began
            print("raised", flush=True)
            time.sleep(0.5)  # or what comes next would be read with the line, and lost
            return raised
    return None
