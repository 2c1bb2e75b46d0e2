"""Members of a job, in the one form that its launcher, its acceptors and its generations use."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_RANKS = re.compile(
    r"\brank \d+\b(?: one of \[[\d, ]+\])?|\branks \d+(?:(?:, | and )\d+)*\b|\bmakes a group of \[[\d, ]+\]"
)
"""Ranks in the text of an error, and the members of a group on which ranks disagree."""


@dataclass(frozen=True)
class Membership:
    """The ranks of one generation of a job, in the order of the ranks that they have in it.

    ``members[r]`` is the rank that rank r had, or took the place of, when the job started: the launcher knows it by
    this one. ``entered[r]`` is the generation in which it came. ``generation`` counts the changes of membership.
    """

    generation: int
    members: tuple[int, ...]
    entered: tuple[int, ...]

    @classmethod
    def at_start(cls, size: int) -> Membership:
        """The first generation of a job of ``size`` ranks."""
        return cls(0, tuple(range(size)), (0,) * size)

    def after(self, generation: int, members: Sequence[int]) -> Membership:
        """A later generation, in which those ``members`` of this one go on; ValueError if it does not have one."""
        entered = tuple(self.entered[self.members.index(member)] for member in members)
        return Membership(generation, tuple(members), entered)

    def admitting(self, newcomers: Iterable[int]) -> Membership:
        """The next generation, with these ranks besides, in the order of the ranks at the job's start."""
        generation = self.generation + 1
        entered = {**dict(zip(self.members, self.entered, strict=True)), **dict.fromkeys(newcomers, generation)}
        members = tuple(sorted(entered))
        return Membership(generation, members, tuple(entered[member] for member in members))

    def in_launchers_words(self, text: str) -> str:
        """Return the text of an error of this generation with the ranks by which the launcher knows its members.

        What a program has said, of its own error or by the names of what it sums, stays as it is.
        """
        if self.members == tuple(range(len(self.members))):
            return text

        ours = re.match(r"(?:(?! ended with \w+: ).)*", text)
        assert ours is not None  # it matches nothing, too
        names = {str(rank): str(member) for rank, member in enumerate(self.members)}

        def renamed(found: re.Match[str]) -> str:
            return re.sub(r"\d+", lambda number: names.get(number[0], number[0]), found[0])

        return _RANKS.sub(renamed, ours[0]) + text[ours.end() :]

    def encode(self) -> dict[str, Any]:
        """Return the fields as a record for JSON."""
        return {"generation": self.generation, "members": self.members, "entered": self.entered}

    @classmethod
    def decode(cls, record: Mapping[str, Any]) -> Membership:
        """The reverse of `encode`."""
        return cls(record["generation"], tuple(record["members"]), tuple(record["entered"]))
