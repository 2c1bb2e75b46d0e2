"""Signatures in which all members of a call must agree; they travel before the first bytes of the call."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from multiring._native import COLLECTIVES, DTYPES, OPS, Call
from multiring.planning.plan import REDUCING, ROOTED

NBYTES = 72
_SEND = COLLECTIVES.index("send")


class Signature(NamedTuple):
    """Signature of a member's call. If it is a message, ``plan`` is its tag and ``part_of`` the collective that it
    belongs to, or send.
    """

    collective: int
    number: int
    elements: int
    dtype: int
    op: int
    root: int
    plan: int
    part_of: int
    label: int = 0

    def packed(self) -> NDArray[np.int64]:
        """The signature as it travels, in `NBYTES` bytes."""
        return np.array(self, np.int64)

    def described(self, other: Signature | None = None, *, receives: bool = False) -> str:
        """The call in the user's words. What another call of the same operation has as well is left out."""
        called = self._called()
        if called == "barrier":
            return "barrier()"
        is_alike = other is not None and other._called() == called
        other = other or self
        found: list[str] = []

        def add(name: str, own: object, its: object) -> None:
            if not is_alike or own != its:
                found.append(f"{name}={own}")

        add("dtype", DTYPES[self.dtype], DTYPES[other.dtype])
        add("count", self.elements, other.elements)
        if called in REDUCING:
            add("op", OPS[self.op], OPS[other.op])
        if called in ROOTED:
            add("root", self.root, other.root)
        if called == "send":
            add("tag", self.plan, other.plan)
        if self.label:
            add("label", f"{self.label:06x}", f"{other.label:06x}")
        elif is_alike and other.label:
            found.append("no label")
        if is_alike and not found and self.collective != _SEND:
            add("plan", self._plan_id(), other._plan_id())
        return f"{'recv' if receives and called == 'send' else called}({', '.join(found)})"

    def is_sent_by_user(self) -> bool:
        """True if this is a message that is no part of a collective."""
        return self.collective == self.part_of == _SEND

    def _called(self) -> str:
        return COLLECTIVES[self.part_of if self.collective == _SEND else self.collective]

    def _plan_id(self) -> str:
        return f"{self.plan >> 15 & 0xFFFFFFFFFFFF:012x}"


def of_collective(call: Call, number: int, plan: int) -> Signature:
    """Return the signature of collective ``number`` of a communicator, by a plan of that number."""
    kind = call.collective
    return Signature(kind, number, call.count, call.dtype, call.op, call.root, plan, kind, call.label)


def of_message(call: Call, number: int) -> Signature:
    """Return the signature of message ``number`` of a tag; sender and receiver have the same."""
    return Signature(_SEND, number, call.count, call.dtype, call.op, call.root, call.tag, call.part_of)


def both_sides(first: tuple[int, str], second: tuple[int, str], disagree_on: str) -> str:
    """Return the calls of two ranks in words, the lower rank first, and the call in which they disagree."""
    sides = ", ".join(f"rank {rank} called {called}" for rank, called in sorted((first, second)))
    return f"{sides}: ranks disagree on {disagree_on}"


def unpacked(header: NDArray[np.int64]) -> Signature:
    """The signature in a header that arrived."""
    return Signature(*header.tolist())
