"""One start of a job's ranks, up to the end of the last of them."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from multiring.errors import Mismatch
from multiring.job.gatherings import Gatherings
from multiring.launch.connection import ANSWER_SECONDS, AgentConnection, host_patience
from multiring.launch.hosts import Assignment, HostEntry
from multiring.launch.messages import Message, to_bytes
from multiring.launch.output import Output
from multiring.launch.processes import GRACE_SECONDS, describe_exit, shell_code
from multiring.launch.spares import Spares
from multiring.launch.stdin import Input
from multiring.net.loop import within
from multiring.runtime.disagreement import Statement, judge

PATIENCE_SECONDS = 1.0
"""Seconds that the others may go on after a rank has failed: those that notice say what they were doing."""

DISAGREEING_SECONDS = 4.0
"""Seconds more, where ranks made different calls: each that says which it made is counted."""

LOOK_SECONDS = 0.5
"""Between two looks at whether the ranks have gone on without one that has not ended."""

LEAVING_SECONDS = 5.0
"""Seconds that such a rank may take to end by itself: a stopped one does not."""

KILLED_SECONDS = 5.0
"""Seconds that a rank may take to end once it is killed: one that the kernel holds does not."""

BEATS = 8
"""Number of times that a silent agent is asked for a sign of life before it counts as lost."""

SEEN_SECONDS = 1.0
"""Seconds that watchers wait for the agents' answers: an agent that answers later is shown as it was before."""

FRESH_SECONDS = 0.5
"""Seconds during which an answer of the agents serves all watchers."""

MOST_LISTED = 16
"""Ranks in a line."""

Agents = Sequence[tuple[Assignment, AgentConnection]]


@dataclass(frozen=True)
class JobFailure:
    """A failure that may have ended a job; ``rank`` is None for a host, ``blames`` is the rank that made it fail."""

    what: str
    code: int
    rank: int | None = None
    blames: int | None = None
    host_ranks: tuple[int, ...] = ()
    """The ranks that were lost with the host."""
    disputed: Statement | None = None
    """The rank's word on a call that others made differently, where that made it fail."""
    is_final: bool = False
    """True if the failure stands on all ranks, and none of them can go on."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that were lost by it."""
        return self.host_ranks if self.rank is None else (self.rank,)


def _listed(ranks: Sequence[int]) -> str:
    """Ranks as they are named in a line."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _do(ranks: Sequence[int], verb: str, of_host: str = "") -> str:
    """Ranks with what they do: "rank 2 starts", "ranks 2, 3 of host b start"."""
    return f"{_listed(ranks)}{f' of host {of_host}' if of_host else ''} {verb}{'s' if len(ranks) == 1 else ''}"


def culprit(failures: Sequence[JobFailure]) -> JobFailure | None:
    """The failure that caused the others: it blames nobody, most others blame it, and it came first."""
    blamed = Counter(failure.blames for failure in failures)
    # max takes the first of equal ones.
    return max(
        failures,
        key=lambda failure: (failure.blames is None, failure.rank is not None and blamed[failure.rank]),
        default=None,
    )


def disagreement(failures: Sequence[JobFailure]) -> JobFailure:
    """The failure of the rank whose call was another than most others', of failures of which one was a Mismatch."""
    disputed = {each.rank: each.disputed for each in failures if each.rank is not None and each.disputed is not None}
    verdict = judge(disputed)
    found = next(each for each in failures if each.rank in verdict.ranks and each.disputed is not None)
    return replace(found, what=f"{found.what}; {verdict.text}")


class Replacements:
    """Number of single replacements that are left, over all attempts, and whether those started were admitted."""

    def __init__(self, most: int, is_member: Callable[[int], bool]) -> None:
        """``is_member(number)`` tells whether the other ranks have admitted the one of that number."""
        self.most = most
        self.is_member = is_member
        self._taken = 0

    @property
    def left(self) -> int:
        """Number of replacements that are left."""
        return self.most - self._taken

    def take(self) -> int:
        """The number of another one."""
        self._taken += 1
        return self._taken


