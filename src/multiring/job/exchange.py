"""All ranks tell one another something through the store, in rounds, and learn who failed or never came."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import secrets
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from multiring.errors import MultiringError, RendezvousError
from multiring.job.store import Client, JobStore, KeyValueStore
from multiring.net import local
from multiring.units import ranges

Record = dict[str, Any]

ARRIVE, PROVE, CONNECT = ROUNDS = ("arrive", "prove", "connect")
"""The rounds in which ranks meet (rendezvous.py); the last one decides whether all have."""

ROLL_EACH = 16
"""Number of ranks that check every second who is missing; with more ranks each checks less often."""

NOTICE_SECONDS = 10.0
"""After this long the missing ranks are named, then at doubling intervals."""

LOOK_SECONDS = 1.0
"""Seconds between rank 0's looks at failures, and seconds that it waits then for others to say why they have failed."""

GRACE_SECONDS = 5.0
"""Seconds that the others wait longer than rank 0, so that its report of who is missing reaches them."""

REPORT_SECONDS = 2.0
"""Seconds after the time limit in which rank 0 waits for the reports of those who lost another rank at the limit."""

ROLL_SECONDS, ROLL_SHARE = 1.0, 0.1
"""Seconds that a roll call of all ranks may take; or this share of the time limit if that is more, within the grace."""

ROLL_RANKS = 64
"""Number of ranks that a roll call asks however many seconds it takes."""

LOSS_SECONDS = 10.0
"""Seconds that the launcher may take to say that the rank was lost which others blame."""

_log = logging.getLogger("multiring")


class RankLost(RendezvousError):
    """A rank was lost before all had met, and is started again: all are to gather anew (gatherings.py)."""


class Roll(NamedTuple):
    """Ranks that have arrived in a round, with their records, those that have not, and those that did not answer."""

    arrived: dict[int, Record]
    missing: list[int]
    unasked: range

    def told(self) -> str:
        """Return in words which ranks are late."""
        ranks = "rank" if len(self.missing) == 1 else "ranks"
        unasked = f"; not asked in time: {ranges(self.unasked)}" if self.unasked else ""
        arrived = f"arrived: {ranges(list(self.arrived)) or 'none'}{unasked}"
        return f"{ranks} {ranges(self.missing)} did not arrive ({arrived})"


def first_open(store: KeyValueStore, prefix: str) -> int:
    """The number of the first exchange below ``prefix`` that does not know yet who has come to it."""
    for number in itertools.count(1):
        try:
            store.get(f"{prefix}/{number}/arrive/all", 0.0)
        except TimeoutError:
            return number
    raise AssertionError("not reached")


