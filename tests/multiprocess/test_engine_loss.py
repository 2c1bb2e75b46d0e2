"""Ranks that die: what the others see, over shared memory and TCP, ranks as processes."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from contextlib import suppress
from pathlib import Path

import engine_ranks
import pytest


@pytest.mark.parametrize("count", [16, 4_000_000])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["run", "start"])
@pytest.mark.parametrize("tcp", [False, True], ids=["shm", "tcp"])
def test_a_killed_rank_is_named_at_once_by_all_others(count, asynchronous, tcp):
    with engine_ranks.started(3, "until_it_fails", count, asynchronous, tcp=tcp) as processes:
        for process in processes:
            assert process.stdout.readline() == "ready\n"
            assert named_memory(process.pid) == []
        time.sleep(0.3)
        processes[1].kill()
        killed = time.time()
        for rank in (0, 2):
            out, _ = processes[rank].communicate(timeout=20)
            error = json.loads(out)
            assert error["kind"] == "PeerLost"
            assert (error["rank"], error["host"], error["collective"]) == (1, "here", "all_reduce")
            assert re.match(
                r"rank 1 \(host here\) (closed|lost) its connection.*; "
                r"(in flight here: all_reduce number \d+|this all_reduce was not started)",
                error["message"],
            )
            assert error["time"] - killed < 2


def named_memory(process: int) -> list[str]:
    """The files of /dev/shm that it has: a rank that is killed would leave them behind."""
    found = Path(f"/proc/{process}/maps").read_text().splitlines()
    for entry in Path(f"/proc/{process}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            found.append(os.readlink(entry))
    return [name for name in found if "/dev/shm" in name]


@pytest.mark.parametrize("tcp", [False, True], ids=["shm", "tcp"])
def test_forked_children_leave_the_rank_alone(tcp):
    assert engine_ranks.run(2, "fork_between_collectives", tcp=tcp) == [True] * 2


@pytest.mark.parametrize("tcp", [False, True], ids=["shm", "tcp"])
def test_a_child_does_not_keep_a_killed_rank_alive(tcp):
    with engine_ranks.started(2, "killed_with_a_child_alive", tcp=tcp) as processes:
        out, _ = processes[0].communicate(timeout=20)
    error = json.loads(out)
    assert (error["kind"], error["rank"]) == ("PeerLost", 1)
    assert error["seconds"] < 2


@pytest.mark.parametrize("tcp", [False, True], ids=["shm", "tcp"])
def test_an_interrupt_ends_a_blocked_collective_everywhere(tcp):
    with engine_ranks.started(2, "interrupted", tcp=tcp) as processes:
        for process in processes:
            assert process.stdout.readline() == "ready\n"
        time.sleep(0.5)
        processes[0].send_signal(signal.SIGINT)
        first, second = engine_ranks.results(processes)
    assert first["kind"] == "KeyboardInterrupt"
    assert first["failure"] == "rank 0 (host here) was interrupted by a signal in a collective"
    assert (second["kind"], second["rank"]) == ("PeerLost", 0)
    assert second["message"].startswith(first["failure"])
