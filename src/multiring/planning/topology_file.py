"""Topology files: TOML that a person can read and edit (docs/topology.md)."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from fractions import Fraction
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Any

from multiring.files import read_text

from .topology import HOST_LINK, LEVELS, RANK_LINK, Link, Place, Topology, ranks_in_host

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_LINK_KEYS = {"rate", "up", "down", "latency", "burst"}
_PREFIXES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9}
_BIT_RATES = {f"{prefix}bit/s": Fraction(factor, 8) for prefix, factor in _PREFIXES.items()}
_SIZE_UNITS = {f"{prefix}B": Fraction(factor) for prefix, factor in _PREFIXES.items()}
_RATE_UNITS = {**_BIT_RATES, **{f"{unit}/s": factor for unit, factor in _SIZE_UNITS.items()}}
_TIME_UNITS = {"s": Fraction(1), "ms": Fraction(1, 10**3), "us": Fraction(1, 10**6)}
"""Exact, so that a number in the file and the same number in a program are one float."""


_MOST_PER_HOST = 1024
"""Most ranks, and most cards, of a host: to plan for many more within one host takes minutes."""

_MOST_HOSTS = 16384
"""Most hosts of a file: to read one with many more takes minutes, and to plan for it hours."""

_LARGEST = 10**18
"""Largest number that a file may give, in bytes a second, seconds or bytes."""


def load(path: Path) -> Topology:
    """Read a topology file; OSError if it cannot be read, ValueError with its path if it is wrong."""
    try:
        return parse(read_text(path))
    except RecursionError:
        raise ValueError(f"{path}: its lists or tables are nested too deeply to be a topology") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


@lru_cache(maxsize=4)  # a job that loses and replaces ranks reads the same file each time
def parse(text: str) -> Topology:
    """The topology that the text of a file describes, ranks numbered from host to host; ValueError if it is wrong."""
    try:
        return _Reader(tomllib.loads(text)).topology()
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"it is no TOML: {error}") from None


class _Reader:
    def __init__(self, file: Mapping[str, Any]) -> None:
        self._file = file
        self._ranks = count()
        self._hosts = 0
        self._names: dict[str, set[str]] = {level: set() for level in LEVELS}
        self._links = {"rank": asdict(RANK_LINK), "host": asdict(HOST_LINK)}
        links = file.get("links", {})
        _check_keys(links, LEVELS, "links")
        for level, link in links.items():
            _check_keys(link, _LINK_KEYS - ({"burst"} if level == "rank" else set()), f"links.{level}")
            self._links[level] = {**self._links.get(level, {}), **_link_fields(link, f"links.{level}")}

    def topology(self) -> Topology:
        _check_keys(self._file, {"links", *LEVELS[1:]}, "the file")
        outermost = [height for height, level in enumerate(LEVELS) if level in self._file]
        if len(outermost) != 1:
            raise ValueError("a topology is a list of hosts, or of racks, or of sites: [[host]], [[rack]] or [[site]]")
        height = outermost[0]
        return Topology(LEVELS[: height + 1], self._places(self._file, height, "the file"))

    def _places(self, outer: Mapping[str, Any], height: int, where: str) -> tuple[Place, ...]:
        level = LEVELS[height]
        entries = outer.get(level)
        if not isinstance(entries, list) or not entries:
            raise ValueError(
                f"{where} has no {level}: list each as [[{level}]], or all as {level} = [{{ name = ... }}]"
            )
        self._hosts += len(entries) if level == "host" else 0
        if self._hosts > _MOST_HOSTS:
            raise ValueError(f"{where} brings the hosts to {self._hosts}; a topology has {_MOST_HOSTS} at most")
        return tuple(self._place(entry, height, f"{level} number {n} of {where}") for n, entry in enumerate(entries, 1))

    def _place(self, entry: Any, height: int, where: str) -> Place:
        level = LEVELS[height]
        inside = {"ranks", "cards"} if level == "host" else {LEVELS[height - 1]}
        _check_keys(entry, {"name"} | _LINK_KEYS | inside, where)
        if "name" not in entry:
            called = ", that which `hostname` prints there" if level == "host" else ""
            raise ValueError(f'{where} has no name: give it one, such as name = "{level[0]}1"{called}')
        name = entry["name"]
        if not isinstance(name, str) or not re.fullmatch(r"[^\s:,]+", name) or not name.isprintable():
            raise ValueError(
                f"a {level} is called {name!r}; it needs a name that can be printed, without blanks, colons and commas"
            )
        where = f"{level} {name}"
        if name in self._names[level]:
            around = "".join(f", whatever {outer} it is in" for outer in LEVELS[height + 1 : height + 2])
            raise ValueError(f"there are two {level}s {name}; every {level} needs a name of its own{around}")
        self._names[level].add(name)
        link = self._link(entry, level, where)
        if level != "host":
            return Place(name, link, self._places(entry, height - 1, where))
        ranks, cards = (_natural(entry.get(key, 1), f"{where}: {key}") for key in ("ranks", "cards"))
        here = [next(self._ranks) for _ in range(ranks)]
        places = ranks_in_host(here, Link(**self._links["rank"]))
        together = Link(link.up * cards, link.down * cards, link.latency, link.burst * cards)
        return Place(name, together, places, cards=cards)

    def _link(self, entry: Mapping[str, Any], level: str, where: str) -> Link:
        fields = {**self._links.get(level, {}), **_link_fields(entry, where)}
        for key, other in (("up", "down"), ("down", "up")):
            if key not in fields:
                missing = f"has {other} and no {key}" if other in fields else "has no rate"
                raise ValueError(
                    f'{where} {missing}: give it one, such as "10 Gbit/s", here or to all in links.{level}'
                )
        latency, burst = fields.get("latency", HOST_LINK.latency), fields.get("burst", HOST_LINK.burst)
        return Link(fields["up"], fields["down"], latency, burst)


def _check_keys(table: Any, known: Sequence[str] | set[str], where: str) -> None:
    if not isinstance(table, dict):
        raise ValueError(f"{where} is {table!r}; it must be a table")
    for key in table:
        if key not in known:
            raise ValueError(f"{where} has a key {key!r}; known are {', '.join(sorted(known))}")


def _link_fields(table: Mapping[str, Any], where: str) -> dict[str, float]:
    """Return a table's values of a link, in bytes, bytes a second and seconds; ``rate`` is both ``up`` and ``down``."""
    found = {}
    if "rate" in table:
        rate = _quantity(table["rate"], _RATE_UNITS, f"{where}: rate")
        found = {"up": rate, "down": rate}
    for key, units in (("up", _RATE_UNITS), ("down", _RATE_UNITS), ("latency", _TIME_UNITS), ("burst", _SIZE_UNITS)):
        if key in table:
            found[key] = _quantity(table[key], units, f"{where}: {key}")
    return found


