"""The links of a topology, numbered, and the way from rank to rank over them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from multiring.planning.topology import Place, Topology, card_pairs


class SimulatedLinks:
    """Every place of a topology has two links: 2p leads out of place p, 2p + 1 into it.

    Places are numbered level by level from the ranks outwards, so that place r is rank r. ``place_of[level][r]`` is
    the place of rank r in a level. The cards of hosts that have several follow, as links within that of the host.
    """

    def __init__(self, topology: Topology):
        self.levels = topology.levels
        self.world_size = topology.world_size
        by_level = [list(topology.places)]
        for _ in self.levels[1:]:
            by_level.insert(0, [inner for place in by_level[0] for inner in place.places])
        self.place_of = _places_of_ranks(by_level)
        by_level[0].sort(key=lambda place: place.rank)
        self._places = [(level, place) for level, places in zip(self.levels, by_level, strict=True) for place in places]
        self.capacity = [
            bandwidth for _, place in self._places for bandwidth in (float(place.link.up), float(place.link.down))
        ]
        self.latency = np.array([place.link.latency for _, place in self._places])
        self._cards: dict[int, int] = {}
        for number, (_, place) in enumerate(self._places):
            if place.cards > 1:
                self._cards[number] = len(self.capacity)
                self.capacity += place.cards * [place.link.up / place.cards, place.link.down / place.cards]
        self.path = lru_cache(maxsize=None)(self._path)

    def place(self, number: int) -> tuple[str, Place]:
        """A place, with its level."""
        return self._places[number]

    def name(self, link: int) -> str:
        """The name of a link, with its place and direction: ``host b up``."""
        level, place = self.place(link // 2)
        return f"{level} {place.name or link // 2} {'down' if link % 2 else 'up'}"

    def level(self, link: int) -> str:
        """The level of the place whose link it is."""
        return self.place(link // 2)[0]

    @property
    def of_places(self) -> int:
        """Number of links of places; the others are cards."""
        return 2 * len(self._places)

    def turns(self, source: int, target: int) -> int:
        """Over how many pairs of cards the messages between two ranks take turns."""
        return len(self._card_pairs(source, target))

    def path_of(self, source: int, target: int, turn: int) -> tuple[int, ...]:
        """The links and cards that a message passes whose turn it is."""
        path = list(self.path(source, target))
        here, there = (self._cards.get(self._place_lists[1][rank]) for rank in (source, target))
        mine, theirs = self._card_pairs(source, target)[turn]
        if not self.are_local(source, target):
            path += [] if here is None else [here + 2 * mine]
            path += [] if there is None else [there + 2 * theirs + 1]
        return tuple(path)

    def _card_pairs(self, source: int, target: int) -> list[tuple[int, int]]:
        if self.are_local(source, target):
            return card_pairs(1, 1)
        return card_pairs(*(self._places[self._place_lists[1][rank]][1].cards for rank in (source, target)))

    def _path(self, source: int, target: int) -> tuple[int, ...]:
        """The links that a message passes."""
        path = []
        for of in self._place_lists:
            here, there = of[source], of[target]
            if here == there:
                break
            path += [2 * here, 2 * there + 1]
        return tuple(path)

    def delay(self, source: int, target: int) -> float:
        """Latency of the slowest link that a message passes."""
        return float(max(self.latency[link // 2] for link in self.path(source, target)))

    def are_local(self, source: int, target: int) -> bool:
        """True if both ranks are on one host."""
        return bool(self.place_of[1][source] == self.place_of[1][target])

    @cached_property
    def _place_lists(self) -> list[list[int]]:
        return [numbers.tolist() for numbers in self.place_of]


def _places_of_ranks(by_level: Sequence[Sequence[Place]]) -> list[NDArray[np.int64]]:
    """The number of each rank's place in each level, from the places of the levels as they stand in the tree."""
    ranks = np.array([place.rank for place in by_level[0]])
    found = [np.arange(len(ranks))]
    above = np.arange(len(ranks))  # the place of this level for each rank, in the order of the tree
    first = len(ranks)
    for places in by_level[1:]:
        above = np.repeat(np.arange(len(places)), [len(place.places) for place in places])[above]
        numbers = np.empty_like(above)
        numbers[ranks] = first + above
        found.append(numbers)
        first += len(places)
    return found
