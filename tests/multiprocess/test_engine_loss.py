"""Ranks that die: what the others see, over shared memory and TCP, ranks as processes."""

from __future__ import annotations

import json
import os
import re
import time

import engine_ranks
import pytest


@pytest.mark.parametrize("count", [16, 4_000_000])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["run", "start"])
@pytest.mark.parametrize("tcp", [False, True], ids=["shm", "tcp"])
def test_a_killed_rank_is_named_at_once_by_all_others(count, asynchronous, tcp):
    before = set(os.listdir("/dev/shm"))
    with engine_ranks.started(3, "until_it_fails", count, asynchronous, tcp=tcp) as processes:
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
            assert re.match(
                r"rank 1 \(host here\) (closed|lost) its connection.*; in flight here: all_r", error["message"]
            )
            assert error["time"] - killed < 2
    assert set(os.listdir("/dev/shm")) == before
