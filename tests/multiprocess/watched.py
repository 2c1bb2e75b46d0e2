"""Programs of the ranks of `test_inside`."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

import multiring as mr

STEPS = 10
SECONDS = 0.05


def waits_for_one(late: int) -> dict[str, Any]:
    mr.init()
    x = np.zeros(5000, np.float32)
    for step in range(STEPS):
        x[:] = mr.rank() + step
        time.sleep(SECONDS * (mr.rank() == late))
        if step % 2:
            mr.all_reduce(x)
        else:
            mr.all_reduce(x, async_op=True).wait()
        assert x[step] == sum(rank + step for rank in range(mr.world_size()))
    stats: dict[str, Any] = mr.stats()
    mr.shutdown()
    return stats


def loses_one() -> None:
    mr.init()
    x = np.ones(5000, np.float32)
    for _ in range(STEPS):
        mr.all_reduce(x, op="max")
    print("steps done", flush=True)
    if mr.rank() == 1:
        time.sleep(60)
    mr.all_reduce(x)


def _contribution(rank: int, dtype: str, count: int) -> np.ndarray:
    random = np.random.default_rng(rank)
    values = random.standard_normal(count) * 10.0 ** random.integers(-3, 4, count)
    return values.astype(dtype)


def sums_in_order() -> dict[str, str]:
    """Compare sums, however cut and called, with the bits of a sum in the order of the ranks."""
    mr.init()
    found = {}
    for dtype in ("float32", "float16", "float64"):
        for count in (1000, 300_001):
            parts = [_contribution(rank, dtype, count) for rank in range(mr.world_size())]
            wide = np.float32 if dtype == "float16" else dtype
            expected = parts[0].astype(wide)
            for part in parts[1:]:
                expected = expected + part.astype(wide)
            bits = expected.astype(dtype).tobytes()
            for pieces in (1, 7):
                mine = parts[mr.rank()].copy()
                works = [mr.all_reduce(piece, async_op=True) for piece in np.array_split(mine, pieces)]
                for work in works:
                    work.wait()
                found[f"{dtype} {count} in {pieces}"] = "as expected" if mine.tobytes() == bits else "other bits"
            blocks = mr.world_size() * (count // mr.world_size())
            block = mr.reduce_scatter(parts[mr.rank()][:blocks])
            own = mr.rank() * block.size * block.itemsize
            same = block.tobytes() == bits[own : own + block.nbytes]
            found[f"{dtype} {count} scattered"] = "as expected" if same else "other bits"
    mr.shutdown()
    return found
