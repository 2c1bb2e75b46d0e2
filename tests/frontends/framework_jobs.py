"""Programs of the framework tests, run by ``multiring run`` in real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def needs(*frameworks: str) -> list[pytest.MarkDecorator]:
    """Marks for tests of frameworks, which only their ranks import."""
    missing = [name for name in frameworks if find_spec(name) is None]
    # Ranks that share a busy core take long to compile.
    return [pytest.mark.timeout(300), pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")]


def job(program: str, *arguments: str, ranks: int, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program that stands beside this file, or those of its functions that ``arguments`` name."""
    paths = [str(HERE.parent / "helpers"), environment.pop("PYTHONPATH", os.environ.get("PYTHONPATH", ""))]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return subprocess.run(
        [sys.executable, "-m", "multiring", "run", "-n", str(ranks), str(HERE / program), *arguments],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=280,
    )


def succeeds(program: str, *arguments: str, ranks: int, **environment: str) -> str:
    """What a job prints that is to end well."""
    done = job(program, *arguments, ranks=ranks, **environment)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout
