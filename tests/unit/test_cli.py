"""The command itself."""

from __future__ import annotations

import subprocess
import sys

import multiring


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "multiring", *words], capture_output=True, text=True)


def test_version() -> None:
    assert run("--version").stdout == f"multiring {multiring.__version__}\n"


def test_help_names_every_command() -> None:
    shown = run("--help").stdout
    assert all(command in shown for command in ("run", "plan", "doctor", "bench"))


def test_unknown_command_is_named() -> None:
    refused = run("fly")
    assert refused.returncode == 2
    assert "fly" in refused.stderr
