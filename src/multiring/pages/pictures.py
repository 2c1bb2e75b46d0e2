"""Parts of all pictures: axes that fit their values, labels that do not overlap, a title that says the answer.

Pure: from values to numbers and text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, floor, log10

SHOWN_ALIKE = 0.0005
"""Efficiencies nearer than this are shown alike, as 98.7 %."""


def round_ticks(low: float, high: float, most: int = 7) -> list[float]:
    """Round numbers, equally far apart, from one that is not above ``low`` to one that is not below ``high``."""
    size = max(abs(low), abs(high)) or 1.0
    if high - low < 1e-6 * size:  # as good as one value
        low, high = low - size / 100, high + size / 100
    unit = 10.0 ** floor(log10((high - low) / most))
    for factor in (1, 2, 5, 10, 20):
        step = factor * unit
        # What differs by rounding alone is no reason for another tick.
        first, last = floor(low / step + 1e-9), ceil(high / step - 1e-9)
        if last - first < most:
            break
    return [round(number * step, 12) for number in range(first, last + 1)]


def apart(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places of labels as near to ``wanted`` ones as can be with ``gap`` between any two, from ``low`` to ``high``.

    Their order is that of ``wanted``. If all do not fit, those at the upper end go beyond ``high``.
    """
    order = sorted(range(len(wanted)), key=wanted.__getitem__)
    blocks: list[list[float]] = []  # runs of labels that touch: the shifts of the first one that each of them wants
    for number, index in enumerate(order):
        blocks.append([wanted[index] - number * gap])
        while len(blocks) > 1 and _mean(blocks[-2]) >= _mean(blocks[-1]):
            blocks[-2:] = [blocks[-2] + blocks[-1]]
    starts = [_mean(block) for block in blocks for _ in block]
    found = [0.0] * len(wanted)
    for number, (index, start) in enumerate(zip(order, starts, strict=True)):
        found[index] = max(low, min(start, high - (len(wanted) - 1) * gap)) + number * gap
    return found


def percent(part: float) -> str:
    """98.7 %."""
    return f"{100 * part:.1f} %"


def best_and_worst(where: str, efficiencies: Mapping[str, float | None]) -> str:
    """A sentence, fit for a title, that says how efficient the best and the worst strategy are."""
    known = {name: part for name, part in efficiencies.items() if part is not None}
    if not known:
        return f"No strategy has a result {where}"
    best, worst = max(known, key=known.__getitem__), min(known, key=known.__getitem__)
    if len(known) == 1:
        return f"{best} reaches {percent(known[best])} efficiency {where}"
    if known[best] - known[worst] < SHOWN_ALIKE:
        return f"Every strategy reaches {percent(known[best])} efficiency {where}"
    return f"{best} reaches {percent(known[best])} efficiency {where}, {worst} {percent(known[worst])}"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
