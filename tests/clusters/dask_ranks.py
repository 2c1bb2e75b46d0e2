"""Functions that ranks and other tasks run in Dask's workers."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from distributed import get_worker
from odd_exceptions import OddData, Sealed

import multiring as mr


def total(factor: int, offset: int = 0) -> dict[str, Any]:
    x = np.arange(5) * (mr.rank() + 1) * factor + offset
    mr.all_reduce(x)
    return {
        "place": (mr.rank(), mr.world_size(), mr.local_world_size()),
        "sum": x.tolist(),
        "process": os.getpid(),
        "worker": get_worker().address,
        "environment": sorted(os.environ.items()),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": sorted(thread.name for thread in threading.enumerate() if "multiring" in thread.name),
    }


def note(folder: str, what: str = "") -> None:
    """Tell the test which process this rank is; one that is run a second time fails."""
    unfinished = Path(folder, f".{mr.rank()}{what}")
    with unfinished.open("x") as file:
        file.write(str(os.getpid()))
    os.link(unfinished, Path(folder, f"{mr.rank()}{what}"))


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
        os.kill(os.getpid(), signal.SIGKILL)
    if peers == "compute":
        compute(folder)
    mr.all_reduce(np.arange(3))


def compute(folder: str) -> None:
    try:
        while True:
            time.sleep(0.05)
    finally:
        note(folder, "-ended")


def work(folder: str) -> None:
    mr.barrier()
    note(folder)
    compute(folder)


def beside(folder: str, other: str, factor: int) -> list[int]:
    """Add up while the two ranks of another job are there."""
    note(folder)
    while not all(Path(other, str(rank)).exists() for rank in range(2)):
        time.sleep(0.05)
    mr.all_reduce(x := np.arange(5) * (mr.rank() + 1) * factor)
    return x.tolist()


def miss_one(folder: str, absent: int) -> None:
    """All but one rank wait in a collective for the one that computes."""
    mr.barrier()
    note(folder)
    if mr.rank() == absent:
        compute(folder)
    try:
        mr.all_reduce(np.arange(3), timeout=3600)
    finally:
        note(folder, "-ended")


def stubborn(folder: str, seconds: float) -> None:
    """Rank 0 catches what ends it, once, and is ended all the same."""
    note(folder)
    try:
        compute(folder)
    except BaseException:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(0.05)
        note(folder, "-again")


def result_of(kind: str) -> Any:
    return (number for number in range(3)) if kind == "generator" else None


def occupy(until: str) -> None:
    """A task of the user's own, which ends when the test makes this file."""
    while not os.path.exists(until):
        time.sleep(0.05)
