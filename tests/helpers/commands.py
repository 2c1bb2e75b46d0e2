"""The command ``multiring``, started as users start it, and in this process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fork_server
import forking_launcher
import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

from multiring.bench import launches
from multiring.cli import bench

TORCH = ("torch", "torch.distributed")


def multiring(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``multiring WORDS`` with ``environment`` added to this process's; return its exit code and output."""
    command = [sys.executable, "-m", "multiring", *words]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=220)


def forked_bench(*words: str, imports: Sequence[str] = (), **environment: str) -> Result:
    """Run ``multiring bench WORDS`` in this process; its launchers and ranks are forked, with ``imports`` done."""
    app = typer.Typer(rich_markup_mode=None)
    bench.register(app)
    with pytest.MonkeyPatch.context() as patch, _kept_handlers():
        for name, value in environment.items():
            patch.setenv(name, value)
        popen = partial(_launched, imports=imports)
        kinds = {"CalledProcessError": subprocess.CalledProcessError}
        patch.setattr(launches, "subprocess", SimpleNamespace(Popen=popen, **kinds))
        return CliRunner().invoke(app, list(words))


@contextmanager
def _launched(
    command: Sequence[str], *, imports: Sequence[str], env: Mapping[str, str], **_: Any
) -> Iterator[fork_server.Process]:
    """The place of `subprocess.Popen` in the command."""
    python, *words = command
    assert (python, words[:2]) == (sys.executable, ["-m", "multiring"])
    with open(os.devnull) as nothing:
        process = forking_launcher.start_on(
            [nothing.fileno(), 1, 2], *words[2:], imports=imports, environment=env, directory=Path.cwd()
        )
    try:
        yield process
    finally:
        process.wait()


@contextmanager
def _kept_handlers() -> Iterator[None]:
    """Keep the handler of SIGTERM, which the command replaces."""
    former = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, former)
