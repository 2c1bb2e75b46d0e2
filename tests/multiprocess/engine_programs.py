"""Programs of the ranks in the engine's tests: each function is called as every rank."""

from __future__ import annotations

import gc
import hashlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
from engines import Rank, all_reduce_plan, blocked_plan
from workers import worker

from multiring.errors import MultiringError


def contribution(rank: int, count: int) -> np.ndarray:
    return ((np.arange(count) * 7 + rank * 3) % 11 - 3).astype(np.float32)


@worker
def all_reduce_sizes(rank: Rank, n: int, arena: bool) -> bool:
    for method in ("at once", "direct", "ring"):
        for segment_bytes, count in ((64, 1), (64, 3001), (1 << 16, 0), (1 << 16, 300_007)):
            mine = rank.engine.empty(4 * count).view(np.float32) if arena else np.empty(count, np.float32)
            for shift in range(3):
                mine[:] = contribution(rank.rank + shift, count)
                rank.run(all_reduce_plan(n, method, segment_bytes), mine)
                expected = sum(contribution(other + shift, count).astype(np.float64) for other in range(n))
                np.testing.assert_array_equal(mine, expected)
    return True


@worker
def same_bits(rank: Rank, n: int) -> str:
    mine = np.random.default_rng(rank.rank).standard_normal(1 << 20).astype(np.float32)
    return hashlib.sha256(rank.run(all_reduce_plan(n, "direct"), mine).tobytes()).hexdigest()


@worker
def gather_and_exchange(rank: Rank, n: int) -> bool:
    count = 30001
    mine = contribution(rank.rank, n * count)
    exchanged = rank.run(blocked_plan("all_to_all", n, 1 << 14), mine.copy())
    block = slice(rank.rank * count, (rank.rank + 1) * count)
    np.testing.assert_array_equal(
        exchanged, np.concatenate([contribution(other, n * count)[block] for other in range(n)])
    )
    return True


@worker
def random_sizes(rank: Rank, n: int, collectives: int) -> bool:
    """Many collectives of random sizes, blocking and not; memory, descriptors and arena stay flat."""
    counts = np.random.default_rng(1).integers(0, 20000, collectives)
    plan = all_reduce_plan(n, "direct", 1 << 14)
    seen = []
    for i, count in enumerate(counts):
        mine = np.full(count, rank.rank + i % 7, np.int32)
        if i % 3 == 0:
            rank.start(plan, mine).wait(30)
        else:
            rank.run(plan, mine)
        assert (mine == n * (n - 1) // 2 + n * (i % 7)).all()
        if i % (collectives // 5) == collectives // 5 - 1:
            resident = int(Path("/proc/self/statm").read_text().split()[1])
            descriptors = len(os.listdir("/proc/self/fd"))
            seen.append((resident, descriptors, rank.engine.statistics()["arena_committed"]))
    assert seen[1][1:] == seen[-1][1:], seen
    assert seen[-1][0] < 1.05 * seen[1][0], seen
    return True


@worker
def until_it_fails(rank: Rank, n: int, count: int, asynchronous: bool) -> dict[str, Any]:
    """Reduce forever; report the error that ends it."""
    plan = all_reduce_plan(n, "direct", 1 << 16)
    mine = np.zeros(count, np.float32)
    print("ready", flush=True)
    try:
        while True:
            if asynchronous:
                rank.start(plan, mine).wait()
            else:
                rank.run(plan, mine)
    except MultiringError as error:
        return {
            "kind": type(error).__name__,
            "rank": error.rank,
            "host": error.host,
            "collective": error.collective,
            "message": str(error),
            "time": time.time(),
        }


@worker
def fork_between_collectives(rank: Rank, n: int) -> bool:
    """Children that outlive a collective, look at the arena, write into it, and try to use the engine."""
    plan = all_reduce_plan(n, "direct", 1 << 14)
    shared = rank.engine.empty(4 * 100_000).view(np.float32)
    shared[:] = contribution(rank.rank, shared.size)
    work = rank.start(plan, np.zeros(2_000_000, np.float32))
    child = os.fork()
    if child == 0:
        refused = False
        try:
            rank.run(plan, np.zeros(3))
        except RuntimeError as error:
            refused = f"forked from rank {rank.rank}" in str(error)
        inherited = sum(
            "socket:" in os.readlink(f"/proc/self/fd/{fd}")
            for fd in range(3, 200)
            if os.path.exists(f"/proc/self/fd/{fd}")
        )
        seen = (shared == contribution(rank.rank, shared.size)).all()
        shared[:] = -1
        del work, shared, rank
        gc.collect()
        os._exit(0 if refused and seen and inherited == 0 else 1)
    for _ in range(20):
        rank.run(plan, contribution(rank.rank, 5000))
    assert os.waitpid(child, 0)[1] == 0
    work.wait(20)
    np.testing.assert_array_equal(shared, contribution(rank.rank, shared.size))
    return True


@worker
def killed_with_a_child_alive(rank: Rank, n: int) -> dict[str, Any]:
    """Rank 1 forks and is killed; its child lives on and must not keep the connections open."""
    plan = all_reduce_plan(n, "direct", 1 << 14)
    rank.run(plan, np.zeros(10))
    if rank.rank == 1:
        if os.fork() == 0:
            os.closerange(1, 3)  # the test waits for the end of what is written there
            time.sleep(5)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    try:
        rank.run(plan, np.zeros(10))
    except MultiringError as error:
        return {"kind": type(error).__name__, "rank": error.rank, "seconds": time.monotonic() - begin}
    raise AssertionError("the collective completed without rank 1")


@worker
def interrupted(rank: Rank, n: int) -> dict[str, Any]:
    """Rank 0 waits alone in a collective until a signal raises in it."""
    plan = all_reduce_plan(n, "direct", 1 << 14)
    rank.run(plan, np.zeros(10))
    print("ready", flush=True)
    if rank.rank == 0:
        try:
            rank.run(plan, np.zeros(10))
        except KeyboardInterrupt:
            return {"kind": "KeyboardInterrupt", "failure": str(rank.engine.failure())}
    time.sleep(2)
    try:
        rank.run(plan, np.zeros(10))
        rank.run(plan, np.zeros(10))
    except MultiringError as error:
        return {"kind": type(error).__name__, "rank": error.rank, "message": str(error)}
    raise AssertionError("the collective completed without rank 0")