def _quantity(text: Any, units: Mapping[str, Fraction], where: str) -> float:
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*(\S+)", text) if isinstance(text, str) else None
    if match is None or match[2] not in units:
        raise ValueError(f"{where} is {text!r}; it must be text, a number and its unit: {', '.join(units)}")
    value = Fraction(match[1]) * units[match[2]]
    if value > _LARGEST:
        most = f"{_LARGEST:.0e} bytes a second, seconds or bytes"
        shown = f"{text[:20]}..." if len(text) > 20 else text
        raise ValueError(f"{where} is {shown!r}; it must be at most {most}")
    if units is _RATE_UNITS and float(value) == 0:
        raise ValueError(f"{where} is {text!r}; it must be more than 0")
    return float(value)


def _natural(value: Any, where: str) -> int:
    if type(value) is not int or not 1 <= value <= _MOST_PER_HOST:
        raise ValueError(f"{where} is {value!r}; it must be a whole number from 1 to {_MOST_PER_HOST}")
    return value


def text(topology: Topology) -> str:
    """The text of a topology file, numbers rounded to three digits.

    It gives the number of ranks of a host and not which they are: `parse` numbers them from host to host.
    """
    return "".join(f"{line}\n" for line in _Writer(topology).lines())


class _Writer:
    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._with_burst: set[str] = set()
        """The levels of which some link has a burst."""
        links: dict[str, Counter[str]] = {level: Counter() for level in topology.levels}
        for height, place in _walk(topology.places, len(topology.levels) - 1):
            self._with_burst |= {LEVELS[height]} if place.link.burst else set()
        for height, place in _walk(topology.places, len(topology.levels) - 1):
            links[LEVELS[height]][self._link(place, LEVELS[height])] += 1
        self._common = {level: counted.most_common(1)[0][0] for level, counted in links.items()}

    def lines(self) -> Iterator[str]:
        for level, link in self._common.items():
            yield f"links.{level} = {{ {link} }}"
        yield from self._list(self._topology.places, len(self._topology.levels) - 1, "")

    def _list(self, places: Sequence[Place], height: int, outer: str) -> Iterator[str]:
        """Racks and sites stand under headings, the hosts of one rack in a list."""
        level = LEVELS[height]
        if level == "host":
            yield f"{level} = [" if outer else f"\n{level} = ["
            yield from (f"    {{ {', '.join(self._fields(place, level))} }}," for place in places)
            yield "]"
            return
        for place in places:
            yield f"\n[[{outer}{level}]]"
            yield from self._fields(place, level)
            yield from self._list(place.places, height - 1, f"{outer}{level}.")

    def _fields(self, place: Place, level: str) -> Iterator[str]:
        yield f'name = "{place.name}"'
        if level == "host":
            yield f"ranks = {len(place.places)}"
            if place.cards > 1:
                yield f"cards = {place.cards}"
        link = self._link(place, level)
        if link != self._common[level]:
            yield link if level == "host" else link.replace(", ", "\n")

    def _link(self, place: Place, level: str) -> str:
        """The fields of a link; with a burst of 0 where other links of the level have one, which it would be given."""
        up, down = (_in_units(rate / place.cards, _BIT_RATES) for rate in (place.link.up, place.link.down))
        rates = f'rate = "{up}"' if up == down else f'up = "{up}", down = "{down}"'
        burst = _in_units(place.link.burst / place.cards, _SIZE_UNITS)
        burst_field = f', burst = "{burst}"' if level in self._with_burst else ""
        return f'{rates}, latency = "{_in_units(place.link.latency, _TIME_UNITS)}"{burst_field}'


