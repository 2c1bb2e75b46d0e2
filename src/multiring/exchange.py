"""All ranks tell one another something through the store, in rounds, and learn who failed or never came."""

from __future__ import annotations

import contextlib
import json
import logging
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

from multiring.errors import MultiringError, RendezvousError
from multiring.store import Store

Record = dict[str, Any]

NOTICE_SECONDS = 10.0
"""After this long the missing ranks are named, then at doubling intervals."""

GRACE_SECONDS = 5.0
"""How much longer than rank 0 the others wait, so that its report of who is missing reaches them."""

_log = logging.getLogger("multiring")


class Exchange:
    """Rounds in which every rank publishes a record and receives those of all.

    Rank 0 gathers, judges and publishes the result, so a round is two operations a rank. If a rank is missing, or
    reports an error in place of its record, or the records do not fit together, every rank raises the same error.
    """

    def __init__(self, store: Store, prefix: str, rank: int, world_size: int, timeout: float) -> None:
        self._store = store
        self._prefix = prefix
        self._rank = rank
        self._world_size = world_size
        self._timeout = timeout
        self.deadline = time.monotonic() + timeout
        """When every round must be over, in monotonic seconds."""

    def round(
        self, name: str, record: Record, judge: Callable[[list[Record]], Record] = lambda records: {}
    ) -> tuple[list[Record], Record]:
        """The records of all ranks, and what ``judge`` made of them on rank 0.

        ``judge`` raises RendezvousError where they do not fit together.
        """
        self._publish(name, self._rank, record)
        if self._rank == 0:
            result = self._conclude(name, judge)
            self._publish(name, "all", result)
        else:
            result = self._conclusion(name)
        if "error" in result:
            raise RendezvousError(result["error"], rank=result["rank"])
        return result["records"], result["verdict"]

    @contextlib.contextmanager
    def reporting(self, name: str) -> Iterator[None]:
        """What precedes round ``name`` on this rank: an error in it reaches all ranks in place of the record."""
        try:
            yield
        except BaseException as error:
            self._fail(name, error)
            raise

    def _fail(self, name: str, error: BaseException) -> None:
        record = {"error": f"rank {self._rank} failed to join: {error or type(error).__name__}", "rank": self._rank}
        self._publish(name, self._rank, record)
        if self._rank == 0:
            self._publish(name, "all", record)

    def _publish(self, name: str, who: int | str, record: Record) -> None:
        self._store.set(f"{self._prefix}/{name}/{who}", zlib.compress(json.dumps(record).encode()))

    def _read(self, name: str, who: int | str, timeout: float) -> Record:
        record: Record = json.loads(zlib.decompress(self._store.get(f"{self._prefix}/{name}/{who}", timeout)))
        return record

    def _conclude(self, name: str, judge: Callable[[list[Record]], Record]) -> Record:
        try:
            records = self._gather(name)
            failed = [record for record in records if "error" in record]
            return failed[0] if failed else {"records": records, "verdict": judge(records)}
        except MultiringError as error:
            return {"error": str(error), "rank": error.rank}

    def _conclusion(self, name: str) -> Record:
        try:
            return self._read(name, "all", self._remaining() + GRACE_SECONDS)
        except TimeoutError:
            arrived, missing = self._roll(name)
            late = _late(missing, arrived) if missing else "rank 0 did not answer"
            raise RendezvousError(f"{late}, within {self._timeout:g} s", rank=(missing or [0])[0]) from None

    def _gather(self, name: str) -> list[Record]:
        records: list[Record] = []
        patience = NOTICE_SECONDS
        while len(records) < self._world_size:
            try:
                records.append(self._read(name, len(records), min(patience, self._remaining())))
            except TimeoutError:
                arrived, missing = self._roll(name)
                if missing and self._remaining() <= 0:
                    late = f"{_late(missing, arrived)}, within {self._timeout:g} s"
                    raise RendezvousError(late, rank=missing[0]) from None
                if missing:
                    _log.warning("%s yet", _late(missing, arrived))
                    patience *= 2
        return records

    def _roll(self, name: str) -> tuple[list[int], list[int]]:
        """Who has arrived in a round, and who is missing."""
        arrived: list[int] = []
        missing: list[int] = []
        for rank in range(self._world_size):
            try:
                self._read(name, rank, 0.0)
                arrived.append(rank)
            except TimeoutError:
                missing.append(rank)
        return arrived, missing

    def _remaining(self) -> float:
        return max(0.0, self.deadline - time.monotonic())


def _late(missing: list[int], arrived: list[int]) -> str:
    ranks = "rank" if len(missing) == 1 else "ranks"
    return f"{ranks} {spans(missing)} did not arrive (arrived: {spans(arrived) or 'none'})"


def spans(ranks: Sequence[int]) -> str:
    """Sorted ranks in words: "0-2, 5"."""

    def runs() -> Iterator[str]:
        for _, run in groupby(enumerate(ranks), lambda entry: entry[1] - entry[0]):
            members = [rank for _, rank in run]
            yield f"{members[0]}-{members[-1]}" if len(members) > 1 else str(members[0])

    return ", ".join(runs())
