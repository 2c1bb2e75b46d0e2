"""The one of several failures that ended a job, and the states of its ranks meanwhile."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from multiring.launch import attempt as attempts
from multiring.launch import connection
from multiring.launch import spares as spare_hosts
from multiring.launch.attempt import Attempt, JobFailure, Replacements, SpareStarts, culprit
from multiring.launch.hosts import Assignment, HostEntry
from multiring.launch.output import Output
from multiring.launch.rank import NO_REPORT
from multiring.launch.spares import Spare, Spares
from multiring.launch.ssh import SshAgent
from multiring.net.loop import within


def failed(rank: int | None, blames: int | None = None) -> JobFailure:
    return JobFailure(f"rank {rank}", 1, rank, blames)


def test_nothing_failed() -> None:
    assert culprit([]) is None


def test_of_those_that_blame_nobody_the_first() -> None:
    assert culprit([failed(3), failed(1)]) == failed(3)


def test_who_blames_nobody_though_it_ended_last() -> None:
    assert culprit([failed(0, 2), failed(3, 2), failed(2)]) == failed(2)
    assert culprit([failed(0, 2), failed(None)]) == failed(None)


def test_of_those_that_blame_nobody_the_most_blamed() -> None:
    assert culprit([failed(1), failed(0, 2), failed(2), failed(3, 2)]) == failed(2)


def test_of_those_that_blame_each_other_the_most_blamed() -> None:
    assert culprit([failed(0, 2), failed(2, 0), failed(3, 2)]) == failed(2, 0)


def test_who_is_blamed_may_have_ended_well() -> None:
    assert culprit([failed(3, 2), failed(0, 2)]) == failed(3, 2)


class Confused:
    """An agent that sends what no agent sends."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def send(self, kind: str, **fields: Any) -> None:
        self.told.append(kind)

    async def receive(self) -> dict[str, Any]:
        return {"kind": "nonsense"}


def test_an_error_of_the_launcher_ends_the_job() -> None:
    agent: Any = Confused()
    output = Output(None, 2, on_broken=lambda: None)
    attempt = Attempt(
        [(Assignment("a", 0, 2), agent)], output, None, 2, Replacements(0, lambda number: False), lambda *_: False
    )
    with pytest.raises(ValueError, match=r"an agent sent \{'kind': 'nonsense'\}"):
        asyncio.run(attempt.run())
    assert "finish" in agent.told


class Silent:
    """An agent that says what its ranks do when it is told to."""

    gone = False

    def __init__(self) -> None:
        self.told: list[str] = []

    def send(self, kind: str, **fields: Any) -> None:
        self.told.append(kind)


def test_states_of_ranks() -> None:
    """One word gives the state that agents see or the launcher knows."""

    async def told() -> list[dict[str, Any]]:
        agent: Any = Silent()
        members = {2}
        attempt = Attempt(
            [(Assignment("a", 0, 7), agent)],
            Output(None, 7, on_broken=lambda: None),
            None,
            1,
            Replacements(2, lambda number: number in members),
            lambda *_: False,
        )
        looking = asyncio.create_task(attempt.look())
        await asyncio.sleep(0)
        said = [{"stage": "runs", "at": 0, "rank": rank} for rank in range(7)]
        said[6] = {"stage": "joins", "at": 0}
        seen = [
            {"rank": rank, "process": rank, "stopped": rank == 3, "age": rank / 2, "status": said[rank]}
            for rank in range(7)
        ]
        attempt._take({"kind": "seen", "first": 0, "ranks": seen})
        await looking
        assert agent.told == ["look"]
        await attempt.look()
        assert agent.told == ["look"]  # what was seen so lately is not asked for again
        attempt._excluded[2] = 0.0
        for rank, code in ((1, 1), (4, 0), (5, 1)):
            account = {"kind": "exit", "rank": rank, "code": code, **NO_REPORT}
            attempt._take(account)
        attempt._take({"kind": "seen", "first": 0, "ranks": [seen[1], seen[5]]})
        return attempt.described()

    described = asyncio.run(told())
    assert [rank["state"] for rank in described] == [
        "runs",
        "waits",  # replacement 1, which nobody has admitted
        "excluded",
        "stopped",
        "ended",
        "replaced",
        "joins",
    ]
    assert [rank["replacement"] for rank in described] == [0, 1, 0, 0, 0, 2, 0]
    ages = [rank["age"] for rank in described]
    assert all(rank / 2 <= age < rank / 2 + 20 for rank, age in enumerate(ages))


