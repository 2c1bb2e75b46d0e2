"""Messages from one rank to another: order, tags, sizes, within a host and over TCP."""

from __future__ import annotations

import contextlib
import threading
import time

import numpy as np
import pytest
from engines import Rank, all_reduce_plan, contribution, in_threads, world

from multiring import _native as native
from multiring.errors import CollectiveTimeout, Mismatch, MultiringError, PeerLost

transports = pytest.mark.parametrize("apart", [False, True], ids=["inproc", "tcp"])


def hosts(n: int, apart: bool) -> list[int]:
    return list(range(n)) if apart else [0] * n


def send(rank: Rank, to: int, array: np.ndarray, tag: int = 0, timeout: float = 30.0) -> native.Work:
    return rank.send(to, array, tag, timeout)


def recv(rank: Rank, source: int, array: np.ndarray, tag: int = 0, timeout: float = 30.0) -> native.Work:
    return rank.recv(source, array, tag, timeout)


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


def test_many_messages_in_flight_are_no_cycle():
    """More than a rank tells of: that one waits for another in a message that is not told is no reason to accuse."""
    with world(2) as ranks:
        large = [np.zeros(1_000_000, np.float32) for _ in range(8)]
        sent = [send(ranks[0], 1, x, tag) for tag, x in enumerate(large)]
        waiting = threading.Thread(target=lambda: errors_of_wait(sent[0], 3.0))
        waiting.start()
        with pytest.raises(CollectiveTimeout, match=r"rank 0 \(host h0\)"):
            recv(ranks[1], 0, np.zeros(4, np.float32), tag=99, timeout=1.5).wait()
        waiting.join()


def errors_of_wait(work: native.Work, timeout: float) -> None:
    with contextlib.suppress(MultiringError):
        work.wait(timeout)


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
            assert str(error).startswith(
                "rank 0 (host h0) called send(count=10), rank 1 (host h1) called recv(count=11): ranks disagree on "
                "message number 0 with tag 0 from rank 0 to rank 1 of communicator 0"
            )


@transports
def test_a_large_message_to_somebody_who_expects_a_small_one_is_a_mismatch(apart):
    """Each waits for a sign of the other: the sender for a grant, the receiver for the message."""
    with world(2, hosts(2, apart)) as ranks:

        def program(rank: Rank) -> BaseException | None:
            work = send(rank, 1, np.zeros(100_000), 3) if rank.rank == 0 else recv(rank, 0, np.zeros(5, "int32"), 3)
            with pytest.raises(Mismatch) as caught:
                work.wait(10)
            return caught.value

        for error in in_threads(ranks, program):
            assert str(error).startswith(
                "rank 0 (host h0) called send(dtype=float64, count=100000), rank 1 (host h1) called recv(dtype=int32, "
                "count=5): ranks disagree on message number 0 with tag 3 from rank 0 to rank 1 of communicator 0"
            )


def test_a_receive_that_nobody_answers_names_the_sender():
    with world(3) as ranks:
        with pytest.raises(
            CollectiveTimeout, match=r"recv number 0 from rank 2 with tag 4 .* waits for rank 2"
        ) as caught:
            recv(ranks[0], 2, np.zeros(3), 4, timeout=0.2).wait()
        assert caught.value.rank == 2


@transports
@pytest.mark.parametrize("count", [0, 1, 16_000, 17_000, 1_000_003])
def test_receives_from_any_rank_get_every_message_once(count, apart):
    n = 4
    with world(n, hosts(n, apart)) as ranks:

        def program(rank: Rank) -> None:
            if rank.rank != 0:
                for work in [send(rank, 0, contribution(10 * rank.rank + i, count), 1) for i in range(3)]:
                    work.wait(20)
                return
            into = [np.empty(count, np.float32) for _ in range(3 * (n - 1))]
            heard = [0] * n
            for work, x in [(recv(rank, native.ANY_SOURCE, x, 1), x) for x in into]:
                work.wait(20)
                np.testing.assert_array_equal(x, contribution(10 * work.other + heard[work.other], count))
                heard[work.other] += 1
            assert heard == [0] + [3] * (n - 1)

        in_threads(ranks, program)


@transports
@pytest.mark.parametrize("count", [7, 100_000])
def test_messages_that_wait_are_taken_in_the_order_of_their_arrival(count, apart):
    n = 4
    order = [2, 3, 1, 1, 3, 2]
    with world(n, hosts(n, apart)) as ranks:
        works = []
        for i, source in enumerate(order):
            works.append(send(ranks[source], 0, np.full(count, i, np.int32), 5))
            # A message of the same rank and another tag, once it is here, shows that the one before it is.
            works.append(send(ranks[source], 0, np.array([source]), 6))
            recv(ranks[0], source, np.empty(1, np.int64), 6).wait(20)
        for i, source in enumerate(order):
            incoming = np.empty(count, np.int32)
            work = recv(ranks[0], native.ANY_SOURCE, incoming, 5)
            work.wait(20)
            assert work.other == source
            assert (incoming == i).all()
        for work in works:
            work.wait(20)


