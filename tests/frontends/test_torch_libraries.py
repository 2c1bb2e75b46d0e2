"""The examples for libraries on top of torch, which hand the backend's name through or use the group that is there."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from forking_launcher import TORCH_LIBRARIES
from framework_jobs import job

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("name", "library"), [("lightning", "lightning"), ("accelerate", "accelerate"), ("trainer", "transformers")]
)
def test_a_library_trains_over_multiring(name: str, library: str) -> None:
    if not importlib.util.find_spec(library):
        pytest.skip(f"{library} is not installed: pip install --group frameworks")
    ended = job(EXAMPLES / f"{name}_digits.py", ranks=2, imports=TORCH_LIBRARIES, timeout=110)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = re.search(r"accuracy ([\d.]+)% on 2 rank\(s\) over multiring", ended.stdout)
    assert found, ended.stdout
    assert float(found[1]) > 75  # guessing gives 10
