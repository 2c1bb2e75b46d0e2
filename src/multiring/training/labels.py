"""Labels of calls: what their buffers hold beside a type and a count, compared between the ranks with everything else.

A label is a number of 24 bits; a Mismatch shows what it stands for on both sides. Labels that nobody keeps are
forgotten, as names may change with each step. 0 is no label.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Sequence

from multiring import _native

LONGEST_TEXT = 28_000
"""Bytes of a label beyond which it is not shown; all of it is compared. A notice has room for two."""


MOST_KEPT = 256
"""Labels made last, which are kept for front ends that ask for the same ones in each step."""


class _Label(int):
    """A label; a Mismatch can say what it stands for while this, and not merely its number, is kept."""

    name: _native.LabelName


def label(what: str, parts: Iterable[str]) -> int:
    """The label of a call whose buffer holds ``parts``, such as the names and shapes of gradients, in this order."""
    return _label(what, tuple(parts))


@functools.lru_cache(maxsize=MOST_KEPT)
def _label(what: str, parts: tuple[str, ...]) -> _Label:
    text = f"{len(parts)} {what}: {', '.join(map(_on_one_line, parts))}".encode(errors="backslashreplace")
    made = _Label(int.from_bytes(hashlib.blake2b(text, digest_size=3).digest(), "big") or 1)
    shown = text if len(text) <= LONGEST_TEXT else text[:LONGEST_TEXT] + b" ..."
    made.name = _native.LabelName(made, shown.decode(errors="ignore"))
    return made


def _on_one_line(text: str) -> str:
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


def part(name: str, shape: Sequence[int]) -> str:
    """Return the part of a label that describes a tensor: ``kernel (64, 10)``."""
    return f"{name} ({', '.join(map(str, shape))})"


def variable_names(names: Sequence[str]) -> list[str]:
    """Return texts that tell variables apart, by the names that a framework gives them; the same on all ranks.

    A framework counts what a process makes: of ``dense_7`` and ``dense_9`` the lowest number is taken away, so that
    equal models have equal names, ``dense`` and ``dense_2``, whatever was made before. Variables of one name, or
    without, have their places in it.
    """
    return list(_variable_names(tuple(names)))


@functools.lru_cache(maxsize=64)
def _variable_names(names: tuple[str, ...]) -> tuple[str, ...]:
    found = _counted_anew(names)
    uses = Counter(found)
    return tuple(name if name and uses[name] == 1 else f"{name or 'variable'} at {i}" for i, name in enumerate(found))


def _counted_anew(names: Sequence[str]) -> list[str]:
    split = [[_counted(piece) for piece in name.split("/")] for name in names]
    lowest: dict[str, int] = {}
    for pieces in split:
        for base, number in pieces:
            lowest[base] = min(number, lowest.get(base, number))
    return ["/".join(_named(base, number - lowest[base]) for base, number in pieces) for pieces in split]


def _counted(piece: str) -> tuple[str, int]:
    found = re.fullmatch(r"(.+)_([1-9]\d{0,8})", piece)
    return (found[1], int(found[2])) if found else (piece, 0)


def _named(base: str, number: int) -> str:
    return f"{base}_{number}" if number else base
