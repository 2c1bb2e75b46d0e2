"""Survivors of a loss go on without a restart: who they are, what they computed, and who may not."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import jobs
import pytest
import shrink_ranks

QUICK = {"MULTIRING_HEARTBEAT_TIMEOUT": "3"}


@pytest.mark.parametrize(
    ("hosts", "victims"),
    [("aaaaa", [0, 3]), ("aabbc", [1, 4]), ("aabbc", [0, 1])],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value)),
)
def test_those_who_are_left_go_on(hosts: str, victims: list[int]) -> None:
    left = [rank for rank in range(len(hosts)) if rank not in victims]
    job = jobs.start(shrink_ranks.lose, len(hosts), victims, hosts=hosts, environment=QUICK)
    outcomes = job.wait()
    assert [outcomes[rank].code for rank in victims] == [-signal.SIGKILL] * len(victims)
    values = [outcomes[rank].value for rank in left]
    for rank, value in enumerate(values):
        assert value["blamed"] in victims
        assert (value["members"], value["rank"], value["size"]) == (left, rank, len(left))
        assert value["generation"] == 1
        assert value["calls"] >= shrink_ranks.LOST_AT - 1  # those before the loss count on
        # The call before the loss may have completed on some of them only.
        assert value["completed"] == min(other["done"] for other in values) - 1
        assert value["completed"] in (shrink_ranks.LOST_AT - 2, shrink_ranks.LOST_AT - 1)
    assert len({value["plan"] for value in values}) == 1


@pytest.mark.parametrize("setting", ["MULTIRING_TRACE", "MULTIRING_TUNE"])
def test_calls_of_the_library_itself_are_not_counted(setting: str, tmp_path: Path) -> None:
    value = {"MULTIRING_TRACE": str(tmp_path / "t.json"), "MULTIRING_TUNE": "1"}[setting]
    environment = {**QUICK, setting: value, "XDG_CACHE_HOME": str(tmp_path)}
    steps = 200  # more than any tuning takes
    outcomes = jobs.start(shrink_ranks.lose_after, 3, steps, environment=environment).wait()
    assert outcomes[1].code == -signal.SIGKILL
    values = [outcomes[rank].value for rank in (0, 2)]
    done = min(value["done"] for value in values)
    assert done in (steps - 1, steps)
    assert [value["completed"] for value in values] == [done - 1] * 2


def test_a_timeline_that_cannot_be_written_costs_a_warning(tmp_path: Path) -> None:
    directory = tmp_path / "removed"
    directory.mkdir()
    environment = {**QUICK, "MULTIRING_TRACE": str(directory / "t.json")}
    outcomes = jobs.start(shrink_ranks.lose_the_timeline_too, 3, str(directory), environment=environment).wait()
    for rank in (0, 2):
        assert outcomes[rank].value["members"] == [0, 2]
        (told,) = (line for line in outcomes[rank].error.splitlines() if "the timeline lacks events" in line)
        assert f"MULTIRING_TRACE={directory / 't.json'}: No such file" in told


@pytest.mark.parametrize(
    ("second", "when"),
    [(3, "join"), (2, "accepted"), (0, "accept"), (0, "decided"), (1, "meeting")],
)
def test_a_loss_while_they_agree(second: int, when: str) -> None:
    job = jobs.start(shrink_ranks.lose_while_shrinking, 5, 4, second, when, hosts="aabba", environment=QUICK)
    outcomes = job.wait()
    left = [rank for rank in range(4) if rank != second]
    assert outcomes[second].code == -signal.SIGKILL
    assert [outcomes[rank].value["members"] for rank in left] == [left] * 3
    assert len({outcomes[rank].value["generation"] for rank in left}) == 1
    # A membership that was accepted by all, or decided on, is one of its own.
    assert outcomes[left[0]].value["generation"] == (1 if when == "join" else 2)


@pytest.mark.parametrize("hosts", ["aaaaaa", "aabbab"])
@pytest.mark.parametrize("seconds", [0.02, 0.2, 0.5])
def test_who_shrinks_in_a_loop_comes_out_with_the_survivors_of_both_losses(seconds: float, hosts: str) -> None:
    outcomes = jobs.start(shrink_ranks.lose_in_a_loop, 6, 1, 2, seconds, hosts=hosts, environment=QUICK).wait()
    assert [outcomes[rank].code for rank in (1, 2)] == [-signal.SIGKILL] * 2
    values = [outcomes[rank].value for rank in (0, 3, 4, 5)]
    assert [value["members"] for value in values] == [[0, 3, 4, 5]] * 4
    assert len({value["generation"] for value in values}) == 1


@pytest.mark.parametrize("second", [0, 2])
def test_a_loss_as_clocks_are_compared_is_part_of_what_is_agreed_on(second: int, tmp_path: Path) -> None:
    environment = {**QUICK, "MULTIRING_TRACE": str(tmp_path / "t.json")}
    outcomes = jobs.start(shrink_ranks.lose_as_clocks_are_compared, 5, second, environment=environment).wait()
    left = [rank for rank in range(4) if rank != second]
    values = [outcomes[rank].value for rank in left]
    assert [(value["members"], value["generation"]) for value in values] == [(left, 2)] * 3
    assert {value["completed"] for value in values} <= {shrink_ranks.LOST_AT - 2, shrink_ranks.LOST_AT - 1}
    assert len({value["completed"] for value in values}) == 1


def test_a_loss_while_they_attach_each_other() -> None:
    outcomes = jobs.start(shrink_ranks.lose_while_attaching, 5, environment=QUICK).wait()
    assert outcomes[2].code == -signal.SIGKILL
    for rank in (0, 1, 3):
        assert (outcomes[rank].value["members"], outcomes[rank].value["generation"]) == ([0, 1, 3], 2)


@pytest.mark.parametrize("hosts", ["aaaaa", "aabbc"])
def test_those_who_had_met_and_those_who_had_not_begin_at_the_same_step(hosts: str) -> None:
    started = jobs.start(shrink_ranks.lose_the_leader_after_some_have_met, 5, hosts=hosts, environment=QUICK)
    outcomes = started.wait()
    assert outcomes[0].code == -signal.SIGKILL
    others = [outcomes[rank].value for rank in (1, 2, 3)]
    met = others.pop(next(index for index, value in enumerate(others) if len(value["begun"]) == 2))
    assert met["generations"] == [1, 2]
    assert met["begun"][0] == met["begun"][1]
    assert met["begun"][0] in (shrink_ranks.LOST_AT - 1, shrink_ranks.LOST_AT)
    assert others == [{"begun": met["begun"][1:], "generations": [2]}] * 2


def test_less_than_half_may_not_go_on() -> None:
    outcomes = jobs.start(shrink_ranks.lose, 3, [0, 1], environment=QUICK).wait()
    assert "of the 3 ranks only rank 2 was found, in" in outcomes[2].value["refused"]
    assert outcomes[2].value["seconds"] < 10


def test_of_two_halves_that_with_rank_zero_goes_on() -> None:
    with_zero = jobs.start(shrink_ranks.lose, 2, [1], environment=QUICK).wait()
    assert (with_zero[0].value["members"], with_zero[0].value["size"]) == ([0], 1)
    without = jobs.start(shrink_ranks.lose, 2, [0], environment=QUICK).wait()
    assert "of the 2 ranks only rank 1 was found, in" in without[1].value["refused"]


@pytest.mark.parametrize("hosts", ["aaa", "abc"])
def test_an_excluded_rank_that_wakes_up_raises(hosts: str, tmp_path: Path) -> None:
    end = tmp_path / "end"
    job = jobs.start(shrink_ranks.stop_and_wake, 3, str(end), hosts=hosts, environment=QUICK)
    try:
        for rank in range(3):
            job.line(rank)
        time.sleep(0.5)
        job.signal(1, signal.SIGSTOP)
        assert [job.line(rank) for rank in (0, 2)] == ["went on", "went on"]
        job.signal(1, signal.SIGCONT)
        assert job.line(1) == "refused"
    finally:
        job.signal(1, signal.SIGCONT)
        end.touch()
        outcomes = job.wait()
    assert "the job went on as generation 1 without this rank, which was rank 1" in outcomes[1].value["refused"]
    assert [outcomes[rank].value["members"] for rank in (0, 2)] == [[0, 2]] * 2


def test_a_rank_that_was_late_stays_a_member() -> None:
    values = jobs.run(shrink_ranks.late, 3)
    assert [value["members"] for value in values] == [[0, 1, 2]] * 3
    assert {value["blamed"] for value in values} == {1}


def test_a_wait_that_was_given_up_is_no_loss_yet() -> None:
    values = jobs.run(shrink_ranks.late_for_a_wait, 3)
    assert [value["members"] for value in values] == [[0, 1, 2]] * 3
    for rank in (0, 2):
        waited, refused = values[rank]["told"]
        assert "s of wait(); the work goes on" in waited
        assert refused.startswith("no rank was lost: shrink() is called after ")
        assert "wait() without a limit, until it ends or raises by its own timeout" in refused


def without(late: int, size: int, timeout: float, said: str, folder: Path, **environment: str) -> list[jobs.Outcome]:
    """Kill the last rank, let rank ``late`` shrink once the others say ``said``, and return the outcomes."""
    go, end = folder / "go", folder / "end"
    job = jobs.start(shrink_ranks.do_something_else, size, late, timeout, str(go), str(end), environment=environment)
    others = [rank for rank in range(size - 1) if rank != late]
    try:
        assert [job.line(rank) for rank in others] == [said] * len(others)
        go.touch()
        assert job.line(late) == "refused"
    finally:
        go.touch()
        end.touch()
        outcomes = job.wait()
    return outcomes


@pytest.mark.parametrize(("size", "late"), [(4, 2), (5, 0), (3, 1)])
def test_a_rank_that_does_not_call_shrink_is_named(size: int, late: int, tmp_path: Path) -> None:
    environment = {"MULTIRING_HEARTBEAT_TIMEOUT": "5", "MULTIRING_LATE_WARNING": "1"}
    enough = size > 3
    outcomes = without(late, size, 4.0, "went on" if enough else "refused", tmp_path, **environment)
    others = [rank for rank in range(size - 1) if rank != late]
    reason = f"rank {late} lives, and has not called shrink()"
    for rank in others:
        if enough:
            assert outcomes[rank].value["members"] == others
        else:
            assert outcomes[rank].value["refused"].endswith(f"without them; {reason}")
    for told in ("this rank has waited for others in shrink() for", "this rank waits no longer in shrink(), after"):
        assert any(told in line and line.endswith(reason) for line in outcomes[others[0]].error.splitlines())
    if enough:
        assert "it did not answer the others, or did not call shrink(), in time" in outcomes[late].value["refused"]


@pytest.mark.parametrize("late", [0, 2])
def test_a_rank_that_does_not_call_shrink_is_waited_for_no_longer_than_asked(late: int, tmp_path: Path) -> None:
    """However long a rank may be silent before it counts as lost: this one answers."""
    heartbeat = 40.0
    outcomes = without(late, 5, 1.0, "went on", tmp_path, MULTIRING_HEARTBEAT_TIMEOUT=f"{heartbeat:g}")
    others = [rank for rank in range(4) if rank != late]
    for rank in others:
        assert outcomes[rank].value["members"] == others
        assert outcomes[rank].value["seconds"] < heartbeat / 2


def test_without_a_loss_there_is_nothing_to_shrink() -> None:
    for told in jobs.run(shrink_ranks.shrink_without_a_loss, 2):
        assert told[0].startswith(
            "no rank was lost: shrink() is called after the PeerLost or CollectiveTimeout of a call"
        )
        assert told[1:] == ["Mismatch"] * 2
