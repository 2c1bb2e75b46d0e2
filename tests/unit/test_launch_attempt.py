"""Which of several failures ended a job."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

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
