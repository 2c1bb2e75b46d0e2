"""The one of several failures that ended a job, and the states of its ranks meanwhile."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from multiring.launch import attempt as attempts
from multiring.launch.attempt import Attempt, JobFailure, Replacements, culprit
from multiring.launch.hosts import Assignment
from multiring.launch.output import Output


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
            account = {"kind": "exit", "rank": rank, "code": code, "blames": None, "account": None, "disputed": None}
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
