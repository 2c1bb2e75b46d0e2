"""The comparison of the simulator's `Outer` with the lab: what it trains, and what it says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import scripts

pytest.importorskip("torch")

from multiring import lab

PAIR = """
links.host = { rate = "400 Mbit/s", latency = "25 us", burst = "100 kB" }
host = [{ name = "a" }, { name = "b" }]
"""
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "outer_against_lab.py"


def test_a_recording_has_the_bytes_and_seconds_asked_for() -> None:
    scripts.loaded(SCRIPT.with_name("simulator_against_lab.py"))
    recording = scripts.loaded(SCRIPT).recording_of(8, 0.06)
    assert recording.nbytes == 8_000_000
    assert recording.seconds == pytest.approx(0.06)
    assert recording.forward == pytest.approx(0.02)


@pytest.mark.lab
@pytest.mark.skipif(lab.obstacle() is not None, reason=str(lab.obstacle()))
def test_strategies_take_turns_on_the_lab(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    words = ["multiring", "outer:rank:4:2:3", "outer:rank:2:1:5"]
    options = ["--megabytes", "0.4", "--seconds", "0.03", "--rounds", "2", "--turns", "2", "--json", str(file)]
    topology = tmp_path / "pair.toml"
    topology.write_text(PAIR)
    done = subprocess.run([sys.executable, SCRIPT, topology, *words, *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = json.loads(file.read_text())["rows"]
    assert [row["strategy"] for row in rows] == words
    for row in rows:  # no step is shorter than what it sleeps
        assert row["predicted"] > 0.0299
        assert len(row["turns"]) == 2
        assert min(row["turns"]) > 0.0299
        assert f"| {row['strategy']} |" in done.stdout