def test_an_agent_that_does_not_answer_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "SEEN_SECONDS", 0.1)

    async def told() -> list[str]:
        agent: Any = Silent()
        output = Output(None, 2, on_broken=lambda: None)
        never: Any = Replacements(0, lambda number: False)
        attempt = Attempt([(Assignment("a", 0, 2), agent)], output, None, 2, never, lambda *_: False)
        await attempt.look()
        return [rank["state"] for rank in attempt.described()]

    assert asyncio.run(told()) == ["starts", "starts"]


class Told(SshAgent):
    """An agent at the end of no ssh, which says what it is told to say."""

    gone = False

    def __init__(self, host: str) -> None:
        self.host = host
        self.is_stopped = False
        self.ranks: dict[int, bool] = {}
        """Ranks that it says to run, and whether each is stopped."""
        self.closed: list[float] = []
        self.sent: list[dict[str, Any]] = []
        self.says: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()

    def send(self, kind: str, **fields: Any) -> None:
        self.sent.append({"kind": kind, **fields})
        if self.is_stopped:
            return
        if kind == "finish":
            self.says.put_nowait({"kind": "finished"})
        elif kind == "beat":
            self.says.put_nowait({"kind": "beat"})
        elif kind == "look":
            looks = [{"rank": rank, "stopped": stopped} for rank, stopped in self.ranks.items()]
            self.says.put_nowait({"kind": "seen", "first": min(self.ranks), "ranks": looks})
        elif kind == "signal" and fields["number"] == signal.SIGKILL:
            for rank in self.ranks.keys() - set(fields["without"]):
                self.report_end(rank, -signal.SIGKILL)

    async def receive(self) -> dict[str, Any] | None:
        return await self.says.get()

    async def why(self) -> str:
        return "ssh has ended"

    async def close(self, seconds: float = 0.0) -> None:
        self.closed.append(seconds)

    def report_end(self, rank: int, code: int, **report: Any) -> None:
        ended = {"kind": "exit", "rank": rank, "code": code, **NO_REPORT, **report}
        self.says.put_nowait(ended)


