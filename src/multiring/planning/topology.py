"""The tree of ranks in hosts in racks, with a link at each edge."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import lcm

LEVELS = ("rank", "host", "rack", "site")
"""The levels from the inside out. A topology has the first two, three or all of them."""


@dataclass(frozen=True, slots=True)
class Link:
    """The link that leads out of a rank, host, rack or site.

    ``up`` and ``down`` are in bytes a second. ``latency`` is the seconds of a message whose slowest link this is.
    ``burst`` is the bytes that a link passes at once after a pause, where a token bucket limits it.
    """

    up: float
    down: float
    latency: float
    burst: float = 0.0

    def __post_init__(self) -> None:
        if not (self.up > 0 and self.down > 0 and self.latency >= 0 and self.burst >= 0):
            raise ValueError(f"a link needs positive bandwidths, and a latency and a burst of 0 or more, not {self}")


RANK_LINK = Link(up=16e9, down=16e9, latency=1e-6)
"""Taken where nothing is measured: one core reads another's memory, and a flag passes between two cores.
Measured: benchmarks/results/2026-11-28-constants.md, Planning."""

_MOST_LISTED = 16
"""Most hosts that a message names."""

HOST_LINK = Link(up=1.25e9, down=1.25e9, latency=50e-6)
"""Taken where nothing is measured: 10 Gbit/s Ethernet, TCP between two processes."""


@dataclass(frozen=True, slots=True)
class Place:
    """A rank, or what holds ranks: a host, rack or site; with the link that leads out of it."""

    name: str
    link: Link
    places: tuple[Place, ...] = ()
    rank: int = -1
    cards: int = 1
    """Number of equal network cards that make up the link, if this is a host."""

    def ranks(self) -> Iterator[int]:
        """All ranks in it, from left to right."""
        if not self.places:
            yield self.rank
        for place in self.places:
            yield from place.ranks()


def card_pairs(mine: int, theirs: int) -> list[tuple[int, int]]:
    """The pairs of cards, by number, over which messages between two hosts take turns, so that all cards load alike."""
    return [(turn % mine, turn % theirs) for turn in range(lcm(mine, theirs))]


def ranks_in_host(ranks: Sequence[int], link: Link = RANK_LINK) -> tuple[Place, ...]:
    """The places of ranks that hang from equal links."""
    return tuple(Place("", link, rank=rank) for rank in ranks)


@dataclass(frozen=True)
class Topology:
    """The places of the outermost level, joined by a switch that is never the bottleneck.

    Ranks are 0 to world_size - 1.
    """

    levels: tuple[str, ...]
    places: tuple[Place, ...]

    def __post_init__(self) -> None:
        if len(self.levels) < 2 or self.levels != LEVELS[: len(self.levels)]:
            raise ValueError(f"levels are {self.levels}; they must be the first two, three or four of {LEVELS}")
        for place in self.places:
            _check_depth(place, self.levels[::-1])
        ranks = sorted(rank for place in self.places for rank in place.ranks())
        if not ranks:
            raise ValueError("a topology has at least one rank")
        if ranks != list(range(len(ranks))):
            wrong = next(rank for number, rank in enumerate(ranks) if rank != number)
            raise ValueError(f"ranks must be 0 to {len(ranks) - 1}, each once; {wrong} is missing, double or too high")

    @staticmethod
    def flat(hosts: Sequence[int], rank_link: Link = RANK_LINK, host_link: Link = HOST_LINK) -> Topology:
        """Hosts under one switch: host h has ``hosts[h]`` ranks, which are numbered on from host to host."""
        names = [f"host{number}" for number, ranks in enumerate(hosts) for _ in range(ranks)]
        return Topology.of_hosts(names, rank_link, host_link)

    @staticmethod
    def of_hosts(hosts: Sequence[str], rank_link: Link = RANK_LINK, host_link: Link = HOST_LINK) -> Topology:
        """Two levels; ``hosts[r]`` names rank r's host."""
        places = (Place(name, host_link, ranks_in_host(ranks, rank_link)) for name, ranks in _by_host(hosts).items())
        return Topology(LEVELS[:2], tuple(places))

    @cached_property
    def hosts(self) -> tuple[str, ...]:
        """Name of the host of each rank."""
        return tuple(host.name for host in self._host_of)

    @cached_property
    def cards(self) -> tuple[int, ...]:
        """Number of network cards of each rank's host."""
        return tuple(host.cards for host in self._host_of)

    def host_link(self, rank: int) -> Link:
        """Return the link that leads out of the host of a rank."""
        return self._host_of[rank].link

    @cached_property
    def _host_of(self) -> tuple[Place, ...]:
        hosts: dict[int, Place] = {}

        def walk(place: Place) -> None:
            for inner in place.places:
                if inner.places:
                    walk(inner)
                else:
                    hosts[inner.rank] = place

        for place in self.places:
            walk(place)
        return tuple(hosts[rank] for rank in range(len(hosts)))

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.hosts)

    def apart(self, rank: int, other: int) -> str:
        """The outermost level between whose places two different ranks are."""
        places = self.places
        for level in reversed(self.levels):
            here = next(place for place in places if rank in place.ranks())
            if other not in here.ranks():
                return level
            places = here.places
        raise ValueError(f"rank {rank} is not apart from itself")

    def links(self) -> Iterator[tuple[list[int], Link]]:
        """The link of each host, rack and site, and the ranks that share it."""

        def walk(place: Place) -> Iterator[tuple[list[int], Link]]:
            if place.places:
                yield sorted(place.ranks()), place.link
                for inner in place.places:
                    yield from walk(inner)

        for place in self.places:
            yield from walk(place)

    def ranks_by(self, level: str) -> list[list[int]]:
        """The ranks of each place of a level, ascending; places in the order of their lowest ranks."""
        if level not in self.levels:
            raise ValueError(f"level={level!r}: the topology has {', '.join(self.levels)}")
        places = self.places
        for _ in range(self.levels.index(level), len(self.levels) - 1):
            places = tuple(inner for place in places for inner in place.places)
        return sorted(sorted(place.ranks()) for place in places)

    def restrict(self, members: Sequence[int]) -> Topology:
        """The topology of some of the ranks, renumbered by their position in ``members``."""
        index = {rank: number for number, rank in enumerate(members)}
        if not members or len(index) != len(members) or not set(index) <= set(range(self.world_size)):
            raise ValueError(f"members {list(members)} must be different ranks from 0 to {self.world_size - 1}")

        def keep(place: Place) -> Place | None:
            if not place.places:
                return replace(place, rank=index[place.rank]) if place.rank in index else None
            inner = _kept(keep, place.places)
            return replace(place, places=inner) if inner else None

        return Topology(self.levels, _kept(keep, self.places))

    def assign(self, hosts: Sequence[str]) -> Topology:
        """The same tree for a job: ``hosts[r]`` names rank r's host. Hosts without ranks are left out."""
        ranks = _by_host(hosts)

        def fill(place: Place) -> Place | None:
            if not place.places[0].places:
                here = ranks.pop(place.name, [])
                return replace(place, places=ranks_in_host(here, place.places[0].link)) if here else None
            inner = _kept(fill, place.places)
            return replace(place, places=inner) if inner else None

        places = _kept(fill, self.places)
        if ranks:
            name, here = next(iter(ranks.items()))
            hosts = list(dict.fromkeys(self.hosts))
            more = f" and {len(hosts) - _MOST_LISTED} more" if len(hosts) > _MOST_LISTED else ""
            known = ", ".join(hosts[:_MOST_LISTED]) + more
            raise ValueError(
                f"rank {here[0]} is on host {name!r}; the topology has only {known}: add the host there, or set "
                "MULTIRING_HOST on it to the name that it has there"
            )
        return Topology(self.levels, places)


def _check_depth(place: Place, levels: tuple[str, ...]) -> None:
    if len(levels) == 1 and place.places:
        raise ValueError(f"{place.name!r} stands where a rank should and holds places itself")
    if len(levels) > 1 and not place.places:
        raise ValueError(f"{levels[0]} {place.name!r} holds no {levels[1]}")
    for inner in place.places:
        _check_depth(inner, levels[1:])


def _by_host(hosts: Sequence[str]) -> dict[str, list[int]]:
    ranks: dict[str, list[int]] = {}
    for rank, name in enumerate(hosts):
        ranks.setdefault(name, []).append(rank)
    return ranks


def _kept(keep: Callable[[Place], Place | None], places: tuple[Place, ...]) -> tuple[Place, ...]:
    return tuple(kept for kept in map(keep, places) if kept is not None)
