"""Faults of a job, as a table: the act, its victim, and what all others must see.

``test_faults.py`` tries each row in short, ``chaos.py`` at random.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fair_time import FAIR
from jobs_under_fault import END_SECONDS, START_SECONDS, Job

from multiring import lab

HEARTBEAT = 5.0  # MULTIRING_HEARTBEAT_TIMEOUT of these jobs

Act = Callable[[Job, int], None]


def _kill(job: Job, rank: int) -> None:
    job.signal(rank, signal.SIGKILL)


def _stop(job: Job, rank: int) -> None:
    job.signal(rank, signal.SIGSTOP)


def _continue(job: Job, rank: int) -> None:
    job.signal(rank, signal.SIGCONT)


def _order(what: str) -> Act:
    return lambda job, rank: job.order(rank, what)


def _link(change: Callable[..., None], *arguments: Any) -> Act:
    def act(job: Job, rank: int) -> None:
        assert job.world.cluster is not None
        change(job.world.cluster, job.world.hosts[rank], *arguments)

    return act


def _nothing(job: Job, rank: int) -> None:
    pass


@dataclass(frozen=True)
class Fault:
    """``act`` is done to a rank (or its host's link), and ``undo`` after ``lasts`` seconds."""

    name: str
    act: Act
    raises: str = ""
    """Error that the others raise; "" if the job goes on, with the right sums."""
    within: float = 0.0
    """Seconds in which they raise it."""
    undo: Act = _nothing
    lasts: float = 0.0
    on_link: bool = False
    """It strikes a host, which takes a lab, and any of its ranks is the culprit."""
    named_after: float | None = None
    """Seconds in which a line in the log of those that wait names the culprit."""
    survives: bool = True
    """The rank itself lives on, and raises too when the fault is over."""
    timeout: float = 60.0
    """MULTIRING_TIMEOUT of the job."""
    of_either: bool = False
    """True if two lone hosts cannot tell which of them was struck."""


FAULTS = (
    Fault("killed", _kill, "PeerLost", 2.0, survives=False),
    Fault("stopped", _stop, "PeerLost", HEARTBEAT + 3, _continue, HEARTBEAT + 4, named_after=5.0),
    Fault("stopped for a while", _stop, undo=_continue, lasts=2.0),
    Fault("late", _order("linger"), "CollectiveTimeout", 9.0, timeout=6.0, named_after=5.0),
    Fault("raises", _order("raise"), "PeerLost", 3.0, survives=False),
    Fault("leaves early", _order("leave"), "PeerLost", 3.0, survives=False),
    Fault("cut off", _link(lab.cut), "PeerLost", HEARTBEAT + 3, _link(lab.restore), HEARTBEAT + 4, True, 5.0),
    Fault("cut off for a while", _link(lab.cut), "", 0.0, _link(lab.restore), 1.5, True),
    Fault(
        "hears nothing",
        _link(lab.deafen),
        "PeerLost",
        HEARTBEAT + 5,
        _link(lab.restore),
        HEARTBEAT + 6,
        True,
        of_either=True,
    ),
    Fault("a tenth of the rate", _link(lab.throttle, 0.1), "", 0.0, _link(lab.restore), 3.0, True),
)


@dataclass(frozen=True)
class Shortage:
    """A rank that gets less than it needs, so that the job cannot start: what its log and the others' say."""

    name: str
    limit: str
    """An option of prlimit."""
    remedy: str

    def judge(self, job: Job, victim: int) -> None:
        """AssertionError unless all ranks end without having begun, each naming the victim, who says the remedy."""
        ranks = range(job.world.size)
        job.end(ranks, START_SECONDS + END_SECONDS)  # they were started just now
        logs = [job.log(rank) for rank in ranks]
        assert [process.returncode for process in job.ranks] == [1] * len(ranks), logs
        assert self.remedy in logs[victim], logs
        for rank in ranks:
            assert f"rank {victim}" in logs[rank] or rank == victim, logs


@dataclass(frozen=True)
class Parting:
    """Two hosts that live, and that all others reach, lose what they send to each other.

    A rank whose calls need both raises as do all: one of the two hosts, the same for everybody, is given up.
    """

    name: str
    both: bool = True
    """Or only what the first sends."""
    larger_than: int = 0
    """Only packets of more bytes are lost."""
    within: float = HEARTBEAT + 3
    named_after: float = 5.0

    def judge(self, job: Job, one: str, other: str, *, needed: bool | None = True) -> None:
        """AssertionError unless every rank saw what it should have seen; ``needed``: whether the calls need what the
        two send to each other, None if that is not known. Those that do not go on, with the right sums."""
        hosts, cluster = job.world.hosts, job.world.cluster
        assert cluster is not None
        struck = time.time()
        lab.part(cluster, one, other, both=self.both, larger_than=self.larger_than)
        job.write("parted")
        try:
            raises = needed if needed is not None else job.any_says("raised", self.within)
            if raises:
                for rank in range(len(hosts)):
                    job.await_line(rank, "raised", self.within + 10)
            elif needed is not None:
                time.sleep(self.within)
        finally:
            for host in (one, other):
                lab.restore(cluster, host)
        job.write("settled" if raises else "stop")
        job.end(range(len(hosts)))
        outcomes = [job.outcome(rank) for rank in range(len(hosts))]
        told = f"{self.name}, {one} and {other} of {' '.join(hosts)}: {outcomes}"
        assert {outcome["kind"] for outcome in outcomes} == {"PeerLost" if raises else ""}, told
        if not raises:
            assert len({outcome["steps"] for outcome in outcomes}) == 1, told
            return
        assert len({(outcome["rank"], outcome["host"]) for outcome in outcomes}) == 1, told
        given_up, kept = (one, other) if outcomes[0]["host"] == one else (other, one)
        assert outcomes[0]["rank"] == hosts.index(given_up), told
        assert {outcome["apart"] for outcome in outcomes} == {hosts.index(kept)}, told
        assert FAIR.between(struck, max(outcome["raised"] for outcome in outcomes)) < self.within, told
        assert all(outcome["unchanged"] and took_to_leave(outcome) < 3 for outcome in outcomes), told
        logs = [line for rank in range(len(hosts)) for line in job.log(rank).splitlines()]
        assert any("cannot reach" in line or "has not been heard of" in line for line in logs), logs


PARTINGS = (
    Parting("parted"),
    Parting("parted one way", both=False),
    Parting("parted for large packets", larger_than=1000),
)

SHORTAGES = (
    Shortage("no descriptors", "--nofile=12", "ulimit -n"),
    Shortage("no shared memory", "--fsize=16384", "ulimit -f"),
)


def strike(fault: Fault, job: Job, victim: int) -> float:
    """Do it and undo it; the time at which it was done."""
    struck = time.time()
    fault.act(job, victim)
    if fault.undo is not _nothing:
        try:
            time.sleep(fault.lasts)
        finally:  # other tests go on in the same lab
            fault.undo(job, victim)
    return struck


def culprits(fault: Fault, job: Job, victim: int) -> set[int]:
    """The ranks that it is right to name."""
    hosts = job.world.hosts
    if fault.of_either and len(set(hosts)) == 2:
        return set(range(len(hosts)))
    return struck_ranks(fault, job, victim)


def struck_ranks(fault: Fault, job: Job, victim: int) -> set[int]:
    """The ranks that it was done to."""
    hosts = job.world.hosts
    return {rank for rank in range(len(hosts)) if hosts[rank] == hosts[victim]} if fault.on_link else {victim}


def took_to_leave(outcome: dict[str, Any]) -> float:
    """Fair seconds from the end of a rank's program to that of its shutdown."""
    return FAIR.between(outcome["left"] - outcome["leaving"], outcome["left"])


def judge(fault: Fault, job: Job, victim: int, struck: float) -> None:
    """AssertionError unless every rank saw what it should have seen."""
    blamed, victims = culprits(fault, job, victim), struck_ranks(fault, job, victim)
    others = [rank for rank in range(job.world.size) if rank not in victims]
    if not fault.raises:
        time.sleep(0.5)  # some steps more
        job.write("stop")
        job.end(range(job.world.size))
        for rank in range(job.world.size):
            outcome = job.outcome(rank)
            assert outcome["kind"] == "", f"rank {rank} raised {outcome}\n{job.log(rank)}"
        assert len({job.outcome(rank)["steps"] for rank in range(job.world.size)}) == 1
        return
    for rank in others:
        job.await_line(rank, "raised", fault.within + 10)
    job.write("settled")
    job.end(range(job.world.size))
    for rank in others:
        outcome = job.outcome(rank)
        told = f"{fault.name} rank {victim}: rank {rank} saw {outcome}\n{job.log(rank)}"
        assert outcome["kind"] == fault.raises, told
        assert outcome["rank"] in blamed, told
        assert outcome["host"] == job.world.hosts[outcome["rank"]], told
        assert outcome["collective"], told
        if "was not started" not in outcome["message"]:
            assert outcome["number"] >= 0, told
            assert outcome["seconds"] >= 0, told  # 0: the call began while its own process was starved
        assert FAIR.between(struck, outcome["raised"]) < fault.within, told
        assert took_to_leave(outcome) < 3, told
        assert outcome["unchanged"], told
    in_a_call = any("was not started" not in job.outcome(rank)["message"] for rank in others)  # which tell of it
    if fault.named_after is not None and in_a_call:
        lines = [line for rank in others for line in job.log(rank).splitlines()]
        names = [f"rank {rank} (host {job.world.hosts[rank]})" for rank in blamed]
        assert any(name in line for name in names for line in lines if "raised" not in line), lines
    if fault.survives:
        for rank in victims:
            outcome = job.outcome(rank)
            assert outcome["kind"] or fault.act is not _stop, f"{fault.name}: rank {rank} itself saw {outcome}"
            assert outcome["unchanged"], outcome
