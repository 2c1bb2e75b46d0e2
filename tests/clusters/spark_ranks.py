"""Functions that ranks and other tasks run in Spark's executors."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from odd_exceptions import OddData, Sealed

import multiring as mr


def total(factor: int, offset: int = 0) -> dict[str, Any]:
    x = np.arange(5) * (mr.rank() + 1) * factor + offset
    mr.all_reduce(x)
    return {
        "place": (mr.rank(), mr.world_size(), mr.local_world_size()),
        "sum": x.tolist(),
        "process": os.getpid(),
        "executor": os.getppid(),
        "environment": sorted(os.environ.items()),
        "descriptors": _kept_descriptors(),
    }


def _kept_descriptors() -> int:
    """The least of a few looks: the worker opens some for a moment."""
    least = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        time.sleep(0.02)
        least = min(least, len(os.listdir("/proc/self/fd")))
    return least


def note(folder: str) -> None:
    """Tell the test which process this rank is."""
    unfinished = Path(folder, f".{mr.rank()}")
    unfinished.write_text(str(os.getpid()))
    unfinished.rename(Path(folder, str(mr.rank())))


def fail(how: str, culprit: int, folder: str, peers: str) -> Any:
    """The culprit fails when its peers are in an all_reduce, or compute for longer than any test."""
    note(folder)
    mr.barrier()
    if mr.rank() == culprit:
        time.sleep(1)  # its peers have left the barrier then
        if how == "raise":
            raise OddData(culprit, 7)
        if how == "sealed":
            raise Sealed(f"rank {culprit}")
        if how == "exit":
            sys.exit(culprit + 40)
        if how == "vanish":
            os._exit(0)
        victim = os.getpid()
        if how == "executor":
            victim = int(Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(victim, signal.SIGKILL)
        time.sleep(600)
    if peers == "compute":
        time.sleep(600)
    mr.all_reduce(np.arange(3))


def sleep(folder: str) -> None:
    note(folder)
    mr.barrier()
    time.sleep(600)


def result_of(kind: str) -> Any:
    return (number for number in range(3)) if kind == "generator" else None


def join(_: Iterator[int]) -> list[int]:
    """A task of the user's own that leaves its worker in a world of one."""
    mr.init()
    return []


def leave(_: Iterator[int]) -> list[int]:
    mr.shutdown()
    return []


def torch_total(factor: int) -> list[float]:
    import torch
    import torch.distributed as dist

    dist.init_process_group("multiring")
    x = torch.arange(3.0) * (dist.get_rank() + 1) * factor
    dist.all_reduce(x)
    dist.destroy_process_group()
    return x.tolist()
