"""All ranks learn which one caused the failure of the others."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from multiring.errors import MultiringError, PeerLost, RendezvousError, ResourceError
from multiring.job import exchange
from multiring.job.exchange import Exchange
from multiring.job.store import Client, Server

SECRET = b"the secret of a test's job"


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server(SECRET, job="test", bind=["127.0.0.1"])
    yield server
    server.close()


def _outcomes(server: Server, size: int, failures: Mapping[int, MultiringError | None]) -> dict[int, BaseException]:
    """Return what each rank raises: those in ``failures`` fail with their error, or stay silent (None)."""

    def take_part(rank: int) -> None:
        store = Client([("127.0.0.1", server.port)], SECRET, job="test")
        exchange = Exchange(store, "test", rank, size, 30)
        try:
            with exchange.settling():
                with exchange.reporting("prove"):
                    if rank in failures:
                        time.sleep(0.1 * rank)
                        error = failures[rank]
                        assert error is not None
                        raise error
                exchange.round("prove", {})
        finally:
            store.close()

    taking_part = [rank for rank in range(size) if failures.get(rank, 0) is not None]
    with ThreadPoolExecutor(size) as pool:
        futures = {rank: pool.submit(take_part, rank) for rank in taking_part}
        found = {rank: future.exception(20) for rank, future in futures.items()}
    assert None not in found.values()
    return {rank: error for rank, error in found.items() if error is not None}


@pytest.mark.parametrize("zero_is_struck", [False, True])
def test_the_cause_and_not_its_consequences(server: Server, zero_is_struck: bool) -> None:
    failures: dict[int, MultiringError | None] = {
        1: RendezvousError("rank 2 has ended before it was attached", rank=2),
        2: PeerLost("rank 3 closed its connection", rank=3),
        3: ResourceError("out of shared memory"),
    }
    if zero_is_struck:
        failures[0] = PeerLost("rank 1 closed its connection", rank=1)
    errors = _outcomes(server, 5, failures)
    assert isinstance(errors[3], ResourceError)
    for rank in (0, 1, 2, 4):
        error = errors[rank]
        assert isinstance(error, RendezvousError)
        assert (str(error), error.rank) == ("rank 3 failed to join: out of shared memory", 3)


def test_a_rank_that_could_not_even_report(server: Server) -> None:
    began = time.monotonic()
    errors = _outcomes(
        server,
        4,
        {
            1: RendezvousError("rank 2 has ended before it was attached", rank=2),
            2: PeerLost("rank 3 closed its connection", rank=3),
            3: None,
        },
    )
    assert time.monotonic() - began < 15  # not the 30 s that ranks may take to come
    for rank in (0, 1):
        error = errors[rank]
        assert isinstance(error, RendezvousError)
        assert (str(error), error.rank) == ("rank 2 failed to join: rank 3 closed its connection", 3)
    assert isinstance(errors[2], PeerLost)  # its own words


def test_rank_zero_is_the_cause(server: Server) -> None:
    errors = _outcomes(server, 3, {0: ResourceError("out of shared memory"), 1: PeerLost("rank 0 is lost", rank=0)})
    assert isinstance(errors[0], ResourceError)
    assert [str(errors[rank]) for rank in (1, 2)] == ["rank 0 failed to join: out of shared memory"] * 2


def _claim(server: Server, where: str, monkeypatch: pytest.MonkeyPatch) -> Client:
    """A process on a host of its own says that it is rank 1; its connection to the store."""
    monkeypatch.setattr(exchange, "_process_space", lambda: where)
    store = Client([("127.0.0.1", server.port)], SECRET, job="test")
    try:
        Exchange(store, "test", 1, 3, 30).claim(store, where)
    except BaseException:
        store.close()
        raise
    return store


def test_a_rank_that_was_started_again_takes_its_place(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for where in ("a", "b", "b"):
        _claim(server, where, monkeypatch).close()


def test_another_process_of_the_rank_is_refused_and_all_hear_it(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = _claim(server, "a", monkeypatch)
    said = r"two processes say that they are rank 1 of 3, process \d+ on host a and process \d+ on host b: give each"
    with pytest.raises(RendezvousError, match=said) as refused:
        _claim(server, "b", monkeypatch)
    assert refused.value.rank == 1
    rank_0 = Client([("127.0.0.1", server.port)], SECRET, job="test")
    with pytest.raises(RendezvousError, match=said):  # though rank 2 has not come
        Exchange(rank_0, "test", 0, 3, 30).round("arrive", {})
    rank_0.close()
    first.close()


def test_who_serves_the_store_is_not_the_one_that_never_came(server: Server) -> None:
    """torch's rank 0 waits in the store that it serves until all others have connected, before it tells us anything."""
    store = Client([("127.0.0.1", server.port)], SECRET, job="test")
    exchange = Exchange(store, "test", 1, 3, 0.5, served_by=0)
    exchange.deadline = time.monotonic() - 4  # a second is left of the five more that rank 0 has to answer
    with pytest.raises(RendezvousError, match=r"^ranks 0, 2 did not arrive \(arrived: 1\), within 0\.5 s$") as raised:
        exchange.round("arrive", {})
    assert raised.value.rank == 2
    store.close()


def test_waiting_at_a_lasting_store_ends_too(server: Server) -> None:
    """While one waits there, it looks every second for others that claim its rank."""
    store = Client([("127.0.0.1", server.port)], SECRET, job="test")
    exchange = Exchange(store, "test", 1, 3, 1.5)
    exchange.claim(store, "here", lasting=True)
    began = time.monotonic()
    with pytest.raises(RendezvousError, match=r"^ranks 0, 2 did not arrive \(arrived: 1\), within 1\.5 s$") as raised:
        exchange.round("arrive", {})
    assert time.monotonic() - began < 20
    assert raised.value.rank == 0
    store.close()


def test_a_lost_store_does_not_hide_who_was_lost_before_it(server: Server) -> None:
    lost = RendezvousError("rank 0 of this host has ended before it was attached", rank=0)

    def fail() -> None:
        with exchange.settling(), exchange.reporting("prove"):
            server.close()
            raise lost

    with closing(Client([("127.0.0.1", server.port)], SECRET, job="test", served_by=0)) as store:
        exchange = Exchange(store, "test", 1, 3, 30, served_by=0)
        with pytest.raises(RendezvousError, match="has ended before it was attached") as raised:
            fail()
    assert raised.value is lost


def test_a_lost_store_names_the_rank_that_served_it(server: Server) -> None:
    with closing(Client([("127.0.0.1", server.port)], SECRET, job="test", served_by=0)) as store:
        server.close()
        with pytest.raises(
            RendezvousError, match=r"^the job's store was lost: .* \(rank 0, which serves it, "
        ) as raised:
            Exchange(store, "test", 1, 3, 30, served_by=0).round("arrive", {})
    assert raised.value.rank == 0
    with pytest.raises(RendezvousError, match="the job's store did not answer") as unreached:
        Client([("127.0.0.1", server.port)], SECRET, job="test", timeout=0.3, served_by=0)
    assert unreached.value.rank == 0