class Exchange:
    """Rounds in which every rank publishes a record and receives those of all.

    Rank 0 gathers, judges and publishes the result, so a round is two operations a rank. If a rank is missing, or
    reports an error in place of its record, or the records do not fit together, every rank raises the same error: of
    several that failed that of the one because of which the others did.
    """

    def __init__(
        self, store: KeyValueStore, prefix: str, rank: int, world_size: int, timeout: float, *, served_by: int = -1
    ) -> None:
        """``served_by`` is the rank that serves the store, if one does."""
        self._served_by = served_by
        self._store = store
        self._prefix = prefix
        self._rank = rank
        self._world_size = world_size
        self._timeout = timeout
        self.deadline = time.monotonic() + timeout
        """Monotonic time at which every round must be over: rank 0's once all have arrived, lest they give up at
        different times, some of them because others have."""
        self._failed: tuple[str, Record] | None = None
        self._newest: tuple[JobStore, str, int] | None = None
        self._claimed: tuple[JobStore, Record] | None = None
        self._met: list[Record] = []
        """Records of the first round, by rank, once all have arrived."""
        self._lasting = False
        self._settles: tuple[JobStore, str] | None = None
        self._next_look = 0.0

    def settle_in(self, store: JobStore, last: str) -> None:
        """Decide the result of each round once, in ``store``, where the launcher may decide it, too (gatherings.py).

        ``last`` is the last round.
        """
        self._settles = store, last

    def end(self) -> BaseException | None:
        """Return why no other rank can arrive: the launcher's reason for the end."""
        if self._settles is None or time.monotonic() < self._next_look:
            return None
        self._next_look = time.monotonic() + LOOK_SECONDS / 2
        try:
            raise_failure(self._read(self._settles[1], "all", 0.0))
        except TimeoutError:
            return None
        except RendezvousError as error:
            return error
        return None

    def outdate(self, store: JobStore, key: str, restart: int) -> None:
        """Say at ``key``, which all restarts of the job have in common, that this rank belongs to ``restart``.

        RendezvousError if a later one stands there; whoever still waits for an earlier one to arrive gets that error.
        Ranks of several restarts may come at once: what stands there is replaced by something later only. Rank 0 looks
        there again while it waits for others.
        """
        self._newest = store, key, restart
        mine = json.dumps({"restart": restart, "prefix": self._prefix}).encode()
        found = b""
        while (now := store.swap(key, found, mine)) != mine:
            newest = json.loads(now)
            _refuse_earlier(restart, newest["restart"])
            if newest["restart"] < restart:  # before it is replaced: whoever then comes knows nobody to tell
                told = {"error": _left_over(newest["restart"], restart), "rank": -1, "by": -1}
                store.set(f"{newest['prefix']}/arrive/all", packed(told))
            found = now

    def claim(self, store: JobStore, host: str, *, lasting: bool = False) -> None:
        """Say that this process is the rank; RendezvousError where another one has said so, for all that still wait.

        One that has ended, or has left the store without being known to live, is replaced: it was started again.
        torch's store does not know who has left: there one of another host is always replaced, and while it waits for
        others to arrive it looks whether it was. Where the store is ``lasting``, and processes come and go, all that
        counts is who has left.
        """
        self._lasting = lasting
        key = f"{self._prefix}/claim/{self._rank}"
        mine = {"host": host, "pid": os.getpid(), "space": _process_space(), "token": secrets.token_hex(8)}
        if isinstance(store, Client):
            store.set_at_end(self._left(mine), b"left")
        found = b""
        while (now := store.swap(key, found, json.dumps(mine).encode())) != json.dumps(mine).encode():
            other = json.loads(now)
            if not self._has_gone(store, other, mine):
                self._refuse_second(other, mine)
            found = now
        self._claimed = store, mine

    def _refuse_second(self, one: Record, other: Record) -> None:
        told = self._told_twice(one, other)
        self._publish("claim", "twice", {"told": told, "rank": self._rank})
        raise RendezvousError(told, rank=self._rank)

    def _look_for_successor(self) -> None:
        """RendezvousError if another process has claimed this rank since."""
        if self._claimed is None or isinstance(self._claimed[0], Client):
            return
        store, mine = self._claimed
        other = json.loads(store.get(f"{self._prefix}/claim/{self._rank}", 0.0))
        if other != mine:
            self._refuse_second(mine, other)

    def _told_twice(self, one: Record, other: Record) -> str:
        names = " and ".join(f"process {each['pid']} on host {each['host']}" for each in (one, other))
        return (
            f"two processes say that they are rank {self._rank} of {self._world_size}, {names}: give each a rank of "
            "its own; a process that a rank has started is none, and finds its parent's variables (RANK, "
            "MULTIRING_RANK) in its environment"
        )

    def _left(self, claimant: Record) -> str:
        return f"{self._prefix}/left/{claimant['token']}"

    def _has_gone(self, store: JobStore, claimant: Record, mine: Record) -> bool:
        if claimant["space"] == mine["space"]:
            ended = claimant["pid"] == mine["pid"] or not Path(f"/proc/{claimant['pid']}").exists()
            return ended or (self._lasting and self._has_left(claimant))
        return not isinstance(store, Client) or self._has_left(claimant)

    def _has_left(self, claimant: Record) -> bool:
        try:
            self._store.get(self._left(claimant), 0.0)
        except TimeoutError:
            return False
        return True

    def _look_for_second(self) -> None:
        """RendezvousError if two processes have claimed one rank."""
        with contextlib.suppress(TimeoutError):
            found = self._read("claim", "twice", 0.0)
            raise RendezvousError(found["told"], rank=found["rank"])

    def _look_for_newer(self) -> None:
        if self._newest is not None:
            store, key, restart = self._newest
            _refuse_earlier(restart, json.loads(store.get(key, 0.0))["restart"])

    def round(
        self, name: str, record: Record, judge: Callable[[list[Record]], Record] = lambda records: {}
    ) -> tuple[list[Record], Record]:
        """The records of all ranks, and what ``judge`` made of them on rank 0.

        ``judge`` raises RendezvousError where they do not fit together.
        """
        claimed = self._claimed if name == ARRIVE else None
        if claimed is not None:
            record = {**record, "claim": claimed[1]}
        self._publish(name, self._rank, record)
        result = self._settle(name, self._conclude(name, judge)) if self._rank == 0 else self._conclusion(name)
        raise_failure(result)
        if self._rank:
            self.deadline = time.monotonic() + result["left"]
        if claimed is not None:
            self._look_for_successor()
            self._met = result["records"]
            counted = self._met[self._rank]
            if counted["claim"] != record["claim"]:  # who came too late to be met
                self._refuse_second(counted["claim"], record["claim"])
        return result["records"], result["verdict"]

    @contextlib.contextmanager
    def reporting(self, name: str) -> Iterator[None]:
        """Run the steps before round ``name``: an error in them reaches all ranks in place of the record."""
        try:
            yield
        except BaseException as error:
            told = f"rank {self._rank} failed to join: {error or type(error).__name__}"
            blamed = error.rank if isinstance(error, MultiringError) and error.rank >= 0 else self._rank
            self._failed = name, {"error": told, "rank": blamed, "by": self._rank}
            with contextlib.suppress(MultiringError):  # a store that is lost as well does not hide why
                self._publish(name, self._rank, self._failed[1])
            raise

    @contextlib.contextmanager
    def settling(self) -> Iterator[None]:
        """Wraps all rounds, and what this rank shares with others in them. A failure that another rank caused is raised
        as the error on which all ranks agreed."""
        try:
            yield
        except RankLost:
            raise
        except BaseException as error:
            told = self._settled() if self._failed is not None else None
            if told is not None and "lost" in told and isinstance(error, Exception):
                raise _lost(told) from None
            if told is None or "lost" in told or self._rank in (told["by"], told["rank"]):
                raise
            raise RendezvousError(told["error"], rank=told["rank"]) from None

    def _settled(self) -> Record | None:
        """The failure because of which all fail; None if this rank cannot learn it."""
        assert self._failed is not None
        name, own = self._failed
        is_cause = own["rank"] == self._rank
        with contextlib.suppress(MultiringError, TimeoutError):
            if self._rank == 0:
                return self._settle(name, own if is_cause else self._conclude(name, lambda records: {}))
            if is_cause:
                return (self._ended(name) if self._settles else None) or own
            seconds = 2 * LOOK_SECONDS + GRACE_SECONDS + (LOSS_SECONDS if self._settles else 0.0)
            return self._read(name, "all", seconds)
        return None

    def _settle(self, name: str, result: Record) -> Record:
        """Return the result of a round: ``result``, unless the launcher has ended it."""
        if self._settles is None:
            self._publish(name, "all", result)
            return result
        return unpacked(self._settles[0].swap(f"{self._prefix}/{name}/all", b"", packed(result)))

    def _ended(self, name: str, seconds: float = 0.0) -> Record | None:
        """Return the result of a round; None if it goes on for that long."""
        try:
            return self._read(name, "all", seconds)
        except TimeoutError:
            return None

    def _publish(self, name: str, who: int | str, record: Record) -> None:
        self._store.set(f"{self._prefix}/{name}/{who}", packed(record))

    def _read(self, name: str, who: int | str, timeout: float) -> Record:
        return unpacked(self._store.get(f"{self._prefix}/{name}/{who}", timeout))

    def _conclude(self, name: str, judge: Callable[[list[Record]], Record]) -> Record:
        try:
            records = self._gather(name)
            failed = [record for record in records if "error" in record]
            if not failed:
                return {"records": records, "verdict": judge(records), "left": self._remaining()}
            cause = _cause(failed)
            if self._settles and cause["rank"] != cause["by"]:  # it may have been lost, and be started again
                return self._ended(name, LOSS_SECONDS) or cause
            return cause
        except _RoundEnded as ended:
            return ended.record
        except MultiringError as error:
            return {"error": str(error), "rank": error.rank, "by": 0}

    def _conclusion(self, name: str) -> Record:
        # Many ranks look less often: one server answers them all.
        interval = LOOK_SECONDS * max(1.0, self._world_size / 1000)
        # A server notices that a client has gone between its calls only: at a lasting store that must not take long.
        apart = self._claimed is not None and not isinstance(self._claimed[0], Client)
        looks = name == ARRIVE and (apart or self._lasting)
        until = self._until(name) + GRACE_SECONDS + (LOSS_SECONDS if self._settles else 0.0)
        next_roll, roll = time.monotonic(), None
        while True:
            left = max(until - time.monotonic(), 0.0)
            try:
                return self._read(name, "all", min(interval, left) if looks else left)
            except TimeoutError:
                pass
            except RendezvousError as lost:  # the store, which rank 0 of torch takes along when its own time is up
                if roll is None or set(roll.missing) <= {self._served_by}:
                    raise
                raise RendezvousError(f"{roll.told()}; {lost}", rank=self._culprit(roll.missing)) from None
            if not looks or time.monotonic() >= until:
                break
            self._look_for_successor()
            if time.monotonic() >= next_roll:
                roll = self._roll(name)
                next_roll = time.monotonic() + LOOK_SECONDS * max(1.0, self._world_size / ROLL_EACH)
        roll = self._roll(name)
        late = roll.told() if roll.missing else "rank 0 did not answer"
        error = RendezvousError(f"{late}, within {self._timeout:g} s", rank=self._culprit(roll.missing))
        self._end_arrivals(name, error)
        raise error

    def _end_arrivals(self, name: str, error: RendezvousError) -> None:
        """Close the round of arrivals of a lasting store, so that ranks that come later start another."""
        if self._lasting and name == ARRIVE and self._claimed is not None:
            told = {"error": str(error), "rank": error.rank, "by": self._rank}
            with contextlib.suppress(MultiringError):
                self._claimed[0].swap(f"{self._prefix}/arrive/all", b"", packed(told))

    def _culprit(self, missing: Sequence[int]) -> int:
        """The rank that serves the store is alive, since the store answers. If another rank is missing, that one is the
        culprit: torch's rank 0 waits for it before it tells us anything."""
        others = [rank for rank in missing if rank != self._served_by]
        return (others or list(missing) or [0])[0]

    def _gather(self, name: str) -> list[Record]:
        """The records of all ranks; once one of them tells of an error, those that are there a moment later."""
        records: list[Record] = []
        began, patience, until = time.monotonic(), NOTICE_SECONDS, self._until(name)
        while len(records) < self._world_size or (gone := self._gone(name, dict(enumerate(records)))):
            if len(records) == self._world_size:
                del records[gone[0] :]
                time.sleep(LOOK_SECONDS / 4)
            else:
                with contextlib.suppress(TimeoutError):
                    left = max(until - time.monotonic(), 0.0)
                    records.append(self._read(name, len(records), min(LOOK_SECONDS, left)))
                    continue
            if self._settles and (ended := self._ended(name)):
                raise _RoundEnded(ended)
            self._look_for_newer()
            if name == ARRIVE:
                self._look_for_successor()
                self._look_for_second()
            roll = self._roll(name)
            if any("error" in record for record in roll.arrived.values()):
                time.sleep(LOOK_SECONDS)
                return list(self._roll(name).arrived.values())
            if (lost := self._ended_early(name, roll.missing)) is not None:
                if self._settles and (ended := self._ended(name, LOSS_SECONDS)):
                    raise _RoundEnded(ended)
                raise RendezvousError(f"rank {lost} has ended, and all ranks had not met yet", rank=lost)
            if roll.missing and time.monotonic() >= until:
                late = f"{roll.told()}, within {self._timeout:g} s"
                raise RendezvousError(late, rank=self._culprit(roll.missing))
            if roll.missing and time.monotonic() - began >= patience:
                _log.warning("%s yet", roll.told())
                patience *= 2
        return records

    def _roll(self, name: str) -> Roll:
        arrived: dict[int, Record] = {}
        missing: list[int] = []
        until = time.monotonic() + max(ROLL_SECONDS, min(self._timeout * ROLL_SHARE, GRACE_SECONDS - 1))
        unasked = range(0)
        for rank in range(self._world_size):
            if missing and rank >= ROLL_RANKS and time.monotonic() >= until:
                unasked = range(rank, self._world_size)
                break
            try:
                arrived[rank] = self._read(name, rank, 0.0)
            except TimeoutError:
                missing.append(rank)
        for rank in self._gone(name, arrived):
            del arrived[rank]
            missing.append(rank)
        return Roll(arrived, sorted(missing), unasked)

    def _ended_early(self, name: str, missing: Sequence[int]) -> int | None:
        """Return a missing rank that had arrived in the first round and has left the store since; None if none has.

        One that fails says why before it leaves.
        """
        if self._claimed is None or not isinstance(self._claimed[0], Client) or not self._met:
            return None
        for rank in missing:
            if "claim" in self._met[rank] and self._has_left(self._met[rank]["claim"]):
                try:
                    self._read(name, rank, 0.0)
                except TimeoutError:
                    return rank
        return None

    def _gone(self, name: str, arrived: Mapping[int, Record]) -> list[int]:
        """Return the ranks that have left a lasting store after they arrived: other processes may take their place."""
        if not self._lasting or name != ARRIVE:
            return []
        return [rank for rank, record in arrived.items() if "claim" in record and self._has_left(record["claim"])]

    def _until(self, name: str) -> float:
        """Up to when rank 0 waits for records, in monotonic seconds: those that all came may tell of a loss."""
        return max(self.deadline, time.monotonic()) + (0.0 if name == ARRIVE else REPORT_SECONDS)

    def _remaining(self) -> float:
        return max(0.0, self.deadline - time.monotonic())


