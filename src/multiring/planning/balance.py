"""Sharing the work of an all-reduce among members with unequal links.

k members at one switch, member i with bandwidth B_i and share w_i of S bytes, by reduce_scatter and all_gather. Each
way it sends or receives all but its share of the contributions, and its share k - 1 times: (1 - w_i) S + (k-1) w_i S.
What it owns it may exchange further out as well, c times each way. So its link is busy for

    (1 + (k - 2 + c) w_i) S / B_i,

and the shares that keep every link busy for the same time are w_i ~ T B_i / S - 1. A member whose link is the
bottleneck with no share at all gets none: it sends its contribution once and receives the sum once.

No algorithm is faster than T for c = 0: no byte can do with fewer than 2 (k-1) messages, nor a member with less than
S each way.
"""

from __future__ import annotations

from collections.abc import Sequence

from .layout import Shape
from .plan import SHARE_UNITS


def shortest_time(bandwidths: Sequence[float], beyond: float = 0.0) -> float:
    """Fewest seconds a byte of an all-reduce between members with these bandwidths, in bytes a second.

    ``beyond`` is how many times the owner of a byte sends it in the dimensions around.
    """
    if len(bandwidths) < 2:
        return 0.0
    return max(1 / min(bandwidths), (2 * (len(bandwidths) - 1) + beyond) / sum(bandwidths))


def fastest_shares(shape: Shape, whole: Shape) -> tuple[int, ...] | None:
    """The shares of the children of a shape, in 64ths, that reach the shortest time; None if equal shares do.

    The shape is a part of ``whole``.
    """
    bandwidths, beyond = shape.bandwidths, _beyond(whole, shape.depth)
    if len(bandwidths) - 2 + beyond <= 0 or min(bandwidths) == max(bandwidths):
        return None
    time = shortest_time(bandwidths, beyond)
    spare = [max(time * bandwidth - 1, 0.0) for bandwidth in bandwidths]
    return _rounded([SHARE_UNITS * each / sum(spare) for each in spare])


def _beyond(whole: Shape, depth: int) -> float:
    """Number of times that the owner of a byte after a dimension sends it and receives it in the dimensions around."""
    total, fraction = 0.0, 1.0
    for shapes in whole.by_depth[depth:]:
        members = max(len(shape.children) for shape in shapes)
        total += fraction * 2 * (members - 1) / members
        fraction /= members
    return total


def _rounded(parts: Sequence[float]) -> tuple[int, ...]:
    """Whole numbers with the same sum; the largest remainders are rounded up."""
    whole = [int(part) for part in parts]
    by_remainder = sorted(range(len(parts)), key=lambda i: (whole[i] - parts[i], i))
    for i in by_remainder[: SHARE_UNITS - sum(whole)]:
        whole[i] += 1
    return tuple(whole)
