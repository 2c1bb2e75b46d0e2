"""A rank that is lost before all have met for the first time is started again; then all ranks meet anew.

A gathering is the rounds of rendezvous.py below keys of its own. How each of its rounds ends is a value of the store
that is settled once: what rank 0 concludes, or, by the launcher, which serves the store, that a rank was lost and is
started again, or why nobody is. Who learns of a loss goes on to the next gathering, where nothing is left of the
process that was lost. A loss after the last round was concluded is one of the job's (survivors.py).
"""

from __future__ import annotations

from multiring.job.exchange import ROUNDS, Record, packed, raise_failure, unpacked
from multiring.job.store import JobStore, Server


def key_of(prefix: str, number: int) -> str:
    """Return the prefix of the keys of gathering ``number`` (from 1) of a start."""
    return f"{prefix}/1/{number}"


def end_of(store: JobStore, prefix: str, number: int) -> Record | None:
    """Return how a gathering has ended, None if it has not; RendezvousError if it has failed for all."""
    try:
        end = unpacked(store.get(f"{key_of(prefix, number)}/{ROUNDS[-1]}/all", 0.0))
    except TimeoutError:
        return None
    if "lost" not in end:
        raise_failure(end)
    return end


def _failed(rank: int, why: str) -> Record:
    """The record of a rank that was lost, in the place of its own or of the result."""
    return {"error": why, "rank": rank, "by": rank}


class Gatherings:
    """Gatherings of one start of the ranks, for the launcher, which serves the store."""

    def __init__(self, server: Server, job: str, restart: int) -> None:
        self._server = server
        self._prefix = f"multiring/{job}/{restart}"
        self._number = 1
        """The gathering that goes on, or that was the last."""

    def have_met(self) -> bool:
        """True if all ranks have met once."""
        return self._server.at_once(self._have_met)

    def lose(self, rank: int) -> bool:
        """End the gathering, since a rank was lost that is started again; whether there was one to be ended.

        There is none where all have met, where they have failed, or where this rank has told them why it fails.
        """
        return self._server.at_once(lambda: self._lose(rank))

    def fail(self, rank: int, why: str) -> None:
        """End the gathering, if it goes on, for all: a rank was lost, and is not started again."""

        def end() -> None:
            self._end(_failed(rank, why))
            self._fail_later(rank, why)

        self._server.at_once(end)

    def fail_later(self, rank: int, why: str) -> None:
        """Fail the ranks at once that wait for this rank in a repeated `init`, after the first one had failed."""
        self._server.at_once(lambda: self._fail_later(rank, why))

    def has_begun_again(self, rank: int) -> bool:
        """True if this rank has called init once more, after the first call had failed: those starts do not gather."""

        def look() -> bool:
            told = self._server.peek(f"{self._prefix}/2/{ROUNDS[0]}/{rank}")
            return told is not None and "error" not in unpacked(told)

        return self._server.at_once(look)

    def _fail_later(self, rank: int, why: str) -> None:
        if self._have_met():
            return
        start = 2
        while True:  # up to the first start that no rank has begun, if they call init again
            for name in ROUNDS:
                self._server.settle(f"{self._prefix}/{start}/{name}/{rank}", packed(_failed(rank, why)))
            if self._server.peek(f"{self._prefix}/{start}/{ROUNDS[0]}/all") is None:
                return
            start += 1

    def _have_met(self) -> bool:
        if "verdict" in (self._read(ROUNDS[-1], "all") or {}):
            return True
        start = 2
        while self._server.peek(f"{self._prefix}/{start}/{ROUNDS[0]}/0") is not None:
            end = self._server.peek(f"{self._prefix}/{start}/{ROUNDS[-1]}/all")
            if end is not None and "verdict" in unpacked(end):
                return True
            start += 1
        return False

    def _lose(self, rank: int) -> bool:
        if self._have_met() or any(self._has_failed(name, rank) for name in ROUNDS):
            return False
        self._end({"lost": rank})
        self._number += 1
        return True

    def _has_failed(self, name: str, rank: int) -> bool:
        told = self._read(name, rank) or {}
        return "error" in (self._read(name, "all") or {}) or told.get("by", -1) == told.get("rank") == rank

    def _end(self, record: Record) -> None:
        for name in ROUNDS:
            self._server.settle(self._key(name, "all"), packed(record))

    def _read(self, name: str, who: int | str) -> Record | None:
        found = self._server.peek(self._key(name, who))
        return None if found is None else unpacked(found)

    def _key(self, name: str, who: int | str) -> str:
        return f"{key_of(self._prefix, self._number)}/{name}/{who}"
