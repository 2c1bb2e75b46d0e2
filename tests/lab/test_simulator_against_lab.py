"""The comparison of the simulator with the lab: what it predicts, what it forces, what it says of both."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import scripts

from multiring import lab
from multiring.planning import topology_file
from multiring.planning.topology import Link
from multiring.simulate import SimulatedCall, simulate

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "simulator_against_lab.py"
FLAT = ROOT / "lab" / "topologies" / "flat.toml"
MB = 1 << 20


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return scripts.loaded(SCRIPT)


def row(plan: str, predicted: float, measured: float, topology: str = "flat") -> dict[str, Any]:
    return {
        "topology": topology,
        "nbytes": 8 * MB,
        "plan": plan,
        "predicted": predicted,
        "measured": measured,
        "error": predicted / measured - 1,
    }


def test_rejected_plans_are_among_the_cases(script: ModuleType) -> None:
    cases = {case.name: case for case in script.cases(topology_file.load(FLAT), 8 * MB)}
    assert {"ring", "masters", "server", "multiring", "multiring, rejected", "multiring, one segment"} <= cases.keys()
    assert cases["multiring, rejected"].plan.id != cases["multiring"].plan.id
    assert cases["multiring, one segment"].plan.segment_bytes == 8 * MB
    assert cases[script.TWICE].calls == 2


def test_of_small_buffers_the_next_best_are_tried_too(script: ModuleType) -> None:
    topology = topology_file.load(FLAT)
    large, small = ([case.name for case in script.cases(topology, nbytes)] for nbytes in (8 * MB, 4096))
    assert [name for name in small if "candidate" in name] == [
        f"multiring, candidate {place}" for place in (2, 3, 4, 5)
    ]
    assert not any("candidate" in name for name in large)
    assert "multiring, one segment" not in small


def test_predictions_are_made_at_the_rates_that_headers_leave(script: ModuleType) -> None:
    topology = topology_file.load(FLAT)
    case = script.cases(topology, 8 * MB)[0]
    nominal = simulate(topology, [SimulatedCall(case.plan, 8 * MB)]).seconds
    assert script.predict(topology, case, 8 * MB) == pytest.approx(nominal / script.GOODPUT, rel=0.01)
    (host, *_) = topology.places
    thinned = script._thinned(host)
    assert thinned.link == Link(0.96 * host.link.up, 0.96 * host.link.down, host.link.latency)
    assert thinned.places == host.places


def test_errors_and_order_are_summed_up(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        row("ring", 1.0, 1.1),
        row("masters", 2.0, 1.0),  # longer than the ring predicted, shorter measured
        row("torus", 2.1, 2.1),  # within 10 % of masters: no pair
        row(script.TWICE, 9.0, 10.0),
        row("ring", 0.1, 0.1, "racks"),
    ]
    script.summarise(rows)
    shown = capsys.readouterr().out
    assert "5 cases: median error 9%, worst 100% (masters on flat)" in shown
    assert "1 of 2 pairs" in shown


@pytest.mark.lab
@pytest.mark.skipif(lab.obstacle() is not None, reason=str(lab.obstacle()))
def test_every_plan_runs_on_the_lab(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    options = ["--nbytes", str(MB), "--rounds", "1", "--json", str(file)]
    done = subprocess.run([sys.executable, str(SCRIPT), str(FLAT), *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = json.loads(file.read_text())["rows"]
    assert len(rows) >= 9
    assert all(each["measured"] > 0 and each["predicted"] > 0 and len(each["rounds"]) == 1 for each in rows)
    # A parameter server sends several times what the planner's choice does, which no noise hides.
    measured = {each["plan"]: each["measured"] for each in rows}
    assert measured["server"] > measured["multiring"]
