"""Topologies that the planning tests share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

from multiring.planning.topology import LEVELS, Link, Place, Topology, ranks_in_host

MBIT = 125_000.0
CORE = Link(5e9, 5e9, 1e-6)


def card(mbit: float, latency: float = 50e-6) -> Link:
    """A network link of so many Mbit/s each way."""
    return Link(mbit * MBIT, mbit * MBIT, latency)


def tree(sizes: Sequence[Any], links: Sequence[Link], ranks: Iterator[int] | None = None) -> tuple[Place, ...]:
    """Places from nested lists of ranks per host; ``links`` from the outermost level to the ranks."""
    ranks = ranks if ranks is not None else count()
    places = []
    for number, inside in enumerate(sizes):
        if isinstance(inside, int):
            inner = ranks_in_host([next(ranks) for _ in range(inside)], links[-1])
        else:
            inner = tree(inside, links[1:], ranks)
        places.append(Place(f"{len(links)}-{number}", links[0], inner))
    return tuple(places)


def nested(sizes: Sequence[Any], links: Sequence[Link]) -> Topology:
    """``[[2, 2], [3]]`` is two racks, of two hosts and of one; ``links`` from the outermost level to the ranks."""
    return Topology(LEVELS[: len(links)], tree(sizes, links))


def unequal(cards: Sequence[float], ranks: int = 2) -> Topology:
    """Hosts with cards of so many Mbit/s."""
    numbers = count()
    hosts = (
        Place(f"h{i}", card(c), ranks_in_host([next(numbers) for _ in range(ranks)], CORE)) for i, c in enumerate(cards)
    )
    return Topology(LEVELS[:2], tuple(hosts))
