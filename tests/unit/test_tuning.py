"""The arithmetic of tuning: turns, medians, who goes on and who wins, clocks; and the file that keeps it."""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from engines import COLLECTIVE, DTYPE, Rank, all_reduce_plan, in_threads, world
from topologies import CORE, card, nested

from multiring import _native
from multiring.errors import PeerLost
from multiring.planning.choice import Candidate, Tuned
from multiring.planning.planner import choose
from multiring.planning.speeds import NATIVE
from multiring.runtime import tuner, tuning
from multiring.runtime.clocks import GroupCalls
from multiring.runtime.plans import Plans
from multiring.runtime.tuning import MAX_CANDIDATES, RUNGS, Rung
from multiring.runtime.world import World

RACKS = nested([[2, 2], [2, 2]], [card(200), card(400), CORE])


def steps(candidate: Candidate) -> int:
    return sum(phase.steps for phase in candidate.prediction.phases)


def times(rung: Rung, usual: dict[str, float]) -> list[float]:
    """Seconds of each call: in the first rung a slow first round, then each plan's usual time, once disturbed."""
    found = [usual[rung.plan(call)] for call in range(rung.calls)]
    if rung.number == 0:
        found[: len(rung.plans) * rung.run] = [9.0] * len(rung.plans) * rung.run
    found[-1] = 5.0
    return found


def last(plans: str, *, run: int = 1) -> Rung:
    return Rung(tuple(plans), 8, run, len(RUNGS) - 1, dict.fromkeys(plans, 1.0))


def test_every_plan_is_tried_in_every_round_in_another_place() -> None:
    rung = Rung(("a", "b", "c", "d"), 4)
    order = [rung.plan(call) for call in range(rung.calls)]
    assert Counter(order) == dict.fromkeys("abcd", 4)
    assert [sorted(order[i : i + 4]) for i in range(0, 16, 4)] == [list("abcd")] * 4
    assert {order[i : i + 4].index("a") for i in range(0, 16, 4)} == {0, 1, 2, 3}


def test_the_round_that_warms_up_does_not_count() -> None:
    usual = {"a": 0.3, "b": 0.2, "c": 0.4}
    rung = Rung(tuple(usual), 2)
    seconds = [9.0, 0.1, 0.1] + [usual[rung.plan(call)] for call in range(3, 6)]
    assert rung.times(seconds) == pytest.approx(usual)
    later = replace(rung, number=1)
    assert later.times(seconds)["b"] < usual["b"]


def test_one_disturbed_call_does_not_count() -> None:
    usual = {"a": 0.3, "b": 0.2, "c": 0.4}
    rung = last("abc")
    assert rung.times(times(rung, usual)) == pytest.approx(usual)


