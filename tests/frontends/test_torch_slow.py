"""A slow rank under DistributedDataParallel, where one thread computes and another waits for the collectives."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Iterator
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
PATIENCE_SECONDS = 100

pytestmark = [
    pytest.mark.timeout(200),
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores"),
    pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the system does not tell who has no core"),
]


def compute(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


class Asked(Net):
    """The net, with a parameter whose gradient is the mean of what all ranks say: they hear it in the same step."""

    def __init__(self) -> None:
        super().__init__()
        self.said = torch.nn.Parameter(torch.zeros(2))


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

    Rank LATE computes for longer before its step or in the backward pass, or has a core that others use. Steps until
    all ranks know it.
    """
    first, second = sorted(os.sched_getaffinity(0))[:2]
    lacks_core = how == "has no core" and int(os.environ["RANK"]) == LATE
    slowest, ran, wall = None, 0.0, 0.0
    with hogs(second if lacks_core else None), group() as (rank, size):
        net = DistributedDataParallel(Asked())
        os.sched_setaffinity(0, {second if rank == LATE else first})  # this thread alone, as in the next line
        os.setpriority(os.PRIO_PROCESS, 0, 5 * lacks_core)  # it lacks a core more than others, whatever else runs
        until = time.monotonic() + PATIENCE_SECONDS
        for number in itertools.count():  # no call but those of DistributedDataParallel
            x, y = batch(number, rank, size)
            before = time.monotonic(), time.thread_time()
            compute(0.1 if rank == LATE and how == "computes" else 0.02)
            wall += time.monotonic() - before[0]
            ran += time.thread_time() - before[1]
            out = net(x)
            if rank == LATE and how == "computes in the backward pass":
                out = ComputesLonger.apply(out)  # type: ignore[no-untyped-call]
            slowest = mr.stats()["slowest"] or slowest
            says = torch.tensor([slowest is not None, time.monotonic() > until], dtype=torch.float32)
            net.module.said.grad = None
            (torch.nn.functional.cross_entropy(out, y) + says @ net.module.said).backward()
            know, over = net.module.said.grad.tolist()
            if know > 1 - 0.5 / size or over > 0:
                return slowest, ran / wall
    raise AssertionError("not reached")


@contextlib.contextmanager
def hogs(core: int | None) -> Iterator[None]:
    """Programs that compute on a core, which have begun to; none without one."""
    command = [sys.executable, "-c", HOG.format(core={core})]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(4 if core is not None else 0)]
    try:
        for hog in running:
            assert hog.stdout is not None
            hog.stdout.readline()
        yield
    finally:
        for hog in running:
            hog.kill()
            hog.communicate()


@pytest.mark.parametrize("how", ["computes", "computes in the backward pass", "has no core"])
def test_the_reason_is_that_of_the_thread_that_computes(how: str) -> None:
    outcomes = values(named, how, world_size=3, timeout=PATIENCE_SECONDS + 50)
    had_its_core = outcomes[LATE][1] > 0.75  # other programs may have taken it
    for slowest, _ in outcomes:
        assert slowest is not None, f"not in {PATIENCE_SECONDS} s"
        assert slowest["ranks"] == [LATE]
        assert slowest["steps"] >= 10
        assert slowest["reason"] == how.split(" in ")[0] or (how != "has no core" and not had_its_core)