def _walk(places: Sequence[Place], height: int) -> Iterator[tuple[int, Place]]:
    for place in places:
        yield height, place
        yield from _walk(place.places, height - 1)


def outline(topology: Topology) -> Iterator[str]:
    """The tree of hosts, racks and sites, a line each with its link."""
    yield from _outline(topology.places, len(topology.levels) - 1, "")


def _outline(places: Sequence[Place], height: int, indent: str) -> Iterator[str]:
    for place in places:
        ranks = f", {len(place.places)} rank{'s' * (len(place.places) > 1)}" if height == 1 else ""
        yield f"{indent}{LEVELS[height]} {place.name}, {describe(place)}{ranks}"
        if height > 1:
            yield from _outline(place.places, height - 1, indent + "  ")


def describe(place: Place) -> str:
    """The link of a place in a line, as people read it."""
    up, down = (_in_units(rate / place.cards, _BIT_RATES) for rate in (place.link.up, place.link.down))
    rates = up if up == down else f"{up} up, {down} down"
    cards = f"{place.cards} cards of " if place.cards > 1 else ""
    burst = f", {_in_units(place.link.burst / place.cards, _SIZE_UNITS)} at once" if place.link.burst else ""
    return f"{cards}{rates}, {_in_units(place.link.latency, _TIME_UNITS)}{burst}"


def _in_units(value: float, units: Mapping[str, Fraction]) -> str:
    """A value to three digits, in the largest unit in which it is at least 1."""
    sizes = sorted((size, unit) for unit, size in units.items())
    size, unit = next((each for each in reversed(sizes) if round(value / each[0], 9) >= 1), sizes[0])
    return f"{float(f'{value / size:.3g}'):.15g} {unit}"
