"""A training that loses a rank in the middle, and goes on from its checkpoint under both launchers.

The ranks of `multiring run` are forks, those of torchrun are not.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from forking_launcher import TORCH
from framework_jobs import job

pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]


@pytest.mark.parametrize("launcher", ["multiring run", "torchrun"])
def test_a_killed_rank_costs_a_restart_and_no_accuracy(launcher: str, tmp_path: Path) -> None:
    example = ROOT / "examples/elastic_digits.py"
    words = ["--checkpoint", str(tmp_path / "digits.pt"), "--every", "10", "--kill", "75"]
    if launcher == "torchrun":
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        command = [sys.executable, *TORCHRUN, str(example), *words]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=150)
    else:
        done = job(example, *words, ranks=2, options=("--max-restarts", "1"), imports=TORCH, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "restart 0: begins at step 0 of 132" in done.stdout
    assert "restart 1: begins at step 70 of 132" in done.stdout
    found = re.search(r"Test accuracy ([\d.]+)%", done.stdout)
    assert found, done.stdout
    assert float(found[1]) > 95
    # torchrun may end rank 0 before that says whom it lost; then torchrun says "local_rank: 1".
    assert re.search("rank:? 1", done.stderr), done.stderr
    assert not (tmp_path / "digits.pt").exists()
