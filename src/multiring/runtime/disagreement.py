"""The ranks that made another call than most, from what each rank that ended with Mismatch says that it called.

Each of them knows two sides alone, so that who knows what all called counts them: the launcher, and flight records.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MOST_LISTED = 16
"""Ranks, and calls, in a line."""


@dataclass(frozen=True)
class Statement:
    """A rank's word on a Mismatch: its own call, if it made one, and the line of its error."""

    message: str
    call: tuple[int, int] | None = None
    """The communicator and the number of the call on which ranks disagree; None if it made none, or of a message."""
    size: int = 0
    """Number of ranks that make it together."""
    words: str = ""
    plan: str = ""
    named: int | None = None
    """The rank that the error names: one of two that disagree, and the other one of them where this rank is one."""

    @classmethod
    def told(cls, said: Mapping[str, Any] | None) -> Statement | None:
        """Return it from what `bootstrap.report` was given."""
        if said is None:
            return None
        if said["call"] is None:
            return cls(said["message"], named=said["named"])
        communicator, number, words, plan = said["call"]
        return cls(said["message"], (communicator, number), said["size"], words, plan, said["named"])


@dataclass(frozen=True)
class OddRanks:
    """The ranks at fault, and what is said of them; without a majority these are all that told what they called."""

    ranks: tuple[int, ...]
    text: str


Side = tuple[str, str]
"""A call that some ranks made, in words, and the id of its plan."""


def sides_of(disputed: Mapping[int, Statement]) -> tuple[tuple[int, int] | None, list[tuple[Side, list[int]]]]:
    """The call on which most of these ranks disagree, and who called what: most ranks first, or else the lowest one.

    None where it is a message, of which a rank alone saw both sides.
    """
    calls = [each.call for each in disputed.values() if each.call is not None]
    call = max(calls, key=calls.count, default=None)
    sides: dict[Side, list[int]] = {}
    for rank, each in sorted(disputed.items()):
        if each.call is not None and each.call == call:
            sides.setdefault((each.words, each.plan), []).append(rank)
    return call, sorted(sides.items(), key=lambda side: (-len(side[1]), side[1]))


def judge(disputed: Mapping[int, Statement]) -> OddRanks:
    """Return the ranks that made another call than most, by what each rank said (one or more).

    Where that is not known, as of a message, they are those whom others name.
    """
    call, sides = sides_of(disputed)
    if call is None or len(sides) < 2:
        named = {each.named for rank, each in disputed.items() if each.named != rank}
        ranks = tuple(sorted(rank for rank in disputed if rank in named) or sorted(disputed))
        return OddRanks(ranks, disputed[ranks[0]].message)
    (side, most), *others = sides
    about = f"call number {call[1]} of communicator {call[0]}"
    if has_most(most, disputed):
        odd = tuple(sorted(rank for _, ranks in others for rank in ranks))
        return OddRanks(odd, f"{_listed(others, sides)} where {_named(most)} called {_words(side, sides)}: {about}")
    told = tuple(sorted(rank for _, ranks in sides for rank in ranks))
    return OddRanks(told, f"ranks disagree on {about}, and no side has most of them: {_listed(sides, sides)}")


def has_most(ranks: Sequence[int], disputed: Mapping[int, Statement]) -> bool:
    """True if these are most of all ranks of their call, of which some may not have said what they called."""
    return 2 * len(ranks) > disputed[ranks[0]].size


Sides = Sequence[tuple[Side, list[int]]]


def _listed(some: Sides, sides: Sides) -> str:
    listed = [f"{_named(ranks)} called {_words(side, sides)}" for side, ranks in some[:MOST_LISTED]]
    return ", ".join(listed) + (f" and {len(some) - MOST_LISTED} more calls" if len(some) > MOST_LISTED else "")


def _named(ranks: Sequence[int]) -> str:
    listed = [str(rank) for rank in ranks[:MOST_LISTED]]
    if len(ranks) > MOST_LISTED:
        listed.append(f"{len(ranks) - MOST_LISTED} more")
    return f"rank{'s' if len(ranks) > 1 else ''} {' and '.join(filter(None, [', '.join(listed[:-1]), listed[-1]]))}"


def _words(side: Side, sides: Sides) -> str:
    """The call of a side, with the plan where nothing else tells it from another."""
    words, plan = side
    is_alone = sum(other == words for (other, _), _ in sides) == 1
    return words if is_alone else f"{words} by plan {plan}"
