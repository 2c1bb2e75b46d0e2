"""The launcher's host is cut off, over OpenSSH itself: the other hosts end what runs there, and only then."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from loopback_sshd import SSHD, serving

from multiring import lab
from multiring.lab import Cluster
from multiring.planning.topology import LEVELS, Link, Place, Topology, ranks_in_host

reason = lab.obstacle()
pytestmark = [
    pytest.mark.lab,
    pytest.mark.timeout(300),
    pytest.mark.skipif(reason is not None, reason=str(reason)),
    pytest.mark.skipif(SSHD is None, reason="no sshd here: apt-get install openssh-server"),
]

CARD = Link(up=1.25e9, down=1.25e9, latency=0.0)

HEARTBEAT_SECONDS = 5
PATIENCE_SECONDS = 10
"""Seconds after which a host of which nothing is heard is lost."""

PROGRAM = """
import os, signal, subprocess, sys, time
from pathlib import Path
import numpy as np
import multiring as mr

here, what = Path(sys.argv[1]), sys.argv[2]
mr.init()
rank = mr.rank()
x = np.arange(4) * (rank + 1)
mr.all_reduce(x)
assert x.tolist() == [0, 3, 6, 9], x
if what == "saves":
    def save(*_):
        (here / f"saved-{rank}").touch()
        sys.exit(1)
    signal.signal(signal.SIGTERM, save)
child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
pids = here / f"writing-{rank}"
pids.write_text(f"{os.getpid()} {child.pid} {os.getppid()}")
pids.rename(here / f"started-{rank}")
if what == "waits" and rank == 0:
    mr.all_reduce(x)  # which rank 1 never calls
while not (here / "end").exists():
    if what == "prints":
        print("x" * 4000, flush=True)
    elif what == "computes" or rank == 1:
        sum(range(10000))
    else:
        time.sleep(0.05)
