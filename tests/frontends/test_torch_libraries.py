"""The examples for libraries on top of torch, which hand the backend's name through or use the group that is there."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("name", "library"), [("lightning", "lightning"), ("accelerate", "accelerate"), ("trainer", "transformers")]
)
def test_a_library_trains_over_multiring(name: str, library: str) -> None:
    if not importlib.util.find_spec(library):
        pytest.skip(f"{library} is not installed: pip install --group frameworks")
    words = ["-m", "multiring", "run", "-n", "2", str(EXAMPLES / f"{name}_digits.py")]
    ended = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=110)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = re.search(r"accuracy ([\d.]+)% on 2 rank\(s\) over multiring", ended.stdout)
    assert found, ended.stdout
    assert float(found[1]) > 75  # guessing gives 10
