"""Equal devices are not equally fast: whoever waits for all of them waits for the slowest."""

from __future__ import annotations

from statistics import NormalDist


def slowness(order: int, ranks: int, spread: float) -> float:
    """Time of device ``order`` of ``ranks``, the fastest first, relative to the mean.

    Devices are drawn from one normal distribution with standard deviation ``spread``; this is about the value expected
    at that position (Blom 1958).
    """
    return 1 + spread * NormalDist().inv_cdf((order + 1 - 0.375) / (ranks + 0.25)) if ranks > 1 else 1.0


def slowest(ranks: int, spread: float) -> float:
    """Ratio of the slowest device's time to the mean."""
    return slowness(ranks - 1, ranks, spread)
