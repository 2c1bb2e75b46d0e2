"""The command ``multiring``, started as users start it."""

from __future__ import annotations

import os
import subprocess
import sys


def multiring(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """What it ended with, and what it said; ``environment`` is added to this process's."""
    command = [sys.executable, "-m", "multiring", *words]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=220)
