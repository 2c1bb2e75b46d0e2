"""Survivors admit newcomers in place of lost ranks: the members then, and the effects of a fault meanwhile."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import grow_ranks
import jobs
import pytest
from launching import wait_until

QUICK = {"MULTIRING_HEARTBEAT_TIMEOUT": "3"}


@pytest.mark.parametrize(("hosts", "victims"), [("aaaa", [0]), ("aabb", [2]), ("aabba", [0, 3])], ids=str)
def test_all_are_back(hosts: str, victims: list[int], tmp_path: Path) -> None:
    size, go = len(hosts), tmp_path / "go"
    job = jobs.start(grow_ranks.come_back, size, victims, str(go), hosts=hosts, environment=QUICK)
    for victim in victims:
        assert job.processes[victim].wait(30) == -signal.SIGKILL
    places = {victim: job.replace(victim) for victim in victims}
    wait_until(lambda: job.applied == len(victims), "all newcomers wait")
    go.touch()
    outcomes = job.wait()
    present = [places.get(rank, rank) for rank in range(size)]
    assert outcomes[present[1]].code == -signal.SIGKILL
    left = [rank for rank in range(size) if rank not in victims]
    for rank in range(size):
        if rank == 1:
            continue
        value = outcomes[present[rank]].value
        assert (value["rank"], value["size"], value["local"]) == (rank, size, hosts.count(hosts[rank]))
        assert (value["at_start"], value["generation"], value["oldest"]) == (list(range(size)), 2, left[0])
        if rank not in victims:
            before = [left.index(other) if other in left else -1 for other in range(size)]
            assert (value["members"], value["told"]) == (before, 2)
        assert value["after"] == [other for other in range(size) if other != 1]


def test_nobody_waits() -> None:
    assert jobs.run(grow_ranks.grow_alone, 3) == [{"told": [None] * 5}] * 3
    assert jobs.run(grow_ranks.grow_alone, 1) == [{"told": [None] * 5}]


@pytest.mark.parametrize(
    ("when", "hosts"),
    [("before answer", "aaaa"), ("before engine", "aaaa"), ("before verdict", "abbb"), ("after verdict", "abbb")],
)
def test_a_newcomer_is_killed_while_it_is_admitted(when: str, hosts: str, tmp_path: Path) -> None:
    go = tmp_path / "go"
    job = jobs.start(grow_ranks.lose_another, 4, 2, 1, when, str(go), hosts=hosts, environment=QUICK)
    killed = job.replace(2)
    wait_until(lambda: job.applied == 1, "it waits")
    go.touch()
    assert job.processes[killed].wait(30) == -signal.SIGKILL
    second = job.replace(2)
    outcomes = job.wait()
    for index in (0, 1, 3, second):
        value = outcomes[index].value
        assert value["at_start"] == [0, 1, 2, 3]
        # Nobody but one that was killed when all had met may have been a member meanwhile.
        assert value["lost"] in ([], [2]) if "verdict" in when else value["lost"] == []


@pytest.mark.parametrize(
    ("rank", "told"), [(0, "rank 0 cannot look who is to be admitted: no way to the store"), (1, None)]
)
def test_who_cannot_reach_the_store_harms_nobody(rank: int, told: str | None, tmp_path: Path) -> None:
    go = tmp_path / "go"
    job = jobs.start(grow_ranks.cannot_reach_the_store, 3, rank, str(go), hosts="aab", environment=QUICK)
    assert job.processes[2].wait(30) == -signal.SIGKILL
    newcomer = job.replace(2)
    wait_until(lambda: job.applied == 1, "it waits")
    go.touch()
    outcomes = job.wait()
    values = [outcomes[index].value for index in (0, 1, newcomer)]
    assert [value["at_start"] for value in values] == [[0, 1, 2]] * 3
    assert [value["first"] for value in values] == [[told], [told], []]
    if told is None:
        said = "nobody was admitted, and the job goes on with 2 ranks: no way to the store"
        assert said in outcomes[rank].error


@pytest.mark.parametrize(
    ("dying", "when"),
    [(0, "before members"), (0, "after members"), (1, "before engine"), (0, "before verdict"), (1, "after verdict")],
)
def test_a_member_is_killed_while_it_admits_others(dying: int, when: str, tmp_path: Path) -> None:
    go = tmp_path / "go"
    job = jobs.start(grow_ranks.lose_another, 4, dying, 0, when, str(go), hosts="aaba", environment=QUICK)
    newcomer = job.replace(2)
    wait_until(lambda: job.applied == 1, "it waits")
    go.touch()
    assert job.processes[dying].wait(30) == -signal.SIGKILL
    outcomes = job.wait()
    left = [rank for rank in (0, 1, 2, 3) if rank != dying]
    values = [outcomes[rank].value for rank in (1 - dying, newcomer, 3)]
    assert [value["at_start"] for value in values] == [left] * 3
    assert values[0]["lost"] == values[2]["lost"] == [2, dying] or values[0]["lost"] == values[2]["lost"] == [dying]


@pytest.mark.parametrize(("dying", "number", "agreed"), [(2, 1, [[0, 1, 2], [0, 1, -1, 2]]), (1, 0, [[0, -1, 2]])])
def test_a_loss_as_clocks_are_compared_is_part_of_what_is_agreed_on(
    dying: int, number: int, agreed: list[list[int]], tmp_path: Path
) -> None:
    go, environment = tmp_path / "go", {**QUICK, "MULTIRING_TRACE": str(tmp_path / "t.json")}
    job = jobs.start(
        grow_ranks.lose_as_clocks_are_compared, 4, dying, number, str(go), hosts="aaba", environment=environment
    )
    assert job.processes[2].wait(30) == -signal.SIGKILL
    newcomer = job.replace(2)
    wait_until(lambda: job.applied == 1, "it waits")
    go.touch()
    assert job.processes[newcomer if number else dying].wait(30) == -signal.SIGKILL
    if number:
        newcomer = job.replace(2)
    outcomes = job.wait()
    left = [rank for rank in range(4) if number or rank != dying]
    values = [outcomes[newcomer if rank == 2 else rank].value for rank in left]
    assert [value["at_start"] for value in values] == [left] * len(left)
    assert [value["agreed"] for value in values] == [[] if rank == 2 else agreed for rank in left]


def test_a_rank_whose_place_is_taken_raises(tmp_path: Path) -> None:
    end = tmp_path / "end"
    job = jobs.start(grow_ranks.stop_and_wake, 3, str(end), hosts="aab", environment=QUICK)
    try:
        for rank in range(3):
            assert job.line(rank) == "running"
        time.sleep(0.5)
        job.signal(1, signal.SIGSTOP)
        assert [job.line(rank) for rank in (0, 2)] == ["went on"] * 2
        newcomer = job.replace(1)
        assert [job.line(rank) for rank in (0, newcomer, 2)] == ["grown"] * 3
        job.signal(1, signal.SIGCONT)
        assert job.line(1) == "refused"
    finally:
        job.signal(1, signal.SIGCONT)
        end.touch()
        outcomes = job.wait()
    assert "of the 3 ranks only rank 1 was found, in" in outcomes[1].value["refused"]
    assert [outcomes[index].value["at_start"] for index in (0, newcomer, 2)] == [[0, 1, 2]] * 3


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"MULTIRING_STREAMS": "3"}, "MULTIRING_STREAMS is 3 on rank 2 (host b) and not set on rank 0 (host a)"),
        ({"OTHER_VERSION": "9.9"}, "install the same version everywhere"),
        ({"MULTIRING_INIT_TIMEOUT": "0.5"}, "was not admitted within 0.5 s (MULTIRING_INIT_TIMEOUT)"),
    ],
    ids=["setting", "version", "time"],
)
def test_a_newcomer_that_does_not_fit(wrong: dict[str, str], told: str, tmp_path: Path) -> None:
    go = tmp_path / "go"
    job = jobs.start(grow_ranks.refuse_the_first, 3, str(go), hosts="aab", environment=QUICK)
    first = job.replace(2, **wrong)
    if "MULTIRING_STREAMS" in wrong:
        wait_until(lambda: job.applied == 1, "it waits")
    else:
        job.processes[first].wait(30)
    go.touch()
    assert [job.line(rank) for rank in (0, 1)] == ["grew"] * 2
    second = job.replace(2)
    outcomes = job.wait()
    assert told in outcomes[first].value["refused"]
    values = [outcomes[index].value for index in (0, 1, second)]
    assert [value["at_start"] for value in values] == [[0, 1, 2]] * 3
    assert [value["first"] for value in values] == [[None], [None], []]
