"""Newcomers, which the launcher has started anew, and the ranks that are there find each other in the job's store.

The launcher serves it: it is the one address that a process has which was never in the job, and it outlives all ranks.

    newcomer                                 rank 0 of those who are there, in `grow`
      takes a join id, introduces itself ->    looks; invites those that fit, refuses the others
      answers                            ->    writes the list of members: those that have answered in time

All on the list meet by the rounds of rendezvous.py, in a new generation, beside the world that is there. Which of the
two goes on is a value of the store that is settled once: ``grown`` by the first who has met all, or why not by the
first who could not, or by the server when a connection ends before. Who cannot learn the verdict goes on in neither.
Rank numbers in this module are those at the job's start; a newcomer has that of the rank it replaces.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

from multiring.errors import RendezvousError
from multiring.job.store import Client, Server
from multiring.net.membership import Membership

ANSWER_SECONDS = 5.0
"""A newcomer that has not answered by then is not invited again."""

MOST_INVITATIONS = 3
"""Times that a newcomer is invited before it is refused, because no world with it has come about."""

LOOK_SECONDS = 0.5
"""Seconds between two looks at the verdict, while something else is waited for."""

Record = dict[str, Any]

_GROWN = b"grown"


class NotAdmitted(RendezvousError):
    """The larger world has not come about, and the old one goes on."""


class JoinQueue:
    """The queue of newcomers, for themselves and for the members of the job; for one thread at a time."""

    def __init__(self, store: Client, job: str, restart: int) -> None:
        self._store = store
        self._job = job
        self._prefix = f"multiring/{job}/{restart}/queue"

    # ---- a newcomer ----

    def apply(self, introduction: Record) -> int:
        """The join id of a newcomer that says this of itself."""
        join_id = self._store.add(f"{self._prefix}/join_ids", 1)
        self._store.set_at_end(f"{self._prefix}/{join_id}/gone", b"")
        self._put(f"{join_id}/introduction", introduction)
        return join_id

    def invitation(self, join_id: int, number: int, until: float, who: str) -> Admission:
        """The ``number``-th admission to which this newcomer is invited; RendezvousError if it is refused,
        TimeoutError at ``until`` (monotonic seconds)."""
        told: Record = json.loads(self._store.get(f"{self._prefix}/{join_id}/{number}", until - time.monotonic()))
        if "refused" in told:
            raise RendezvousError(told["refused"])
        return Admission(self._store, told["admission"], who)

    def enter(self, replacement: int, admission: Admission) -> None:
        """Let the launcher know that this one is to be a member from the verdict on."""
        self._store.set(_entering(self._job, replacement), admission.key.encode())

    # ---- those who are there ----

    def waiting(self) -> dict[int, Record]:
        """Return the introductions of the newcomers that are still there, by join id."""
        join_ids = range(1, int(self._find("join_ids") or 0) + 1)
        found = {t: self._find(f"{t}/introduction") for t in join_ids if self._find(f"{t}/gone") is None}
        return {join_id: json.loads(said) for join_id, said in found.items() if said is not None}

    def admission(self, who: str) -> Admission:
        """A new one."""
        number = self._store.add(f"{self._prefix}/admissions", 1)
        return Admission(self._store, f"{self._prefix}/admission/{number}", who)

    def join(self, key: str, who: str) -> Admission:
        """One that another rank has begun."""
        return Admission(self._store, key, who)

    def invite(self, admission: Admission, join_id: int) -> bool:
        """Invite a newcomer; if that was done too often, refuse it and return False."""
        number = self._next(join_id)
        if number <= MOST_INVITATIONS:
            self._put(f"{join_id}/{number}", {"admission": admission.key})
            return True
        why = f"this rank was invited {MOST_INVITATIONS} times, and not all met: the others' log says who did not"
        self._refuse(join_id, number, why)
        return False

    def refuse(self, join_id: int, why: str) -> None:
        """End a newcomer that cannot be admitted."""
        self._refuse(join_id, self._next(join_id), why)

    def give_up(self, join_id: int, replacement: int, why: str) -> None:
        """End a newcomer that does not answer, by its launcher where it is stopped."""
        self.refuse(join_id, why)
        self._store.set(_given_up(self._job, replacement), b"")

    def _next(self, join_id: int) -> int:
        return self._store.add(f"{self._prefix}/{join_id}/invitations", 1)

    def _refuse(self, join_id: int, number: int, why: str) -> None:
        self._put(f"{join_id}/{number}", {"refused": why})
        self._store.settle(f"{self._prefix}/{join_id}/gone", b"")

    def _find(self, key: str) -> bytes | None:
        return _find(self._store, f"{self._prefix}/{key}")

    def _put(self, key: str, value: Any) -> None:
        self._store.set(f"{self._prefix}/{key}", json.dumps(value).encode())


class Admission:
    """One attempt at a larger world: a `KeyValueStore` in which its ranks meet, until the verdict."""

    def __init__(self, store: Client, key: str, who: str) -> None:
        self._store = store
        self.key = key
        self.failure: Callable[[], BaseException | None] = lambda: None
        """Return the error that ends the attempt for this rank while there is no verdict."""
        self._verdict = f"{key}/verdict"
        store.set_at_end(self._verdict, f"{who} was lost".encode())

    def answer(self, join_id: int, until: float) -> Record | None:
        """Return the answer to a newcomer that was invited; None if it was too late."""
        self.set(f"answer/{join_id}", b"")
        member_list: Record = json.loads(self.get("member_list", until - time.monotonic()))
        return member_list if join_id in member_list["join_ids"] else None

    def answered(self, join_ids: Mapping[int, int]) -> dict[int, int]:
        """Return the ranks, by join id in ``join_ids``, that have answered in time."""
        until = time.monotonic() + ANSWER_SECONDS
        found = {}
        for rank, join_id in join_ids.items():
            try:
                self.get(f"answer/{join_id}", until - time.monotonic())
                found[rank] = join_id
            except TimeoutError:
                continue
        return found

    def call(self, member_list: Record) -> None:
        """Tell the newcomers who is to meet."""
        self.set("member_list", json.dumps(member_list).encode())

    def set(self, key: str, value: bytes) -> None:
        """Set ``key`` to ``value``."""
        self._store.set(f"{self.key}/{key}", value)

    def get(self, key: str, timeout: float) -> bytes:
        """The value of ``key``, waiting up to ``timeout`` seconds for it to be set; TimeoutError after that.

        NotAdmitted, or what ``failure`` tells, if that comes first.
        """
        until = time.monotonic() + timeout
        while True:
            remaining = until - time.monotonic()
            try:
                return self._store.get(f"{self.key}/{key}", min(remaining, LOOK_SECONDS))
            except TimeoutError:
                ended = self.ended()
                if ended is not None:
                    raise ended from None
                if remaining <= LOOK_SECONDS:
                    raise TimeoutError(f"{key!r} was not set within {timeout:g} s") from None

    def ended(self) -> BaseException | None:
        """Return the error that ends the wait; None if it goes on."""
        verdict = _find(self._store, self._verdict)
        if verdict == _GROWN:
            return None  # all have met: whoever is lost now is lost in the larger world
        return self.failure() if verdict is None else NotAdmitted(verdict.decode())

    def conclude(self, reason: str = "") -> str:
        """Settle the verdict, unless it is: the old world goes on for this reason, the larger one without any.

        The reason that stands, or ""."""
        verdict = self._store.settle(self._verdict, reason.encode() or _GROWN)
        return "" if verdict == _GROWN else verdict.decode()


def is_member(server: Server, job: str, replacement: int) -> bool:
    """True if the newcomer of this number was admitted, for the launcher, who serves the store."""
    admission = server.peek(_entering(job, replacement))
    return admission is not None and server.peek(f"{admission.decode()}/verdict") == _GROWN


def exclude(store: Client, job: str, restart: int, ranks: Mapping[int, int]) -> None:
    """Let the launcher know that the others have gone on without these ``ranks``, by the generation in which they came.

    One that was stopped, or that could not be reached, has yet to end.
    """
    for rank, entered in ranks.items():
        store.set(_excluded(job, restart, rank, entered), b"")


def is_excluded(server: Server, job: str, restart: int, rank: int, replacement: int) -> bool:
    """True if the others have gone on without this process of a rank: the ``replacement`` of this number, 0 if none."""
    entered = 0
    if replacement:
        if server.peek(_given_up(job, replacement)) is not None:
            return True
        admission = server.peek(_entering(job, replacement))
        found = admission and server.peek(f"{admission.decode()}/member_list")
        if not found:
            return False  # it is no member yet
        membership = Membership.decode(json.loads(found)["membership"])
        entered = membership.entered[membership.members.index(rank)]
    return server.peek(_excluded(job, restart, rank, entered)) is not None


def _excluded(job: str, restart: int, rank: int, entered: int) -> str:
    return f"multiring/{job}/{restart}/excluded/{rank}/{entered}"


def _given_up(job: str, replacement: int) -> str:
    return f"multiring/{job}/given up/{replacement}"


def _entering(job: str, replacement: int) -> str:
    return f"multiring/{job}/entering/{replacement}"


def _find(store: Client, key: str) -> bytes | None:
    try:
        return store.get(key, 0)
    except TimeoutError:
        return None
