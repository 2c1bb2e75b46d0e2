"""Which of several failures ended a job."""

from __future__ import annotations

from multiring.launch.attempt import Failure, culprit


def failed(rank: int | None, blames: int | None = None) -> Failure:
    return Failure(f"rank {rank}", 1, rank, blames)


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
