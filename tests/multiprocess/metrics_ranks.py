"""Programs of the ranks of `test_metrics`."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import numpy as np

import multiring as mr
from multiring import api, metrics


def _wait_for(path: str) -> None:
    until = time.monotonic() + 60
    while not Path(path).exists():
        assert time.monotonic() < until
        time.sleep(0.01)


def calls_until(go: str) -> list[object]:
    """Calls whose numbers and sizes depend on the rank where they can; then it is watched until a file is there."""
    communicator = mr.init()
    rank = mr.rank()
    x = np.zeros(5000, np.float32)
    for step in range(4):
        x[:] = rank + step
        mr.all_reduce(x)
        assert x[step] == 1 + 2 * step
    mr.broadcast(np.zeros(100, np.int64), 1)
    block = np.zeros(30, np.float64)
    for _ in range(3):
        mr.send(block, 1) if rank == 0 else mr.recv(block, 0)
    print("ready", flush=True)
    _wait_for(go)
    mr.barrier()
    stats = communicator.stats()
    mr.shutdown()
    return [stats["collectives"], sorted(name for name in sys.modules if name.startswith("prometheus"))[:1]]


def goes_on(lost: str, back: str) -> str:
    """Rank 1 is killed; the others go on, and later with one that takes its place."""
    mr.init()
    replacement = bool(int(os.environ.get("MULTIRING_REPLACEMENT", "0")))
    if not replacement:
        try:
            mr.barrier()
            if mr.rank() == 1:
                os.kill(os.getpid(), 9)
            mr.barrier()
        except mr.PeerLost:  # in the first one, too, where a rank comes to the end of it late
            assert api._exporter is not None
            found = api._exporter.samples()
            assert found["multiring_failed"] == [((), True)]
            assert found["multiring_failure"] == [(("PeerLost", "1", ""), 1)]
            mr.shrink()
        mr.all_reduce(np.zeros(10, np.float32))
        print("shrunk", flush=True)
        while mr.world_size() < 3:
            mr.grow()
            time.sleep(0.05)
    mr.barrier()
    print("grown", flush=True)
    _wait_for(back)
    mr.barrier()
    mr.shutdown()
    return "done"


def disagrees(odd: int, go: str) -> str:
    """Rank ``odd`` sums one element more than the others; all are watched then until a file is there."""
    mr.init()
    x = np.arange(5) + mr.rank()
    mr.all_reduce(x)
    try:
        mr.all_reduce(np.zeros(6 if mr.rank() == odd else 5, np.int64))
        mr.barrier()
    except mr.Mismatch as error:
        named = error.rank
    print("disagree", flush=True)
    _wait_for(go)
    return str(named)


def cannot_show() -> str:
    try:
        mr.init()
    except (mr.MultiringError, ValueError) as error:
        assert not mr.is_initialized()
        return f"{type(error).__name__}: {error}"
    try:
        mr.barrier()
    except mr.PeerLost as error:
        return f"PeerLost: {error}"
    return "nothing"


def without_package() -> str:
    sys.modules["prometheus_client"] = None  # type: ignore[assignment]
    return cannot_show()


def of_forked_child(go: str) -> None:
    """A child that outlives its parent, which showed metrics."""
    mr.init()
    if os.fork() == 0:
        sys.stdout.close()
        os.close(1), os.close(2)
        _wait_for(go)
        os._exit(0)
    mr.shutdown()


def every_family() -> list[str]:
    """The metrics that have samples."""
    exporter = metrics.Exporter(mr.init())
    mr.all_reduce(np.zeros(10, np.float32))
    found = exporter.samples()
    mr.shutdown()
    return sorted(found)