class Moves:
    """An attempt of two ranks on each of hosts a, b and c, which are lost and come back as a test says."""

    def __init__(self, spares: list[Spare], most: int = 8, patience: float = 30.0) -> None:
        self.agents = {name: Told(name) for name in "abc"}
        self.notes: list[str] = []
        output: Any = Output(None, 6, on_broken=lambda: None)
        output.note = self.notes.append
        for i, agent in enumerate(self.agents.values()):
            agent.ranks = {2 * i: False, 2 * i + 1: False}
        self.back: dict[str, asyncio.Event] = {name: asyncio.Event() for name in "abcd"}
        self.new = {name: Told(name) for name in "abcd"}
        self.started: list[tuple[str, dict[int, int], int]] = []
        self.prepared = asyncio.Event()
        self.prepared.set()
        self.spares = Spares(spares, self.prepare, self.reach, self.use, self.notes.append)
        self.members: set[int] = set()
        self.excluded: set[tuple[int, int]] = set()
        """Ranks without which the others have gone on, each with the number of its replacement, 0 if it was none."""
        self.attempt = Attempt(
            [(Assignment(name, 2 * i, 2), agent) for i, (name, agent) in enumerate(self.agents.items())],
            output,
            None,
            2,
            Replacements(most, self.members.__contains__),
            lambda *process: process in self.excluded,
            None,
            SpareStarts(self.spares, self.start),
            patience,
        )

    async def prepare(self, assignment: Assignment, agent: Any) -> None:
        await self.prepared.wait()

    async def reach(self, entry: HostEntry, lost: SshAgent) -> SshAgent | None:
        await self.back[entry.name].wait()
        return self.new[entry.name]

    async def use(self, spare: Spare) -> None:
        await self.attempt.use_spare(spare.entry.name)

    def start(self, agent: Any, numbers: Mapping[int, int], left: int) -> None:
        agent.ranks = dict.fromkeys(numbers, False)
        self.started.append((agent.host, dict(numbers), left))

    async def until(self, condition: Callable[[], bool], seconds: float = 0.5) -> None:
        for _ in range(round(1000 * seconds)):
            if condition():
                return
            await asyncio.sleep(0.001)
        raise AssertionError(self.notes)

    async def lose(self, name: str) -> None:
        self.agents[name].says.put_nowait(None)
        await self.until(lambda: any(f"host {name} is lost" in note for note in self.notes))

    async def noted(self, text: str) -> None:
        await self.until(lambda: text in self.notes)

    async def ended(self, task: asyncio.Task[None]) -> None:
        """Let the job end well."""
        for _, agent in self.attempt.agents:
            if isinstance(agent, Told):
                for rank in range(6):
                    if self.attempt.hosts[rank] == agent.host:
                        agent.report_end(rank, 0)
        await within(10, task)
        await self.spares.close()


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spare_hosts, "FIRST_PAUSE_SECONDS", 0.0)


def test_the_ranks_of_lost_hosts_start_again_on_those_that_are_back_each_on_its_own(at_once: None) -> None:
    async def moved() -> None:
        moves = Moves([])
        task = asyncio.create_task(moves.attempt.run())
        for name in "bc":
            await moves.lose(name)
        assert "host b is lost; its ranks 2, 3 start there again when it is back" in moves.notes
        moves.back["c"].set()
        await moves.noted("ranks 4, 5 of host c start again on host c, replacements 1, 2 of 8")
        assert moves.started == [("c", {4: 1, 5: 2}, 6)]
        assert moves.attempt.agent_lost
        moves.back["b"].set()
        await moves.noted("ranks 2, 3 of host b start again on host b, replacements 3, 4 of 8")
        assert moves.started[1:] == [("b", {2: 3, 3: 4}, 4)]
        assert not moves.attempt.agent_lost
        states = {rank["rank"]: (rank["host"], rank["state"]) for rank in moves.attempt.described()}
        assert states == {0: ("a", "starts"), 1: ("a", "starts")} | {
            rank: (host, "waits") for rank, host in zip(range(2, 6), "bbcc", strict=True)
        }
        moves.members |= {1, 2, 3, 4}
        await moves.ended(task)
        assert moves.attempt.failure is None

    asyncio.run(moved())


def test_a_host_that_is_back_takes_the_ranks_of_another_if_its_own_have_moved(at_once: None) -> None:
    async def moved() -> None:
        moves = Moves([Spare(HostEntry("d", 2), Told("d"))])
        task = asyncio.create_task(moves.attempt.run())
        moves.agents["b"].says.put_nowait(None)
        await moves.noted("host b is lost; when it is back, it is a spare host")
        assert moves.started == [("d", {2: 1, 3: 2}, 6)]
        moves.agents["c"].says.put_nowait(None)
        await moves.noted("host c is lost; its ranks 4, 5 start there again when it is back")
        moves.back["b"].set()
        await moves.noted("ranks 4, 5 of host c start again on host b, replacements 3, 4 of 8")
        assert moves.spares.agents == []
        moves.back["c"].set()
        await moves.noted("host c is back")
        assert moves.spares.agents == [moves.new["c"]]
        assert len(moves.started) == 2
        moves.members |= {1, 2, 3, 4}
        await moves.ended(task)

    asyncio.run(moved())


