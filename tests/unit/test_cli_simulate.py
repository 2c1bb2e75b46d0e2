"""The command: tables, sweeps, one's own cluster and job, and one line for what does not fit."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner, Result

from multiring.cli import simulate
from multiring.cli.scenario import chosen, parse_values
from multiring.simulate.recording import Gradient, Recording, save

TOPOLOGY = """
links.host = { rate = "8 Gbit/s", latency = "20 us" }
host = [{ name = "a", ranks = 1 }, { name = "b", ranks = 1 }, { name = "c", ranks = 1 }]
"""


def run(*options: str) -> Result:
    app = typer.Typer(rich_markup_mode=None)
    simulate.register(app)
    return CliRunner().invoke(app, options, env={"COLUMNS": "150"})


def test_a_table_of_strategies() -> None:
    shown = run("--machine", "minsky", "--hosts", "6", "--strategy", "multiring,halving,async-server")
    assert shown.exit_code == 0, shown.output
    lines = shown.output.splitlines()
    assert lines[0].startswith("resnet50 on 6 hosts, 24 ranks: 164 ms of computation, 97.49 MB of gradients")
    rows = {line.split()[0]: line for line in lines[1:] if line.strip()}
    assert "% busy" in rows["multiring"]
    assert "needs a power of two hosts, not 6" in rows["halving"]
    assert "updates a step" in rows["async-server"]
    assert rows["async-server"].split()[3] == "-"
    assert "asynchronous: async-server; a step is the mean cycle of one worker" in lines[-1]


def test_one_s_own_cluster_and_job(tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text(TOPOLOGY)
    save(Recording("mine", 0.5, (Gradient(30 << 20, 0.5),)), tmp_path / "job.json")
    files = ("--topology", str(tmp_path / "cluster.toml"), "--job", str(tmp_path / "job.json"))
    shown = run(*files, "--strategy", "ring", "--json")
    assert shown.exit_code == 0, shown.output
    (point,) = json.loads(shown.stdout)
    assert point["ranks"] == 3
    (result,) = point["results"]
    assert result["exposed"] == pytest.approx(2 * 2 / 3 * (30 << 20) / 1e9, rel=0.1)
    assert result["seconds"] == pytest.approx(1 + result["exposed"])


def test_a_narrow_wire_of_the_environment_is_that_of_our_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cluster.toml").write_text(TOPOLOGY)
    save(Recording("mine", 0.5, (Gradient(30 << 20, 0.5),)), tmp_path / "job.json")
    files = ("--topology", str(tmp_path / "cluster.toml"), "--job", str(tmp_path / "job.json"))
    options = (*files, "--strategy", "multiring,ring,outer:host:5")

    def exposed() -> list[float]:
        shown = run(*options, "--json")
        assert shown.exit_code == 0, shown.output
        return [result["exposed"] for result in json.loads(shown.stdout)[0]["results"]]

    monkeypatch.delenv("MULTIRING_WIRE", raising=False)
    ours, ring, outer = exposed()
    assert "MULTIRING_WIRE" not in run(*options).output
    monkeypatch.setenv("MULTIRING_WIRE", "host=bfloat16")
    assert exposed() == [pytest.approx(ours / 2, rel=0.2), ring, pytest.approx(outer / 2, rel=0.2)]
    assert "MULTIRING_WIRE=host=bfloat16 for multiring and outer alone" in run(*options).output
    monkeypatch.setenv("MULTIRING_WIRE", "host=int2")
    assert "no exchange travels in int2" in run(*options).output
    half = run("--machine", "minsky", "--hosts", "2", "--gradients", "float16", "--strategy", "multiring")
    assert half.exit_code == 0
    assert "MULTIRING_WIRE" not in half.output


@pytest.mark.parametrize(
    ("wire", "fault"),
    [
        ("host", "MULTIRING_WIRE='host': expected level=format"),
        ("host=int3", "MULTIRING_WIRE=host=int3: wire 'int3' for level host: known are"),
        ("site=int8", "MULTIRING_WIRE=site=int8: wire for level 'site': the topology has host"),
    ],
)
def test_a_wrong_wire_of_the_environment_is_one_line(wire: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MULTIRING_WIRE", wire)
    shown = run("--machine", "minsky", "--hosts", "2")
    assert shown.exit_code == 2
    assert fault in shown.output
    assert len(shown.output.splitlines()) == 1


def test_results_that_are_approximate_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uneven = TOPOLOGY.replace("""ranks = 1 }]""", """ranks = 2 }]""")
    (tmp_path / "cluster.toml").write_text(uneven)
    options = ("--topology", str(tmp_path / "cluster.toml"), "--speed", "8", "--strategy", "ring,masters")
    assert "approximate" not in run(*options).output
    monkeypatch.setattr("multiring.simulate._MESSAGE_SECONDS", 1.0)
    assert "approximate: ring, masters; ranks differ and send too many" in run(*options).output


def test_a_strategy_of_too_many_messages_says_so_at_once(tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text('host = [{ name = "a", ranks = 100 }, { name = "b", ranks = 100 }]')
    shown = run("--topology", str(tmp_path / "cluster.toml"), "--speed", "8", "--strategy", "halving,server", "--json")
    assert shown.exit_code == 0, shown.output
    halving, server = json.loads(shown.stdout)[0]["results"]
    assert halving["seconds"] is None
    assert halving["note"] == "too many messages to simulate: 1560 x 200 different steps of 200 ranks"
    assert server["seconds"] > 4
    assert not server["note"]


def test_steps_that_fill_the_memory_are_counted_before_they_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("multiring.simulate.lockstep.rounds", lambda *_: pytest.fail("they have been made"))
    hosts = ", ".join(f'{{ name = "h{i}", ranks = 1024 }}' for i in range(32))
    (tmp_path / "cluster.toml").write_text(f"host = [{hosts}]")
    save(Recording("small", 0.5, (Gradient(4096, 0.5),)), tmp_path / "job.json")
    files = ("--topology", str(tmp_path / "cluster.toml"), "--job", str(tmp_path / "job.json"))
    shown = run(*files, "--strategy", "halving")
    assert shown.exit_code == 0, shown.output
    assert "too many messages to simulate: 1 x 2056 different steps of 32768 ranks" in shown.output


def test_all_names_of_strategies_are_known_before_the_first_is_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multiring.cli.scenario.simulate_strategy", lambda *_: pytest.fail("it has been simulated"))
    for sweep in ((), ("--sweep", "hosts=1,2")):
        shown = run("--machine", "minsky", "--strategy", "ring,async-server,bogus", *sweep)
        assert shown.exit_code == 2
        assert "unknown strategy 'bogus'; known are ring, halving" in shown.output


@pytest.mark.parametrize(("strategies", "watched"), [("ring,server", True), ("ring", False)])
def test_a_terminal_shows_how_many_strategies_are_done(
    strategies: str, watched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr("multiring.cli.scenario.Console", lambda stderr: Console(file=terminal, force_terminal=True))
    shown = run("--machine", "commodity", "--hosts", "4", "--strategy", strategies)
    assert shown.exit_code == 0, shown.output
    assert ("simulating" in terminal.getvalue()) == watched
    assert "simulating" not in shown.output


def test_names_are_shown_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text(TOPOLOGY.replace('"a"', '"[/a]"'))
    save(Recording("[/red]:cat:", 0.5, (Gradient(30 << 20, 0.5),)), tmp_path / "job.json")
    files = ("--topology", str(tmp_path / "cluster.toml"), "--job", str(tmp_path / "job.json"))
    shown = run(*files, "--strategy", "ring")
    assert shown.exit_code == 0, shown.output
    assert shown.output.startswith("[/red]:cat: on 3 hosts")
    assert "host [/a] up" in shown.output


def test_files_that_are_nested_without_end_are_refused(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text("[" * 100_000)
    (tmp_path / "cluster.toml").write_text("host = " + "[" * 100_000)
    for options in (("--machine", "minsky", "--job", "job.json"), ("--topology", "cluster.toml")):
        shown = run(*options[:-1], str(tmp_path / options[-1]))
        assert shown.exit_code == 2
        assert "nested too deeply" in shown.output


def test_a_sweep_and_its_picture(tmp_path: Path) -> None:
    picture = tmp_path / "efficiency.svg"
    shown = run(
        *("--machine", "commodity", "--strategy", "multiring,ring", "--sweep", "hosts=1..4", "--plot", str(picture))
    )
    assert shown.exit_code == 0, shown.output
    rows = [line.split() for line in shown.output.splitlines()[-4:]]
    assert rows[0] == ["hosts", "multiring", "ring"]
    assert [row[0] for row in rows[1:]] == ["1", "2", "4"]
    efficiencies = [float(row[1].rstrip("%")) for row in rows[1:]]
    assert efficiencies == sorted(efficiencies, reverse=True)
    texts = re.findall(r"<!-- (.*?) -->", picture.read_text())  # matplotlib draws letters, and says which
    assert any(text.startswith(("multiring reaches 9", "ring reaches 9")) for text in texts)
    ends = [
        f"{name} {row[column].rstrip('%')} %" for row in rows[-1:] for column, name in ((1, "multiring"), (2, "ring"))
    ]
    assert set(ends) <= set(texts)
    ticks = [float(text.rstrip("% ")) for text in texts if re.fullmatch(r"[\d.]+ %", text)]
    assert min(ticks) > 80


def test_a_picture_of_strategies_without_a_result(tmp_path: Path) -> None:
    for strategies, said in (("halving,ring", "ring reaches 9"), ("halving", "No strategy has a result on 5 hosts")):
        picture = tmp_path / f"{strategies}.svg"
        shown = run(*("--machine", "minsky", "--strategy", strategies, "--sweep", "hosts=3,5", "--plot", str(picture)))
        assert shown.exit_code == 0, shown.output
        assert f"<!-- {said}" in picture.read_text()


def test_a_sweep_says_where_a_strategy_has_no_result() -> None:
    shown = run("--machine", "minsky", "--strategy", "halving,ring,masters:8", "--sweep", "hosts=2,3,5")
    assert shown.exit_code == 0, shown.output
    lines = shown.output.splitlines()
    assert lines[-2] == "no halving at hosts 3, 5: halving and doubling needs a power of two hosts, not 3"
    assert lines[-1].startswith(
        "no masters:8 at hosts 3, 5: groups of 8 are no whole hosts of 4 ranks, or do not divide"
    )


def test_a_picture_is_drawn_where_nobody_reads_what_is_printed(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    options = ("--machine", "minsky", "--strategy", "ring", "--sweep", "hosts=3,5", "--plot", str(tmp_path / "a.svg"))
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "multiring", "simulate", *options],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
        )
    told = "multiring: the output cannot be written: No space left on device\n"
    assert (ended.returncode, ended.stderr) == (2, told)
    assert "<!-- ring reaches" in (tmp_path / "a.svg").read_text()


def test_a_picture_needs_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "matplotlib.backend_bases", raising=False)
    shown = run("--machine", "minsky", "--strategy", "ring", "--sweep", "hosts=1,2", "--plot", str(tmp_path / "a.png"))
    assert shown.exit_code == 2
    assert "pip install 'multiring[plot]'" in shown.output


def test_what_cannot_be_drawn_is_said_before_the_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multiring.cli.scenario.simulate_strategy", lambda *_: pytest.fail("it has been simulated"))
    sweep = ("--machine", "two-sites", "--strategy", "ring", "--sweep")
    for file, fault in (
        (tmp_path / "none" / "a.svg", "none is no directory"),
        (tmp_path, "it is a directory; name a file"),
        (tmp_path / "a.bmpp", "the suffix says the format"),
    ):
        shown = run(*sweep, "hosts=2,4", "--plot", str(file))
        assert shown.exit_code == 2
        assert fault in shown.output
    assert "5 hosts are not equally many at 2 sites" in run(*sweep, "hosts=2,4,5").output


def test_a_picture_that_cannot_be_written_costs_no_figures(tmp_path: Path) -> None:
    full = tmp_path / "a.svg"
    full.symlink_to("/dev/full")
    sweep = ("--machine", "commodity", "--strategy", "ring", "--sweep", "hosts=1,2", "--plot", str(full))
    for form in ((), ("--json",)):
        shown = run(*sweep, *form)
        assert shown.exit_code == 2
        assert "efficiency" in shown.stdout if form else "hosts   ring" in shown.stdout
        assert f"multiring simulate: {full}: No space left on device" in shown.stderr


def test_numbers_have_sources() -> None:
    shown = run("--machine", "minsky", "--sources")
    assert shown.exit_code == 0, shown.output
    assert "TensorFlow benchmarks" in shown.output
    assert "2017" in shown.output


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ((), "either by --machine and --hosts or by --topology"),
        (("--machine", "minsky", "--topology", "x.toml"), "either by --machine"),
        (("--machine", "cray"), "unknown machine 'cray'; known are minsky"),
        (("--machine", "minsky", "--model", "lenet"), "unknown model 'lenet'"),
        (("--machine", "minsky", "--strategy", "rings"), "masters:16; in the simulator also async-server, groups"),
        (
            ("--machine", "minsky", "--strategy", "outer:cage"),
            "'outer:cage': give a level (rank, host, rack, site) and the steps between exchanges, and",
        ),
        (
            ("--machine", "minsky", "--strategy", "outer:host:5:1:0:1"),
            "as in outer:rack:50 or outer:rack:50:4",
        ),
        (
            ("--machine", "minsky", "--strategy", "outer:host"),
            "'outer:host': give a level (rank, host, rack, site) and",
        ),
        (("--machine", "minsky", "--strategy", "outer:host:-5"), "'outer:host:-5': give a level"),
        (("--machine", "minsky", "--strategy", "outer:host:0"), "'outer:host:0': 0 steps between exchanges; 1"),
        (("--machine", "minsky", "--strategy", "outer:host:3:4"), "4 fragments in 3 steps; one is sent in a step"),
        (
            ("--machine", "minsky", "--strategy", "outer:host:3:1:12"),
            "a delay of 12 steps; at most 4 exchanges of a fragment are under way, so it is 0 to 11",
        ),
        (
            ("--machine", "minsky", "--strategy", "outer:host:20000:10001"),
            "10001 fragments; 10000 at most are predicted",
        ),
        (("--machine", "minsky", "--sweep", "ranks=1..8"), "hosts or batch can be swept"),
        (("--machine", "minsky", "--sweep", "hosts=8..1"), "'8..1' is no range"),
        (("--machine", "minsky", "--plot", "a.png"), "--plot draws a sweep"),
        (("--topology", "no.toml"), "no.toml: No such file"),
        (("--machine", "minsky", "--job", "/dev/null"), "/dev/null: it is a device, and a regular file"),
        (("--machine", "minsky", "--job", __file__), f"{__file__}: a recording is JSON, and this is none: "),
        (("--topology", "no.toml", "--hosts", "4"), "--topology FILE describes its own hosts: leave out --hosts"),
        (("--machine", "minsky", "--job", "a.json", "--model", "vgg16"), "its own job: leave out --model"),
        (("--machine", "minsky", "--job", "a.json", "--gradients", "float16"), "its own job: leave out --gradients"),
        (("--machine", "minsky", "--job", "a.json", "--sweep", "batch=1,2"), "batch is swept with --model"),
        (("--machine", "minsky", "--hosts", "999999"), "999999 hosts are 3999996 ranks; 1000000 can be simulated"),
        (("--machine", "minsky", "--sweep", "hosts=1," + 30 * "9"), "goes beyond 1000000"),
        (("--machine", ""), "unknown machine ''"),
        (("--machine", "minsky", "--hosts", "2", "--sweep", "hosts=2,4"), "values of hosts: leave out --hosts"),
        (("--machine", "minsky", "--spread", "100"), "--spread is 100: the fastest of 64 ranks would need no time"),
        (("--sources",), "--sources shows the numbers of a machine: give --machine"),
        (("--machine", "minsky", "--sources", "--batch", "3", "--hosts", "4"), "nothing: leave out --hosts, --batch"),
        (("--sources", "--json"), "--sources simulates nothing: leave out --json"),
        (("--machine", "two-sites", "--hosts", "3"), "not equally many at 2 sites"),
    ],
)
def test_what_does_not_fit_is_one_line(options: tuple[str, ...], fault: str) -> None:
    shown = run(*options)
    assert shown.exit_code == 2
    assert fault in shown.output
    assert len(shown.output.splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        (("--gradients", "int8"), "'int8' is not one of 'float32', 'float16'"),
        (("--sweep", "hosts=1,2", "--plot", "/proc/a.svg"), "'--plot': /proc/a.svg: it cannot be made"),
    ],
)
def test_a_value_that_an_option_does_not_take_is_named(options: tuple[str, ...], fault: str) -> None:
    shown = run("--machine", "minsky", *options)
    assert shown.exit_code == 2
    assert fault in shown.output


def test_ranges() -> None:
    assert parse_values("1..8") == [1, 2, 4, 8]
    assert parse_values("3..20") == [3, 6, 12, 20]
    assert parse_values("5..5") == [5]
    assert parse_values("4,2") == [4, 2]
    assert chosen("ring, masters") == ["ring", "masters"]
    for wrong in ("", "0..4", "4..2", "a", "1,,2"):
        with pytest.raises(ValueError, match="is no range"):
            parse_values(wrong)