mr.all_reduce(x)
print("sum", *x, "of", rank, flush=True)
mr.shutdown()
"""


@dataclass
class Job:
    """A job whose launcher is on host a and whose two ranks are on b and c, and where it leaves files."""

    cluster: Cluster
    directory: Path
    process: subprocess.Popen[bytes]

    def told(self) -> str:
        return (self.directory / "errors").read_text()

    def left(self) -> list[int]:
        """Ranks, their children and their agents that are left."""
        named = [(self.directory / f"started-{rank}").read_text().split() for rank in (0, 1)]
        return [int(pid) for pids in named for pid in pids if Path(f"/proc/{pid}").exists()]

    def told_by_agents(self) -> list[str]:
        return (self.directory / "agents").read_text().splitlines()


@contextmanager
def running(directory: Path, what: str, spares: bool = False) -> Iterator[Job]:
    places = tuple(Place(name, CARD, ranks_in_host([i])) for i, name in enumerate("abcd"))
    served = dict.fromkeys("bcd", "")
    python = directory / "python"  # what a login finds of this test's own environment
    path = ":".join(filter(None, sys.path))
    python.write_text(f'#!/bin/sh\nPYTHONPATH={path} exec {sys.executable} "$@" 2>> {directory}/agents\n')
    found = directory / "bin/ssh"  # found instead of ssh, and called with the launcher's own options
    found.parent.mkdir()
    with lab.up(Topology(LEVELS[:2], places)) as cluster, serving(directory, served, cluster.hosts) as config:
        found.write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F {config} "$@"\n')
        for script in (python, found):
            script.chmod(0o755)
        words = ["-H", "b:1,c:1", "--no-summary", "--python", str(python)]
        if spares:
            words += ["--spares", "d:1", "--min-ranks", "1", "--max-replacements", "1"]
        run = [sys.executable, "-m", "multiring", "run", *words, sys.executable, "-c", PROGRAM, str(directory), what]
        settings = [f"MULTIRING_HEARTBEAT_TIMEOUT={HEARTBEAT_SECONDS}", "MULTIRING_PROBE=off"]
        settings.append(f"PATH={found.parent}:{os.environ['PATH']}")
        with (directory / "output").open("w") as output, (directory / "errors").open("w") as errors:
            process = subprocess.Popen(cluster.command("a", "env", *settings, *run), stdout=output, stderr=errors)
        job = Job(cluster, directory, process)
        try:
            for rank in (0, 1):
                wait_until((directory / f"started-{rank}").exists, f"rank {rank} has begun", job)
            yield job
        finally:
            process.kill()
            process.wait()


def wait_until(condition: Callable[[], object], what: str, job: Job, seconds: float = 90.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:g} s until {what}: {job.told()}"
        time.sleep(0.05)


def agents(job: Job, host: str) -> list[int]:
    """The agents on a host; a session of its sshd may stay, with no shell in it."""
    found = []
    for pid in job.cluster.processes()[host]:
        with contextlib.suppress(OSError):  # it has ended
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if words[:3] == [sys.executable.encode(), b"-m", b"multiring.launch.agent"]:
                found.append(pid)
    return found


@pytest.mark.parametrize("what", ["computes", "waits", "prints", "saves"])
def test_hosts_end_their_ranks_when_the_launchers_host_is_cut_off(tmp_path: Path, what: str) -> None:
    with running(tmp_path, what) as job:
        assert len(job.left()) == 6
        began = time.monotonic()
        lab.cut(job.cluster, "a")
        wait_until(lambda: not job.left(), "nothing is left on the other hosts", job)
        print(f"{what}: after {time.monotonic() - began:.1f} s nothing was left")
        assert time.monotonic() - began > HEARTBEAT_SECONDS
        assert sorted(line.split()[2] for line in job.told_by_agents()) == ["b:", "c:"]
        for line in job.told_by_agents():
            assert "the launcher's host has not been heard of for" in line
    assert (what == "saves") == (tmp_path / "saved-0").exists() == (tmp_path / "saved-1").exists()


def test_a_spare_host_ends_too(tmp_path: Path) -> None:
    with running(tmp_path, "computes", spares=True) as job:
        assert len(agents(job, "d")) == 1
        lab.cut(job.cluster, "a")
        wait_until(lambda: len(job.told_by_agents()) == 3, "all hosts have said why they end", job)
        wait_until(lambda: not agents(job, "d"), "no agent is left on the spare host", job)


def test_a_job_goes_on_when_the_launchers_host_is_soon_back(tmp_path: Path) -> None:
    with running(tmp_path, "computes") as job:
        lab.cut(job.cluster, "a")
        time.sleep(0.8 * HEARTBEAT_SECONDS)
        lab.restore(job.cluster, "a")
        time.sleep(1.5 * PATIENCE_SECONDS)
        assert job.process.poll() is None, job.told()
        expect_a_good_end(job)


def test_a_launcher_that_is_stopped_is_not_lost(tmp_path: Path) -> None:
    with running(tmp_path, "computes") as job:
        job.process.send_signal(signal.SIGSTOP)
        time.sleep(2 * PATIENCE_SECONDS)
        assert len(job.left()) == 6
        job.process.send_signal(signal.SIGCONT)
        expect_a_good_end(job)


def expect_a_good_end(job: Job) -> None:
    (job.directory / "end").touch()
    assert job.process.wait(60) == 0, job.told()
    output = (job.directory / "output").read_text()
    for rank in (0, 1):
        assert f"sum 0 6 12 18 of {rank}\n" in output
    assert not job.left()


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_a_host_on_which_the_command_was_typed_ends_when_host_0_is_cut_off(tmp_path: Path, is_encrypted: bool) -> None:
    (tmp_path / "secret").write_text("0123456789abcdef0123456789abcdef")
    places = tuple(Place(name, CARD, ranks_in_host([i])) for i, name in enumerate("ab"))
    settings = [f"MULTIRING_HEARTBEAT_TIMEOUT={HEARTBEAT_SECONDS}", "MULTIRING_PROBE=off"]
    settings += [f"MULTIRING_SECRET_FILE={tmp_path}/secret", f"MULTIRING_ENCRYPT={int(is_encrypted)}"]
    program = [sys.executable, "-c", TYPED, str(tmp_path)]
    with lab.up(Topology(LEVELS[:2], places)) as cluster, contextlib.ExitStack() as stack:
        started = []
        for index, host in enumerate("ab"):
            meeting = f"{cluster.hosts[0].addresses[0]}:29400"
            typed = ["--hosts", "2", "--host-index", str(index), "--rendezvous", meeting]
            run = [sys.executable, "-m", "multiring", "run", "-n", "2", *typed, *program]
            with (tmp_path / f"errors-{host}").open("w") as errors:
                started.append(subprocess.Popen(cluster.command(host, "env", *settings, *run), stderr=errors))
            stack.callback(started[-1].wait)
            stack.callback(started[-1].kill)
        there = tmp_path / "pid-1"
        deadline = time.monotonic() + 60
        while not there.exists() or not there.read_text().endswith("\n"):
            assert time.monotonic() < deadline, (tmp_path / "errors-b").read_text()
            time.sleep(0.05)
        began = time.monotonic()
        lab.cut(cluster, "a")
        assert started[1].wait(90) == 2
        assert time.monotonic() - began > HEARTBEAT_SECONDS
        assert not Path(f"/proc/{there.read_text().strip()}").exists()
        told = (tmp_path / "errors-b").read_text().splitlines()
    assert "is lost: all ranks here have been ended" in told[-1], told
    assert len(told) == 2, told


TYPED = """
import os, sys, time
from pathlib import Path

rank = os.environ["RANK"]
(Path(sys.argv[1]) / f"pid-{rank}").write_text(f"{os.getpid()}\\n")
time.sleep(1000)
"""