def test_ranks_for_which_a_spare_host_is_being_made_ready_are_started_once(at_once: None) -> None:
    """One host is lost while the spare one makes ready for another, and is back before that has begun."""

    async def moved() -> None:
        moves = Moves([Spare(HostEntry("d", 2), Told("d"))])
        task = asyncio.create_task(moves.attempt.run())
        moves.prepared.clear()
        moves.agents["b"].says.put_nowait(None)
        await moves.until(lambda: moves.spares.agents == [])
        moves.agents["c"].says.put_nowait(None)
        await moves.noted("host c is lost; its ranks 4, 5 start there again when it is back")
        moves.back["c"].set()
        await moves.noted("host c is back")
        moves.prepared.set()
        await moves.until(lambda: len(moves.started) == 2)
        assert sorted((host, *numbers) for host, numbers, _ in moves.started) == [("c", 4, 5), ("d", 2, 3)]
        assert sorted(number for _, numbers, _ in moves.started for number in numbers.values()) == [1, 2, 3, 4]
        moves.members |= {1, 2, 3, 4}
        await moves.ended(task)

    asyncio.run(moved())


def test_a_host_that_is_back_too_late_gets_no_ranks(at_once: None) -> None:
    async def moved() -> None:
        moves = Moves([], most=3)
        task = asyncio.create_task(moves.attempt.run())
        for name in "bc":
            await moves.lose(name)
        moves.back["b"].set()
        await moves.noted("ranks 2, 3 of host b start again on host b, replacements 1, 2 of 3")
        moves.back["c"].set()
        await moves.noted(
            "ranks 4, 5 of host c need 2 replacements, and 1 of 3 are left (--max-replacements): they are not started "
            "again"
        )
        moves.members |= {1, 2}
        await moves.ended(task)
        assert len(moves.started) == 1
        assert moves.attempt.failure is None

    asyncio.run(moved())


def test_a_host_whose_agent_does_not_answer_is_lost_and_its_connection_ended(
    at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "TELLING_SECONDS", 0.1)

    async def moved() -> None:
        moves = Moves([], patience=0.3)
        task = asyncio.create_task(moves.attempt.run())
        await asyncio.sleep(1.0)
        assert not moves.notes  # all answer
        moves.agents["b"].is_stopped = True
        why = "its agent has not answered for 0 s: it is stopped, or its host hangs or is out of reach"
        lost = f"host b: {why}; the job may go on with 4 of 6 ranks"
        await moves.until(lambda: len(moves.notes) == 2, 5.0)
        assert moves.notes == [lost, "host b is lost; its ranks 2, 3 start there again when it is back"]
        assert moves.agents["b"].closed[0] == 0.0
        assert not moves.agents["a"].closed + moves.agents["c"].closed
        moves.back["b"].set()
        await moves.noted("ranks 2, 3 of host b start again on host b, replacements 1, 2 of 8")
        await asyncio.sleep(1.0)
        assert len(moves.notes) == 4  # with "host b is back": nobody else is lost
        await moves.ended(task)

    asyncio.run(moved())


def test_a_host_whose_agent_is_stopped_ends_a_job_that_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "TELLING_SECONDS", 0.1)

    async def ended() -> JobFailure | None:
        moves = Moves([], patience=0.3)
        moves.attempt._min_ranks = 6
        moves.agents["c"].is_stopped = True
        for host, ranks in (("a", (0, 1)), ("b", (2, 3))):
            for rank in ranks:  # all the others have ended
                moves.agents[host].report_end(rank, 0)
        await within(10, moves.attempt.run())
        await moves.spares.close()
        return moves.attempt.failure

    failure = asyncio.run(ended())
    assert failure is not None
    assert (
        failure.what
        == "host c: its agent has not answered for 0 s: it is stopped, or its host hangs or is out of reach"
    )
    assert failure.host_ranks == (4, 5)


def disputed(words: str, size: int) -> dict[str, Any]:
    return {"call": (0, 7, words, "p"), "size": size, "message": "ranks disagree", "named": None}


