"""Jobs that try plans on their own calls: right results throughout, one plan in the end, kept for the next job."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import jobs
import pytest
import tuning_ranks
from tuning_ranks import CALLS

from multiring.runtime.tuning import MAX_CANDIDATES


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {"MULTIRING_TUNE": "1", "XDG_CACHE_HOME": str(tmp_path)}


def test_ranks_agree_and_the_next_job_knows(environment: dict[str, str], tmp_path: Path) -> None:
    first = jobs.run(tuning_ranks.reduce_until_tuned, 4, hosts="aabb", environment=environment)
    for found in first:
        assert (found["plan"], found["tuned_at"], found["tried"]) == (
            first[0]["plan"],
            first[0]["tuned_at"],
            first[0]["tried"],
        )
        assert found["plan"] in found["tried"]
        assert found["operations"] == CALLS + 11  # and none for the tuner
        assert len(found["tried"]) == min(found["candidates"], MAX_CANDIDATES)
        assert set(found["tried"]) <= set(found["used"])
        assert max(found["used"], key=found["used"].get) == found["plan"]
    assert 0 < first[0]["tuned_at"] < CALLS - 50
    assert "plans that were tried" in first[0]["text"]

    (file,) = tmp_path.rglob("*.json")
    (row,) = json.loads(file.read_text())["tuned"]
    assert (row["collective"], row["bytes"], row["plan"]) == ("all_reduce", 8192, first[0]["plan"])

    second = jobs.run(tuning_ranks.reduce_until_tuned, 4, 5, hosts="aabb", environment=environment)
    assert [(found["plan"], found["tuned_at"]) for found in second] == [(first[0]["plan"], 0)] * 4
    assert not (set(first[0]["tried"]) - {first[0]["plan"]}) & set(second[0]["used"])


def test_works_in_flight_over_the_end_of_a_rung(environment: dict[str, str]) -> None:
    sums = [[sum(4 * call + 6.0 for call in range(CALLS))] * 2] * 4
    assert jobs.run(tuning_ranks.many_at_once, 4, CALLS, environment=environment) == sums


def test_a_plan_that_is_given_is_used(environment: dict[str, str]) -> None:
    plan = jobs.run(tuning_ranks.reduce_until_tuned, 2, 1)[0]["plan"]
    found = jobs.run(
        tuning_ranks.reduce_until_tuned,
        2,
        100,
        environment={**environment, "MULTIRING_PLAN": plan},
    )
    assert [(each["plan"], each["tuned_at"], each["used"][plan]) for each in found] == [(plan, None, 101)] * 2


def test_a_plan_that_keeps_others_from_being_tried_is_logged_once(environment: dict[str, str]) -> None:
    outcomes = jobs.start(
        tuning_ranks.many_at_once, 2, 1, environment={**environment, "MULTIRING_PLAN": "0123456789ab"}
    ).wait()
    assert [outcome.code for outcome in outcomes] == [0, 0]
    said = "".join(outcome.error for outcome in outcomes)
    assert said.count("MULTIRING_PLAN=0123456789ab is given: no plans are tried, though MULTIRING_TUNE is set\n") == 1
    assert "MULTIRING_PLAN=0123456789ab is no candidate for all_reduce of 8 KB over 2 ranks, which has " in said


@pytest.mark.parametrize("hosts", [None, "aab"], ids=["shared", "mixed"])
@pytest.mark.parametrize("async_op", [False, True], ids=["synchronous", "started"])
def test_the_time_limit_holds_at_the_end_of_a_rung(
    async_op: bool, hosts: str | None, environment: dict[str, str]
) -> None:
    job = jobs.start(tuning_ranks.miss_the_end_of_a_rung, 3, async_op, hosts=hosts, environment=environment)
    assert job.line(0) == job.line(2) == "raised"
    job.signal(1, signal.SIGKILL)
    outcomes = job.wait(20)
    for rank in (0, 2):
        kind, culprit, collective, message, seconds = outcomes[rank].value
        assert (kind, culprit, collective) == ("CollectiveTimeout", 1, "all_reduce"), message
        assert message.startswith("all_reduce waited for the end of the trials of its plans: "), message
        assert "rank 1" in message
        assert seconds < 10
