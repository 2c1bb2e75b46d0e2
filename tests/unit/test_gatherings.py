"""Ranks gather anew when one is lost before all have met, or all learn why they cannot."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing

import pytest

from multiring.errors import RendezvousError, ResourceError
from multiring.job.exchange import Exchange, RankLost
from multiring.job.gatherings import ROUNDS, Gatherings, end_of, key_of
from multiring.job.store import Client, Server

SECRET = b"the secret of a test's job"
PREFIX = "multiring/test/4"


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server(SECRET, job="test", bind=["127.0.0.1"])
    yield server
    server.close()


@pytest.fixture
def gatherings(server: Server) -> Gatherings:
    return Gatherings(server, "test", 4)


def client(server: Server) -> Client:
    return Client([("127.0.0.1", server.port)], SECRET, job="test")


def gather(
    server: Server,
    rank: int,
    number: int,
    before: Callable[[str], None] = lambda name: None,
    rounds: tuple[str, ...] = ROUNDS,
) -> list[list[int]]:
    """Return what rank ``rank`` of 3 learns in each of the ``rounds``; ``before`` runs first in each, and may raise."""
    with closing(client(server)) as store:
        exchange = Exchange(store, key_of(PREFIX, number), rank, 3, 30)
        exchange.settle_in(store, ROUNDS[-1])
        found = []
        with exchange.settling():
            for name in rounds:
                with exchange.reporting(name):
                    before(name)
                records, _ = exchange.round(name, {"value": 10 * rank + len(name)})
                found.append([record["value"] for record in records])
        return found


def error_of(future: Future[list[list[int]]]) -> BaseException:
    error = future.exception(20)
    assert error is not None
    return error


def fails(error: Exception) -> Callable[[str], None]:
    def fail(name: str) -> None:
        if name == "prove":
            raise error

    return fail


def test_all_gather_anew_when_one_is_lost_and_then_no_more(server: Server, gatherings: Gatherings) -> None:
    with ThreadPoolExecutor(3) as pool:
        others = [pool.submit(gather, server, rank, 1) for rank in (0, 2)]
        time.sleep(0.5)
        assert not gatherings.have_met()
        assert gatherings.lose(1)
        for error in map(error_of, others):
            assert isinstance(error, RankLost)
            assert error.rank == 1
        found = [pool.submit(gather, server, rank, 2) for rank in range(3)]
        for future in found:
            assert future.result(20) == [[len(name), 10 + len(name), 20 + len(name)] for name in ROUNDS]
    assert gatherings.have_met()
    assert not gatherings.lose(2)
    gatherings.fail(2, "too late")
    with closing(client(server)) as store:
        assert end_of(store, PREFIX, 1) == {"lost": 1}
        assert "verdict" in (end_of(store, PREFIX, 2) or {})
        assert end_of(store, PREFIX, 3) is None


@pytest.mark.parametrize("notices", [0, 2])
def test_who_notices_a_loss_waits_until_the_launcher_knows_it(
    server: Server, gatherings: Gatherings, notices: int
) -> None:
    lost = RendezvousError("rank 1 has ended before it was attached", rank=1)
    with ThreadPoolExecutor(3) as pool:
        killed = pool.submit(gather, server, 1, 1, rounds=ROUNDS[:1])
        others = [
            pool.submit(gather, server, rank, 1, fails(lost) if rank == notices else lambda name: None)
            for rank in (0, 2)
        ]
        time.sleep(2.5)
        assert killed.result(20) == [[6, 16, 26]]
        with closing(client(server)) as store:
            assert end_of(store, PREFIX, 1) is None
        assert gatherings.lose(1)
        assert [type(error_of(future)) for future in others] == [RankLost, RankLost]


def test_who_fails_of_itself_fails_all(server: Server, gatherings: Gatherings) -> None:
    with ThreadPoolExecutor(3) as pool:
        failing = pool.submit(gather, server, 1, 1, fails(ResourceError("out of shared memory")))
        others = [pool.submit(gather, server, rank, 1) for rank in (0, 2)]
        assert str(error_of(failing)) == "out of shared memory"
        assert not gatherings.lose(1)
        for error in map(error_of, others):
            assert str(error) == "rank 1 failed to join: out of shared memory"
            assert not isinstance(error, RankLost)
    assert not gatherings.have_met()


def test_all_learn_that_nobody_is_started_again(server: Server, gatherings: Gatherings) -> None:
    with ThreadPoolExecutor(2) as pool:
        others = [pool.submit(gather, server, rank, 1) for rank in (0, 2)]
        time.sleep(0.2)
        gatherings.fail(1, "rank 1 was killed once too often")
        for error in map(error_of, others):
            assert isinstance(error, RendezvousError)
            assert (error.rank, str(error)) == (1, "rank 1 was killed once too often")
    with closing(client(server)) as store, pytest.raises(RendezvousError, match="once too often"):
        end_of(store, PREFIX, 1)
    assert not gatherings.lose(1)