def test_nobody_is_started_again_after_a_failure_that_stands_on_all_ranks(at_once: None) -> None:
    """Rank 3 may be replaced, which was killed before; rank 1 fails as all will, and a host is lost meanwhile."""

    async def ended() -> None:
        moves = Moves([Spare(HostEntry("d", 2), Told("d"))])
        task = asyncio.create_task(moves.attempt.run())
        moves.agents["b"].report_end(3, -9)
        await moves.until(lambda: any("rank 3 is started again" in note for note in moves.notes))
        moves.members.add(1)
        before = list(moves.notes)
        moves.agents["a"].report_end(1, 1, is_final=True, disputed=disputed("A", 6))
        moves.agents["b"].report_end(2, 1, is_final=True, disputed=disputed("B", 6))
        moves.agents["c"].says.put_nowait(None)
        await moves.until(lambda: moves.attempt.agent_lost)
        assert moves.attempt.shown_failure() == {
            "kind": "Mismatch",
            "ranks": [1, 2],
            "text": "ranks disagree on call number 7 of communicator 0, and no side has most of them: rank 1 called A, "
            "rank 2 called B",
        }
        moves.agents["a"].report_end(0, 1, is_final=True, disputed=disputed("B", 6))
        moves.agents["b"].report_end(3, 1, is_final=True, disputed=disputed("B", 6))
        await within(10, task)
        await moves.spares.close()
        assert (moves.notes, moves.started) == (before, [])
        sent = [each["rank"] for agent in moves.agents.values() for each in agent.sent if each["kind"] == "replace"]
        assert sent == [3]

    asyncio.run(ended())


def test_the_failure_that_is_shown_is_forgotten_when_its_rank_is_back() -> None:
    async def told() -> None:
        moves = Moves([])
        task = asyncio.create_task(moves.attempt.run())
        assert moves.attempt.shown_failure() is None
        moves.agents["b"].report_end(2, 3)
        await moves.until(lambda: len(moves.notes) == 2)
        moves.agents["a"].report_end(0, 1, blames=2)
        await moves.until(lambda: len(moves.notes) == 4)
        shown = moves.attempt.shown_failure()
        assert shown is not None
        assert (shown["kind"], shown["ranks"]) == ("", [2])
        assert shown["text"].startswith("rank 2 on host b failed: exit code 3, after ")
        moves.members.add(1)
        shown = moves.attempt.shown_failure()
        assert shown is not None
        assert shown["ranks"] == [0]
        moves.members.add(2)
        assert moves.attempt.shown_failure() is None
        await moves.ended(task)

    asyncio.run(told())


