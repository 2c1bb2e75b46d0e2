"""The engine over shared memory, ranks as processes."""

from __future__ import annotations

import json
import os
import time

import engine_ranks
import pytest


@pytest.mark.parametrize("arena", [False, True], ids=["private", "arena"])
@pytest.mark.parametrize("n", [2, 3, 8])
def test_all_reduce(n, arena):
    assert engine_ranks.run(n, "all_reduce_sizes", arena) == [True] * n


def test_all_ranks_end_with_the_same_bits():
    assert len(set(engine_ranks.run(4, "same_bits"))) == 1


def test_all_to_all():
    assert engine_ranks.run(3, "gather_and_exchange") == [True] * 3


def test_ten_thousand_collectives_leave_nothing_behind():
    assert engine_ranks.run(2, "random_sizes", 10000) == [True] * 2


@pytest.mark.parametrize("count", [16, 4_000_000])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["run", "start"])
def test_a_killed_rank_is_named_at_once_by_all_others(count, asynchronous):
    before = set(os.listdir("/dev/shm"))
    with engine_ranks.started(3, "until_it_fails", count, asynchronous) as processes:
        for process in processes:
            assert process.stdout.readline() == "ready\n"
        time.sleep(0.3)
        processes[1].kill()
        killed = time.time()
        for rank in (0, 2):
            out, _ = processes[rank].communicate(timeout=20)
            error = json.loads(out)
            assert error["kind"] == "PeerLost"
            assert (error["rank"], error["host"], error["collective"]) == (1, "here", "all_reduce")
            assert error["message"].startswith("rank 1 (host here) closed its connection; in flight here: all_reduce")
            assert error["time"] - killed < 2
    assert set(os.listdir("/dev/shm")) == before
