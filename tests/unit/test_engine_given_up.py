"""A call has failed, its caller writes into the buffer, and a rank that has heard of nothing reads it.

That rank was stopped, or got no time, while the news came. Here the test holds the control connections, so that no
rank hears anything until the test passes it on.
"""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from engines import Rank, in_threads, rooted_plan

from multiring import _native as native
from multiring.errors import PeerLost

COUNT = 100_000
SMALL = 12_000  # 48 KB: sent from where it lies, and without being asked for


class News:
    """The control connections between ranks of one host, as two halves each."""

    def __init__(self) -> None:
        self._ends: dict[tuple[int, int], socket.socket] = {}

    def end_for(self, rank: int, peer: int) -> int:
        """The descriptor over which ``rank`` is to hear of ``peer``."""
        kept, given = socket.socketpair()
        kept.setblocking(False)
        self._ends[rank, peer] = kept
        return given.detach()

    def pass_on(self, source: int, to: int) -> None:
        """Deliver all that ``source`` has told ``to`` so far."""
        self._ends[to, source].sendall(self._ends[source, to].recv(1 << 20))

    def close(self) -> None:
        for end in self._ends.values():
            end.close()


@contextmanager
def unheard(size: int) -> Iterator[tuple[list[Rank], News]]:
    """Engines that share memory as processes do, and the news between them."""
    engines = [native.Engine(rank, size, hosts=["here"] * size, arena_bytes=64 << 20) for rank in range(size)]
    news = News()
    for rank, peer in itertools.permutations(range(size), 2):
        of = engines[peer]
        engines[rank].attach_local(peer, os.dup(of.memory_fd), os.dup(of.doorbell_fd), news.end_for(rank, peer))
    for engine in engines:
        engine.communicator(0, list(range(size)))
    try:
        yield [Rank(engine, rank) for rank, engine in enumerate(engines)], news
    finally:
        for engine in engines:
            engine.shutdown(0)
        news.close()


def in_arena(rank: Rank, count: int) -> np.ndarray:
    array = rank.engine.empty(4 * count).view(np.float32)
    array[:] = expected(count)
    return array


def expected(count: int) -> np.ndarray:
    return np.arange(count, dtype=np.float32) + 3


def wait_until_sent(rank: Rank, to: int) -> None:
    until = time.monotonic() + 10
    while not dict(rank.engine.statistics()["peers"])[to]["messages_sent"]:
        assert time.monotonic() < until
        time.sleep(0.001)


def give_up(rank: Rank, work: native.Work, array: np.ndarray) -> None:
    """Another rank is lost, so the call fails, and its caller does with the buffer what he likes."""
    rank.engine.fail("PeerLost", len(rank.engine.statistics()["peers"]), "the last rank was seen to vanish")
    with pytest.raises(PeerLost, match="the last rank was seen to vanish"):
        work.wait(10)
    array[:] = np.nan


def broadcast(rank: Rank, array: np.ndarray, size: int) -> native.Work:
    return rank.start(rooted_plan("broadcast", size, 0, "direct"), array, timeout=20.0)


def send(rank: Rank, array: np.ndarray, size: int) -> native.Work:
    return rank.send(1, array, 5, 20.0)


def recv(rank: Rank, array: np.ndarray, size: int) -> native.Work:
    return rank.recv(0, array, 5, 20.0)


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize(
    ("give", "take", "count"), [(broadcast, broadcast, COUNT), (send, recv, SMALL)], ids=["broadcast", "message"]
)
def test_what_was_overwritten_after_a_failure_is_handed_to_nobody(give, take, count, told):
    with unheard(3) as (ranks, news):
        array = in_arena(ranks[0], count)
        work = give(ranks[0], array, 3)
        wait_until_sent(ranks[0], 1)
        give_up(ranks[0], work, array)
        late = take(ranks[1], np.zeros(count, np.float32), 3)
        if told:
            news.pass_on(0, 1)
        with pytest.raises(PeerLost) as caught:
            late.wait(10)
        if told:
            assert caught.value.rank == 2
            assert str(caught.value).startswith("the last rank was seen to vanish; in flight here: ")
        else:
            assert caught.value.rank == 0
            assert str(caught.value).startswith("rank 0 (host here) has given up a call, and has not told why; ")


def test_the_caller_that_drives_its_call_is_told_as_well():
    with unheard(3) as (ranks, _):
        array = in_arena(ranks[0], COUNT)
        work = broadcast(ranks[0], array, 3)
        wait_until_sent(ranks[0], 1)
        give_up(ranks[0], work, array)
        with pytest.raises(PeerLost, match=r"rank 0 .* has given up a call"):
            ranks[1].run(rooted_plan("broadcast", 3, 0, "direct"), np.zeros(COUNT, np.float32), timeout=20.0)


def test_nor_is_it_passed_on_to_others():
    """Rank 1 stands between; rank 3 has nothing to do with rank 0, and would not know."""
    with unheard(4) as (ranks, _):
        plan = rooted_plan("broadcast", 4, 0, "ring")
        array = in_arena(ranks[0], COUNT)
        work = ranks[0].start(plan, array, timeout=20.0)
        wait_until_sent(ranks[0], 1)
        give_up(ranks[0], work, array)
        buffers = [np.full(COUNT, -1, np.float32) for _ in range(3)]
        works = [rank.start(plan, buffer, timeout=1.0) for rank, buffer in zip(ranks[1:], buffers, strict=True)]
        for one in works:
            with pytest.raises(Exception, match=r"has given up a call|time(out|-out)|waits for"):
                one.wait(10)
        assert not np.isnan(buffers[1]).any()
        assert not np.isnan(buffers[2]).any()


def test_what_a_rank_sent_before_it_left_well_is_read():
    with unheard(2) as (ranks, _):
        plan = rooted_plan("broadcast", 2, 0, "direct")
        array = expected(2_000)
        ranks[0].run(plan, array)
        ranks[0].engine.shutdown()
        array[:] = np.nan
        found = ranks[1].run(plan, np.zeros(2_000, np.float32))
    np.testing.assert_array_equal(found, expected(2_000))


def test_a_call_that_nobody_gives_up_is_whole():
    with unheard(3) as (ranks, _):
        plan = rooted_plan("broadcast", 3, 0, "ring")

        def program(rank: Rank) -> np.ndarray:
            return rank.run(plan, in_arena(rank, COUNT) if rank.rank == 0 else np.zeros(COUNT, np.float32))

        for found in in_threads(ranks, program):
            np.testing.assert_array_equal(found, expected(COUNT))
