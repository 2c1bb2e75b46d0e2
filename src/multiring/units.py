"""Sizes, times, rates and numbers of things as people read them."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby


def count(number: int, thing: str) -> str:
    """1 rank, 2 ranks."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}{'es' if thing.endswith(('s', 'ch')) else 's'}"


def ranges(numbers: Iterable[int]) -> str:
    """Numbers in order, those in a row as first and last: "0-2, 5"."""
    in_a_row = (
        [number for _, number in row]
        for _, row in groupby(enumerate(sorted(numbers)), lambda entry: entry[1] - entry[0])
    )
    return ", ".join(f"{row[0]}-{row[-1]}" if len(row) > 1 else str(row[0]) for row in in_a_row)


def size(nbytes: float) -> str:
    """Bytes, in the unit that leaves a number from 1 to 1023."""
    for unit, factor in (("GB", 1 << 30), ("MB", 1 << 20), ("KB", 1 << 10)):
        if nbytes >= factor:
            return f"{nbytes / factor:.4g} {unit}"
    return f"{nbytes:.4g} B"


def duration(seconds: float) -> str:
    """Seconds, in the unit that leaves a number from 1 to 999."""
    number, unit = precise_duration(seconds).split()
    return f"{float(number):.3g} {unit}"


def precise_duration(seconds: float) -> str:
    """The same with zeros at the end, so that all have three digits and what is compared can be."""
    unit, factor = next((each for each in (("s", 1.0), ("ms", 1e-3)) if seconds >= 0.9995 * each[1]), ("us", 1e-6))
    return f"{seconds / factor:#.3g}".rstrip(".") + f" {unit}" if seconds else "0 us"


def rate(bytes_a_second: float) -> str:
    """The bandwidth of a link, in bits as networks are sold."""
    bits = 8 * bytes_a_second
    return f"{bits / 1e9:.4g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.4g} Mbit/s"
