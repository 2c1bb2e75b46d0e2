"""The command itself."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import multiring


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "multiring", *words], capture_output=True, text=True)


def test_version() -> None:
    assert run("--version").stdout == f"multiring {multiring.__version__}\n"


def test_help_names_every_command() -> None:
    shown = run("--help").stdout
    assert all(command in shown for command in ("run", "plan", "doctor", "bench"))


def test_run_refuses_a_plan_that_every_rank_would_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    for plan, fault in (("async-server", "it can be simulated only"), ("rings", "unknown strategy 'rings'")):
        monkeypatch.setenv("MULTIRING_PLAN", plan)
        refused = run("run", "-n", "2", "true")
        assert refused.returncode == 2
        (line,) = refused.stderr.splitlines()
        assert line.startswith("multiring run: MULTIRING_PLAN: ")
        assert fault in line


def test_a_reader_that_has_gone_ends_a_command_quietly() -> None:
    """As after ``| head``."""
    reads, writes = os.pipe()
    os.close(reads)
    words = [sys.executable, "-m", "multiring", "lab", "status"]
    ended = subprocess.run(words, stdout=writes, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writes)
    assert (ended.returncode, ended.stderr) == (1, "")


def test_unknown_command_is_named() -> None:
    refused = run("fly")
    assert refused.returncode == 2
    assert "fly" in refused.stderr
