"""A rank that enters its collectives later than the others is named by all of them, with what keeps it."""

from __future__ import annotations

import os
from pathlib import Path

import jobs
import pytest
import slow_ranks

from multiring.units import ranges

ENVIRONMENT = {"MULTIRING_TIMEOUT": "100"}

WHERE_IT_SLEEPS = "in steps_until: time.sleep(LATE_SECONDS)"

TELLS_WHY = Path("/proc/self/schedstat").exists()
"""True if the system tells a thread that sleeps from one that has no core."""


@pytest.mark.parametrize(
    ("size", "hosts", "late", "how", "works"),
    [
        (3, ["a", "b", "b"], [0], "sleeps", 3),
        (4, ["a", "a", "b", "b"], [3], "computes", 1),
        (5, ["a", "a", "b", "c", "c"], [3, 4], "sleeps", 1),
        (2, None, [1], "sleeps", 2),
    ],
)
def test_late_ranks_are_named_with_their_reason_until_they_are_late_no_longer(
    tmp_path: Path, size: int, hosts: list[str] | None, late: list[int], how: str, works: int
) -> None:
    page = tmp_path / "page.html"
    job = jobs.start(slow_ranks.some_late, size, late, how, works, str(page), hosts=hosts, environment=ENVIRONMENT)
    outcomes = job.wait(220)
    for outcome in outcomes:
        slowest = outcome.value["slowest"]
        assert slowest["ranks"] == late
        assert slowest["host"] == (hosts[late[0]] if hosts else slowest["host"])
        assert 0.1 <= slowest["share"] <= 1
        assert slowest["seconds"] > 0
        had_its_core = outcomes[late[0]].value["ran"] > 0.75
        reason = how if how == "computes" or TELLS_WHY else "does not run"
        assert slowest["reason"] == reason or (how == "computes" and not had_its_core)
        assert late in [each["ranks"] for each in outcome.value["so_far"]]
        assert slowest["where"] == "" or outcomes.index(outcome) in late
    told = page.read_text()
    named = f"<p>Rank{'s' * (len(late) > 1)} {ranges(late)} (host "
    (line,) = [line for line in told.splitlines() if named in line]
    assert ") kept the others waiting for " in line
    if how == "sleeps":
        assert WHERE_IT_SLEEPS in line
        for rank in late:
            assert WHERE_IT_SLEEPS in outcomes[rank].error
            assert WHERE_IT_SLEEPS in outcomes[rank].value["slowest"]["where"]
    assert all("for which the others wait" not in outcomes[rank].error for rank in range(size) if rank not in late)
    name = f"rank {late[0]} (host" if len(late) == 1 else f"host {hosts[late[0]]} (ranks {late[0]}, {late[1]})"
    named, over = (
        [line for line in outcomes[0].error.splitlines() if line.startswith(name) and what in line]
        for what in (") keeps the others waiting for ", ") no longer keeps the others waiting")
    )
    assert len(named) == len(over) >= 1  # more often where the machine was busy in between
    assert all("keeps the others waiting" not in outcome.error for outcome in outcomes[1:])


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_rank_whose_core_others_use_is_told_apart() -> None:
    reason = "has no core" if TELLS_WHY else "does not run"
    for outcome in jobs.run(slow_ranks.without_a_core, 3, reason, timeout=220, environment=ENVIRONMENT):
        assert outcome["slowest"]["ranks"] == [1]
        assert outcome["slowest"]["reason"] == reason


def test_nobody_is_named_where_all_take_as_long() -> None:
    assert jobs.run(slow_ranks.nobody_late, 4, 300) == [[]] * 4


def test_threads_that_wait_for_words_of_a_rank_are_not_held_up_by_it_and_not_looked_at() -> None:
    job = jobs.start(slow_ranks.beside_listeners, 4, 250, environment=ENVIRONMENT)
    outcomes = job.wait(220)
    for outcome in outcomes:
        assert outcome.value["known"] == []
        assert outcome.value["slowest"]["ranks"] == [1]
        assert " in listen" not in outcome.error
    assert WHERE_IT_SLEEPS in outcomes[1].value["slowest"]["where"]
    assert WHERE_IT_SLEEPS in outcomes[1].error


@pytest.mark.parametrize("pause", [None, 0.001, 0.01])
def test_a_rank_that_asks_whether_a_call_is_done_is_not_late(pause: float | None) -> None:
    for named in jobs.run(slow_ranks.beside_one_that_polls, 4, pause, timeout=220, environment=ENVIRONMENT):
        assert named == [[2]] * len(named)
        assert named
