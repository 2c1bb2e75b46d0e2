"""The command itself."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

import multiring
from multiring.cli import COMMANDS, main

PLAN = ["plan", "--topology", str(Path(__file__).parents[2] / "lab/topologies/flat.toml"), "--size", "1MB"]
"""A command whose output does not depend on what this machine holds or runs."""


class Ended(NamedTuple):
    code: str | int | None
    output: str
    errors: str


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "multiring", *words], capture_output=True, text=True)


@pytest.fixture
def inside(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """The same in this process."""

    def ended(*words: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["multiring", *words])
        with pytest.raises(SystemExit) as end:
            main()
        return Ended(end.value.code, *capsys.readouterr())

    return ended


def test_version() -> None:
    assert run("--version").stdout == f"multiring {multiring.__version__}\n"


def test_the_version_is_told_without_importing_what_commands_need() -> None:
    words = [sys.executable, "-X", "importtime", "-m", "multiring", "--version"]
    told = subprocess.run(words, capture_output=True, text=True)
    assert told.stdout == f"multiring {multiring.__version__}\n"
    imported = {line.rpartition("|")[2].strip() for line in told.stderr.splitlines()}
    assert not imported & {"typer", "rich", "asyncio", "numpy", "multiring.launch", "multiring.cli.run"}


@pytest.mark.parametrize("words", [["--help"], ["fly"], ["run", "--help"]])
def test_help_imports_nothing_of_other_commands(words: list[str]) -> None:
    told = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "multiring", *words], capture_output=True, text=True
    )
    imported = {line.rpartition("|")[2].strip() for line in told.stderr.splitlines()}
    assert "typer" in imported
    assert not imported & {"numpy", "multiring.cli.bench", "multiring.job.rendezvous", "multiring.simulate"}


def test_help_is_readable_in_80_columns(inside: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for words in ([], ["run"], ["bench"], ["lab"]):
        shown = inside(*words, "--help").output.splitlines()
        assert max(map(len, shown)) <= 80
        assert len(shown) < 60


def test_every_command_is_told_of_in_help(inside: Callable[..., Ended]) -> None:
    for command in COMMANDS:
        assert inside(command, "--help").output.startswith(f"Usage: multiring {command} ")


def test_a_shell_completes_commands_and_options() -> None:
    def completed(*words: str) -> list[str]:
        asked = {
            "_MULTIRING_COMPLETE": "complete_bash",
            "COMP_WORDS": " ".join(words),
            "COMP_CWORD": str(len(words) - 1),
        }
        return subprocess.run(
            [sys.executable, "-m", "multiring"], capture_output=True, text=True, env={**os.environ, **asked}
        ).stdout.split()

    assert completed("multiring", "pl") == ["plan"]
    assert completed("multiring", "run", "--max-re") == ["--max-restarts", "--max-replacements"]
    assert "--install-completion" in run("--help").stdout


def test_help_names_every_command(inside: Callable[..., Ended]) -> None:
    shown = inside("--help").output
    assert all(f"\n  {command} " in shown for command in COMMANDS)


def test_run_refuses_a_plan_that_every_rank_would_refuse(
    inside: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    for plan, fault in (("async-server", "it can be simulated only"), ("rings", "unknown strategy 'rings'")):
        monkeypatch.setenv("MULTIRING_PLAN", plan)
        refused = inside("run", "-n", "2", "true")
        assert (refused.code, refused.output) == (2, "")
        (line,) = refused.errors.splitlines()
        assert line.startswith("multiring run: MULTIRING_PLAN: ")
        assert fault in line


@pytest.mark.parametrize(
    ("variable", "value", "told"),
    [
        ("WIRE", "host=fp16", "'fp16' for level host: known are bfloat16, float16, int8, int4, int2, float8"),
        ("WIRE", "hots=int8", "MULTIRING_WIRE=hots=int8: wire for level 'hots': known are host, rack, site"),
        ("WIRE", "host=int8,rack=float16", "the sum can be rounded to one format only"),
        ("INTERFACE", "eth99", "MULTIRING_INTERFACE='eth99' admits no address of this host; it has: "),
    ],
)
def test_run_refuses_settings_that_every_rank_would_refuse(
    inside: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch, variable: str, value: str, told: str
) -> None:
    monkeypatch.setenv(f"MULTIRING_{variable}", value)
    refused = inside("run", "-n", "2", "true")
    assert (refused.code, refused.output) == (2, "")
    (line,) = refused.errors.splitlines()
    assert line.startswith("multiring run: MULTIRING_")
    assert told in line


def test_a_reader_that_has_gone_ends_a_command_quietly() -> None:
    """The pipe has no reader, as after ``| head``."""
    reads, writes = os.pipe()
    os.close(reads)
    words = [sys.executable, "-m", "multiring", *PLAN]
    ended = subprocess.run(words, stdout=writes, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writes)
    assert (ended.returncode, ended.stderr) == (1, "")


@pytest.mark.parametrize("command", [*COMMANDS, "lab up", "data pack", ""])
def test_h_is_help(inside: Callable[..., Ended], command: str) -> None:
    short, long = inside(*command.split(), "-h"), inside(*command.split(), "--help")
    assert short == long
    assert short.output.startswith(f"Usage: {' '.join(['multiring', *command.split()])} ")


@pytest.mark.parametrize("words", [["--version"], PLAN, ["run", "--help"]])
def test_an_output_that_cannot_be_written_is_told_in_one_line(words: list[str]) -> None:
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "multiring", *words], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60
        )
    told = "multiring: the output cannot be written: No space left on device\n"
    assert (ended.returncode, ended.stderr) == (2, told)


def test_an_interrupt_while_a_command_is_imported_is_told_in_one_line(
    inside: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("multiring.cli.import_module", interrupted)
    ended = inside("plan")
    assert (ended.code, ended.output, ended.errors) == (130, "", "multiring: ended by SIGINT\n")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--seconds", "inf"], "'--seconds'"),
        (["--seconds", "1e300"], "'--seconds'"),
        (["--launches", f"{10**30}"], "'--launches'"),
        (["--replay", "resnet50", "--speed", "inf"], "'--speed'"),
        (["--replay", "resnet50", "--steps", f"{10**30}"], "'--steps'"),
    ],
)
def test_what_would_be_measured_without_end_is_refused(
    inside: Callable[..., Ended], words: list[str], told: str
) -> None:
    refused = inside("bench", *words)
    assert (refused.code, refused.output) == (2, "")
    assert f"invalid value for {told}" in refused.errors


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("fly", "multiring: no such command 'fly'; see multiring --help"),
        ("lab fly", "multiring lab: no such command 'fly'; see multiring lab --help"),
        ("lab up", "multiring lab up: missing argument 'TOPOLOGY.toml'; see multiring lab up --help"),
        ("plan", "multiring plan: missing option '--topology'; see multiring plan --help"),
        ("doctor now", "multiring doctor: got unexpected extra argument(s) (now); see multiring doctor --help"),
        ("doctor --jsn", "multiring doctor: no such option: --jsn; did you mean --json?"),
        (
            "simulate --hosts",
            "multiring simulate: option '--hosts' requires an argument; see multiring simulate --help",
        ),
        (
            "simulate --hosts 0",
            "multiring simulate: invalid value for '--hosts': '0' is not a whole number from 1 to 1000000",
        ),
        (
            "simulate --speed inf",
            "multiring simulate: invalid value for '--speed': 'inf' is not a number of 0.001 or more",
        ),
        (
            "simulate --spread nan",
            "multiring simulate: invalid value for '--spread': 'nan' is not a number of 0 or more",
        ),
        (
            "bench --seconds 1_0",
            "multiring bench: invalid value for '--seconds': '1_0' is not a number from 0.01 to 86400",
        ),
        ("plan --root -1", "multiring plan: invalid value for '--root': '-1' is not a whole number from 0 to 524288"),
        (
            "simulate --gradients f8",
            "multiring simulate: invalid value for '--gradients': 'f8' is not one of 'float32', 'float16'",
        ),
    ],
)
def test_a_command_line_that_is_wrong_is_told_in_one_line(inside: Callable[..., Ended], words: str, told: str) -> None:
    refused = inside(*words.split())
    assert (refused.code, refused.output, refused.errors) == (2, "", f"{told}\n")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--output links.toml", "which hosts? Give -H A:2,B:2 or --hostfile FILE"),
        ("-H a:2 --hostfile f", "-H a:2 and --hostfile f do not go together: they are two lists of hosts"),
        ("-H a:two", "-H a:two: 'a:two' is not host:ranks,host:ranks"),
        ("-H localhost:2 --python /p", "start multiring by that Python (/p -m multiring probe ...)"),
    ],
)
def test_probe_speaks_of_itself_and_of_its_own_options(inside: Callable[..., Ended], words: str, told: str) -> None:
    refused = inside("probe", *words.split())
    assert (refused.code, refused.output) == (2, "")
    assert refused.errors.startswith("multiring probe: ")
    assert refused.errors.endswith(f"{told}\n")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("report {0} --speed 8 --topology {0}", "multiring report: FILE.html {0} would be written over --topology {0}"),
        ("report {0} --machine minsky --job {0}", "multiring report: FILE.html {0} would be written over --job {0}"),
        (
            "simulate --machine minsky --job {0} --sweep hosts=1 --plot {0}",
            "--plot {0} would be written over --job {0}",
        ),
        ("bench --record {0} {0}", "multiring bench: --record {0} would be written over the script {0}"),
        ("bench --replay {0} --json {0}", "multiring bench: --json {0} would be written over --replay {0}"),
        ("lab peers --replay {0} --json {0}", "multiring lab peers: --json {0} would be written over --replay {0}"),
        ("probe --hostfile {0} --output {0}", "multiring probe: --output {0} would be written over --hostfile {0}"),
    ],
)
def test_what_is_read_is_not_written_over(inside: Callable[..., Ended], tmp_path: Path, words: str, told: str) -> None:
    file = tmp_path / "mine.png"
    file.write_text("mine")
    refused = inside(*words.format(file).split())
    assert (refused.code, refused.output) == (2, "")
    assert refused.errors.endswith(f"{told.format(file)}: name another file\n")
    assert file.read_text() == "mine"


@pytest.mark.parametrize("columns", ["0", "-4", "wide", "30"])
def test_no_width_of_the_terminal_hides_anything(
    inside: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    words = ("simulate", "--machine", "minsky", "--hosts", "3", "--strategy", "ring,halving")
    monkeypatch.delenv("COLUMNS", raising=False)
    usual = "".join(inside(*words).output.split())
    monkeypatch.setenv("COLUMNS", columns)
    shown = inside(*words).output
    assert "\u2026" not in shown
    if columns == "30":
        assert max(map(len, shown.splitlines())) == 30
        assert sorted(shown.replace(" ", "").replace("\n", "")) == sorted(usual)
    else:
        assert "".join(shown.split()) == usual


def test_a_command_without_words_shows_its_help(inside: Callable[..., Ended]) -> None:
    shown = inside("probe")
    assert (shown.code, shown.output) == (2, "")
    assert shown.errors.startswith("Usage: multiring probe [OPTIONS]\n")
    assert "--hostfile FILE" in shown.errors
