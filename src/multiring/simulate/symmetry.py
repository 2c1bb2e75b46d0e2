"""Links and ranks that cannot be told apart: the same load in every round."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

_GRAIN = 1e-9
"""Loads that differ by less are equal."""


class Classes:
    """A partition that is refined by what its members do: at the end, one member stands for its class."""

    def __init__(self, values: Iterable[float]):
        self.of = np.unique(np.fromiter(values, np.float64), return_inverse=True)[1]

    def refine(self, values: NDArray[np.float64]) -> None:
        """Part members with different values."""
        scale = float(np.abs(values).max())
        if scale == 0:
            return
        grains = np.round(values / (scale * _GRAIN)).astype(np.int64)
        kinds = np.unique(grains, return_inverse=True)[1]
        self.of = np.unique(self.of * (int(kinds.max()) + 1) + kinds, return_inverse=True)[1]

    @property
    def first(self) -> list[int]:
        """The first member of each class."""
        return [int(member) for member in np.unique(self.of, return_index=True)[1]]

    @property
    def count(self) -> list[int]:
        """How many members each class has."""
        return [int(count) for count in np.unique(self.of, return_counts=True)[1]]
