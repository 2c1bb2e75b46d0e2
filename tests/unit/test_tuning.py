"""The arithmetic of tuning: turns, medians, who goes on and who wins, clocks; and the file that keeps it."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from topologies import CORE, card, nested

from multiring import tuner, tuning
from multiring.planner import Candidate, Tuned, choose
from multiring.tuning import FIELD, FIELD_OF_SHORT, FINALISTS, Heat

RACKS = nested([[2, 2], [2, 2]], [card(200), card(400), CORE])


def steps(candidate: Candidate) -> int:
    return sum(phase.steps for phase in candidate.prediction.phases)


def times(heat: Heat, usual: dict[str, float]) -> list[float]:
    """Seconds of each call: a slow first round, then each plan's usual time, once disturbed."""
    found = [usual[heat.plan(call)] for call in range(heat.calls)]
    found[: len(heat.plans)] = [9.0] * len(heat.plans)
    found[-1] = 5.0
    return found


def test_every_plan_is_tried_in_every_round_in_another_place() -> None:
    heat = Heat(("a", "b", "c", "d"), 4)
    order = [heat.plan(call) for call in range(heat.calls)]
    assert Counter(order) == dict.fromkeys("abcd", 4)
    assert [sorted(order[i : i + 4]) for i in range(0, 16, 4)] == [list("abcd")] * 4
    assert {order[i : i + 4].index("a") for i in range(0, 16, 4)} == {0, 1, 2, 3}


def test_neither_the_first_round_nor_one_disturbed_call_counts() -> None:
    usual = {"a": 0.3, "b": 0.2, "c": 0.4}
    heat = tuning.opening(list(usual), predicted=0.3)
    assert heat.times(times(heat, usual)) == usual


def test_short_calls_are_tried_more_often_but_not_without_end() -> None:
    calls = [tuning.opening("ab", predicted).calls for predicted in (1.0, 0.02, 0.001, 0.0)]
    assert calls == [8, 12, 96, 96]


def test_short_calls_try_a_plan_several_times_in_a_row_and_the_second_half_counts() -> None:
    heat = tuning.opening("abc", 1e-4)
    run = tuning.RUN_OF_SHORT
    order = "".join(heat.plan(call) for call in range(heat.calls))
    assert order.startswith("a" * run + "b" * run + "c" * run + "b" * run)
    seconds = [1.0 if call % run < run // 2 or call < 3 * run else 0.1 for call in range(heat.calls)]
    assert heat.times(seconds) == pytest.approx(dict.fromkeys("abc", 0.1))
    second = tuning.after(heat, seconds, "2026-11-23")
    assert isinstance(second, Heat)
    assert (second.rounds, second.run) == (heat.rounds, tuning.RUN_OF_FINALISTS)


def test_a_plan_has_the_mean_of_its_calls_but_for_the_slowest_quarter() -> None:
    heat = tuning.opening("abc", 1e-4)
    slow = {"a": 16, "b": 8, "c": 2}  # a call in so many
    found = heat.times([0.5 if call % slow[heat.plan(call)] == 1 else 0.1 for call in range(heat.calls)])
    assert found["a"] == found["b"] == pytest.approx(0.1)
    assert 0.2 < found["c"] < 0.3


def test_the_fastest_and_the_planners_choice_meet_again() -> None:
    usual = {"a": 0.9, "b": 0.2, "c": 0.4, "d": 0.1, "e": 0.8, "f": 0.3, "g": 0.5}
    heat = tuning.opening(list(usual), predicted=0.3)
    second = tuning.after(heat, times(heat, usual), "2026-11-21")
    assert isinstance(second, Heat)
    assert second.plans == ("a", "d", "b", "f", "c")
    assert len(second.plans) == FINALISTS
    assert second.rounds > heat.rounds
    usual["b"] = 0.05  # what counts is the second heat
    won = tuning.after(second, times(second, usual), "2026-11-21")
    assert won == Tuned("b", usual, "2026-11-21")


@pytest.mark.parametrize(("other", "winner"), [(0.99, "a"), (0.97, "b")])
def test_the_planners_choice_stays_unless_another_is_clearly_faster(other: float, winner: str) -> None:
    usual = {"a": 1.0, "b": other}
    heat = Heat(("a", "b"), 5, earlier=usual)
    won = tuning.after(heat, times(heat, usual), "2026-11-21")
    assert isinstance(won, Tuned)
    assert won.plan == winner


def test_calls_that_did_not_end_lose() -> None:
    heat = Heat(("a", "b"), 4, earlier={"a": 1.0, "b": 1.0})
    seconds = [np.inf if heat.plan(call) == "a" else 2.0 for call in range(heat.calls)]
    won = tuning.after(heat, seconds, "2026-11-21")
    assert isinstance(won, Tuned)
    assert won.plan == "b"


@pytest.mark.parametrize(("nbytes", "field"), [(4 << 10, FIELD_OF_SHORT), (256 << 10, FIELD), (4 << 20, FIELD)])
def test_few_plans_are_tried_and_they_differ(nbytes: int, field: int) -> None:
    choice = choose(RACKS, "all_reduce", nbytes)
    ranked = [choice.chosen, *choice.rejected]
    tried = tuning.contestants(choice)
    assert tried[: tuning.NEAREST] == tuple(ranked[: tuning.NEAREST])
    assert len({choice.plan_of(each).id for each in tried}) == len(tried) == field < len(ranked)
    assert any(len(each.stages) == 1 for each in tried)  # never slower than the best flat one
    assert min(map(steps, tried)) == min(map(steps, ranked))


def test_a_choice_without_alternatives() -> None:
    choice = choose(nested([1], [card(400), CORE]), "all_reduce", 1 << 20)
    assert len(tuning.contestants(choice)) == 1 + len(choice.rejected)


@pytest.mark.parametrize("ahead", [-1234.5, 0.25, 1e6])
def test_the_offset_of_a_clock(ahead: float) -> None:
    """Both leave 0.1 s after the later one has entered."""
    entered = np.array([[10.0, 10.5], [11.0, 11.0], [12.2, 12.0]])  # the reference, this rank
    left = entered.max(axis=1, keepdims=True) + 0.1
    reference = np.hstack([entered[:, :1], left])
    mine = np.hstack([entered[:, 1:], left]) + ahead
    assert tuning.offset(mine, reference) == pytest.approx(-ahead, abs=0.1)


def test_clocks_that_may_be_one_are() -> None:
    reference = np.array([[10.0, 10.3], [11.0, 11.3]])
    assert tuning.offset(reference + 0.2, reference) == 0.0


FOUND = {(0, 23, 0): Tuned("0123456789ab", {"0123456789ab": 0.25, "ba9876543210": 0.5}, "2026-11-21")}


def test_what_was_found_is_read_as_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "plans.json"
    assert tuner.read(file) == {}
    file.write_text(tuner.text(FOUND))
    assert tuner.read(file) == FOUND
    assert '"bytes": 4194304' in file.read_text()


@pytest.mark.parametrize(
    "spoilt",
    [
        "{",
        "[]",
        '{"tuned": [{}]}',
        tuner.text(FOUND).replace("0.25", '"x"'),
        tuner.text(FOUND).replace('"plan": "0123', '"plan": "9'),
    ],
)
def test_a_spoilt_file_is_named_and_done_without(tmp_path: Path, caplog: pytest.LogCaptureFixture, spoilt: str) -> None:
    file = tmp_path / "plans.json"
    file.write_text(spoilt)
    with caplog.at_level(logging.WARNING, "multiring"):
        assert tuner.read(file) == {}
    assert str(file) in caplog.text
    assert "remove it" in caplog.text
