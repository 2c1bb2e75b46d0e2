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
STEPS = 50
STEPS_WITHOUT_A_CORE = 200  # others may lack theirs meanwhile, where other programs run

pytestmark = [
    pytest.mark.timeout(150),
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores"),
    pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the system does not tell who has no core"),
]


def compute(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


class ComputesLonger(torch.autograd.Function):
    """The identity, whose gradient takes some time of the processor."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        compute(0.08)
        return gradient


def named(how: str) -> tuple[dict[str, Any] | None, float]:
    """Return the slow rank that was named, and what part of the time this rank had a core as it computed.

    Rank LATE computes for longer before its step or in the backward pass, or has a core that others use.
    """
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
        slowest, ran, wall = None, 0.0, 0.0
        steps = STEPS_WITHOUT_A_CORE if how == "has no core" else STEPS
        try:
            for number in range(steps):  # no call but those of DistributedDataParallel
                x, y = batch(number, rank, size)
                before = time.monotonic(), time.thread_time()
                compute(0.1 if rank == LATE and how == "computes" else 0.02)
                wall += time.monotonic() - before[0]
                ran += time.thread_time() - before[1]
                out = net(x)
                if rank == LATE and how == "computes in the backward pass":
                    out = ComputesLonger.apply(out)  # type: ignore[no-untyped-call]
                torch.nn.functional.cross_entropy(out, y).backward()
                slowest = mr.stats()["slowest"] or slowest
            return slowest, ran / wall
        finally:
            for hog in hogs:
                hog.kill()
                hog.communicate()


@pytest.mark.parametrize("how", ["computes", "computes in the backward pass", "has no core"])
def test_the_reason_is_that_of_the_thread_that_computes(how: str) -> None:
    outcomes = values(named, how, world_size=3, timeout=120)
    had_its_core = outcomes[LATE][1] > 0.75  # other programs may have taken it
    for slowest, _ in outcomes:
        assert slowest is not None, how
        assert slowest["ranks"] == [LATE]
        assert slowest["steps"] >= 10
        assert slowest["reason"] == how.split(" in ")[0] or (how != "has no core" and not had_its_core)
