"""``multiring run`` over OpenSSH itself: a server on loopback, with keys of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from loopback_sshd import SSHD, serving

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(SSHD is None, reason="no sshd here: apt-get install openssh-server"),
]

PROGRAM = """
import numpy as np
import multiring as mr

mr.init()
x = np.arange(3) * (mr.rank() + 1)
mr.all_reduce(x)
print("rank", mr.rank(), "of", mr.world_size(), "has", x.tolist())
mr.shutdown()
"""


@pytest.fixture
def config(tmp_path: Path) -> Iterator[Path]:
    """File with ssh's settings for ``beta``, which is this machine."""
    with serving(tmp_path, {"beta": ""}) as found:
        yield found


def run(config: Path, hosts: str, python: Path) -> subprocess.CompletedProcess[str]:
    program = config.with_name("train.py")
    program.write_text(PROGRAM)
    options = ["--no-summary", "--ssh", f"ssh -F {config}", "--python", str(python), "-H", hosts]
    command = [sys.executable, "-m", "multiring", "run", *options, str(program)]
    return subprocess.run(command, cwd=config.parent, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("hosts", ["beta:2", "localhost:1,beta:1"])
def test_ranks_are_started_by_ssh(config: Path, hosts: str) -> None:
    python = config.with_name("python")  # what a login finds of this test's own environment
    python.write_text(f'#!/bin/sh\nPYTHONPATH={":".join(filter(None, sys.path))} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    done = run(config, hosts, python)
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        assert f"rank {rank} of 2 has [0, 3, 6]" in done.stdout


def test_a_host_without_multiring_is_named(config: Path) -> None:
    python = config.with_name("python")
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    python.chmod(0o755)
    done = run(config, "beta:2", python)
    assert done.returncode != 0
    assert "host beta: ssh has ended: exit code 1; install multiring" in done.stderr