@transports
@pytest.mark.parametrize("count", [5, 100_000])
def test_receives_of_a_tag_are_served_in_the_order_of_their_calls(count, apart):
    """They take from any rank, rank 1, any rank, and rank 2; a receive of another tag does not wait for them."""
    with world(3, hosts(3, apart)) as ranks:
        asked = [native.ANY_SOURCE, 1, native.ANY_SOURCE, 2]
        into = [np.empty(count, np.int32) for _ in asked]
        works = [recv(ranks[0], source, x, 3) for source, x in zip(asked, into, strict=True)]
        send(ranks[2], 0, np.zeros(4), 4).wait(20)
        recv(ranks[0], 2, np.empty(4), 4).wait(20)
        assert not any(work.done() for work in works)
        sends = []
        for value, (source, expected) in enumerate([(1, 0), (1, 1), (2, 2), (2, 3)]):
            sends.append(send(ranks[source], 0, np.full(count, value, np.int32), 3))
            works[expected].wait(20)
            assert works[expected].other == source
            assert (into[expected] == value).all()
        for work in sends:
            work.wait(20)


@transports
@pytest.mark.parametrize(("sent", "wanted"), [(10, 11), (0, 1), (1, 0), (100_000, 10), (10, 100_000)])
@pytest.mark.parametrize("source", [1, native.ANY_SOURCE], ids=["named", "any"])
def test_a_message_of_another_size_is_a_mismatch(sent, wanted, source, apart):
    with world(2, hosts(2, apart)) as ranks:
        out = send(ranks[1], 0, np.zeros(sent))
        with pytest.raises(Mismatch) as caught:
            recv(ranks[0], source, np.zeros(wanted)).wait(10)
        assert f"send(count={sent})" in str(caught.value)
        assert f"recv(count={wanted})" in str(caught.value)
        if sent > 10_000:  # a small one has left by now
            with pytest.raises(Mismatch):
                out.wait(10)


def test_a_receive_from_any_rank_that_nobody_answers_says_so():
    with world(3) as ranks:
        behind = recv(ranks[0], 2, np.zeros(3), 4)
        first = recv(ranks[0], native.ANY_SOURCE, np.zeros(3), 4)
        after = recv(ranks[0], 1, np.zeros(3), 4, timeout=0.2)
        with pytest.raises(CollectiveTimeout, match=r"recv from rank 1 with tag 4 .* its timeout of 0.2 s is up"):
            after.wait(10)
        for work in (behind, first):
            with pytest.raises(CollectiveTimeout):
                work.wait(10)


def test_a_receive_from_any_rank_lasts_until_the_last_other_has_left():
    with world(3) as ranks:
        incoming = np.empty(3)
        work = recv(ranks[0], native.ANY_SOURCE, incoming)
        ranks[1].engine.shutdown()
        send(ranks[2], 0, np.arange(3.0)).wait(10)
        work.wait(10)
        assert work.other == 2
        np.testing.assert_array_equal(incoming, np.arange(3.0))
        work = recv(ranks[0], native.ANY_SOURCE, incoming)
        ranks[2].engine.shutdown()
        with pytest.raises(PeerLost, match=r"recv from any rank with tag 0 of communicator 0"):
            work.wait(10)


def test_a_receive_from_any_rank_fails_with_the_rank_that_was_lost():
    with world(3, [0, 1, 2]) as ranks:
        work = recv(ranks[0], native.ANY_SOURCE, np.empty(3))
        ranks[1].engine.fail("PeerLost", 1, "rank 1 (host h1) went away")
        with pytest.raises(PeerLost, match="rank 1"):
            work.wait(10)


@transports
def test_empty_messages_take_no_credit(apart):
    """More of them than the credit would cover."""
    with world(2, hosts(2, apart)) as ranks:
        for _ in range(20_000):
            send(ranks[0], 1, np.empty(0)).wait(10)
            recv(ranks[1], 0, np.empty(0)).wait(10)


def test_nobody_who_has_left_is_waited_for_on_leaving():
    """More messages than the memory between two ranks takes."""
    with world(2) as ranks:
        for _ in range(3000):
            send(ranks[0], 1, np.arange(100.0))
        ranks[1].engine.shutdown()
        while not ranks[0].engine.departed(1):
            time.sleep(0.01)
        began = time.monotonic()
        ranks[0].engine.shutdown(timeout=60.0)
        assert time.monotonic() - began < 30


def test_strangers_are_refused():
    with world(2) as ranks:
        with pytest.raises(ValueError, match="rank 5 is not a member of communicator 0"):
            send(ranks[0], 5, np.zeros(3))
        with pytest.raises(ValueError, match="rank 0 is this rank itself in communicator 0"):
            recv(ranks[0], 0, np.zeros(3))
    with world(1) as ranks, pytest.raises(ValueError, match="rank 0 is alone in communicator 0: nobody can send to it"):
        recv(ranks[0], native.ANY_SOURCE, np.zeros(3))