class _RoundEnded(Exception):
    """The launcher has ended a round."""

    def __init__(self, record: Record) -> None:
        super().__init__()
        self.record = record


def raise_failure(result: Record) -> None:
    """RankLost or RendezvousError if a round has come to that."""
    if "lost" in result:
        raise _lost(result)
    if "error" in result:
        raise RendezvousError(result["error"], rank=result["rank"])


def _lost(result: Record) -> RankLost:
    return RankLost(f"rank {result['lost']} was lost before all had met, and is started again", rank=result["lost"])


def _process_space() -> str:
    """Return a text that processes share which know each other by process id."""
    return f"{local.kernel()} {os.stat('/proc/self/ns/pid').st_ino}"


def packed(record: Record) -> bytes:
    """A record as stores carry it."""
    return zlib.compress(json.dumps(record).encode())


def unpacked(value: bytes) -> Record:
    """The reverse of `packed`."""
    record: Record = json.loads(zlib.decompress(value))
    return record


def _refuse_earlier(restart: int, newest: int) -> None:
    if newest > restart:
        raise RendezvousError(_left_over(restart, newest))


def _left_over(restart: int, newest: int) -> str:
    return (
        f"this rank belongs to restart {restart} of the job, and others to restart {newest}: it is left over from an "
        "earlier start of the ranks, and can only end; or else MULTIRING_RESTART must be the same on all ranks"
    )


def _cause(failed: Sequence[Record]) -> Record:
    """The failure that caused the others: of a rank that blames nobody else, or else of one that could not even
    report."""
    reported = {record["by"] for record in failed}
    own = [record for record in failed if record["rank"] == record["by"]]
    silent = [record for record in failed if record["rank"] not in reported]
    return (own or silent or failed)[0]
