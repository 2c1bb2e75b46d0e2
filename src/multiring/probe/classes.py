"""Measured rates and latencies rounded to coarse classes, so that the same cluster gets the same plan tomorrow."""

from __future__ import annotations

from collections.abc import Sequence
from math import floor, log10

R10 = (1.0, 1.25, 1.6, 2.0, 2.5, 3.15, 4.0, 5.0, 6.3, 8.0)
"""Preferred numbers of ISO 3, 25 % apart: the classes of latencies."""

R20 = (*R10, 1.12, 1.4, 1.8, 2.24, 2.8, 3.55, 4.5, 5.6, 7.1, 9.0)
"""12 % apart: the classes of rates in bits. The rates that links are sold with are among them."""

ALIKE_RATE, ALIKE_LATENCY = 1.2, 1.5
"""Measured values that differ by less are of one class: machines of one kind are to look so."""


def rates(measured: Sequence[float]) -> list[float]:
    """A class, in bytes a second, for each of some rates above 0.

    The upper half of those that are alike decides, since what disturbs a measurement makes it too low.
    """
    return _classes([8 * rate for rate in measured], ALIKE_RATE, R20, 1 / 8)


def latencies(measured: Sequence[float]) -> list[float]:
    """A class, in seconds, for each of some latencies above 0; the shorter half of those that are alike decides."""
    return [1 / each for each in _classes([1 / seconds for seconds in measured], ALIKE_LATENCY, R10, 1.0)]


def _classes(values: Sequence[float], ratio: float, numbers: Sequence[float], unit: float) -> list[float]:
    found: dict[float, float] = {}
    left = sorted(values, reverse=True)
    while left:
        alike = [value for value in left if value * ratio >= left[0]]
        upper = alike[: (len(alike) + 1) // 2]
        found |= dict.fromkeys(alike, unit * _nearest(sum(upper) / len(upper), numbers))
        left = left[len(alike) :]
    return [found[value] for value in values]


def _nearest(value: float, numbers: Sequence[float]) -> float:
    """The value nearest to ``value``, by their ratio, among ``numbers`` times powers of ten."""
    decade = floor(log10(value))
    candidates = [float(f"{number}e{power}") for power in (decade, decade + 1) for number in numbers]
    return min(candidates, key=lambda each: max(each / value, value / each))
