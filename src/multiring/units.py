"""Sizes, times and rates as people read them."""

from __future__ import annotations


def size(nbytes: float) -> str:
    """Bytes, in the unit that leaves a number from 1 to 1023."""
    for unit, factor in (("GB", 1 << 30), ("MB", 1 << 20), ("KB", 1 << 10)):
        if nbytes >= factor:
            return f"{nbytes / factor:.4g} {unit}"
    return f"{nbytes:.4g} B"


def duration(seconds: float) -> str:
    """Seconds, in the unit that leaves a number from 1 to 999."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= 0.9995 * factor:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"


def rate(bytes_a_second: float) -> str:
    """The bandwidth of a link, in bits as networks are sold."""
    bits = 8 * bytes_a_second
    return f"{bits / 1e9:.4g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.4g} Mbit/s"
