"""Offsets between the clocks of ranks, from round trips and from barriers."""

from __future__ import annotations

import queue
import threading
from typing import Any

import numpy as np
import pytest

from multiring.runtime import clocks
from multiring.runtime.buffers import Piece


def test_the_shortest_round_trip_gives_the_offset() -> None:
    assert clocks.best_offset([(0, 1070, 100), (200, 1210, 220), (300, 1900, 900)]) == 1000


class Pair:
    """Two ranks that exchange arrays through queues, at once."""

    def __init__(self, rank: int, boxes: list[queue.Queue[Any]]) -> None:
        self.rank = rank
        self._boxes = boxes

    def send(self, piece: Piece, dst: int) -> Pair:
        self._boxes[dst].put(piece.owner.copy())
        return self

    def recv(self, piece: Piece, src: int) -> Pair:
        piece.owner[:] = self._boxes[self.rank].get(timeout=30)
        return self

    def wait(self) -> None:
        """It is done."""


def test_hosts_ask_rank_0_for_the_time() -> None:
    boxes: list[queue.Queue[Any]] = [queue.Queue(), queue.Queue()]
    ticks = iter(range(10**9))
    lock = threading.Lock()

    def clock() -> int:  # one time for both, of which the second sees another
        with lock:
            return 1000 * next(ticks)

    found: dict[int, int] = {}

    def ask(rank: int) -> None:
        skew = 0 if rank == 0 else 5 * 10**9
        found[rank] = clocks._ask(Pair(rank, boxes), ["a", "b"], 0, lambda: clock() + skew)  # type: ignore[arg-type]

    threads = [threading.Thread(target=ask, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found[0] == 0
    assert abs(found[1] + 5 * 10**9) <= 2000


@pytest.mark.parametrize("ahead", [-1234.5, 0.25, 1e6])
def test_the_offset_of_a_clock(ahead: float) -> None:
    """Both leave 0.1 s after the later one has entered."""
    entered = np.array([[10.0, 10.5], [11.0, 11.0], [12.2, 12.0]])  # the reference, this rank
    left = entered.max(axis=1, keepdims=True) + 0.1
    reference = np.hstack([entered[:, :1], left])
    mine = np.hstack([entered[:, 1:], left]) + ahead
    assert clocks.barrier_offset(mine, reference) == pytest.approx(-ahead, abs=0.1)


def test_clocks_that_may_be_one_are() -> None:
    reference = np.array([[10.0, 10.3], [11.0, 11.3]])
    assert clocks.barrier_offset(reference + 0.2, reference) == 0.0
