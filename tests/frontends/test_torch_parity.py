"""What torch's own distributed tests do over Gloo with two ranks, they do over multiring."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ACCOUNT = HERE.parents[1] / "benchmarks/results/2026-11-27-torch.md"

EXCLUDED = {  # ACCOUNT says why
    "test_monitored_barrier_gloo",
    "test_monitored_barrier_gloo_rank_0_timeout",
    "test_monitored_barrier_gloo_subgroup",
}


def outcomes(backend: str, *tests: str) -> dict[str, dict[str, Any]]:
    command = [sys.executable, HERE / "torch_parity.py", "--backend", backend, *tests]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=800, check=True)
    return {result["name"]: result for result in map(json.loads, done.stdout.splitlines())}


@pytest.mark.timeout(1700)
def test_what_passes_over_gloo_passes_over_multiring() -> None:
    pytest.importorskip("expecttest")  # torch's test support needs it
    ours = outcomes("multiring")
    doubtful = [name for name, result in ours.items() if result["outcome"] not in ("passed", "skipped")]
    gloo = outcomes("gloo", *doubtful) if doubtful else {}
    lost = {name: ours[name]["detail"] for name, result in gloo.items() if result["outcome"] == "passed"}
    assert set(lost) == EXCLUDED, "\n".join(detail for name, detail in lost.items() if name not in EXCLUDED)
    assert sum(result["outcome"] == "passed" for result in ours.values()) > 90


def test_exclusions_are_documented() -> None:
    text = ACCOUNT.read_text()
    assert not [name for name in EXCLUDED if name not in text]
