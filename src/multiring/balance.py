"""Sharing the work of an all-reduce among members with unequal links.

k members at one switch, member i with bandwidth B_i and share w_i of S bytes. It sends and receives all but its share
of the contributions, and its share k - 1 times: (1 - w_i) S + (k-1) w_i S = (1 + (k-2) w_i) S each way. No
element can do with fewer than 2 (k-1) messages, nor a member with less than S. So no algorithm is faster than

    T = max( S / min B,  2 (k-1) S / sum B ),

and the shares that fill every link for that time, w_i ~ T B_i / S - 1, reach it. The slowest link bounds the first
term: its member owns nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from .plan import SHARE_UNITS


def shortest_time(bandwidths: Sequence[float]) -> float:
    """Seconds per byte below which no all-reduce of members with these bandwidths can be."""
    if len(bandwidths) < 2:
        return 0.0
    return max(1 / min(bandwidths), 2 * (len(bandwidths) - 1) / sum(bandwidths))


def fastest_shares(bandwidths: Sequence[float]) -> tuple[int, ...] | None:
    """The shares that reach ``shortest_time``, in 64ths; None where equal shares do."""
    if len(bandwidths) <= 2 or min(bandwidths) == max(bandwidths):
        return None
    time = shortest_time(bandwidths)
    room = [max(time * bandwidth - 1, 0.0) for bandwidth in bandwidths]
    return _rounded([SHARE_UNITS * r / sum(room) for r in room])


def _rounded(parts: Sequence[float]) -> tuple[int, ...]:
    """Whole numbers with the same sum; the largest remainders are rounded up."""
    whole = [int(part) for part in parts]
    by_remainder = sorted(range(len(parts)), key=lambda i: (whole[i] - parts[i], i))
    for i in by_remainder[: SHARE_UNITS - sum(whole)]:
        whole[i] += 1
    return tuple(whole)
