"""Functions that run as ranks in worker processes of somebody else's, as cluster engines have them."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import pickle
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
import pytest

import multiring as mr
from multiring.worker import RankAssignment, in_a_line, run_rank


class Sealed(Exception):
    """It cannot be pickled."""

    def __reduce__(self) -> Any:
        raise RuntimeError("sealed")


def total() -> list[int]:
    mr.all_reduce(x := np.arange(4) * (mr.rank() + 1))
    return [mr.rank(), *x.tolist()]


def fail(error: type[BaseException]) -> list[int]:
    if mr.rank() == 1:
        raise error("row 17")
    return total()


def generator() -> Iterator[int]:
    mr.barrier()
    return (number for number in range(mr.rank()))


def work(given: RankAssignment, function: Any, *args: Any) -> Any:
    outcome = run_rank(given, lambda: function(*args), pickle.dumps)
    assert not mr.is_initialized()
    return outcome


def stay(given: RankAssignment) -> Any:
    mr.init()
    try:
        return run_rank(given, total, pickle.dumps)
    finally:
        mr.shutdown()


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as found:
        yield found


@pytest.fixture
def assignments() -> Iterator[list[RankAssignment]]:
    with mr.StoreServer() as store:
        yield [
            RankAssignment(rank, 2, store.addresses, store.secret, "a host", {"init_timeout": 60}) for rank in range(2)
        ]


def outcomes(pool: ProcessPoolExecutor, assignments: list[RankAssignment], *call: Any) -> list[Any]:
    futures = [pool.submit(work, given, *call) for given in assignments]
    done, _ = concurrent.futures.wait(futures, 120)
    assert len(done) == 2
    return [future.result() for future in futures]


def test_workers_are_used_for_one_job_after_another(
    pool: ProcessPoolExecutor, assignments: list[RankAssignment]
) -> None:
    for _ in range(3):
        found = [pickle.loads(each) for each in outcomes(pool, assignments, total)]
        assert found == [[0, 0, 3, 6, 9], [1, 0, 3, 6, 9]]


@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt, Sealed])
def test_the_others_are_told_what_a_rank_raised(
    error: type[BaseException], pool: ProcessPoolExecutor, assignments: list[RankAssignment]
) -> None:
    began = time.monotonic()
    survivor, failed = outcomes(pool, assignments, fail, error)
    assert time.monotonic() - began < 60  # and not the time-out of a call
    words = f"{error.__name__}: row 17"
    assert failed.words == words
    assert not failed.is_consequence
    assert "in fail" in failed.trace
    assert survivor.is_consequence
    assert f"rank 1 (host a host) ended with {words}" in survivor.words
    raised = failed.exception()
    if error is ValueError:
        assert isinstance(raised, ValueError)
        assert raised.args == ("row 17",)
    else:  # it cannot be had, or would end who raises it
        assert type(raised) is mr.MultiringError
        assert str(raised) == f"rank 1 ended with {words}"


def test_a_result_that_cannot_be_pickled(pool: ProcessPoolExecutor, assignments: list[RankAssignment]) -> None:
    found = outcomes(pool, assignments, generator)
    assert any(isinstance(failed.exception(), TypeError) for failed in found)
    for rank, failed in enumerate(found):
        if isinstance(failed.exception(), TypeError):
            assert f"the result of rank {rank}, a generator, cannot be pickled" in failed.words
        else:  # the other one failed while this rank was still on its way out of their barrier
            assert failed.words.startswith(
                f"PeerLost: rank {1 - rank} (host a host) ended with TypeError: the result of"
            )


def test_a_worker_that_is_in_a_job_already(pool: ProcessPoolExecutor, assignments: list[RankAssignment]) -> None:
    failed = pool.submit(stay, assignments[1]).result(60)
    assert "the worker of rank 1 (host a host) is in a job of multiring already" in failed.words


@pytest.mark.parametrize("other", [{"version": "99.1"}, {"python": "2.7.18"}])
def test_another_version_than_the_drivers(other: dict[str, str], pool: ProcessPoolExecutor) -> None:
    given = RankAssignment(1, 2, ("127.0.0.1:1",), b"0123456789abcdef", "a host", {}, **other)
    failed = pool.submit(work, given, total).result(60)
    assert f"{next(iter(other.values()))}" in failed.words
    assert "the worker of rank 1 (host a host) has Python" in failed.words


def test_a_secret_is_not_shown() -> None:
    assert "0123456789abcdef" not in repr(RankAssignment(0, 1, (), b"0123456789abcdef", "a", {}))


def test_long_text_in_a_line() -> None:
    assert in_a_line("a\n  b\tc") == "a b c"
    assert in_a_line("0123456789", 4) == "01 ... 89"
