"""Output about plans: bytes and times that can be worked out by hand, and one line for what cannot be planned."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from multiring import units
from multiring.cli import plan
from multiring.planning import planner, topology_file
from multiring.planning.choice import TIE
from multiring.planning.strategies import strategy

MB = 1 << 20

RACKS = """
links.host = { rate = "400 Mbit/s" }
links.rack = { rate = "200 Mbit/s" }

[[rack]]
name = "left"
host = [{ name = "a", ranks = 2 }, { name = "b", ranks = 2 }]

[[rack]]
name = "right"
host = [{ name = "c", ranks = 2 }, { name = "d", ranks = 2 }]
"""

SLOW_CARD = """
links.host = { rate = "400 Mbit/s" }
host = [{ name = "a", ranks = 1 }, { name = "b", ranks = 1 }, { name = "c", ranks = 1, rate = "100 Mbit/s" }]
"""


def run(*options: str, columns: int = 120) -> Result:
    app = typer.Typer(rich_markup_mode=None)
    plan.register(app)
    return CliRunner().invoke(app, options, env={"COLUMNS": str(columns)})


def planned(tmp_path: Path, topology: str, size: str, *options: str) -> dict[str, Any]:
    file = tmp_path / "topology.toml"
    file.write_text(topology)
    shown = run("--topology", str(file), "--size", size, "--json", *options)
    assert shown.exit_code == 0, shown.output
    record: dict[str, Any] = json.loads(shown.stdout)
    return record


def test_bytes_on_each_link_and_the_bound(tmp_path: Path) -> None:
    record = planned(tmp_path, RACKS, "8MB")
    assert (record["collective"], record["nbytes"], record["world_size"]) == ("all_reduce", 8 * MB, 8)
    loads = {link["level"]: (link["alike"], link["bytes_up"], link["bytes_down"]) for link in record["links"]}
    # A host sends and receives half of the buffer for its rack and half of the rest for the other, there and back.
    assert loads["rack"] == (2, 8 * MB, 8 * MB)
    assert loads["host"] == (4, 12 * MB, 12 * MB)
    assert record["bound_seconds"] == pytest.approx(8 * MB / (200e6 / 8))
    assert record["bound_seconds"] < record["predicted_seconds"] < 1.05 * record["bound_seconds"]
    assert [phase["level"] for phase in record["phases"]] == ["rank", "host", "rack", "rack", "host", "rank"]


def test_the_buffer_passes_a_slow_card_once(tmp_path: Path) -> None:
    record = planned(tmp_path, SLOW_CARD, "8MB")
    loads = {
        link["rank"]: (link["bytes_up"], link["bytes_down"]) for link in record["links"] if link["level"] == "host"
    }
    assert loads[2] == (8 * MB, 8 * MB)  # a ring would pass 2 (n - 1) / n of it
    assert record["bound_seconds"] == pytest.approx(8 * MB / (100e6 / 8))
    assert record["predicted_seconds"] < 1.05 * record["bound_seconds"]


def test_rejected_candidates_are_sorted_and_none_is_much_faster(tmp_path: Path) -> None:
    record = planned(tmp_path, RACKS, "4KB")
    rejected = [candidate["predicted_seconds"] for candidate in record["rejected"]]
    assert len(rejected) > 10
    assert min(rejected) * TIE >= record["predicted_seconds"]
    assert max(rejected) > 2 * record["predicted_seconds"]


def test_collective_and_root_are_planned(tmp_path: Path) -> None:
    record = planned(tmp_path, RACKS, "1MB", "--collective", "broadcast", "--root", "5")
    assert {phase["kind"] for phase in record["phases"]} == {"broadcast"}
    assert record["bound_seconds"] == pytest.approx(MB / (200e6 / 8))


def test_table_and_printed_choice_show_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "topology.toml"
    file.write_text(RACKS)
    choice = planner.choose(topology_file.load(file), "all_reduce", planner.size_class(8 * MB))
    shown = run("--topology", str(file), "--size", "8MB").stdout
    monkeypatch.setenv("FORCE_COLOR", "1")  # what is printed by a job is the same everywhere
    monkeypatch.setenv("COLUMNS", "40")
    assert [line.rstrip() for line in shown.splitlines()] == str(choice).splitlines()
    phases, *rows = str(choice).partition("\n\n")[2].splitlines()[: 2 + len(choice.plan.phases)]
    assert phases == "phases:"
    assert rows[0] == "  kind            level  method  rings   shares  steps  alone"
    assert [row.split()[:2] for row in rows[1:]] == [[phase.kind, phase.level] for phase in choice.plan.phases]
    for word in (choice.plan.id, "reduce_scatter", "200 Mbit/s", "rejected", "cut bound"):
        assert word in shown


def test_a_narrow_terminal_breaks_cells_and_not_columns(tmp_path: Path) -> None:
    file = tmp_path / "topology.toml"
    file.write_text(RACKS)
    shown = run("--topology", str(file), "--size", "8MB", columns=60).stdout
    rejected = shown.partition("rejected:\n")[2].splitlines()
    assert max(map(len, rejected)) <= 60
    assert rejected[0].split() == ["plan", "stages", "predicted", "longer", "by"]
    assert rejected[2].startswith(" " * 16)  # the second line of a cell stands under its first


def test_a_plan_is_made_without_what_shows_it() -> None:
    program = (
        "import sys, multiring\n"
        "from multiring.planning import planner\n"
        "from multiring.planning.topology import Topology\n"
        "choice = planner.choose(Topology.flat([4]), 'all_reduce', 4096)\n"
        "assert not any(name.partition('.')[0] == 'rich' for name in sys.modules)\n"
        "print(choice)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("plan ")
    assert "\nphases:\n  kind " in done.stdout


@pytest.mark.parametrize(
    ("options", "offending"),
    [
        (["--topology", "nowhere.toml", "--size", "1MB"], "nowhere.toml"),
        (["--topology", "FILE", "--size", "1XB"], "1XB"),
        (["--topology", "FILE", "--size", "1MB", "--collective", "allreduce"], "allreduce"),
        (["--topology", "FILE", "--size", "1MB", "--collective", "broadcast", "--root", "8"], "root is 8"),
        (["--topology", "FILE", "--size", "1MB", "--root", "3"], "--root 3: all_reduce has no root"),
        (["--topology", "BROKEN", "--size", "1MB"], "hots"),
        (["--topology", "FILE", "--size", "0"], "--size 0: of nothing nothing is sent"),
        (
            ["--topology", "FILE", "--size", "1MB", "--collective", "broadcast", "--wire", "rack=bfloat16"],
            "--wire rack=bfloat16: only all_reduce travels narrow",
        ),
    ],
)
def test_one_line_says_what_cannot_be_planned(options: list[str], offending: str, tmp_path: Path) -> None:
    (tmp_path / "FILE").write_text(RACKS)
    (tmp_path / "BROKEN").write_text('[[hots]]\nname = "a"\nranks = 1\n')
    options = [str(tmp_path / option) if option in ("FILE", "BROKEN") else option for option in options]
    refused = run(*options)
    assert refused.exit_code == 2
    assert refused.stdout == ""
    assert offending in refused.stderr
    assert len(refused.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (units.ranges([]), ""),
        (units.ranges([3]), "3"),
        (units.ranges([0, 1, 2, 5]), "0-2, 5"),
        (units.ranges({4, 1, 3}), "1, 3-4"),
        (units.duration(2.5), "2.5 s"),
        (units.duration(0.9996), "1 s"),
        (units.duration(35.04e-3), "35 ms"),
        (units.duration(1.25e-6), "1.25 us"),
        (units.precise_duration(53.96e-3), "54.0 ms"),
        (units.precise_duration(0.09996), "100 ms"),
        (units.precise_duration(0.0), "0 us"),
        (units.size(64 * MB), "64 MB"),
        (units.size(1536), "1.5 KB"),
        (units.size(100), "100 B"),
        (units.rate(50e6), "400 Mbit/s"),
        (units.rate(1.25e9), "10 Gbit/s"),
    ],
)
def test_quantities_are_read_with_their_units(text: str, expected: str) -> None:
    assert text == expected


def test_a_strategy_is_planned_by_its_name(tmp_path: Path) -> None:
    """A parameter server on every host: half of the ranks are servers, and the uplinks carry four times the bound."""
    record = planned(tmp_path, RACKS, "8MB", "--strategy", "server")
    topology = topology_file.parse(RACKS)
    assert record["plan"] == strategy("server").plan(topology, 8 * MB).id
    assert [phase["shares"] for phase in record["phases"]] == [[1, 0] * 4] * 2
    loads = {link["level"]: (link["alike"], link["bytes_up"]) for link in record["links"] if link["level"] != "rank"}
    assert loads == {"rack": (2, 32 * MB), "host": (4, 24 * MB)}
    assert record["predicted_seconds"] == pytest.approx(32 * MB / (200e6 / 8), rel=0.05)
    assert record["rejected"][0]["predicted_seconds"] < record["predicted_seconds"] / 3


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--strategy", "async-server"], "strategy 'async-server' is no collective"),
        (["--strategy", "multiring:3x3"], "3x3 is 9 ranks; the topology has 8"),
        (
            ["--strategy", "ring", "--collective", "broadcast"],
            "--strategy ring is a way to all_reduce; it has no broadcast",
        ),
        (["--strategy", "ring", "--wire", "rack=bfloat16"], "--strategy ring sends float32 as it is; leave out --wire"),
    ],
)
def test_a_strategy_that_cannot_be_had_is_one_line(tmp_path: Path, options: list[str], reason: str) -> None:
    file = tmp_path / "racks.toml"
    file.write_text(RACKS)
    refused = run("--topology", str(file), "--size", "8MB", *options)
    assert refused.exit_code == 2
    assert reason in refused.stderr
    assert refused.stderr.count("\n") == 1


def test_a_wire_of_the_environment_counts_where_none_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "racks.toml"
    file.write_text(RACKS)
    options = ["--topology", str(file), "--size", "8MB", "--json"]
    monkeypatch.delenv("MULTIRING_WIRE", raising=False)
    plain, given = run(*options).stdout, run(*options, "--wire", "rack=bfloat16").stdout
    monkeypatch.setenv("MULTIRING_WIRE", "rack=bfloat16")
    assert run(*options).stdout == given != plain
    assert run(*options, "--wire", "").stdout == plain
    refused = run(*options, "--strategy", "ring")
    assert "--strategy ring sends float32 as it is, which MULTIRING_WIRE=rack=bfloat16 forbids" in refused.stderr
    for wire, fault in (
        ("rack", "MULTIRING_WIRE='rack': expected"),
        ("site=int8", "MULTIRING_WIRE=site=int8: wire for"),
    ):
        monkeypatch.setenv("MULTIRING_WIRE", wire)
        refused = run(*options)
        assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1)
        assert fault in refused.stderr


def test_a_strategy_of_too_many_messages_is_refused_as_the_simulator_does(tmp_path: Path) -> None:
    file = tmp_path / "two.toml"
    file.write_text('host = [{ name = "a", ranks = 200 }, { name = "b", ranks = 200 }]')
    options = ["--topology", str(file), "--size", "64MB", "--strategy", "halving"]
    refused = subprocess.run([sys.executable, "-m", "multiring", "plan", *options], capture_output=True, text=True)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr == "multiring plan: too many messages to simulate: 256 x 400 different steps of 400 ranks\n"
