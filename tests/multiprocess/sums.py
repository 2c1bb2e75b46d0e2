"""Sums that tell who took part in them."""

from __future__ import annotations

import numpy as np

import multiring as mr


def reduced(count: int, step: int, timeout: float | None = None) -> None:
    """An all_reduce whose sum depends on who takes part, on the step and on the index."""
    x = np.arange(count) % 1021 * (mr.rank() + 1.0) + step
    mr.all_reduce(x, timeout=timeout)
    size = mr.world_size()
    assert (x == np.arange(count) % 1021 * (size * (size + 1) / 2) + step * size).all(), f"wrong sum in step {step}"
