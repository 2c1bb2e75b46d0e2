"""Ranks that have different numbers of samples count for as much as they have."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np

from multiring.runtime.buffers import writable
from multiring.runtime.comm import Communicator, group_of
from multiring.training.labels import label

_Metrics = TypeVar("_Metrics", float, Mapping[str, float])


def share(communicator: Communicator, weight: float) -> float:
    """This rank's part of the sum of all ranks' weights; all ranks call it.

    ValueError, on all of them, if the sum is zero or no finite number.
    """
    mine = valid(weight)
    total = np.array([mine])
    communicator.all_reduce(total)
    _check_sum(float(total[0]), weight, communicator)
    return float(mine / total[0])


def average(communicator: Communicator, metrics: _Metrics, weight: float = 1.0) -> _Metrics:
    """The mean over all ranks of a number, or of each number of a dictionary, by the ranks' ``weight``.

    The number of samples that a metric was taken on is its weight; a rank of weight 0 only listens, and its numbers may
    be NaN. All ranks give the same keys, or a Mismatch shows them. The result is in float64. ValueError if all weights
    are 0, or their sum is no finite number.
    """
    named: Mapping[str, float] = metrics if isinstance(metrics, Mapping) else {"": metrics}
    for name in named:
        if not isinstance(name, str):
            raise TypeError(f"metrics has the key {name!r}: the key of a metric is text")
    names: list[str] = sorted(named)
    sums = np.zeros(len(names) + 1)
    counts: float = valid(weight)
    if counts:
        sums[:] = [*(counts * _metric(name, named[name]) for name in names), counts]
    group_of(communicator).run("all_reduce", writable(sums), label=label("metrics", names))
    _check_sum(float(sums[-1]), weight, communicator)
    means = dict(zip(names, (sums[:-1] / sums[-1]).tolist(), strict=True))
    return means if isinstance(metrics, Mapping) else means[""]  # type: ignore[return-value]


def _check_sum(total: float, weight: float, communicator: Communicator) -> None:
    """ValueError for a sum of all weights by which nothing can be divided; all ranks have the same one."""
    if total == 0:
        raise ValueError(f"weight={weight}: the weights of all {communicator.size} ranks are 0")
    if not total < math.inf:
        raise ValueError(
            f"weight={weight}: the sum of the weights of all {communicator.size} ranks is more than a float64 holds, "
            f"{np.finfo(np.float64).max:.2g}: give smaller ones"
        )


def valid(weight: float, name: str = "weight") -> float:
    """The weight in float64, since ranks may give it in several types, and sums of small integers would overflow.

    ValueError if it is none, which calls it by the ``name`` of the argument.
    """
    number = real_number(weight)
    if number is None or not 0 <= number < math.inf:
        raise ValueError(f"{name}={weight!r}: a weight is 0 or more, such as the number of this rank's samples")
    return number


def _metric(name: str, metric: float) -> float:
    number = real_number(metric)
    if number is None:
        raise TypeError(f"metrics{f'[{name!r}]' if name else ''}={metric!r}: a metric is a real number")
    return number


def real_number(given: Any) -> float | None:
    """The number in float64, None if it is no real one: NumPy would drop an imaginary part or a mask, and read text."""
    if isinstance(given, (str, bytes, complex, np.complexfloating, np.ma.MaskedArray)):
        return None
    try:
        return float(given)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last is torch's, for complex numbers
        return None
