"""The engine over TCP (loopback), alone and beside memory that is shared: sums, flow control, order of arrival."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from dataclasses import replace

import engines
import numpy as np
import pytest
from engines import (
    COLLECTIVE,
    DTYPE,
    Rank,
    all_reduce_plan,
    blocked_plan,
    connected_sockets,
    contribution,
    in_threads,
    message,
    rooted_plan,
    two_level_plan,
    world,
)

from multiring import _native as native
from multiring.errors import Mismatch, MultiringError, PeerLost


def apart(n: int) -> list[int]:
    """Every rank on a host of its own."""
    return list(range(n))


@pytest.mark.parametrize("streams", [1, 3])
@pytest.mark.parametrize("n", [2, 3, 4, 7])
def test_all_reduce(n, streams):
    with world(n, apart(n), streams) as ranks:
        for method in ["at once", "direct", "ring"] + (["halving"] if n & (n - 1) == 0 else []):
            for segment_bytes, count in ((64, 0), (64, 1), (64, 2011), (1 << 16, 1000), (1 << 16, 300_007)):
                plan = all_reduce_plan(n, method, segment_bytes)
                results = in_threads(ranks, lambda rank, p=plan, c=count: rank.run(p, contribution(rank.rank, c)))
                expected = sum(contribution(rank, count).astype(np.float64) for rank in range(n))
                for result in results:
                    np.testing.assert_array_equal(result, expected, err_msg=f"{method} {segment_bytes} {count}")


class Detour:
    """Connections of which every second one carries its bytes 3 ms late, both ways."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._sockets: list[socket.socket] = []

    def connected_sockets(self, count: int) -> tuple[list[int], list[int]]:
        pairs = [socket.socketpair() for _ in range(count)]
        for number in range(1, count, 2):
            (near, one), (other, far) = socket.socketpair(), pairs[number]
            pairs[number] = near, far
            self._sockets += [one, other]
            for source, target in ((one, other), (other, one)):
                self._threads.append(threading.Thread(target=self._relay, args=(source, target)))
                self._threads[-1].start()
        near, far = zip(*([end.detach() for end in pair] for pair in pairs), strict=True)
        return list(near), list(far)

    @staticmethod
    def _relay(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 20):
                time.sleep(3e-3)
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def join(self) -> None:
        for thread in self._threads:
            thread.join()
        for sock in self._sockets:
            sock.close()


def test_grants_may_overtake_each_other(monkeypatch):
    detour = Detour()
    monkeypatch.setattr(engines, "connected_sockets", detour.connected_sockets)
    count = 100_003
    with world(3, apart(3), streams=2) as ranks:
        plan = replace(all_reduce_plan(3, "direct", 4096), window=5)
        for _ in range(3):
            results = in_threads(ranks, lambda rank: rank.run(plan, contribution(rank.rank, count), timeout=20.0))
            expected = sum(contribution(rank, count).astype(np.float64) for rank in range(3))
            for result in results:
                np.testing.assert_array_equal(result, expected)
    detour.join()


@pytest.mark.parametrize("window", [1, 2, 7, 40])
def test_windows_of_any_number_of_segments(window):
    count = 9_001
    with world(4, [0, 0, 1, 1]) as ranks:
        plan = replace(two_level_plan(2, 2, 1024), window=window)
        results = in_threads(ranks, lambda rank: rank.run(plan, contribution(rank.rank, count)))
        expected = sum(contribution(rank, count).astype(np.float64) for rank in range(4))
        for result in results:
            np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("hosts", [[0, 1, 1], [0, 0, 0, 1, 2, 2]])
def test_exchange_with_ranks_of_this_host_and_of_others_at_once(hosts):
    count, n = 300_007, len(hosts)
    plan = all_reduce_plan(n, "at once", 1 << 16)
    with world(n, hosts) as ranks:
        results = in_threads(ranks, lambda rank: rank.run(plan, contribution(rank.rank, count), timeout=20.0))
        expected = sum(contribution(rank, count).astype(np.float64) for rank in range(n))
        for result in results:
            np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("n", [2, 5])
def test_other_collectives(n):
    count = 20_001
    with world(n, apart(n)) as ranks:
        for segment_bytes in (1024, 1 << 16):
            plan = blocked_plan("all_to_all", n, segment_bytes)
            results = in_threads(ranks, lambda rank, p=plan: rank.run(p, contribution(rank.rank, n * count)))
            for rank, result in enumerate(results):
                block = slice(rank * count, (rank + 1) * count)
                sent = [contribution(other, n * count)[block] for other in range(n)]
                np.testing.assert_array_equal(result, np.concatenate(sent))
            for method in ("direct", "tree", "ring"):
                spread = rooted_plan("broadcast", n, n - 1, method, segment_bytes)
                for result in in_threads(ranks, lambda rank, p=spread: rank.run(p, contribution(rank.rank, count))):
                    np.testing.assert_array_equal(result, contribution(n - 1, count))


