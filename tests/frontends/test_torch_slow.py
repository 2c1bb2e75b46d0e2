"""A slow rank under DistributedDataParallel, where one thread computes and another waits for the collectives."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch_helpers import Net, batch, group
from torch_ranks import values

import multiring as mr

HOG = "import os; os.sched_setaffinity(0, {core}); print(flush=True)\nwhile True: pass"
LATE = 1
PATIENCE_SECONDS = 60.0

pytestmark = [
    pytest.mark.timeout(150),
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores"),
    pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the system does not tell who has no core"),
]


def compute(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def named(how: str) -> dict[str, Any] | None:
    """Return the slow rank that all know of; rank LATE computes for longer, or on a core that others use."""
    first, second = sorted(os.sched_getaffinity(0))[:2]
    with group() as (rank, size):
        net = DistributedDataParallel(Net())
        hogs = []
        if rank == LATE and how == "has no core":
            command = [sys.executable, "-c", HOG.format(core={second})]
            hogs = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(6)]
            for hog in hogs:
                assert hog.stdout is not None
                hog.stdout.readline()
        os.sched_setaffinity(0, {second if rank == LATE else first})  # this thread alone
        slowest, number, began = None, 0, time.monotonic()
        try:
            while True:
                x, y = batch(number, rank, size)
                compute(0.1 if rank == LATE and how == "computes" else 0.02)
                torch.nn.functional.cross_entropy(net(x), y).backward()
                slowest = mr.stats()["slowest"] or slowest
                over = time.monotonic() - began > PATIENCE_SECONDS
                wishes = torch.tensor([int(over or slowest is not None)])
                torch.distributed.all_reduce(wishes, torch.distributed.ReduceOp.MIN)
                number += 1
                if wishes.item():
                    return slowest
        finally:
            for hog in hogs:
                hog.kill()
                hog.communicate()


@pytest.mark.parametrize("how", ["computes", "has no core"])
def test_the_reason_is_that_of_the_thread_that_computes(how: str) -> None:
    for slowest in values(named, how, world_size=3, timeout=120):
        assert slowest is not None, "not in time"
        assert slowest["ranks"] == [LATE]
        assert slowest["reason"] == how
