"""Least time of a collective on a topology: the limit shown beside every result.

The link of a place splits the ranks in two, and whatever the algorithm some bytes must cross it. For an all-reduce the
places around one switch give more: with k of them every byte needs k - 1 messages to be summed and k - 1 to be
spread, wherever the summing is done (``balance``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from .balance import shortest_time
from .topology import Link, Place, Topology

MOST_KEPT = 16
"""Most topologies, each with a collective and a root, whose bounds are kept: sizes have them in common."""

_MUST_CROSS: dict[str, Callable[[float, bool], tuple[float, float]]] = {
    "all_reduce": lambda fraction, has_root: (1, 1),
    "reduce_scatter": lambda fraction, has_root: (1 - fraction, fraction),
    "all_gather": lambda fraction, has_root: (fraction, 1 - fraction),
    "broadcast": lambda fraction, has_root: (1, 0) if has_root else (0, 1),
    "reduce": lambda fraction, has_root: (0, 1) if has_root else (1, 0),
    "barrier": lambda fraction, has_root: (0, 0),
}
"""Bytes up and down the link of a place, for each byte of the buffer; it holds ``fraction`` of the ranks."""


def cut_bound(topology: Topology, collective: str, nbytes: int, root: int = 0) -> float:
    """Seconds below which no algorithm can be, latencies apart; ``nbytes`` is all blocks together."""
    return nbytes * _seconds_per_byte(topology, collective, root)


@lru_cache(maxsize=MOST_KEPT)
def _seconds_per_byte(topology: Topology, collective: str, root: int) -> float:
    size = topology.world_size

    def below(places: Sequence[Place], outside: Link | None) -> float:
        """The bound from the switch that joins ``places`` and, over the link ``outside``, the rest."""
        worst = 0.0
        for place in places:
            ranks = tuple(place.ranks())
            is_part = len(ranks) < size
            if is_part:
                up, down = _crossing(collective, len(ranks), size, root in ranks)
                worst = max(worst, up / place.link.up, down / place.link.down)
            if place.places:
                worst = max(worst, below(place.places, place.link if is_part else None))
        if collective == "all_reduce":
            legs = [place.link for place in places] + ([Link(outside.down, outside.up, 0)] if outside else [])
            worst = max(worst, shortest_time([leg.up for leg in legs]), shortest_time([leg.down for leg in legs]))
        return worst

    return below(topology.places, None)


def _crossing(collective: str, ranks: int, size: int, has_root: bool) -> tuple[float, float]:
    fraction = ranks / size
    if collective == "all_to_all":
        return ranks * (1 - fraction), ranks * (1 - fraction)
    return _MUST_CROSS[collective](fraction, has_root)
