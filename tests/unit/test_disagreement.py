"""The ranks that made another call than most, from what each says of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from multiring.launch.attempt import JobFailure, culprit, disagreement
from multiring.runtime.disagreement import OddRanks, Statement, judge
from multiring.runtime.flight_recorder import lost_ranks, odd_ranks

SIZE = 5
NO_SIDE = "ranks disagree on call number 7 of communicator 0, and no side has most of them: "


def disputed(words: str, plan: str = "p", call: tuple[int, int] = (0, 7)) -> Statement:
    return Statement(f"two of them and {words}", call, SIZE, words, plan)


@pytest.mark.parametrize(
    ("called", "ranks", "text"),
    [
        ("AABAA", (2,), "rank 2 called B where ranks 0, 1, 3 and 4 called A: call number 7 of communicator 0"),
        (
            "ABACA",
            (1, 3),
            "rank 1 called B, rank 3 called C where ranks 0, 2 and 4 called A: call number 7 of communicator 0",
        ),
        ("BBAAA", (0, 1), "ranks 0 and 1 called B where ranks 2, 3 and 4 called A: call number 7 of communicator 0"),
        ("AB-A-", (0, 1, 3), NO_SIDE + "ranks 0 and 3 called A, rank 1 called B"),
        ("ABB-A", (0, 1, 2, 4), NO_SIDE + "ranks 0 and 4 called A, ranks 1 and 2 called B"),
        ("A--AA", (0, 3, 4), "two of them and A"),
    ],
)
def test_the_ranks_that_most_others_outvote(called: str, ranks: tuple[int, ...], text: str) -> None:
    verdict = judge({rank: disputed(words) for rank, words in enumerate(called) if words != "-"})
    assert (verdict.ranks, verdict.text) == (ranks, text)


def test_calls_alike_but_for_the_plan_show_it() -> None:
    verdict = judge({rank: disputed("A", "qp"[rank != 3]) for rank in range(SIZE)})
    assert verdict.ranks == (3,)
    assert verdict.text.startswith("rank 3 called A by plan q where ranks 0, 1, 2 and 4 called A by plan p: ")


def test_who_has_made_no_such_call_and_who_speaks_of_another_have_no_part() -> None:
    said = {
        0: disputed("A"),
        1: disputed("B"),
        2: Statement("a message"),
        3: disputed("B", call=(0, 8)),
        4: disputed("A"),
    }
    assert judge({**said, 2: disputed("A")}).ranks == (1,)
    assert judge({2: said[2]}).text == "a message"


def test_of_a_message_those_are_at_fault_whom_others_name() -> None:
    said = {rank: Statement(f"told by {rank}", named=named) for rank, named in enumerate([3, 3, 3, 1, 3])}
    assert judge(said) == OddRanks((1, 3), "told by 1")
    assert judge({**said, 2: Statement("told by 2", named=2)}).ranks == (1, 3)  # it does not know of the other one
    failures = [JobFailure(f"rank {rank} failed", 1, rank, disputed=said[rank]) for rank in (4, 0, 3, 2)]
    assert disagreement(failures).what == "rank 3 failed; told by 3"


def test_the_failure_of_a_job_is_that_of_the_odd_rank_whoever_ended_first() -> None:
    failures = [
        JobFailure("rank 3 failed", 1, 3, disputed=disputed("A")),
        JobFailure("rank 0 failed", 1, 0, disputed=disputed("A")),
        JobFailure("rank 2 failed", 4, 2, disputed=disputed("B")),
        JobFailure("rank 1 failed", 1, 1, disputed=disputed("A")),
    ]
    found = disagreement(failures)
    assert culprit(failures) is failures[0]
    assert (found.rank, found.code) == (2, 4)
    assert found.what.startswith("rank 2 failed; rank 2 called B where ranks 0, 1 and 3 called A")


def lost(rank: int, apart: int = -1, kind: str = "PeerLost") -> Mapping[str, Any]:
    return {"failure": {"kind": kind, "rank": rank, "apart": apart, "message": ""}}


@pytest.mark.parametrize(
    ("told", "size", "ranks"),
    [
        ({0: lost(2), 1: lost(2), 2: lost(0)}, 4, []),  # two of four
        ({0: lost(2), 1: lost(2), 3: lost(2)}, 5, [2]),
        ({0: lost(1), 1: lost(0)}, 2, [1]),  # all have written: the word of the lowest rank
        ({1: lost(0), 0: lost(1), 2: lost(0)}, 3, [0]),
        ({rank: lost(1, 2) for rank in range(4)}, 4, [1, 2]),
        ({rank: lost(1, kind="CollectiveTimeout") for rank in range(4)}, 4, []),  # it has not made the call: that shows
        ({rank: lost(1, kind="Mismatch") for rank in range(4)}, 4, []),
        ({rank: lost(-1, kind="MultiringError") for rank in range(4)}, 4, []),
    ],
)
def test_the_ranks_whose_records_are_set_aside(told: Mapping[int, Any], size: int, ranks: list[int]) -> None:
    assert lost_ranks(told, size) == ranks


@pytest.mark.parametrize(
    ("called", "ranks"),
    [("AABAA", [2]), ("BBAAA", [0, 1]), ("AB-A-", []), ("AAA--", []), ("ABA-A", [1]), ("ABBAC", [1, 2, 4])],
)
def test_the_ranks_whose_records_are_read_last(called: str, ranks: list[int]) -> None:
    told = {
        rank: {"failure": {"kind": "Mismatch", "message": ""}, "disputed": [3, 7, words, "p"]}
        for rank, words in enumerate(called)
        if words != "-"
    }
    assert odd_ranks(told, {3: SIZE}) == ranks