async def failing(moves: Moves, rank: int, code: int, blames: int | None = None) -> None:
    """Let a rank end, and return when the launcher has heard of it."""
    agent = moves.attempt.agents[rank // 2][1]
    assert isinstance(agent, Told)
    agent.report_end(rank, code, blames=blames)
    await moves.until(lambda: rank in moves.attempt._failed)


def test_a_loss_without_which_the_others_had_gone_on_is_not_why_the_job_ends() -> None:
    """Ranks 4 and 5 are killed as they hear of the loss of rank 3: that is one loss. Rank 1 fails later by itself."""

    async def named() -> JobFailure | None:
        moves = Moves([], most=0)
        task = asyncio.create_task(moves.attempt.run())
        await failing(moves, 3, -9)
        await failing(moves, 4, -6, blames=3)
        await failing(moves, 5, -9, blames=3)
        shown = moves.attempt.shown_failure()
        assert shown is not None
        assert shown["ranks"] == [3]
        moves.excluded |= {(3, 0), (4, 0), (5, 0)}
        await failing(moves, 1, 5)
        await failing(moves, 0, 1, blames=1)
        await moves.ended(task)
        return moves.attempt.failure

    failure = asyncio.run(named())
    assert failure is not None
    assert (failure.rank, failure.code) == (1, 5)
    assert failure.what.startswith("rank 1 on host a failed: exit code 5, after ")


@pytest.mark.parametrize("code", [-9, -6, 1])
def test_who_ends_as_it_hears_of_a_loss_is_of_it_though_the_others_have_gone_on(code: int) -> None:
    """Four ranks in a row end because of rank 5, the last of them when the others have left all of them behind."""

    async def named() -> JobFailure | None:
        moves = Moves([], most=0)
        task = asyncio.create_task(moves.attempt.run())
        await failing(moves, 5, -9)
        for rank in (0, 1, 2):
            await failing(moves, rank, code, blames=5)
        moves.excluded |= {(rank, 0) for rank in (0, 1, 2, 3, 5)}
        await failing(moves, 3, code, blames=5)
        await moves.ended(task)
        return moves.attempt.failure

    failure = asyncio.run(named())
    assert failure is not None
    assert (failure.rank, failure.code) == (5, 137)


def test_who_is_killed_after_the_others_and_it_had_gone_on_is_named_though_it_still_blames_who_was_lost_before() -> (
    None
):
    async def named() -> JobFailure | None:
        moves = Moves([], most=0)
        task = asyncio.create_task(moves.attempt.run())
        await failing(moves, 5, -9)
        moves.excluded.add((5, 0))
        await failing(moves, 0, -9, blames=5)
        for rank in (1, 2, 3):
            await failing(moves, rank, 1, blames=0)
        await moves.ended(task)
        return moves.attempt.failure

    failure = asyncio.run(named())
    assert failure is not None
    assert (failure.rank, failure.blames, failure.code) == (0, None, 137)


def test_ranks_that_are_stopped_are_ended_where_those_that_missed_them_have_failed(at_once: None) -> None:
    """Ranks 0 and 3 are stopped; the others find too few, and fail."""

    async def ended() -> tuple[Moves, JobFailure | None, list[str]]:
        moves = Moves([], most=0, patience=1.5)
        moves.attempt._min_ranks = 1
        task = asyncio.create_task(moves.attempt.run())
        moves.agents["a"].ranks[0] = moves.agents["b"].ranks[3] = True
        for rank in (1, 2):
            moves.agents["abc"[rank // 2]].report_end(rank, 1, blames=0)
        await asyncio.sleep(2.5)  # ranks 4 and 5 live, and may go on
        before = list(moves.notes)
        for rank in (4, 5):
            moves.agents["c"].report_end(rank, 1, blames=0)
        await within(10, task)
        await moves.spares.close()
        return moves, moves.attempt.failure, before

    moves, failure, before = asyncio.run(ended())
    assert len(before) == 2
    assert not any("stopped" in note for note in before)
    assert failure is not None
    assert (failure.rank, failure.code) == (0, 137)
    assert failure.what.startswith("rank 0 on host a was stopped, and was ended, after ")
    assert "rank 0 on host a, rank 3 on host b are all that is left, and stopped: they are ended" in moves.notes


def test_those_that_are_stopped_when_the_job_fails_are_named_together(at_once: None) -> None:
    async def ended() -> JobFailure | None:
        moves = Moves([], most=0)
        moves.attempt._min_ranks = 6
        moves.agents["a"].ranks[0] = moves.agents["b"].ranks[3] = True
        for rank in (1, 2, 4, 5):
            moves.agents["abc"[rank // 2]].report_end(rank, 1, blames=0)
        task = asyncio.create_task(moves.attempt.run())
        await moves.until(lambda: any(sent["kind"] == "signal" for sent in moves.agents["b"].sent), 10)
        for rank in (0, 3):
            moves.agents["ab"[rank // 2]].report_end(rank, -9)
        await within(10, task)
        return moves.attempt.failure

    failure = asyncio.run(ended())
    assert failure is not None
    assert failure.what.endswith("; it waited in vain for rank 0 on host a, rank 3 on host b, which are stopped")


def test_a_stopped_rank_that_nobody_has_missed_is_left_alone(at_once: None) -> None:
    """A debugger may hold it; the others have failed by themselves."""

    async def noted() -> list[str]:
        moves = Moves([], most=0, patience=0.5)
        moves.attempt._min_ranks = 1
        task = asyncio.create_task(moves.attempt.run())
        for rank in range(1, 6):
            moves.agents["abc"[rank // 2]].report_end(rank, 1)
        moves.agents["a"].ranks[0] = True
        await asyncio.sleep(3)
        assert 0 in moves.attempt._running
        moves.agents["a"].report_end(0, 0)
        await within(10, task)
        await moves.spares.close()
        return moves.notes

    assert not any("stopped" in note for note in asyncio.run(noted()))


def test_agents_that_have_to_finish_are_asked_for_no_sign_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "TELLING_SECONDS", 0.1)

    async def asked() -> tuple[int, int]:
        moves = Moves([], patience=0.1)
        task = asyncio.create_task(moves.attempt.run())
        await moves.until(lambda: {"kind": "beat"} in moves.agents["b"].sent, 5.0)
        moves.attempt._finishing = True
        before = [sent["kind"] for sent in moves.agents["b"].sent].count("beat")
        await asyncio.sleep(0.5)
        after = [sent["kind"] for sent in moves.agents["b"].sent].count("beat")
        moves.attempt._finishing = False
        await moves.ended(task)
        return before, after

    before, after = asyncio.run(asked())
    assert before == after > 0


def test_that_no_replacement_is_left_is_said_once_for_each_loss(at_once: None) -> None:
    async def told() -> list[str]:
        moves = Moves([], most=1)
        task = asyncio.create_task(moves.attempt.run())
        for rank in (0, 3, 5):
            await failing(moves, rank, -signal.SIGKILL)
        moves.attempt._running.discard(0)  # the replacement of rank 0
        await moves.ended(task)
        return moves.notes

    notes = asyncio.run(told())
    assert "rank 0 is started again, replacement 1 of 1" in notes
    assert [note for note in notes if "no replacement is left" in note] == [
        f"rank {rank} is not started again: no replacement is left (--max-replacements 1)" for rank in (3, 5)
    ]


def test_a_replacement_that_is_lost_counts_as_lost_again() -> None:
    """Four of six ranks are to be there: rank 2 is lost, its replacement too, then ranks 3 and 4."""

    async def ends() -> tuple[list[str], JobFailure | None]:
        moves = Moves([], most=1)
        moves.attempt._min_ranks = 4
        task = asyncio.create_task(moves.attempt.run())
        moves.agents["b"].report_end(2, -9)
        await moves.until(lambda: any("rank 2 is started again" in note for note in moves.notes))
        moves.members.add(1)
        moves.agents["b"].report_end(2, -11)
        await moves.until(lambda: len([note for note in moves.notes if "may go on" in note]) == 2)
        moves.excluded |= {(2, 0), (2, 1)}
        await failing(moves, 3, 5)
        moves.excluded.add((3, 0))
        await failing(moves, 4, 7)
        await moves.ended(task)
        return [note.rpartition("; ")[2] for note in moves.notes if "may go on" in note], moves.attempt.failure

    left, failure = asyncio.run(ends())
    assert left == [f"the job may go on with {count} of 6 ranks" for count in (5, 5, 4)]
    assert failure is not None
    assert (failure.rank, failure.code) == (4, 7)


def test_a_lost_host_is_why_the_job_ends_though_one_of_its_ranks_was_lost_before() -> None:
    async def named() -> JobFailure | None:
        moves = Moves([], most=0)
        moves.attempt._min_ranks = 5
        task = asyncio.create_task(moves.attempt.run())
        await failing(moves, 4, 9)
        moves.excluded.add((4, 0))
        moves.agents["c"].says.put_nowait(None)
        await moves.until(lambda: moves.attempt.agent_lost)
        await moves.ended(task)
        return moves.attempt.failure

    failure = asyncio.run(named())
    assert failure is not None
    assert (failure.rank, failure.ranks) == (None, (5,))
    assert failure.what.startswith("host c: ")