@pytest.mark.parametrize("arena", [False, True], ids=["private", "arena"])
@pytest.mark.parametrize(("hosts", "per_host"), [(2, 2), (3, 2), (2, 3)])
def test_hosts_of_several_ranks(hosts, per_host, arena):
    n = hosts * per_host
    with world(n, [rank // per_host for rank in range(n)]) as ranks:
        for plan in (two_level_plan(hosts, per_host, 4096), all_reduce_plan(n, "direct", 4096)):
            for count in (3, 1000, 100_003):

                def program(rank: Rank, plan=plan, count=count) -> np.ndarray:
                    mine = rank.engine.empty(4 * count).view(np.float32) if arena else np.empty(count, np.float32)
                    mine[:] = contribution(rank.rank, count)
                    return rank.run(plan, mine)

                expected = sum(contribution(rank, count).astype(np.float64) for rank in range(n))
                for result in in_threads(ranks, program):
                    np.testing.assert_array_equal(result, expected)


def test_the_order_of_communicators_may_differ():
    """More small collectives than the credit covers, and large ones, started in opposite orders."""
    n, small, large = 2, 10_000, 1_000_000
    with world(n, apart(n)) as ranks:
        for rank in ranks:
            rank.engine.communicator(7, list(range(n)))
        plan = all_reduce_plan(n, "direct", 1 << 16)

        def program(rank: Rank) -> None:
            order = (0, 7) if rank.rank else (7, 0)
            shapes = [small] * 100 + [large] * 4
            arrays = {(c, i): contribution(rank.rank + c + i, m) for c in order for i, m in enumerate(shapes)}
            works = [rank.start(plan, array, communicator=c) for (c, _), array in arrays.items()]
            for work in works:
                work.wait(30)
            for (c, i), array in arrays.items():
                expected = sum(contribution(other + c + i, len(array)).astype(np.float64) for other in range(n))
                np.testing.assert_array_equal(array, expected)

        in_threads(ranks, program)


def test_a_rank_that_comes_late_holds_up_nobody_else():
    """Rank 0's messages for communicator 7 wait for rank 1, while communicator 0 goes on."""
    n = 2
    with world(n, apart(n)) as ranks:
        for rank in ranks:
            rank.engine.communicator(7, list(range(n)))
        plan = all_reduce_plan(n, "direct", 1 << 14)
        waiting = [np.ones(15_000, np.float32) for _ in range(40)]
        works = [ranks[0].start(plan, array, communicator=7) for array in waiting]
        for count in (100, 15_000, 500_000):
            for result in in_threads(ranks, lambda rank, c=count: rank.run(plan, contribution(rank.rank, c))):
                np.testing.assert_array_equal(result, contribution(0, count) + contribution(1, count))
        assert not any(work.done() for work in works)
        for _ in waiting:
            ranks[1].run(plan, np.ones(15_000, np.float32), communicator=7)
        for work, array in zip(works, waiting, strict=True):
            work.wait(20)
            assert (array == 2).all()


def test_bytes_and_connections_are_counted():
    count = 100_000
    with world(2, apart(2), streams=2) as ranks:
        plan = all_reduce_plan(2, "direct", 1 << 16)
        in_threads(ranks, lambda rank: rank.run(plan, contribution(rank.rank, count)))
        for rank in ranks:
            peer = rank.engine.statistics()["peers"][1 - rank.rank]
            assert peer["bytes_sent"] == peer["bytes_received"] == 4 * count
            assert peer["connections"] == 2


def test_ranks_that_disagree_see_both_sides():
    with world(2, apart(2)) as ranks:
        plan = all_reduce_plan(2, "direct")

        def program(rank: Rank) -> MultiringError | None:
            try:
                for _ in range(2):
                    rank.run(plan, np.zeros(100_000 + rank.rank))
            except MultiringError as error:
                return error
            return None

        for error in in_threads(ranks, program):
            assert isinstance(error, Mismatch)
            assert "count=100000" in str(error)
            assert "count=100001" in str(error)


def test_a_failure_reaches_who_waits_also_where_the_ranks_between_have_left():
    """Control connections of 1 and 2 lead to 0 only, which leaves; 2 waits for 1, which fails."""
    engines = [native.Engine(rank, 3, hosts=["a", "b", "c"], inproc=True) for rank in range(3)]
    for a, b in ((0, 1), (0, 2), (1, 2)):
        for end, other, (data, control) in zip((a, b), (b, a), connected_sockets(2), strict=True):
            engines[end].attach_tcp(other, [data])
            if a == 0:
                engines[end].attach_control(other, control)
            else:
                os.close(control)
    engines[0].shutdown()
    for engine in engines[1:]:
        engine.communicator(1, [1, 2])
    plan = all_reduce_plan(2, "direct")
    ranks = [Rank(engines[1], 1), Rank(engines[2], 2)]
    ranks[1].install(plan, 1, member=1)
    work = ranks[1].start(plan, np.zeros(100), communicator=1)
    assert not work.done()
    engines[1].fail("PeerLost", 0, "rank 0 is gone")
    with pytest.raises(PeerLost, match="rank 0 is gone; in flight here: all_reduce number 0") as caught:
        work.wait(20)
    assert caught.value.rank == 0
    for engine in engines[1:]:
        engine.shutdown()


@pytest.mark.parametrize("count", [100, 2_000_000])
def test_a_rank_that_leaves_is_lost_to_those_that_wait_for_it(count):
    with world(3, apart(3)) as ranks:
        plan = all_reduce_plan(3, "direct", 1 << 16)
        leaver = threading.Timer(0.2, ranks[2].engine.shutdown)
        leaver.start()
        begin = time.monotonic()

        def program(rank: Rank) -> None:
            with pytest.raises(PeerLost, match=r"rank 2 \(host h2\) has shut down") as caught:
                rank.run(plan, np.zeros(count))
            assert caught.value.rank == 2

        in_threads(ranks[:2], program)
        leaver.join()
        assert time.monotonic() - begin < 5


FRAME_TYPES = {"data": 1, "grant": 3, "ask": 4, "waits": 5}
"""Frame types by csrc/frame.hpp."""


def message_frame(kind: str, communicator: int, incarnation: int, tag: int, count: int) -> bytes:
    """A frame of this kind about the first float32 message of a tag."""
    payload = bytes(4 * count) if kind == "data" else b""
    send, number = COLLECTIVE["send"], incarnation << 48
    place, call = kind == "data", (count, tag, send, send, DTYPE["float32"], 0)
    head = struct.pack("<IBBHIIQ", 0, FRAME_TYPES[kind], 0, 0, communicator, 0, number)
    return head + struct.pack("<QQIBBHQII", *call, place, len(payload), 0) + payload


@pytest.mark.parametrize("before", ["forgotten", "made again"])
@pytest.mark.parametrize("kind", FRAME_TYPES)
def test_what_comes_late_is_not_for_the_next_communicator_of_that_number(kind, before):
    """A message of the next incarnation is received, even if it comes before that is made."""
    engine = native.Engine(0, 2, hosts=["a", "b"], inproc=True)
    here, there = socket.socketpair()
    engine.attach_tcp(1, [here.detach()])
    engine.communicator(0, [0, 1])
    engine.communicator(5, [0, 1], 1)
    engine.forget(5)
    if before == "made again":
        engine.communicator(5, [0, 1], 2)
    token, mine, early = np.zeros(1, np.float32), np.zeros(4, np.float32), np.ones(4, np.float32)
    with there:
        seen = message(engine, "recv", 0, 1, token, 0, 20.0)
        there.sendall(
            message_frame(kind, 5, 1, tag=3, count=9)
            + message_frame("data", 5, 2, tag=8, count=4)
            + message_frame("data", 0, 0, tag=0, count=1)
        )
        seen.wait(20)
        if before == "forgotten":
            engine.communicator(5, [0, 1], 2)
        message(engine, "recv", 5, 1, early, 8, 20.0).wait(20)
        assert not early.any()
        work = message(engine, "send" if kind == "grant" else "recv", 5, 1, mine, 3, 20.0)
        if kind != "grant":
            there.sendall(message_frame("data", 5, 2, tag=3, count=4))
        work.wait(20)
        engine.communicator(6, [0, 1], (1 << 16) - 1)
        engine.forget(6)
        engine.communicator(6, [0, 1], 0)  # they go around
        there.sendall(message_frame("data", 6, (1 << 16) - 1, tag=3, count=9) + message_frame("data", 6, 0, 3, 4))
        message(engine, "recv", 6, 1, mine, 3, 20.0).wait(20)
        engine.shutdown()


@pytest.mark.parametrize("hosts", [[0, 1], [0, 0]], ids=["tcp", "inproc"])
def test_messages_that_nobody_receives_are_given_back(hosts):
    """Messages that come before or after a communicator closes give their sender its credit back."""
    count, timeout = 10_000, 5.0
    with world(2, hosts) as ranks:
        engines_ = [rank.engine for rank in ranks]
        token, mine = np.zeros(1, np.float32), np.zeros(count, np.float32)

        def send(number: int, tag: int, array: np.ndarray) -> native.Work:
            return message(engines_[1], "send", number, 0, array, tag, timeout)

        for incarnation in range(100):
            for engine in engines_:
                engine.communicator(5, [0, 1], incarnation)
            send(5, 1, mine).wait(timeout)
            if incarnation % 2:
                send(5, 2, token).wait(timeout)
                message(engines_[0], "recv", 5, 1, token, 2, timeout).wait(timeout)
            for engine in engines_:
                engine.forget(5)
        send(0, 0, token).wait(timeout)  # what it can have only if so many have not used the credit up
        message(engines_[0], "recv", 0, 1, token, 0, timeout).wait(timeout)
