"""Links and ranks that cannot be told apart: the same load in every round."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

_GRAIN = 1e-9
"""Loads that differ by less, as a part of the largest, are equal."""

_MULTIPLIER = np.uint64(6364136223846793005)
"""Multiplier of the congruential generator that hashes what a member does (Knuth)."""


class Classes:
    """Members that did the same throughout: of each class the first member, and how many there are."""

    def __init__(self, does: Iterable[NDArray[np.float64]]):
        """``does`` yields what each member does, once for each occasion."""
        hashes: NDArray[np.uint64] | None = None
        for values in does:
            scale = float(np.abs(values).max()) or 1.0
            grains = np.round(values / (scale * _GRAIN)).astype(np.int64).view(np.uint64)
            hashes = (grains if hashes is None else hashes) * _MULTIPLIER + (grains ^ (grains >> np.uint64(29)))
        if hashes is None:
            raise ValueError("there is no occasion on which members could differ")
        _, first, count = np.unique(hashes, return_index=True, return_counts=True)
        order = np.argsort(first)
        self.first = first[order].tolist()
        self.count = count[order].tolist()
