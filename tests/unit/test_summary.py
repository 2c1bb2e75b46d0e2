"""The three lines at the end of a job: who was waited for in the end, not who stood next to it."""

from __future__ import annotations

from typing import Any

from multiring.launch.summary import slow_ranks, summary

HOSTS = dict.fromkeys(range(4), "a") | {3: "b"}


def account(waited_for: dict[str, float], calls: int = 10, **others: Any) -> dict[str, Any]:
    waiting = sum(waited_for.values())
    whole = {"seconds": 20.0, "calls": calls, "bytes": 3 << 20, "slow": [], "slow_links": [], "places": []}
    return {**whole, "in_calls": waiting + 1, "waiting": waiting, "waited_for": waited_for, **others}


def test_a_late_rank_makes_its_neighbours_late() -> None:
    """Every rank of a ring waits for the one before it: only the late one does not wait itself."""
    ring = {0: account({"3": 5.0}), 1: account({"0": 5.0}), 2: account({"1": 5.0}), 3: account({"2": 0.25})}
    lines = summary(ring, HOSTS)
    assert lines == [
        "4 ranks in 20 s; of one rank at most 10 calls and 3 MB sent",
        "the median rank was in calls for 6 s (30%), of these waiting for 5 s (25%)",
        "slowest: rank 3 (host b): others waited 5 s for it, it waited 250 ms for others",
    ]


def test_all_wait_for_one() -> None:
    told = {rank: account({"1": 2.0} if rank != 1 else {"0": 0.5}) for rank in range(3)}
    assert summary(told, HOSTS)[2].startswith("slowest: rank 1 (host a): others waited 4 s for it")


def test_nothing_to_say_of_ranks_that_did_nothing_together() -> None:
    assert summary({}, HOSTS) == []
    assert summary({0: account({})}, HOSTS) == []
    assert summary({0: account({}, calls=0), 1: account({}, calls=0)}, HOSTS) == []


def test_those_that_were_slow_are_told_with_what_kept_them() -> None:
    slow = [
        {"ranks": [1], "seconds": 4.0, "share": 0.5, "reason": "sleeps"},
        {"ranks": [2, 3], "seconds": 5.0, "share": 0.4, "reason": "computes"},
        {"ranks": [1], "seconds": 3.0, "share": 0.2, "reason": "sleeps"},
        {"ranks": [0], "seconds": 2.0, "share": 0.75, "reason": "has no core"},
        {"ranks": [0], "seconds": 1.0, "share": 0.1, "reason": "does not run"},
    ]
    told = {
        0: account({"1": 2.0}, slow=slow[:1], places=[["sleeps", "train.py:8 in wait"]]),
        1: account({"0": 0.5}, slow=slow, places=[["sleeps", "train.py:7 in load"], ["computes", "train.py:9"]]),
        3: account({"1": 1.0}, slow=slow[:2]),
    }
    assert summary(told, dict.fromkeys(range(4), "a") | {2: "b", 3: "b"})[3:] == [
        "rank 1 (host a) kept the others waiting for 2.6 s in 7 s: it slept between collectives, or waited for data, "
        "a lock or another process, most often at train.py:7 in load",
        "ranks 2-3 (host b) kept the others waiting for 2 s in 5 s: the latest of them computed between collectives",
        "rank 0 (host a) kept the others waiting for 1.5 s in 2 s: it was ready to run between collectives and had no "
        "core",
    ]


def test_slow_ranks_of_several_hosts_are_told_with_their_hosts_and_places() -> None:
    slow = [{"ranks": [0, 1, 3], "seconds": 8.0, "share": 0.25, "reason": "computes"}]
    told = {rank: account({}, slow=slow, places=[["computes", f"train.py:{7 * rank}"]]) for rank in (0, 2, 3)}
    (line,) = slow_ranks(told, HOSTS)
    assert line == (
        "rank 0 (host a), rank 1 (host a) and rank 3 (host b) kept the others waiting for 2 s in 8 s: the latest of "
        "them computed between collectives; rank 0 most often at train.py:0; rank 3 most often at train.py:21"
    )


def test_a_rank_that_was_slow_for_two_reasons_has_the_place_of_each() -> None:
    slow = [
        {"ranks": [1], "seconds": 4.0, "share": 0.5, "reason": "sleeps"},
        {"ranks": [1], "seconds": 2.0, "share": 0.5, "reason": "computes"},
    ]
    places = [["computes", "train.py:7"], ["sleeps", "train.py:3"], ["computes", "train.py:9"]]
    told = {0: account({}, slow=slow), 1: account({}, slow=slow, places=places)}
    assert [line.rpartition(" ")[2] for line in slow_ranks(told, HOSTS)] == ["train.py:3", "train.py:9"]


def test_ranks_that_no_window_has_looked_at_since_another_left_them_are_left_out() -> None:
    slow = [
        {"ranks": [1, 2], "seconds": 3.0, "share": 0.5, "reason": "sleeps"},
        {"ranks": [1], "seconds": 0.0, "share": 0.5, "reason": "sleeps"},
    ]
    (line,) = slow_ranks({0: account({}, slow=slow)}, HOSTS)
    assert line.startswith("ranks 1-2 (host a) kept the others waiting for 1.5 s in 3 s")


def test_links_that_were_slow_are_told_with_the_least_that_they_carried() -> None:
    of_c, there, both = "the links of host c", "the link from host a to host b", "the links between host a and host b"
    slow = [
        {"name": of_c, "seconds": 30.0, "bytes_per_second": 5e6, "expected": 5e7},
        {"name": there, "seconds": 12.0, "bytes_per_second": 2e7, "expected": 5e7},
        {"name": of_c, "seconds": 10.0, "bytes_per_second": 4.5e6, "expected": 5e7},
        {"name": both, "seconds": 8.0, "bytes_per_second": 1e6, "expected": 5e7},
        {"name": "several links between the hosts", "seconds": 7.0, "bytes_per_second": 1e6, "expected": 5e7},
    ]
    told = {0: account({"1": 2.0}, slow_links=slow[:2]), 1: account({"0": 0.5}, slow_links=slow)}
    assert summary(told, HOSTS)[3:] == [
        "the links of host c carried 4.5 MB/s, 9% of what the plan counts on, for 40 s",
        "the link from host a to host b carried 20 MB/s, 40% of what the plan counts on, for 12 s",
        "the links between host a and host b carried 1 MB/s, 2% of what the plan counts on, for 8 s",
    ]
