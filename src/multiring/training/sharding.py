"""Shards of a data set: the samples that a rank trains on."""

from __future__ import annotations

from typing import Any

import numpy as np

from multiring.env import whole_number


def shard(
    length: int, rank: int, size: int, epoch: int = 0, seed: int = 0, uneven: str = "keep"
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The indices of rank ``rank``: every ``size``-th of one shuffle of 0 to ``length`` - 1, the same on all ranks.

    ``uneven`` says what becomes of a length that ``size`` does not divide: "keep" gives some ranks one index more,
    "pad" repeats the first of the shuffle, "drop" leaves out its last.
    """
    length = whole_number("length", length)
    rank, size = whole_number("rank", rank, "a rank"), whole_number("size", size)
    if length < 0:
        raise ValueError(f"length={length}: a data set has 0 samples or more")
    if not 0 <= rank < size:
        raise ValueError(f"rank={rank} and size={size}: ranks are 0 to {size - 1}")
    state = [whole_number("seed", seed), whole_number("epoch", epoch)]
    if not 0 <= min(state) <= max(state) < 1 << 32:
        raise ValueError(f"seed={seed} and epoch={epoch}: both are 0 to 2**32 - 1")
    # The legacy generator: its stream is frozen, so ranks with different releases of NumPy shuffle alike.
    order: np.ndarray[Any, np.dtype[np.int64]] = np.random.RandomState(state).permutation(length)
    rest = length % size
    if uneven == "pad":
        order = np.resize(order, length + (size - rest) % size) if length else order
    elif uneven == "drop":
        order = order[: length - rest]
    elif uneven != "keep":
        raise ValueError(f"uneven={uneven!r}: known are keep, pad, drop")
    return order[rank::size]