def test_what_slows_rounds_down_is_no_plans_fault() -> None:
    """Three times as long from some call on, in the middle of a round, and back."""
    usual = {"a": 1.0, "b": 0.9, "c": 1.1, "d": 1.05}
    rung = last("abcd", run=4)
    slow = range(rung.calls * 3 // 10, rung.calls * 8 // 10)
    found = rung.times([usual[rung.plan(call)] * (3 if call in slow else 1) for call in range(rung.calls)])
    assert sorted(found, key=found.__getitem__) == list("badc")
    assert found["b"] / found["a"] == pytest.approx(0.9, rel=0.05)


def test_short_calls_are_tried_more_often_but_not_without_end() -> None:
    calls = [tuning.first_rung("ab", predicted).calls for predicted in (1.0, 0.004, 0.001, 0.0)]
    assert calls == [6, 12, 60, 96]


def test_short_calls_try_a_plan_several_times_in_a_row_and_the_second_half_counts() -> None:
    rung = tuning.first_rung("abc", 1e-4)
    run = RUNGS[0].longest_run
    order = "".join(rung.plan(call) for call in range(rung.calls))
    assert order.startswith("a" * run + "b" * run + "c" * run + "b" * run)
    seconds = [1.0 if call % run < run // 2 or call < 3 * run else 1e-4 for call in range(rung.calls)]
    assert rung.times(seconds) == pytest.approx(dict.fromkeys("abc", 1e-4))
    second = tuning.after(rung, seconds, "2026-11-23")
    assert isinstance(second, Rung)
    assert (second.rounds, second.run) == (RUNGS[1].rounds, RUNGS[1].longest_run)


def test_a_run_has_the_mean_of_its_calls_but_for_the_slowest_quarter() -> None:
    rung = tuning.first_rung("abc", 1e-4)
    slow = {"a": 16, "b": 8, "c": 2}  # a call in so many
    found = rung.times([0.5 if call % slow[rung.plan(call)] == 1 else 0.1 for call in range(rung.calls)])
    assert found["a"] == found["b"] == pytest.approx(0.1)
    assert 0.2 < found["c"] < 0.3


def test_the_fastest_and_the_planners_choice_meet_again() -> None:
    usual = {name: 0.1 + 0.01 * place for place, name in enumerate("ponmlkjihgfedcba")}  # the planner's is the slowest
    rung = tuning.first_rung(sorted(usual), predicted=0.3)
    second = tuning.after(rung, times(rung, usual), "2026-11-21")
    assert isinstance(second, Rung)
    assert second.plans == tuple("aponmlkjih")
    assert len(second.plans) == RUNGS[1].plans
    third = tuning.after(second, times(second, usual), "2026-11-21")
    assert isinstance(third, Rung)
    assert third.plans == tuple("apon")
    assert third.rounds > second.rounds
    usual["o"] = 0.05  # what counts is the last rung
    won = tuning.after(third, times(third, usual), "2026-11-21")
    assert isinstance(won, Tuned)
    assert (won.plan, won.day) == ("o", "2026-11-21")
    assert won.seconds == pytest.approx(usual)


@pytest.mark.parametrize(("other", "winner"), [(0.99, "a"), (0.97, "b")])
def test_the_planners_choice_stays_unless_another_is_clearly_faster(other: float, winner: str) -> None:
    rung = last("ab")
    won = tuning.after(rung, times(rung, {"a": 1.0, "b": other}), "2026-11-21")
    assert isinstance(won, Tuned)
    assert won.plan == winner


@pytest.mark.parametrize("plans", ["ab", "abcd"])
def test_calls_that_did_not_end_lose(plans: str) -> None:
    rung = last(plans)
    seconds = [2.0 if rung.plan(call) == "b" else np.inf for call in range(rung.calls)]
    won = tuning.after(rung, seconds, "2026-11-21")
    assert isinstance(won, Tuned)
    assert won.plan == "b"


@pytest.mark.parametrize("nbytes", [4 << 10, 256 << 10, 4 << 20])
def test_few_plans_are_tried_and_they_differ(nbytes: int) -> None:
    choice = choose(RACKS, "all_reduce", nbytes)
    ranked = [choice.chosen, *choice.rejected]
    tried = tuning.candidates_to_try(choice)
    assert tried[: tuning.TOP_PREDICTED] == tuple(ranked[: tuning.TOP_PREDICTED])
    assert len({each.plan.id for each in tried}) == len(tried) == MAX_CANDIDATES < len(ranked)
    assert any(len(each.stages) == 1 for each in tried)  # never slower than the best flat one
    assert min(map(steps, tried)) == min(map(steps, ranked))


def test_a_choice_without_alternatives() -> None:
    choice = choose(nested([1], [card(400), CORE]), "all_reduce", 1 << 20)
    assert len(tuning.candidates_to_try(choice)) == 1 + len(choice.rejected)


def test_a_trial_is_taken_once_and_has_its_times() -> None:
    trials = _native.Trials([5, 7, 5])
    assert [trials.take() for _ in range(2)] == [0, 1]
    assert not trials.over
    assert [trials.take() for _ in range(3)] == [2, None, None]
    assert trials.over
    assert [trials.handle(number) for number in range(3)] == [5, 7, 5]
    before = time.monotonic()
    trials.enter(0)
    trials.leave(0)
    (entered, left), *others = trials.stamps
    assert before <= entered <= left <= time.monotonic()
    assert others == [(0.0, np.inf)] * 2
    with pytest.raises(IndexError):
        trials.handle(3)


class Started:
    """A call that has ended, or fails."""

    def __init__(self, ended: float, fails: bool = False) -> None:
        self.ended, self.fails = ended, fails
        self.limits: list[float] = []

    def wait(self, timeout: float) -> None:
        self.limits.append(timeout)
        if self.fails:
            raise PeerLost("rank 1 is gone", rank=1)


def test_a_trial_that_goes_on_is_left_when_it_has_ended() -> None:
    trials = _native.Trials([5, 7, 5])
    first, last = Started(12.5), Started(0.0, fails=True)
    trials.enter(1)
    trials.go_on(1, first)
    trials.complete(2.0)
    entered, left = trials.stamps[1]
    assert 0 < entered <= time.monotonic()
    assert left == 12.5
    trials.go_on(2, last)
    with pytest.raises(PeerLost, match="rank 1 is gone"):
        trials.complete(0.0)
    assert first.limits[0] == pytest.approx(2.0, abs=0.5)
    assert [first.limits[1], *last.limits] == [0.0, 0.0]
    assert trials.stamps[2] == (0.0, np.inf)


def test_calls_take_trials_in_turn_and_then_ask_again() -> None:
    """Run, started and plain calls of one size are trials alike; a started one is timed from its entry to its end."""
    plans = [all_reduce_plan(2, method) for method in ("ring", "direct")]
    with world(2) as ranks:

        def program(rank: Rank) -> list[tuple[int, int]]:
            handles = [rank.install(plan) for plan in plans]
            trials = _native.Trials([handles[1], handles[0], handles[1]])
            answers, asked = [trials, handles[0]], []

            def choose_plan(*wanted: float) -> int | _native.Trials:
                asked.append(wanted)
                return answers.pop(0)

            calls = rank.engine.calls(rank.rank, 2, 20.0, choose_plan)
            x = np.arange(5.0) * (rank.rank + 1)
            call = _native.Call(COLLECTIVE["all_reduce"], x.ctypes.data, 5, DTYPE["float64"], 30.0)
            calls.run(call)
            work = calls.start(call, x)
            work.wait(20)
            assert calls.all_reduce_plain(x, "sum")
            trials.complete(20.0)
            stamps = trials.stamps
            assert trials.over
            assert asked == [(COLLECTIVE["all_reduce"], 40, 0, 30.0)]
            assert stamps[1][1] == work.ended
            assert all(0 < entered <= left <= time.monotonic() for entered, left in stamps)
            assert sorted(stamps) == stamps
            calls.run(call)
            assert asked == [(COLLECTIVE["all_reduce"], 40, 0, 30.0)] * 2
            np.testing.assert_array_equal(x, np.arange(5.0) * 24)
            return [rank.engine.installed_record(handle)[0] for handle in handles]

        assert in_threads(ranks, program) == [[2, 2], [2, 2]]


def test_what_was_found_is_kept_by_the_connections_that_the_job_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where nobody said how many there should be."""
    monkeypatch.setattr(tuner.cache, "folder", Path)

    def file(streams: int | None, said: int | None) -> Path:
        world = SimpleNamespace(
            settings=SimpleNamespace(wire="", reproducible=False, streams=said),
            links=streams and SimpleNamespace(streams=streams),
            speeds=NATIVE,
        )
        plans, group = SimpleNamespace(topology=RACKS), SimpleNamespace(hosts=["a"], size=4)
        return tuner._file(cast(Plans, plans), cast(World, world), cast(GroupCalls, group))

    assert file(4, None) == file(4, 4)
    assert len({file(None, None), file(1, None), file(3, None), file(4, None)}) == 4


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
        tuner.text(FOUND).replace("4194304", "1e999"),
        "[" * 200_000,
        b"\xff\x00\x1b" * 10_000,
    ],
    ids=["cut", "list", "empty", "word", "unknown", "endless", "deep", "binary"],
)
def test_a_spoilt_file_is_named_and_done_without(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, spoilt: str | bytes
) -> None:
    file = tmp_path / "plans.json"
    file.write_bytes(spoilt.encode() if isinstance(spoilt, str) else spoilt)
    with caplog.at_level(logging.WARNING, "multiring"):
        assert tuner.read(file) == {}
    assert str(file) in caplog.text
    assert "remove it" in caplog.text
    assert len(caplog.text) < 500 + len(str(file))


@pytest.mark.timeout(60)
def test_a_pipe_in_the_place_of_the_file_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "plans.json"
    os.mkfifo(file)
    with caplog.at_level(logging.WARNING, "multiring"):
        assert tuner.read(file) == {}
    assert "it is a pipe, and a regular file is needed" in caplog.text