@dataclass(frozen=True)
class SpareStarts:
    """Start of a lost host's ranks on a spare host, or on itself when it is back."""

    spares: Spares
    start: Callable[[AgentConnection, Mapping[int, int], int], None]
    """Lets a prepared agent start ranks as the replacements of these numbers, after which so many are left."""


class Attempt:
    """Follows the ranks that the agents have been told to start; `run` returns when all have ended."""

    def __init__(
        self,
        agents: Agents,
        output: Output,
        stdin: Input | None,
        min_ranks: int,
        replacements: Replacements,
        is_excluded: Callable[[int, int], bool],
        gatherings: Gatherings | None = None,
        spare_starts: SpareStarts | None = None,
        patience: float = ANSWER_SECONDS,
    ) -> None:
        """``stdin`` is what rank 0 reads if it runs on another host; ``min_ranks`` go on without those that fail.

        ``is_excluded(rank, number)`` tells whether the others have gone on without the process of a rank: its
        replacement of that number, 0 if it is none. ``gatherings`` are those of the ranks, where one that is lost
        before all have met is started again; None where nobody is. ``spare_starts``: how the ranks of a lost host
        start again on a spare one; None where none waits. ``patience``: seconds for which a rank may be silent; an
        agent may for `host_patience`.
        """
        self._agents = list(agents)
        self._output = output
        self._stdin = stdin
        self._host = {rank: assignment.host for assignment, _ in agents for rank in assignment.ranks}
        self._spare_starts = spare_starts
        self._patience = patience
        self._agent_patience = host_patience(patience)
        self._heard: Counter[int] = Counter()
        """Number of messages of each agent, by its first rank."""
        self._followers: list[asyncio.Task[None]] = []
        self._running = set(self._host)
        self._begin = time.monotonic()
        self._over = asyncio.Event()
        """Set at the first failure or interrupt, or when all have ended."""
        self._ended = asyncio.Event()
        self._interrupted: int | None = None
        """The signal that the ranks were sent because somebody ended the job."""
        self._min_ranks = min_ranks
        self._failed: set[int] = set()
        self._failed_as: dict[int, int] = {}
        """The number of the replacement, 0 if it was none, that each rank among them was when it failed last."""
        self._left: set[int] = set()
        """The ranks that have ended well."""
        self._replacements = replacements
        self._replaced: dict[int, int] = {}
        """The number of the replacement of each rank that was started again."""
        self._is_excluded = is_excluded
        self._gatherings = gatherings
        self._excluded: dict[int, float] = {}
        """Since when it is known of a rank that runs that the others have gone on without it."""
        self._ended_here: dict[int, str] = {}
        """Ranks that were killed, each with the reason."""
        self._killed_at: dict[int, float] = {}
        """Time at which each rank was killed that has not ended since."""
        self._unkillable: set[int] = set()
        """Ranks that count as ended though their process is left, and in whose place no other was started."""
        self._holding: set[int] = set()
        """The first ranks of the hosts on which such a process is, or was, left."""
        self._ended_at = 0.0
        """Time at which a rank has ended last; 0 once one was seen after that which is not stopped."""
        self._has_failed = False
        self._failures: list[JobFailure] = []
        self._judged = False
        """True if ranks that end now do so because they were told to."""
        self._leaving: set[int] = set()
        """The ranks of agents that got a signal: they end because of it."""
        self._lost_hosts: dict[int, list[int]] = {}
        """Lost hosts whose ranks were not replaced: their ranks, by the first of them."""
        self._moving: set[int] = set()
        """The first ranks of those among them for which a spare host is just being made ready."""
        self.accounts: dict[int, dict[str, Any]] = {}
        """Each rank's own account of its calls, by rank."""
        self._seen: dict[int, tuple[float, dict[str, Any]]] = {}
        """Time and contents of the agents' last report on each rank."""
        self._looked = -FRESH_SECONDS
        self._unseen: set[int] = set()
        """The first ranks of the agents that have not answered yet."""
        self._all_seen = asyncio.Event()
        self._finishing = False
        self._found_stopped: list[int] = []
        """The ranks that were stopped when the job had failed."""

    @property
    def agents(self) -> Agents:
        """Agents of the hosts that have ranks now."""
        return self._agents

    @property
    def hosts(self) -> Mapping[int, str]:
        """The host of each rank, by rank."""
        return self._host

    @property
    def agent_lost(self) -> bool:
        """True if a host is lost in whose place no other came."""
        return bool(self._lost_hosts)

    @property
    def failure(self) -> JobFailure | None:
        """The failure that ended the job."""
        return self._explained() if self._has_failed else None

    def _explained(self) -> JobFailure | None:
        """The failure that caused the others, with what they say of it."""
        found = culprit(self._failures)
        disagree = any(failure.disputed is not None for failure in self._failures)
        if disagree and found is not None and (found.disputed is not None or self._had_gone_on(found)):
            return disagreement(self._failures)
        if found is None or found.blames is None or found.blames not in self._host:
            return found
        who = f"rank {found.blames} on host {self._host[found.blames]}"
        if found.blames in self._left:
            return replace(found, what=f"{found.what}; it lost {who}, which had ended with exit code 0")
        if all(other.rank != found.blames for other in self._failures):  # it is stopped, cut off, or late
            how = "had not ended"
            if found.blames in self._found_stopped:
                who = self._named(self._found_stopped)
                how = "is stopped" if len(self._found_stopped) == 1 else "are stopped"
            return replace(found, what=f"{found.what}; it waited in vain for {who}, which {how}")
        return found

    async def run(self) -> None:
        if self._stdin is not None:
            self._stdin.attach()
        self._followers = [asyncio.create_task(self._follow(assignment, agent)) for assignment, agent in self._agents]
        looking = [asyncio.create_task(self._end_the_excluded()), asyncio.create_task(self._end_the_stopped())]
        await self._over.wait()
        for each in looking:
            if not each.cancel():  # an error of this program
                each.result()
        await self._end_ranks()
        if self._stdin is not None:
            self._stdin.detach()
        self._finishing = True
        self._tell("finish")
        followed, late = await asyncio.wait(self._followers, timeout=GRACE_SECONDS)
        for follower in late:
            follower.cancel()
        self._output.end_streams()
        for follower in followed:
            follower.result()

    def interrupt(self, number: int, without: Collection[int]) -> None:
        """End the ranks by a signal, ``without`` those that have got it; kill them if they are ending already."""
        self._interrupted = number
        if self._over.is_set():
            self._tell("kill")
        else:
            self.signal(number, without)
            self._over.set()

    def signal(self, number: int, without: Collection[int] = ()) -> None:
        # Whoever was started again is not at the terminal, and gets no signal from there.
        self._tell("signal", number=number, without=[rank for rank in without if rank not in self._replaced])

    async def look(self) -> None:
        """Let the agents say what their ranks do, unless they just did; after `SEEN_SECONDS` some may not have said."""
        now = time.monotonic()
        if not self._finishing and now - self._looked >= FRESH_SECONDS:  # later answers would be nobody's
            self._looked = now
            self._all_seen.clear()
            self._unseen = {assignment.first for assignment, agent in self._agents if not agent.gone}
            self._tell("look")
        if self._unseen:
            with contextlib.suppress(asyncio.TimeoutError):
                await within(SEEN_SECONDS, self._all_seen.wait())

    def described(self) -> list[dict[str, Any]]:
        """Each rank of the job: where it runs, its state, and what was last seen of it and how many seconds ago."""
        now, found = time.monotonic(), []
        for rank, host in sorted(self._host.items()):
            at, seen = self._seen.get(rank, (now, {}))
            age = seen.get("age")
            status = seen.get("status")
            found.append(
                {
                    "rank": rank,
                    "host": host,
                    "process": seen.get("process"),
                    "state": self._state(rank, seen),
                    "replacement": self._replaced.get(rank, 0),
                    "age": None if age is None else age + now - at,
                    "status": status,
                }
            )
        return found

    def shown_failure(self) -> dict[str, Any] | None:
        """Return the ranks that failed and what is said of that; None if nothing did, or the job has recovered from it.

        Ranks that live and have a Mismatch are asked as well as those that it has ended.
        """
        self._forget_recovered()
        disputed = {each.rank: each.disputed for each in self._failures if each.rank is not None and each.disputed}
        for rank in self._running:
            status = self._seen.get(rank, (0.0, {}))[1].get("status") or {}
            if (told := Statement.told(status.get("disputed"))) is not None:
                disputed[rank] = told
        if disputed:
            verdict = judge(disputed)
            return {"kind": Mismatch.__name__, "ranks": list(verdict.ranks), "text": verdict.text}
        found = self._explained()
        if found is None:
            return None
        return {"kind": "", "ranks": list(found.ranks), "text": found.what}

    def _state(self, rank: int, seen: dict[str, Any]) -> str:
        """Return the state of a rank in a word: that of its process first, then that of its place in the job."""
        if rank not in self._running:
            return "lost" if rank in self._failed and rank not in self._left else "ended"
        if rank in self._excluded:
            return "excluded"
        if seen.get("stopped"):
            return "stopped"
        if self._waits(rank):
            return "waits"
        stage = (seen.get("status") or {}).get("stage", "starts")
        return "replaced" if stage == "runs" and rank in self._replaced else stage

    def _tell(self, kind: str, **fields: object) -> None:
        for _, agent in self._agents:
            agent.send(kind, **fields)

    async def _end_ranks(self) -> None:
        if await self._have_ended(PATIENCE_SECONDS if self._interrupted is None else GRACE_SECONDS):
            return
        disagree = any(failure.disputed is not None for failure in self._failures)
        if disagree and await self._have_ended(DISAGREEING_SECONDS):
            return
        if self._interrupted is None:
            await self.look()
            self._found_stopped = [rank for rank in sorted(self._running) if self._is_stopped(rank)]
        self._judged = True
        if self._interrupted != signal.SIGTERM:  # else they may be saving, and would begin again
            self.signal(signal.SIGTERM)
        if not await self._have_ended(GRACE_SECONDS):
            self._tell("kill")
            if not await self._have_ended(GRACE_SECONDS):
                self._output.note(f"these do not end: {self._named(sorted(self._running))}")

    def _named(self, ranks: Sequence[int]) -> str:
        """Ranks with their hosts: "rank 2 on host b, rank 3 on host b"."""
        listed = [f"rank {rank} on host {self._host[rank]}" for rank in ranks[:MOST_LISTED]]
        if len(ranks) > MOST_LISTED:
            listed.append(f"{len(ranks) - MOST_LISTED} more")
        return ", ".join(listed)

    async def _end_the_excluded(self) -> None:
        """Kill the ranks that the others go on without, if they do not end by themselves."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            now = time.monotonic()
            for rank in sorted(self._running):
                if not self._is_excluded(rank, self._replaced.get(rank, 0)):
                    continue
                if now - self._excluded.setdefault(rank, now) >= LEAVING_SECONDS:
                    self._kill(rank, "was stopped or out of reach, and was ended: the others had gone on without it")
            await self._give_up_the_unkillable()

    async def _give_up_the_unkillable(self) -> None:
        """Wait no longer for ranks that were killed, and that their agents still see."""
        self._killed_at = {rank: at for rank, at in self._killed_at.items() if rank in self._running}
        if all(time.monotonic() - at < KILLED_SECONDS for at in self._killed_at.values()):
            return
        await self.look()
        for rank, killed in list(self._killed_at.items()):
            at, seen = self._seen.get(rank, (0.0, {}))
            if rank not in self._running or at - killed < KILLED_SECONDS:
                continue  # it has ended, or its host is out of reach
            del self._killed_at[rank]
            self._unkillable.add(rank)
            self._holding.add(next(each.first for each, _ in self._agents if rank in each.ranks))
            what = (
                f"rank {rank} on host {self._host[rank]} {self._ended_here[rank]}; its process {seen['process']} is "
                "left, in a wait that the kernel does not interrupt"
            )
            self._fail(JobFailure(what, shell_code(-signal.SIGKILL), rank), [rank])
            self._end({rank})
            if not self._over.is_set():
                self._replace(rank)

    async def _end_the_stopped(self) -> None:
        """Kill the ranks that are left where all of them are stopped, and those that missed them have failed.

        Nobody is left who could find out that they are lost.
        """
        looks = 0
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            self._forget_recovered()
            if not self._failures or not self._ended_at:
                continue
            await self.look()
            if not any(failure.blames in self._running for failure in self._failures):
                continue  # nobody has missed them: they may be stopped on purpose
            members = [rank for rank in sorted(self._running) if not self._waits(rank)]
            seen = [rank for rank in members if self._seen.get(rank, (0.0, {}))[0] > self._ended_at]
            if not all(map(self._is_stopped, seen)):
                self._ended_at, looks = 0.0, 0
            elif members and seen == members:
                looks += 1  # not seconds: this process may have been stopped as well
            if looks * LOOK_SECONDS >= self._patience:
                self._ended_at, looks = 0.0, 0
                are = (
                    "is all that is left, and stopped: it is"
                    if len(members) == 1
                    else ("are all that is left, and stopped: they are")
                )
                self._output.note(f"{self._named(members)} {are} ended")
                for rank in members:
                    self._kill(rank, "was stopped, and was ended")

    def _is_stopped(self, rank: int) -> bool:
        """True if a rank that runs was stopped when its agent last looked."""
        return rank in self._running and bool(self._seen.get(rank, (0.0, {}))[1].get("stopped"))

    def _kill(self, rank: int, why: str) -> None:
        """Kill a rank, unless that was done."""
        if rank not in self._ended_here:
            self._ended_here[rank] = why
            self._killed_at[rank] = time.monotonic()
            assignment, agent = next(each for each in self._agents if rank in each[0].ranks)
            agent.send("signal", number=signal.SIGKILL, without=[r for r in assignment.ranks if r != rank])

    def _forget_killed(self, rank: int) -> None:
        """Take what comes of a rank from now on for another process's."""
        self._killed_at.pop(rank, None)
        self._unkillable.discard(rank)

    async def _have_ended(self, seconds: float) -> bool:
        try:
            await within(seconds, self._ended.wait())
        except asyncio.TimeoutError:
            return False
        return True

    async def _follow(self, assignment: Assignment, agent: AgentConnection) -> None:
        hearing = asyncio.create_task(self._hear(assignment, agent))
        silence = asyncio.create_task(self._await_silence(assignment, agent))
        try:
            await asyncio.wait((hearing, silence), return_when=asyncio.FIRST_COMPLETED)
            if hearing.done():
                hearing.result()
                return
            seconds = silence.result()
            hearing.cancel()
            self._lose(
                assignment,
                f"its agent has not answered for {seconds:.0f} s: it is stopped, or its host hangs or is out of reach",
            )
            await agent.close(0.0)
            await self._move(assignment, agent)
        except Exception:  # an error of this program, after which the job would never end
            self._lose(assignment, "it is not listened to any more")
            raise
        finally:
            hearing.cancel()
            silence.cancel()

    async def _await_silence(self, assignment: Assignment, agent: AgentConnection) -> float:
        """Seconds for which an agent has not answered, once they are too many; time that this process slept is none."""
        pause = self._agent_patience / BEATS
        beats = 0
        while beats < BEATS:
            before = self._heard[assignment.first]
            if not self._finishing:  # its answer would be taken for one to the next attempt
                agent.send("beat")
            await asyncio.sleep(pause)
            # Its connection has ended, or it is to end: both have time limits of their own.
            has_ended = agent.gone or self._finishing or assignment.first in self._lost_hosts
            beats = 0 if has_ended or self._heard[assignment.first] != before else beats + 1
        return beats * pause

    async def _hear(self, assignment: Assignment, agent: AgentConnection) -> None:
        while (message := await agent.receive()) is not None:
            self._heard[assignment.first] += 1
            if message["kind"] == "finished":
                return
            if message["kind"] == "beat":
                continue
            if message["kind"] == "error" and self._finishing and assignment.first in self._holding:
                self._output.note(f"host {assignment.host}: {message['text']}")
                return
            if message["kind"] == "error":
                self._lose(assignment, message["text"])
                await agent.close()
                await self._move(assignment, agent)
                return
            if message["kind"] == "leaving":
                self._leave(assignment, message["text"])
            elif message["kind"] == "note":
                self._output.note(f"host {assignment.host}: {message['text']}")
            else:
                self._take(message)
        if self._leaving.issuperset(assignment.ranks):  # it has said why
            self._end(assignment.ranks)
            await self._move(assignment, agent)
            return
        failure = self._lose(assignment, "it is lost")
        reason = await agent.why()
        self._failures = [
            replace(failure, what=f"host {assignment.host}: {reason}") if other is failure else other
            for other in self._failures
        ]
        await self._move(assignment, agent)

    async def _move(self, lost: Assignment, agent: AgentConnection) -> None:
        """Start the ranks of a lost host again on a spare one, as replacements, and expect that host to come back."""
        ranks = self._lost_hosts.get(lost.first, [])
        if self._spare_starts is None or not self._may_start_again(lost):
            return
        has_moved = await self._start_on_spare(lost)
        if self._over.is_set():
            return
        is_expected = self._spare_starts.spares.expect(HostEntry(lost.host, lost.count), agent)
        if has_moved and is_expected:
            self._output.note(f"host {lost.host} is lost; when it is back, it is a spare host")
        elif is_expected:
            self._output.note(f"host {lost.host} is lost; its {_do(ranks, 'start')} there again when it is back")
        elif not has_moved:
            self._output.note(f"no spare host with room for {_listed(ranks)} takes the place of host {lost.host}")

    async def use_spare(self, host: str) -> None:
        """Start the ranks of lost hosts again where there is room now: those of ``host`` first, which is back."""
        lost = [assignment for assignment, _ in self._agents if assignment.first in self._lost_hosts]
        for each in sorted(lost, key=lambda each: each.host != host):
            if each.first not in self._moving and self._may_start_again(each):
                await self._start_on_spare(each)

    def _may_start_again(self, lost: Assignment) -> bool:
        """True if the ranks of a lost host may be started on another one; notes if replacements do not suffice."""
        ranks = self._lost_hosts.get(lost.first, [])
        if self._over.is_set() or not ranks or (self._gatherings is not None and not self._gatherings.have_met()):
            return False
        if self._replacements.left < len(ranks):
            needed, they_are = (
                ("1 replacement", "it is") if len(ranks) == 1 else (f"{len(ranks)} replacements", "they are")
            )
            self._output.note(
                f"{_do(ranks, 'need', of_host=lost.host)} {needed}, and {self._replacements.left} of "
                f"{self._replacements.most} are left (--max-replacements): {they_are} not started again"
            )
            return False
        return True

    async def _start_on_spare(self, lost: Assignment) -> bool:
        """Start the ranks of a lost host on the first spare one with room for them; whether there is one."""
        assert self._spare_starts is not None
        ranks = self._lost_hosts[lost.first]
        self._moving.add(lost.first)
        try:
            taken = await self._spare_starts.spares.take(lost)
        finally:
            self._moving.discard(lost.first)
        if taken is None:
            return False
        assignment, spare = taken
        if self._over.is_set() or self._replacements.left < len(ranks):  # meanwhile
            self._spare_starts.spares.give_back(spare)
            return False
        agent = spare.agent
        numbers = {rank: self._replacements.take() for rank in ranks}
        self._agents = [(assignment, agent) if each.first == lost.first else (each, its) for each, its in self._agents]
        self._host.update(dict.fromkeys(assignment.ranks, assignment.host))
        del self._lost_hosts[lost.first]
        for rank in ranks:
            self._replaced[rank] = numbers[rank]
            self._excluded.pop(rank, None)
            self._ended_here.pop(rank, None)
            self._forget_killed(rank)
            self._leaving.discard(rank)
            self._seen.pop(rank, None)
        self._running.update(ranks)
        self._spare_starts.start(agent, numbers, self._replacements.left)
        self._followers.append(asyncio.create_task(self._follow(assignment, agent)))
        shown = f"replacement{'s' if len(ranks) > 1 else ''} {', '.join(map(str, numbers.values()))}"
        self._output.note(
            f"{_do(ranks, 'start', of_host=lost.host)} again on host {assignment.host}, {shown} of "
            f"{self._replacements.most}"
        )
        return True

    def _take(self, message: Message) -> None:
        if message["kind"] == "output":
            self._output.write(message["rank"], message["stream"], to_bytes(message["text"]))
        elif message["kind"] == "seen":
            at = time.monotonic()
            self._seen.update((seen["rank"], (at, seen)) for seen in message["ranks"])
            self._unseen.discard(message["first"])
            if not self._unseen:
                self._all_seen.set()
        elif message["kind"] == "taken":
            assert self._stdin is not None
            self._stdin.taken()
        elif message["kind"] == "exit":
            rank, code = message["rank"], message["code"]
            if rank in self._unkillable:  # it has ended after all
                return
            if message["account"] is not None:
                self.accounts[rank] = message["account"]
            if rank in self._leaving:
                self._end({rank})
                return
            if code != 0:
                seconds = time.monotonic() - self._begin
                how = self._ended_here.get(rank, f"failed: {describe_exit(code)}")
                what = f"rank {rank} on host {self._host[rank]} {how}, after {seconds:.1f} s"
                if self._begin_again(rank, code, what):
                    return
                disputed = Statement.told(message["disputed"])
                failure = JobFailure(what, shell_code(code), rank, message["blames"], (), disputed, message["is_final"])
                self._fail(failure, [rank])
            else:
                self._left.add(rank)
            self._end({rank})
            if code != 0 and not self._over.is_set():
                self._replace(rank)
        else:
            raise ValueError(f"an agent sent {message}")

    def _lose(self, assignment: Assignment, reason: str) -> JobFailure:
        running = [rank for rank in assignment.ranks if rank in self._running]
        lost = self._lost_hosts.setdefault(assignment.first, running)
        failure = JobFailure(f"host {assignment.host}: {reason}", 1, host_ranks=tuple(lost))
        self._gather_no_more(assignment.first, failure.what)
        self._fail(failure, assignment.ranks)
        self._end(assignment.ranks)
        return failure

    def _leave(self, assignment: Assignment, reason: str) -> None:
        self._leaving.update(assignment.ranks)
        ranks = [rank for rank in assignment.ranks if rank in self._running]
        self._lost_hosts[assignment.first] = ranks
        listed = ", ".join(map(str, ranks[:MOST_LISTED])) + (" ..." if len(ranks) > MOST_LISTED else "")
        what = f"host {assignment.host}: {reason}, with rank{'s' if len(ranks) > 1 else ''} {listed}"
        self._gather_no_more(assignment.first, what)
        self._fail(JobFailure(what, 1, host_ranks=tuple(ranks)), assignment.ranks)

    def _begin_again(self, rank: int, code: int, what: str) -> bool:
        """Start a rank again as at first, if it was killed before all had met; otherwise the loss is one of the job's.

        One that ended by itself would do so again: a wrong option, or others that did not come in time.
        """
        if self._gatherings is None or self._over.is_set():
            return False
        if code > 0 or self._left:
            self._gather_no_more(rank, what)
            return False
        if not self._replacements.left:
            self._gather_no_more(rank, what, f"; no replacement is left (--max-replacements {self._replacements.most})")
            return False
        if not self._gatherings.lose(rank):
            self._gatherings.fail_later(rank, f"{what}, before all ranks had met")
            return False
        self._output.note(f"{what}; the ranks had not all met yet")
        self._start(rank, 0)
        if rank == 0 and self._stdin is not None:  # it is to learn that its input has ended
            self._stdin.detach()
            self._stdin.attach()
        return True

    def _gather_no_more(self, rank: int, what: str, why: str = "") -> None:
        """Let those who wait for others to come fail, if they still do: this rank does not."""
        if self._gatherings is not None:
            self._gatherings.fail(rank, f"{what}, before all ranks had met{why}")

    def _replace(self, rank: int) -> None:
        self._excluded.pop(rank, None)
        self._ended_here.pop(rank, None)
        if not self._replacements.left:
            if self._replacements.most:
                self._output.note(
                    f"rank {rank} is not started again: no replacement is left (--max-replacements "
                    f"{self._replacements.most})"
                )
            return
        if self._gatherings is None or self._gatherings.have_met():
            self._replaced[rank] = self._start(rank)
        elif self._gatherings.has_begun_again(rank):
            self._output.note(
                f"rank {rank} is not started again: the first init() had failed on all ranks, and one that they call "
                "after that waits for no replacement; once it has succeeded, grow() admits some"
            )

    def _start(self, rank: int, as_number: int | None = None) -> int:
        """Start a rank again: as the replacement that it is, or ``as_number``; the number of the replacement."""
        number = self._replacements.take()
        agent = next(agent for assignment, agent in self._agents if rank in assignment.ranks)
        shown = number if as_number is None else as_number
        agent.send("replace", rank=rank, number=shown, left=self._replacements.left)
        self._running.add(rank)
        self._forget_killed(rank)
        self._seen.pop(rank, None)
        self._output.note(f"rank {rank} is started again, replacement {number} of {self._replacements.most}")
        return number

    def _is_back(self, rank: int) -> bool:
        """True if it was started again and admitted by the others, and has not failed again since."""
        number = self._replaced.get(rank)
        return number is not None and number != self._failed_as.get(rank) and self._replacements.is_member(number)

    def _is_recovered(self, failure: JobFailure) -> bool:
        """True if all ranks that were lost by it are back."""
        return bool(failure.ranks) and all(map(self._is_back, failure.ranks))

    def _forget_recovered(self) -> None:
        """Drop the failures from which the job has recovered: they are not why it ends."""
        self._failures = [other for other in self._failures if not self._is_recovered(other)]

    def _without_left_behind(self, failure: JobFailure, ranks: Collection[int]) -> JobFailure:
        """Drop the losses without which the ``ranks`` that fail now had gone on, and return the failure without them.

        They are not why it fails, though a rank that is killed soon after may still blame them.
        """
        ran = failure.ranks or ranks  # those of a lost host that had not ended before
        if self._has_failed or any(self._is_excluded(rank, self._replaced.get(rank, 0)) for rank in ran):
            return failure  # all of one loss
        left_behind = [other for other in self._failures if self._had_gone_on(other)]
        self._failures = [other for other in self._failures if other not in left_behind]
        gone = {rank for other in left_behind for rank in other.ranks}
        return replace(failure, blames=None) if failure.blames in gone else failure

    def _had_gone_on(self, failure: JobFailure) -> bool:
        """True if the others had gone on without the ranks that were lost by it, and disagree for another reason."""
        ranks = failure.ranks
        return bool(ranks) and all(self._is_excluded(rank, self._failed_as.get(rank, 0)) for rank in ranks)

    def _waits(self, rank: int) -> bool:
        """True if it was started again and is no member yet."""
        return rank in self._replaced and not self._replacements.is_member(self._replaced[rank])

    def _fail(self, failure: JobFailure, ranks: Collection[int]) -> None:
        if failure.rank is not None and self._waits(failure.rank):
            if not self._judged and self._interrupted is None:
                self._output.note(f"{failure.what}; the others had not admitted it")
            return
        if not self._judged and self._interrupted is None:
            self._forget_recovered()
            failure = self._without_left_behind(failure, ranks)
            self._failures.append(failure)
            self._failed.update(ranks)
            self._failed_as.update({rank: self._replaced.get(rank, 0) for rank in ranks})
            left = len(self._host) - sum(rank in ranks or not self._is_back(rank) for rank in self._failed)
            if left >= self._min_ranks and not self._has_failed and not failure.is_final:
                self._output.note(f"{failure.what}; the job may go on with {left} of {len(self._host)} ranks")
                return
        self._has_failed = True
        self._over.set()

    def _end(self, ranks: Collection[int]) -> None:
        self._running.difference_update(ranks)
        self._ended_at = time.monotonic()
        if all(self._waits(rank) for rank in self._running):  # nobody else is there to be waited for
            self._over.set()
        if not self._running:
            self._ended.set()
