"""Contributions of ranks in the tests of front ends that take NumPy's arrays."""

from __future__ import annotations

import numpy as np


def own(rank: int, count: int, dtype: str = "float32") -> np.ndarray:
    """Contributions that depend on rank and index, small enough to be exact in every format."""
    return ((np.arange(count) * 3 + rank * 5) % 7).astype(dtype)


def everyone(size: int, count: int, dtype: str = "float32") -> np.ndarray:
    """Contributions of ``size`` ranks, a row for each."""
    return np.stack([own(rank, count, dtype) for rank in range(size)])
