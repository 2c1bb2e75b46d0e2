"""The commands of docs/tutorial/two-machines.md as they stand there, on two hosts of the lab."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from multiring import lab
from multiring.lab import Cluster
from multiring.planning.topology import LEVELS, Link, Place, Topology, ranks_in_host

reason = lab.obstacle()
pytestmark = [pytest.mark.lab, pytest.mark.skipif(reason is not None, reason=str(reason))]

PAGE = Path(__file__).parents[2] / "docs" / "tutorial" / "two-machines.md"

TRAIN = """
import os
import socket

import numpy as np

import multiring as mr

mr.init()
gradient = np.arange(1000, dtype=np.float64) * (mr.rank() + 1)
mr.all_reduce(gradient)
assert (gradient == np.arange(1000) * 10).all()
print("rank", mr.rank(), "of", mr.world_size(), "on", socket.gethostname(), "at", os.environ["MASTER_ADDR"])
mr.shutdown()
"""

EXPECTED = [
    "rank 0 of 4 on alpha at 10.77.0.1",
    "[1] rank 1 of 4 on alpha at 10.77.0.1",
    "[2] rank 2 of 4 on beta at 10.77.0.1",
    "[3] rank 3 of 4 on beta at 10.77.0.1",
]


@pytest.fixture(scope="module")
def machines() -> Iterator[Cluster]:
    card = Link(up=1.25e9, down=1.25e9, latency=0.0)  # more than the cores can fill
    places = (Place("alpha", card, ranks_in_host([0, 1])), Place("beta", card, ranks_in_host([2, 3])))
    with lab.up(Topology(LEVELS[:2], places)) as cluster:
        yield cluster


@pytest.fixture
def directory(machines: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with train.py, where ``ssh`` leads to the other machine and ``multiring`` is this one."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "ssh").symlink_to(machines.ssh)
    (programs / "multiring").write_text(f'#!/bin/sh\nexec {sys.executable} -m multiring "$@"\n')
    (programs / "multiring").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


def commands() -> tuple[str, str]:
    """The blocks of shell commands that start the job over ssh and without."""
    blocks = re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    (over_ssh,) = (block for block in blocks if block.startswith("multiring run") and "-H alpha:2,beta:2" in block)
    (typed,) = (block for block in blocks if "--host-index" in block)
    return over_ssh, typed


def start(machines: Cluster, host: str, command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        machines.command(host, "sh", "-c", command),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def left(machines: Cluster) -> dict[str, list[int]]:
    return {host: pids for host, pids in machines.processes().items() if pids}


def test_over_ssh(machines: Cluster, directory: Path) -> None:
    over_ssh, _ = commands()
    with start(machines, "alpha", over_ssh) as launcher:
        output, errors = launcher.communicate(timeout=60)
    assert launcher.returncode == 0, errors
    measured, *summary = errors.splitlines()
    assert measured.startswith("measured the links of 2 hosts in ")
    assert summary[0].startswith("multiring: 4 ranks in ")
    assert len(summary) == 3
    assert sorted(output.splitlines()) == sorted(EXPECTED)


def test_typed_on_each(machines: Cluster, directory: Path) -> None:
    _, typed = commands()
    (export,) = re.findall(r"^# on both\n(.*)$", typed, flags=re.MULTILINE)
    starts = dict(re.findall(r"^# on (alpha|beta)\n(multiring run .*)$", typed, flags=re.MULTILINE))
    assert list(starts) == ["alpha", "beta"]
    on = {host: f"{export}\n{command}" for host, command in starts.items()}
    (directory / ".multiring-secret").write_bytes(os.urandom(32).hex().encode())
    with start(machines, "beta", on["beta"]) as beta, start(machines, "alpha", on["alpha"]) as alpha:
        output, errors = alpha.communicate(timeout=60)
        assert (alpha.returncode, beta.wait(30)) == (0, 0), errors
    assert sorted(output.splitlines()) == sorted(EXPECTED)


def test_a_killed_rank_is_named_on_both_machines(machines: Cluster, directory: Path) -> None:
    (directory / "train.py").write_text("""
import os
import signal

import numpy as np

import multiring as mr

mr.init()
x = np.zeros(1 << 20)
for step in range(1000):
    if step == 10 and mr.rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        mr.all_reduce(x)
    except mr.PeerLost as error:
        print("lost", error.rank, "of host", error.host)
        raise
""")
    over_ssh, _ = commands()
    with start(machines, "alpha", over_ssh) as launcher:
        output, errors = launcher.communicate(timeout=60)
    assert launcher.returncode == 137, errors
    assert re.search(
        r"multiring: rank 2 on host beta failed: killed by signal 9 \(SIGKILL\), after [\d.]+ s\n$", errors
    )
    assert sorted(output.splitlines()) == ["[1] lost 2 of host beta", "[3] lost 2 of host beta", "lost 2 of host beta"]
    assert left(machines) == {}


def test_a_host_behind_a_firewall_is_named_at_the_end(machines: Cluster, directory: Path) -> None:
    over_ssh, _ = commands()
    lab.cut(machines, "beta")
    try:
        with start(machines, "alpha", f"MULTIRING_INIT_TIMEOUT=3 {over_ssh}") as launcher:
            _, errors = launcher.communicate(timeout=100)
    finally:
        lab.restore(machines, "beta")
    assert launcher.returncode != 0
    cause = "host alpha (10.77.0.1) could not be reached from host beta: if there is a firewall, open ports in it"
    lines = errors.splitlines()
    assert lines[0].startswith(f"multiring: {cause}")
    assert lines[-1].startswith(f"multiring: at its start {cause}")


def test_a_killed_launcher_leaves_nothing_on_either_machine(machines: Cluster, directory: Path) -> None:
    (directory / "train.py").write_text("""
import os, time
open(f"started-{os.environ['RANK']}", "w").close()
time.sleep(100)
""")
    over_ssh, _ = commands()
    with start(machines, "alpha", f"exec {over_ssh}") as launcher:
        deadline = time.monotonic() + 30
        while not all((directory / f"started-{rank}").exists() for rank in range(4)):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert len(left(machines)["beta"]) >= 3
        launcher.kill()
        launcher.wait(30)
        while left(machines):
            assert time.monotonic() < deadline + 30, left(machines)
            time.sleep(0.02)
