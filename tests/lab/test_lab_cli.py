"""``multiring lab``, as it is typed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from multiring import lab
from multiring.cli import lab as cli
from multiring.lab import directory

needs_root = [pytest.mark.lab, pytest.mark.skipif(lab.obstacle() is not None, reason=str(lab.obstacle()))]

TOPOLOGY = """
links.rack = { rate = "200 Mbit/s" }

[[rack]]
name = "left"
host = [{ name = "a", ranks = 2 }, { name = "b" }]

[[rack]]
name = "right"
host = [{ name = "c" }]
"""


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    """A topology file; labs made of it are removed at the end."""
    path = tmp_path / f"test-cli-{os.getpid()}.toml"
    path.write_text(TOPOLOGY)
    yield path
    if path.stem in lab.clusters():
        lab.remove(path.stem)


def multiring_lab(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "multiring", "lab", *words]
    wide = {**os.environ, "COLUMNS": "120"}
    return subprocess.run(command, env=wide, capture_output=True, text=True, timeout=60)


def start_run(file: Path, *words: str) -> subprocess.Popen[str]:
    """``multiring lab run``, once all of its ranks have written a line."""
    command = [sys.executable, "-m", "multiring", "lab", "run", "--lab", file.stem, *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for _ in range(4):
        process.stdout.readline()
    return process


@pytest.fixture
def sleeper(tmp_path: Path) -> str:
    script = tmp_path / "sleeper.py"
    script.write_text("import time\nprint('here', flush=True)\ntime.sleep(600)\n")
    return str(script)


class TestWithRoot:
    pytestmark = needs_root

    def test_from_up_to_down(self, file: Path) -> None:
        made = multiring_lab("up", str(file))
        assert made.stderr == ""
        assert made.stdout == (
            f"lab {file.stem}: 3 hosts, 4 ranks, TCP congestion control cubic\n"
            "  rack left, 200 Mbit/s, 50 us\n"
            "    host a, 10 Gbit/s, 50 us, 10.77.0.1, 2 ranks\n"
            "    host b, 10 Gbit/s, 50 us, 10.77.0.2, 1 rank\n"
            "  rack right, 200 Mbit/s, 50 us\n"
            "    host c, 10 Gbit/s, 50 us, 10.77.0.3, 1 rank\n"
        )
        assert multiring_lab("status", "--lab", file.stem).stdout == made.stdout
        assert multiring_lab("down", "--lab", file.stem).returncode == 0
        assert not (directory.LABS / file.stem).exists()

    def test_a_lab_that_cannot_be_shown_is_not_left(self, file: Path) -> None:
        command = [sys.executable, "-m", "multiring", "lab", "up", str(file)]
        with Path("/dev/full").open("w") as full:
            failed = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
        assert (failed.returncode, failed.stderr.count("\n")) == (2, 1)
        assert "No space left on device" in failed.stderr
        assert not (directory.LABS / file.stem).exists()

    def test_a_lab_stays_whose_tree_is_not_read_to_the_end(self, file: Path) -> None:
        unread, output = os.pipe()
        os.close(unread)
        command = [sys.executable, "-m", "multiring", "lab", "up", str(file)]
        done = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True, timeout=60)
        os.close(output)
        assert done.stderr == ""
        assert lab.find(file.stem).host("a").ranks == 2

    def test_every_rank_runs_on_its_host(self, file: Path) -> None:
        multiring_lab("up", str(file))
        program = ["sh", "-c", "echo $RANK of $WORLD_SIZE on $(hostname)"]
        ran = multiring_lab("run", "--lab", file.stem, *program)
        lines = {line.partition("] ")[2] or line for line in ran.stdout.splitlines()}
        assert lines == {"0 of 4 on a", "1 of 4 on a", "2 of 4 on b", "3 of 4 on c"}

    def test_options_of_multiring_run_are_passed_on(self, file: Path) -> None:
        multiring_lab("up", str(file))
        ran = multiring_lab("run", "--lab", file.stem, "-n", "1", "sh", "-c", "echo $WORLD_SIZE; exit 7")
        assert (ran.returncode, ran.stdout) == (7, "1\n")

    def test_a_command_on_one_host(self, file: Path) -> None:
        multiring_lab("up", str(file), "--cores", "1")
        ran = multiring_lab("run", "--lab", file.stem, "--on", "c", "sh", "-c", "hostname; nproc")
        assert ran.stdout == "c\n1\n"

    def test_ours_beside_a_peer(self, file: Path) -> None:
        pytest.importorskip("torch")
        multiring_lab("up", str(file))
        options = ["--peers", "gloo", "--api", "numpy", "--sizes", "4KB", "--launches", "1", "--seconds", "0.1"]
        done = multiring_lab("peers", "--lab", file.stem, *options)
        assert done.returncode == 0, done.stderr
        title, headings, *rows = done.stdout.splitlines()
        assert title.startswith(f"all_reduce, 4 ranks on lab {file.stem}, float32, 1 launch;")
        assert "predicted" in headings
        assert [row.split()[:4] for row in rows if "private" in row] == [["4", "KB", "numpy", "private"]] * 2
        assert " 164 us " in rows[0]  # what the links allow
        assert "gloo / ours" in done.stdout

    def test_an_interrupted_run_leaves_no_process(self, file: Path, sleeper: str) -> None:
        multiring_lab("up", str(file))
        with start_run(file, sleeper) as process:
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=30) == 128 + signal.SIGINT
        assert not any(lab.find(file.stem).processes().values())

    def test_down_ends_what_a_killed_run_left(self, file: Path, sleeper: str) -> None:
        multiring_lab("up", str(file))
        with start_run(file, sleeper) as process:
            process.kill()
        before = list(directory.processes(directory.LABS / file.stem))
        assert multiring_lab("down", "--lab", file.stem).returncode == 0
        deadline = time.monotonic() + 10
        while any(Path(f"/proc/{pid}").exists() for pid in before):
            assert time.monotonic() < deadline, f"of {before} some are still there"
            time.sleep(0.01)

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (("up", "/nowhere.toml"), "multiring lab up: /nowhere.toml: No such file or directory\n"),
            (("down", "--lab", "none-such"), "multiring lab down: there is no lab 'none-such'"),
            (("run", "--lab", "none-such", "true"), "multiring lab run: there is no lab 'none-such'"),
        ],
    )
    def test_an_error_is_one_line(self, words: tuple[str, ...], message: str) -> None:
        failed = multiring_lab(*words)
        assert failed.returncode == 2
        assert failed.stderr.startswith(message)
        assert failed.stderr.count("\n") == 1

    def test_a_name_that_is_too_long_for_a_directory(self, file: Path) -> None:
        failed = multiring_lab("up", str(file), "--lab", "x" * 300)
        assert failed.stderr.startswith("multiring lab up: a lab cannot be called 'xxx")
        assert failed.stderr.count("\n") == 1

    def test_a_lab_that_has_ended_by_itself_hides_no_other(self, file: Path) -> None:
        other = f"{file.stem}-other"
        multiring_lab("up", str(file), "--lab", other)
        multiring_lab("up", str(file))
        os.kill(lab.find(file.stem).keeper, signal.SIGKILL)
        try:
            shown = multiring_lab("status")
        finally:
            lab.remove(other)
        assert f"lab {other}: 3 hosts" in shown.stdout
        assert f"lab {file.stem} has ended by itself" in shown.stderr
        assert shown.returncode == 2

    def test_a_host_that_is_not_there(self, file: Path) -> None:
        multiring_lab("up", str(file))
        failed = multiring_lab("run", "--lab", file.stem, "--on", "z", "true")
        assert failed.stderr == f"multiring lab run: lab {file.stem} has no host 'z'; it has a, b, c\n"

    def test_more_cores_than_there_are(self, file: Path) -> None:
        failed = multiring_lab("up", str(file), "--cores", "1000")
        assert failed.stderr.startswith("multiring lab up: 1000 cores a host: this machine has")
        assert not (directory.LABS / file.stem).exists()


@pytest.mark.parametrize("command", ["up FILE", "run true", "peers --peers gloo", "status", "down --lab roots"])
def test_without_root_it_is_said_in_one_line(
    command: str, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("multiring.lab.cluster.LABS", tmp_path / "labs")
    monkeypatch.setattr("multiring.lab.cluster.os.geteuid", lambda: 1000)
    monkeypatch.setattr("multiring.cli.lab.choose_peers", lambda *_: ["gloo"])
    (tmp_path / "labs/roots").mkdir(parents=True)
    app = typer.Typer()
    cli.register(app)
    words = command.replace("FILE", str(file)).split()
    failed = CliRunner().invoke(app, ["lab", *words])
    assert failed.exit_code == 2
    assert failed.stderr == f"multiring lab {words[0]}: a lab needs root, for network namespaces: run it with sudo\n"
