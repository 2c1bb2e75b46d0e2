"""Which samples of a data set a rank trains on."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np


def shard(
    length: int, rank: int, size: int, epoch: int = 0, seed: int = 0, uneven: str = "keep"
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The indices of rank ``rank``: every ``size``-th of one shuffle of 0 to ``length`` - 1, the same on all ranks.

    ``uneven`` says what becomes of a length that ``size`` does not divide: "keep" gives some ranks one index more,
    "pad" repeats the first of the shuffle, "drop" leaves out its last.
    """
    if operator.index(length) < 0:
        raise ValueError(f"length={length}: a data set has 0 samples or more")
    # The legacy generator: its stream is frozen, so ranks with different releases of NumPy shuffle alike.
    order: np.ndarray[Any, np.dtype[np.int64]] = np.random.RandomState([seed, epoch]).permutation(length)
    rest = length % size
    if uneven == "pad":
        order = np.resize(order, length + (size - rest) % size) if length else order
    elif uneven == "drop":
        order = order[: length - rest]
    elif uneven != "keep":
        raise ValueError(f"uneven={uneven!r}: known are keep, pad, drop")
    return order[rank::size]
