"""Status of a running rank, once a second, for those who watch the job (``multiring top``).

A thread of its own looks at the engine's counters and writes what they say into the memory that the rank shares with
the launcher (reports.py). Nothing of it is in the way of a collective, and nothing is sent.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from multiring.job import reports
from multiring.runtime.comm import Communicator, group_of
from multiring.runtime.world import World

_log = logging.getLogger("multiring")

EVERY = 1.0
"""Seconds between two statuses. What one takes: benchmarks/results/2026-11-28-constants.md, Job."""

MOST_WAITED_FOR = 3
"""Ranks that a status names as waited for: those that were waited for longest."""

LONG_SECONDS = 1.0
"""A call that has been in flight for so long is told of, with the ranks that it waits for."""

MOST_NAMED = 64
"""Slow ranks in a status."""

LONGEST_TEXT = 2000
"""Characters of a failure's text, or of a plan's phases."""


@dataclass
class Counted:
    """Counts up to a moment, and the moment since which they run."""

    at: float
    calls: int = 0
    in_calls: float = 0.0
    """Seconds, of those calls too that are in flight."""
    waiting: float = 0.0
    waited_for: Counter[int] = field(default_factory=Counter)
    sent: Counter[str] = field(default_factory=Counter)
    """Bytes, by the level of the link."""
    received: Counter[str] = field(default_factory=Counter)
    of_plans: Counter[str] = field(default_factory=Counter)
    """Bytes of the calls of each plan, by its id."""
    slowest: Mapping[str, Any] | None = None
    """Rank that kept the others waiting at that moment."""
    slow_link: Mapping[str, Any] | None = None
    """The link that kept all waiting at that moment."""
    in_flight: list[Mapping[str, Any]] = field(default_factory=list)


class StatusTeller:
    """Tells the status of one rank, in every generation of its job, until `close`."""

    def __init__(self, memory: int, communicator: Communicator) -> None:
        """``memory`` is the descriptor of `reports.memory`, of which it keeps a copy: the program may close that."""
        self._memory = os.dup(memory)
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._communicator: Communicator | None = None
        self._thread = threading.Thread(target=self._run, name="multiring status", daemon=True)
        try:
            self.follow(communicator)
            self._thread.start()
        except BaseException:
            os.close(self._memory)
            raise

    def follow(self, communicator: Communicator) -> None:
        """Speak of this communicator of all ranks from now on."""
        with self._lock:
            self._communicator = communicator
            self._before = Counted(time.monotonic())
            self._levels: dict[int, str] = {}
            self._plan = ""
            self._write(Counted(self._before.at))

    def pause(self, stage: str) -> None:
        """Say no more than what this rank does, which is in no world for now; no engine is looked at any more."""
        with self._lock:
            self._communicator = None
            reports.write(self._memory, reports.STATUS, {"stage": stage, "at": time.monotonic()})

    def close(self) -> None:
        """Say that this rank has left, and nothing any more."""
        self.pause("left")
        self._stopping.set()
        self._thread.join()
        if reports.is_memory(self._memory):  # else the program has closed it
            os.close(self._memory)

    def _run(self) -> None:
        while not self._stopping.wait(EVERY):
            with self._lock:
                if self._communicator is not None:
                    now = self._count(self._communicator)
                    self._write(now)
                    self._before = now

    def _count(self, communicator: Communicator) -> Counted:
        counted = communicator.world.engine.statistics()
        found = Counted(
            time.monotonic(), counted["operations"], counted["seconds_in_calls"], counted["seconds_waiting"]
        )
        for peer, of in counted["peers"].items():
            found.waited_for[peer] = of["seconds_waited"]
            level = self._level(communicator.world, peer)
            found.sent[level] += of["bytes_sent"]
            found.received[level] += of["bytes_received"]
        for plan, measured in group_of(communicator).plans.measured().items():
            found.of_plans[plan] = measured.nbytes
        found.slowest, found.slow_link = counted["slowest"], counted["slow_link"]
        found.in_flight = counted["in_flight"]
        found.in_calls += max((call["seconds"] for call in found.in_flight if call["is_blocked"]), default=0.0)
        return found

    def _level(self, world: World, peer: int) -> str:
        if peer not in self._levels:
            self._levels[peer] = world.topology.apart(world.rank, peer)
        return self._levels[peer]

    def _write(self, now: Counted) -> None:
        assert self._communicator is not None
        reports.write(self._memory, reports.STATUS, {**self._said(self._communicator, now), **self._rates(now)})

    def _said(self, communicator: Communicator, now: Counted) -> dict[str, Any]:
        """Return the present status; ranks have their numbers of the job's start."""
        slowest, slow_link = now.slowest, now.slow_link
        world = communicator.world
        names, failure = world.membership.members, world.engine.failure()
        link = world.topology.host_link(world.rank)
        return {
            "stage": "runs",
            "rank": names[world.rank],
            "host": world.topology.hosts[world.rank],
            "generation": world.membership.generation,
            "size": communicator.size,
            "failure": ""
            if failure is None
            else f"{type(failure).__name__}: {world.membership.in_launchers_words(str(failure))}"[:LONGEST_TEXT],
            "disputed": _cut(world.disputed()),
            "link": {"up": link.up, "down": link.down} if world.known else None,
            "slowest": None
            if slowest is None
            else {
                "ranks": [names[rank] for rank in slowest["ranks"][:MOST_NAMED]],
                "share": slowest["share"],
                "reason": slowest["reason"],
            },
            "slow_link": None
            if slow_link is None
            else {
                name: slow_link[name] for name in ("from", "to", "both_ways", "name", "bytes_per_second", "expected")
            },
            "where": ""
            if slowest is None or world.sampler is None or world.rank not in slowest["ranks"]
            else world.sampler.places.get(slowest["reason"], ""),
        }

    def _rates(self, now: Counted) -> dict[str, Any]:
        """Return what was done a second since the status before; nothing without one."""
        assert self._communicator is not None
        before, names = self._before, self._communicator.world.membership.members
        seconds = now.at - before.at
        told: dict[str, Any] = {"at": now.at, "calls": now.calls, "plan": None, "rates": None}
        told["in_flight"] = [
            {**call, "waits_for": [names[peer] for peer in call["waits_for"]]}
            for call in now.in_flight
            if call["seconds"] >= LONG_SECONDS
        ]
        if seconds > 0:
            waited_for = (now.waited_for - before.waited_for).most_common(MOST_WAITED_FOR)
            told["rates"] = {
                "calls": (now.calls - before.calls) / seconds,
                # A call that has just ended may be counted once more, as one in flight.
                "in_calls": min(max(now.in_calls - before.in_calls, 0.0) / seconds, 1.0),
                "waiting": (now.waiting - before.waiting) / seconds,
                "waits_for": [[names[peer], min(waited / seconds, 1.0)] for peer, waited in waited_for],
                "links": {
                    level: {
                        "sent": (now.sent[level] - before.sent[level]) / seconds,
                        "received": (now.received[level] - before.received[level]) / seconds,
                    }
                    for level in now.sent
                },
            }
            for plan, _ in (now.of_plans - before.of_plans).most_common(1):
                self._plan = plan
        if self._plan:
            words = group_of(self._communicator).plans.in_words(self._plan)
            told["plan"] = {"id": self._plan, "words": words[:LONGEST_TEXT]}
        return told


def _cut(disputed: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return a rank's word on a Mismatch with its texts as long as a status has room for."""
    if disputed is None:
        return None
    cut = {**disputed, "message": disputed["message"][:LONGEST_TEXT]}
    if cut["call"] is not None:
        communicator, number, words, plan = cut["call"]
        cut["call"] = (communicator, number, words[:LONGEST_TEXT], plan)
    return cut


def teller(communicator: Communicator) -> StatusTeller | None:
    """Return the thread that tells the status of this rank; None if no launcher asks for it."""
    memory = reports.memory()
    if memory is None:
        return None
    try:
        return StatusTeller(memory, communicator)
    except (OSError, RuntimeError) as error:  # no descriptor or no thread is left: the job does without
        _log.warning("this rank cannot tell its launcher what it does: %s", error)
        return None
