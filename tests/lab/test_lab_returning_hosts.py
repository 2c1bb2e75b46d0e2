"""A host whose network is away, over OpenSSH itself: its ranks start there again once it can be reached."""

from __future__ import annotations

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
    pytest.mark.skipif(reason is not None, reason=str(reason)),
    pytest.mark.skipif(SSHD is None, reason="no sshd here: apt-get install openssh-server"),
]

CARD = Link(up=1.25e9, down=1.25e9, latency=0.0)

PROGRAM = """
import os, subprocess, sys, time
from pathlib import Path
import numpy as np
import multiring as mr

here = Path(sys.argv[1])
rank, size, replacement = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MULTIRING_REPLACEMENT"))
host = os.uname().nodename
mr.init()
child = subprocess.Popen(["sleep", "1000"])
pids = here / f"writing-{rank}-{replacement}"
pids.write_text(f"{os.getpid()} {child.pid}")
pids.rename(here / f"started-{rank}-{replacement}")
while True:
    try:
        done = np.array(float((here / "end").exists()))  # what one rank sees, all go by
        mr.all_reduce(done)
        if done and (mr.world_size() == size or sys.argv[2] == "alone"):
            break
        time.sleep(0.05)
        if mr.world_size() < size:
            mr.grow()
    except mr.PeerLost:
        if host == "b":  # cut off, and deaf to that
            time.sleep(1000)
        mr.shrink()
x = np.arange(4) * (rank + 1)
mr.all_reduce(x)
print("sum", *x, "of", rank, "on", host, "beside", mr.local_world_size(), flush=True)
mr.shutdown()
"""


@dataclass
class Job:
    """A job on two hosts of a lab, and where it leaves files."""

    cluster: Cluster
    directory: Path
    process: subprocess.Popen[str]

    def told(self) -> str:
        return (self.directory / "errors").read_text()

    def ended(self) -> tuple[int, str]:
        """Exit code and output, once it was told to end."""
        (self.directory / "end").touch()
        code = self.process.wait(60)
        return code, (self.directory / "output").read_text()


@contextmanager
def running(directory: Path, how: str) -> Iterator[Job]:
    places = tuple(Place(name, CARD, ranks_in_host([2 * i, 2 * i + 1])) for i, name in enumerate("ab"))
    python = directory / "python"  # what a login finds of this test's own environment
    python.write_text(f'#!/bin/sh\nPYTHONPATH={":".join(filter(None, sys.path))} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    with lab.up(Topology(LEVELS[:2], places)) as cluster, serving(directory, {"b": ""}, cluster.hosts) as config:
        # A lost connection is noticed in 3 s.
        ssh = f"ssh -F {config} -oBatchMode=yes -oConnectTimeout=5 -oServerAliveInterval=1"
        words = ["-H", "a:2,b:2", "--min-ranks", "2", "--max-replacements", "4", "--no-summary", "--ssh", ssh]
        program = [sys.executable, "-c", PROGRAM, str(directory), how]
        run = [sys.executable, "-m", "multiring", "run", *words, "--python", str(python), *program]
        settings = ["env", "MULTIRING_HEARTBEAT_TIMEOUT=5", "MULTIRING_PROBE=off"]
        with (directory / "output").open("w") as output, (directory / "errors").open("w") as errors:
            process = subprocess.Popen(cluster.command("a", *settings, *run), stdout=output, stderr=errors)
        try:
            job = Job(cluster, directory, process)
            for rank in range(4):
                wait_until((directory / f"started-{rank}-0").exists, f"rank {rank} has begun", job)
            yield job
        finally:
            process.kill()
            process.wait()


def wait_until(condition: Callable[[], bool], what: str, job: Job) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, f"waited 60 s until {what}: {job.told()}"
        assert job.process.poll() is None, job.told()
        time.sleep(0.05)


def left(job: Job, name: str) -> list[int]:
    """The processes that a rank named in a file, of which something is left."""
    return [int(pid) for pid in (job.directory / name).read_text().split() if Path(f"/proc/{pid}").exists()]


LOST = "host b is lost; its ranks 2, 3 start there again when it is back\n"


def test_ranks_start_again_on_a_host_whose_network_is_back_and_former_ones_are_gone(tmp_path: Path) -> None:
    with running(tmp_path, "together") as job:
        lab.cut(job.cluster, "b")
        wait_until(lambda: LOST in job.told(), "its loss is told", job)
        assert len(left(job, "started-2-0") + left(job, "started-3-0")) == 4  # nobody has told them
        lab.restore(job.cluster, "b")
        for rank, number in ((2, 1), (3, 2)):
            wait_until((tmp_path / f"started-{rank}-{number}").exists, f"rank {rank} has begun again", job)
        assert left(job, "started-2-0") + left(job, "started-3-0") == []
        code, output = job.ended()
        told = job.told()
    assert code == 0, output + told
    for rank, host in enumerate("aabb"):
        assert f"sum 0 10 20 30 of {rank} on {host} beside 2\n" in output
    assert "host b is back\n" in told
    assert "ranks 2, 3 of host b start again on host b, replacements 1, 2 of 4\n" in told


def test_a_job_ends_without_a_host_that_does_not_come_back(tmp_path: Path) -> None:
    with running(tmp_path, "alone") as job:
        lab.cut(job.cluster, "b")
        wait_until(lambda: LOST in job.told(), "its loss is told", job)
        code, output = job.ended()
        told = job.told()
    assert code == 0, output + told
    for rank in (0, 1):
        assert f"sum 0 3 6 9 of {rank} on a beside 2\n" in output
    assert "host b is back\n" not in told
