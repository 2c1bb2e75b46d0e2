"""Messages from one rank to another: order, tags, sizes, within a host and over TCP."""

from __future__ import annotations

import numpy as np
import pytest
from engines import DTYPE, Rank, all_reduce_plan, in_threads, world
from test_engine import contribution

from multiring import _native as native
from multiring.errors import CollectiveTimeout, Mismatch, MultiringError

transports = pytest.mark.parametrize("apart", [False, True], ids=["inproc", "tcp"])


def hosts(n: int, apart: bool) -> list[int]:
    return list(range(n)) if apart else [0] * n


def send(rank: Rank, to: int, array: np.ndarray, tag: int = 0, timeout: float = 30.0) -> native.Work:
    d = native.describe(array)
    return rank.engine.send(0, to, tag, d.pointer, d.count, DTYPE[d.dtype], timeout, owner=array)


def recv(rank: Rank, source: int, array: np.ndarray, tag: int = 0, timeout: float = 30.0) -> native.Work:
    d = native.describe(array)
    return rank.engine.recv(0, source, tag, d.pointer, d.count, DTYPE[d.dtype], timeout, owner=array)


@transports
@pytest.mark.parametrize("count", [0, 1, 16_000, 17_000, 1_000_003])
def test_a_ring_of_messages(count, apart):
    n = 3
    with world(n, hosts(n, apart)) as ranks:

        def program(rank: Rank) -> None:
            for round_ in range(3):
                incoming = np.empty(count, np.float32)
                works = [
                    send(rank, (rank.rank + 1) % n, contribution(rank.rank + round_, count)),
                    recv(rank, (rank.rank - 1) % n, incoming),
                ]
                for work in works:
                    work.wait(20)
                np.testing.assert_array_equal(incoming, contribution((rank.rank - 1) % n + round_, count))

        in_threads(ranks, program)


@transports
@pytest.mark.parametrize("count", [100, 200_000])
def test_messages_are_received_in_another_order_than_sent(count, apart):
    """Far more than the credit covers; the last tag is received first, messages of one tag in their order."""
    tags, each = 30, 2
    with world(2, hosts(2, apart)) as ranks:

        def program(rank: Rank) -> None:
            if rank.rank == 0:
                works = [send(rank, 1, contribution(t * 10 + i, count), t) for t in range(tags) for i in range(each)]
                for work in works:
                    work.wait(30)
                return
            for tag in reversed(range(tags)):
                for i in range(each):
                    incoming = np.empty(count, np.float32)
                    recv(rank, 0, incoming, tag).wait(30)
                    np.testing.assert_array_equal(incoming, contribution(tag * 10 + i, count))

        in_threads(ranks, program)


@transports
def test_a_small_message_needs_no_receiver(apart):
    with world(2, hosts(2, apart)) as ranks:
        for value in range(10):
            send(ranks[0], 1, np.full(1000, value, np.int64)).wait(10)
        for value in range(10):
            incoming = np.empty(1000, np.int64)
            recv(ranks[1], 0, incoming).wait(10)
            assert (incoming == value).all()


@transports
def test_more_small_messages_than_the_credit_covers_wait_for_their_receiver(apart):
    count, messages = 8000, 60
    with world(2, hosts(2, apart)) as ranks:
        works = [send(ranks[0], 1, np.full(count, value, np.int64)) for value in range(messages)]
        with pytest.raises(CollectiveTimeout, match=r"waits for rank 1|send number"):
            works[-1].wait(0.2)
        for value in range(messages):
            incoming = np.empty(count, np.int64)
            recv(ranks[1], 0, incoming).wait(10)
            assert (incoming == value).all()
        for work in works:
            work.wait(10)


@transports
def test_messages_and_collectives_do_not_hinder_each_other(apart):
    n, count = 3, 300_000
    with world(n, hosts(n, apart)) as ranks:
        plan = all_reduce_plan(n, "direct", 1 << 16)

        def program(rank: Rank) -> None:
            early = send(rank, (rank.rank + 1) % n, contribution(rank.rank, count), 9)
            for shift in range(5):
                result = rank.run(plan, contribution(rank.rank + shift, count))
                np.testing.assert_array_equal(result, sum(contribution(r + shift, count) for r in range(n)))
            incoming = np.empty(count, np.float32)
            recv(rank, (rank.rank - 1) % n, incoming, 9).wait(20)
            early.wait(20)
            np.testing.assert_array_equal(incoming, contribution((rank.rank - 1) % n, count))

        in_threads(ranks, program)


@transports
def test_sizes_that_differ_are_a_mismatch(apart):
    with world(2, hosts(2, apart)) as ranks:

        def program(rank: Rank) -> BaseException | None:
            work = send(rank, 1, np.zeros(10)) if rank.rank == 0 else recv(rank, 0, np.zeros(11))
            try:
                work.wait(10)
                work = recv(rank, 1, np.zeros(1))
                work.wait(10)
            except MultiringError as error:
                return error
            return None

        for error in in_threads(ranks, program):
            assert isinstance(error, Mismatch)
            assert "send(count=10" in str(error)
            assert "send(count=11" in str(error)


def test_a_receive_that_nobody_answers_names_the_sender():
    with world(3) as ranks:
        with pytest.raises(
            CollectiveTimeout, match=r"recv number 0 from rank 2 with tag 4 .* waits for rank 2"
        ) as caught:
            recv(ranks[0], 2, np.zeros(3), 4, timeout=0.2).wait()
        assert caught.value.rank == 2


def test_strangers_are_refused():
    with world(2) as ranks:
        with pytest.raises(ValueError, match="rank 5 is not a member of communicator 0"):
            send(ranks[0], 5, np.zeros(3))
        with pytest.raises(ValueError, match="rank 0 is this rank itself in communicator 0"):
            recv(ranks[0], 0, np.zeros(3))
