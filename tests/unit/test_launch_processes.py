"""The processes that an agent has left which was lost are killed, and no others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from multiring.launch import processes

FORMER = """
import ctypes, os, signal, subprocess, sys, time

ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER, as an agent does
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN)
child = subprocess.Popen(["sh", "-c", "trap '' TERM; setsid sleep 1000 & echo $!; exec sleep 1000"],
                         stdout=subprocess.PIPE, text=True, start_new_session=True)
print(child.pid, child.stdout.readline(), flush=True)
time.sleep(1000)
"""


@contextmanager
def former() -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A process that heeds no signal, with the processes of two generations below it."""
    with subprocess.Popen([sys.executable, "-c", FORMER], stdout=subprocess.PIPE, text=True) as agent:
        try:
            assert agent.stdout is not None
            yield agent, [int(word) for word in agent.stdout.readline().split()]
        finally:
            processes.kill_descendants()


def is_there(pid: int) -> bool:
    return processes.began(pid) is not None


def test_a_former_agent_is_killed_with_all_below_it_even_if_it_is_stopped() -> None:
    for is_stopped in (False, True):
        with former() as (agent, below):
            began = processes.began(agent.pid)
            assert began is not None
            assert all(map(is_there, below))
            assert len(below) == 2
            if is_stopped:
                os.kill(agent.pid, signal.SIGSTOP)
            assert processes.kill_former(agent.pid, began) == []
            assert not any(map(is_there, [agent.pid, *below]))
            assert agent.wait(10) == -signal.SIGKILL


def test_another_process_of_its_number_is_left_alone() -> None:
    with former() as (agent, below):
        began = processes.began(agent.pid)
        assert began is not None
        assert processes.kill_former(agent.pid, began - 1) == []
        assert processes.kill_former(agent.pid, began + 1) == []
        assert all(map(is_there, [agent.pid, *below]))
        assert not processes.is_stopped(agent.pid)


def test_when_a_process_began_is_what_the_kernel_says() -> None:
    up = float(Path("/proc/uptime").read_text().split()[0])
    began = processes.began(os.getpid())
    assert began is not None
    assert 0 < began <= up * os.sysconf("SC_CLK_TCK")
    with subprocess.Popen(["true"]) as child:
        deadline = time.monotonic() + 30
        while processes.began(child.pid) is not None:  # it has not been waited for
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert processes.began(child.pid) is None


def test_what_may_not_be_asked_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that belongs to root, such as of sudo, may handle the signal and not get it."""
    asked: list[int] = []

    def kill(pid: int, number: int) -> None:
        if pid == 12:
            raise PermissionError(1, "Operation not permitted")
        asked.append(pid)

    class Running:
        pid = 11

        def poll(self) -> None:
            return None

    monkeypatch.setattr(processes, "descendants", lambda pid: [pid + 1, pid + 2])
    monkeypatch.setattr(processes, "_handles", lambda *_: True)
    monkeypatch.setattr(os, "kill", kill)
    running: Any = Running()
    processes.ask(running, signal.SIGUSR2)
    assert asked == [11, 13]
