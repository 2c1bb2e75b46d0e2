"""From launches to the figures that are reported, which peers are here, and what the command refuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import typer
from commands import TORCH, forked_bench, multiring
from processes import processes_with
from typer.testing import CliRunner

from multiring.bench import curves, parse_sizes, peers, report
from multiring.bench.contestants import Task
from multiring.bench.measure import Figure, check, size_of_buffer
from multiring.cli import bench as cli_bench
from multiring.cli import bench_rank
from multiring.simulate.recording import Gradient, Recording, save

MB = 1 << 20
INTEL = "Intel(R) MPI Library for Linux* OS, Version 2021.18.1 Build 20260626"


def launches(*seconds: float, buffer: str = "private") -> list[list[Figure]]:
    return [[Figure(MB, buffer, each, 2 * each, 3 * each, 5e-4, 8e-4, 7e-4)] for each in seconds]


def refused(monkeypatch: pytest.MonkeyPatch, *options: str, **environment: str) -> str:
    """Refusal that the command prints, in this process, before anything starts."""

    def started(*_: object) -> None:
        raise AssertionError("nothing may be started")

    monkeypatch.setattr("multiring.cli.comparison.alternate", started)
    monkeypatch.setattr("os.execv", started)
    app = typer.Typer(rich_markup_mode=None)
    cli_bench.register(app)
    result = CliRunner().invoke(app, list(options), env=environment)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    return result.stderr


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("options", ["--sizes 4KB --seconds 50", "--replay vgg16 --steps 999"])
def test_a_measurement_that_is_ended_takes_its_ranks_along(tmp_path: Path, options: str, how: signal.Signals) -> None:
    command = [sys.executable, "-m", "multiring", "bench", "-n", "2", *options.split()]
    with subprocess.Popen(command, env={**os.environ, "TMPDIR": str(tmp_path)}, stderr=subprocess.DEVNULL) as measuring:
        deadline = time.monotonic() + 60
        while len(processes_with(bytes(tmp_path))) < 4:  # itself, the launcher, and two ranks
            assert time.monotonic() < deadline
            time.sleep(0.1)
        measuring.send_signal(how)
        assert measuring.wait(60) == (-how if how == signal.SIGKILL else 128 + how)
    while how == signal.SIGKILL and processes_with(bytes(tmp_path)):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert processes_with(bytes(tmp_path)) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("options", ["--sizes 4KB --seconds 0.1", "--replay resnet50 --speed 1000 --steps 1"])
def test_ctrl_c_keeps_what_was_measured(tmp_path: Path, options: str) -> None:
    json_file = tmp_path / "figures.json"
    words = ["-n", "2", "--launches", "1000", "--json", str(json_file), *options.split()]
    command = [sys.executable, "-m", "multiring", "bench", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as measuring:
        assert measuring.stderr is not None
        lines = [measuring.stderr.readline() for _ in range(2)]
        measuring.send_signal(signal.SIGINT)
        output, errors = measuring.communicate(timeout=60)
    assert [line.partition(":")[0] for line in lines] == [f"launch {n} of 1000, multiring numpy" for n in (1, 2)]
    assert measuring.returncode == 128 + signal.SIGINT
    assert "interrupted: these are the figures of" in errors
    assert "Traceback" not in errors
    assert output.count("\n") >= 3
    assert json.loads(json_file.read_text())["rows"]


def test_our_median_stands_beside_the_best_of_a_peer() -> None:
    ours, theirs = {"torch": launches(3e-3, 1e-3, 2e-3)}, {"gloo": launches(9e-3, 6e-3, 7e-3)}
    (row,) = report.summarise(ours, theirs, "all_reduce", world_size=4)
    assert (row.seconds, row.p95) == (2e-3, 4e-3)
    assert row.launches == (3e-3, 1e-3, 2e-3)
    assert row.peers == {"gloo": (9e-3, 6e-3, 7e-3)}
    assert row.ratios == {"gloo": pytest.approx(3.0)}
    assert row.algbw == pytest.approx(MB / 2e-3)
    assert row.busbw == pytest.approx(MB / 2e-3 * 1.5)
    assert row.cpu_seconds_per_gb == pytest.approx(6e-3 / MB * 1e9)
    assert row.peer_cpu_seconds_per_gb == {"gloo": pytest.approx(21e-3 / MB * 1e9)}


def test_the_bound_is_a_pass_over_memory_on_one_host_and_the_links_elsewhere() -> None:
    ours = {"numpy": launches(2e-3)}
    (here,) = report.summarise(ours, {}, "all_reduce", 2)
    assert (here.bound, here.fraction_of_bound, here.predicted) == (5e-4, pytest.approx(0.25), None)
    (there,) = report.summarise(ours, {}, "all_reduce", 2, bounds={MB: 1e-3})
    assert (there.bound, there.fraction_of_bound, there.predicted) == (1e-3, pytest.approx(0.5), 8e-4)


def test_each_peer_stands_beside_ours_through_the_same_api() -> None:
    ours = {"numpy": launches(1e-3), "torch": launches(2e-3)}
    through_numpy, through_torch = report.summarise(
        ours, {"gloo": launches(8e-3), "mpich": launches(3e-3)}, "all_reduce", 2
    )
    assert through_numpy.ratios == {"mpich": pytest.approx(3.0)}
    assert through_torch.ratios == {"gloo": pytest.approx(4.0)}


def test_arena_buffers_are_compared_with_the_private_ones_of_a_peer() -> None:
    both = [[*private, *arena] for private, arena in zip(launches(4e-3), launches(1e-3, buffer="arena"), strict=True)]
    private, arena = report.summarise({"torch": both}, {"gloo": launches(8e-3)}, "all_reduce", world_size=2)
    assert (private.buffer, private.ratios["gloo"]) == ("private", pytest.approx(2.0))
    assert (arena.buffer, arena.ratios["gloo"]) == ("arena", pytest.approx(8.0))


@pytest.mark.parametrize(
    ("collective", "factor"), [("all_reduce", 1.5), ("all_gather", 0.75), ("reduce_scatter", 0.75), ("broadcast", 1.0)]
)
def test_bus_bandwidth_counts_what_a_link_carries(collective: str, factor: float) -> None:
    assert report.bus_factor(collective, 4) == factor


def test_sizes_are_those_that_were_asked_for_in_equal_blocks() -> None:
    assert parse_sizes("4KB,1MB") == [4096, MB]
    assert parse_sizes("1MB,4KB,4096") == [MB, 4096]
    assert [size_of_buffer(nbytes, 3) for nbytes in (1, 4096, 4104)] == [12, 4104, 4104]


@pytest.mark.parametrize(
    ("collective", "elements"), [("all_reduce", 8), ("broadcast", 8), ("all_gather", 16), ("reduce_scatter", 4)]
)
def test_a_wrong_result_is_named(collective: str, elements: int) -> None:
    result = np.empty(elements, np.float32)
    given = result if elements == 8 else np.empty(8, np.float32)
    task = Task(lambda: result.fill(-7), given, result)
    with pytest.raises(RuntimeError, match=f"{collective} is wrong on rank 1: element 0 of {elements} is -7.0, not"):
        check(1, 2, collective, task, error=0.0)


def test_a_sum_may_be_off_by_what_the_wire_rounds_and_no_more() -> None:
    result = np.empty(1000, np.float32)
    exact = 2.0 * (np.arange(1000) % 251) + 1
    task = Task(lambda: np.multiply(exact, 1 + 2.0**-8, out=result, casting="same_kind"), result, result)
    check(0, 2, "all_reduce", task, error=2.0**-7)
    with pytest.raises(RuntimeError, match="element 0 of 1000 is 1"):
        check(0, 2, "all_reduce", task, error=2.0**-9)


def test_elements_that_are_rounded_together_may_be_off_by_a_part_of_the_largest() -> None:
    result = np.empty(1000, np.float32)
    exact = 2.0 * (np.arange(1000) % 251) + 1
    task = Task(lambda: np.add(exact, 0.25, out=result, casting="same_kind"), result, result)
    check(0, 2, "all_reduce", task, error=2.0**-9, together=256)
    with pytest.raises(RuntimeError, match=r"element 0 of 1000 is 1\.25, not 1\.0"):
        check(0, 2, "all_reduce", task, error=2.0**-9)
    with pytest.raises(RuntimeError, match=r"element 0 of 1000 is 1\.25, not 1\.0"):
        check(0, 2, "all_reduce", task, error=2.0**-12, together=256)


def test_the_launcher_of_an_mpi_is_known_by_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mpi4py")
    said = {"a": "mpirun (Open MPI) 4.1.2", "b": INTEL, "c": "mpirun (Open MPI) 5.0.11"}
    for name, version in said.items():
        (tmp_path / name / "bin").mkdir(parents=True)
        (tmp_path / name / "lib").mkdir()
        launcher = tmp_path / name / "bin" / "mpirun"
        launcher.write_text(f"#!/bin/sh\necho '{version}'\n")
        launcher.chmod(0o755)
    (tmp_path / "b" / "lib" / "libmpi.so.12").touch()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", ":".join(str(tmp_path / name / "bin") for name in said))
    peers.mpi.cache_clear()
    try:
        assert peers.mpi("openmpi") == peers.MPI("openmpi", "5.0.11", str(tmp_path / "c/bin/mpirun"), "libmpi.so.40")
        assert peers.mpi("impi") == peers.MPI(
            "impi", "2021.18.1", str(tmp_path / "b/bin/mpirun"), str(tmp_path / "b/lib/libmpi.so.12")
        )
        assert peers.mpi("mpich") is None
        assert "pip install mpich" in (peers.remedy("mpich") or "")
    finally:
        peers.mpi.cache_clear()


@pytest.mark.parametrize(
    ("options", "offending"),
    [
        (["--sizes", "4KB,1XB"], "1XB"),
        (["--sizes", "4KB,3"], "--sizes '4KB,3': expected at least 4 bytes, a float32, not 3"),
        (["-n", "3", "--sizes", "9999GB"], "3 ranks with buffers of 9999 GB take 3e+04 GB at least"),
        (["-n", "99999", "--sizes", "4KB"], "99999 ranks with buffers of 4 KB take 2344 GB at least"),
        (["--json", "/proc/figures.json"], "'--json': /proc/figures.json: it cannot be made"),
        (["--peers", "nccl"], "--peers nccl: it moves tensors of CUDA devices"),
        (["--api", "fortran"], "'fortran' is not one of 'numpy', 'torch'"),
        (["--collective", "scan"], "'scan' is not one of 'all_reduce', 'all_gather', 'reduce_scatter', 'broadcast'"),
        (["--plot", "curves.txt"], "--plot curves.txt: the suffix says the format"),
        (["--json", "one.png", "--plot", "./one.png"], "--json one.png and --plot one.png are one file"),
        (["--plot", "/nonexistent/curves.png"], "/nonexistent is no directory"),
        (["--json", "/nonexistent/figures.json"], "/nonexistent is no directory"),
        (["--record", "/nonexistent/job.json", "-m", "train"], "/nonexistent is no directory"),
        (["--record", "job.json", "nothere.py"], "--record job.json: no such script: nothere.py"),
        (["--record", "job.json", "-m"], "which program?"),
        (["--launchs", "3"], "no such option: --launchs; did you mean --launches?"),
        (["--record", "job.json", "--launchs", "3", "train.py"], "no such option: --launchs"),
    ],
)
def test_bad_option_is_named_before_anything_starts(
    options: list[str], offending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert offending in refused(monkeypatch, *options)


@pytest.mark.parametrize(
    ("options", "offending"),
    [
        (["--sizes", "4KB,1XB"], "multiring bench: --sizes '4KB,1XB'"),
        (["--json", "/nonexistent/figures.json"], "'--json': /nonexistent/figures.json: /nonexistent is no directory"),
    ],
)
def test_a_refusal_is_the_exit_code_of_the_process(options: list[str], offending: str) -> None:
    done = multiring("bench", *options)
    assert (done.returncode, done.stdout) == (2, "")
    assert offending in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("options", "offending"),
    [
        (["--sizes", "4KB,1XB"], "1XB"),
        (["--library", "nccl"], "--library 'nccl': known on cpu are multiring, gloo"),
        (["--replay", "/nonexistent/job.json"], "/nonexistent/job.json: No such file"),
        (["--library", "openmpi"], "the ranks of an MPI are started by its own launcher"),
    ],
)
def test_a_launch_that_cannot_be_is_one_line_and_joins_no_job(options: list[str], offending: str) -> None:
    done = CliRunner().invoke(bench_rank.app, options, env={"RANK": "0"})
    assert done.exit_code == 2
    assert done.stderr.startswith("multiring bench: ")
    assert offending in done.stderr
    assert done.output.count("\n") == 1


def test_a_rank_is_told_what_it_can_measure() -> None:
    program = [sys.executable, "-m", "multiring.cli.bench_rank", "--collective", "barrier"]
    done = subprocess.run(program, env={**os.environ, "RANK": "0"}, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert "'barrier' is not one of 'all_reduce', 'all_gather'" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("settings", "offending"),
    [
        ({"MULTIRING_STREAMS": "many"}, "MULTIRING_STREAMS='many'"),
        ({"MULTIRING_REPRODUCIBLE": "1", "MULTIRING_PLAN": "ring"}, "MULTIRING_PLAN=ring and MULTIRING_REPRODUCIBLE"),
    ],
)
def test_a_setting_that_every_rank_would_refuse_is_refused_once(
    settings: dict[str, str], offending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = refused(monkeypatch, **settings)
    assert offending in said
    assert said.count("\n") == 1


def test_a_peer_that_is_not_here_is_named_with_its_remedy(tmp_path: Path) -> None:
    (tmp_path / "torch.py").touch()  # what is found first is no torch
    code = "import sys; sys.modules['torch'] = None; sys.argv[0] = 'multiring'; from multiring.cli import main; main()"
    refused = subprocess.run([sys.executable, "-c", code, "bench", "--peers", "gloo"], capture_output=True, text=True)
    assert refused.returncode == 2
    assert refused.stderr == "multiring bench: --peers gloo: it is not here. Gloo comes with torch: pip install torch\n"


def test_a_rank_does_not_start_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "-m multiring.cli.bench_rank" in refused(monkeypatch, RANK="1")


def test_two_ranks_are_measured_recorded_and_drawn(tmp_path: Path) -> None:
    file, picture = tmp_path / "result.json", tmp_path / "CURVES.PNG"
    options = ["--launches", "2", "--seconds", "0.01", "--json", str(file), "--plot", str(picture)]
    sizes = "4094,4KB,512KB"  # 4094 in whole numbers of two blocks are 4 KB
    done = multiring("bench", "-n", "2", "--sizes", sizes, *options)
    assert done.returncode == 0, done.stderr
    record = json.loads(file.read_text())
    rows = [(row["nbytes"], row["buffer"], row["api"], len(row["launches"])) for row in record["rows"]]
    assert rows == [(size << 10, kind, "numpy", 2) for size in (4, 512) for kind in ("private", "arena")]
    assert all(seconds > 0 for row in record["rows"] for seconds in row["launches"])
    assert record["command"].startswith("multiring bench -n 2")
    assert record["cores"] >= 1
    assert (record["collective"], record["ranks"], record["where"]) == ("all_reduce", 2, "on one host")
    assert "512 KB" in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_full_disk_is_named_with_the_file() -> None:
    refused = multiring(
        "bench", "-n", "2", "--sizes", "8", "--launches", "1", "--seconds", "0.01", "--json", "/dev/full"
    )
    assert refused.returncode == 2
    assert "multiring bench: /dev/full: No space left on device" in refused.stderr


@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter", "broadcast"])
def test_other_collectives(collective: str) -> None:
    options = ["--collective", collective, "--sizes", "300KB", "--launches", "1", "--seconds", "0.01"]
    done = forked_bench("-n", "3", *options)
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith(f"{collective}, 3 ranks on one host")


def test_other_collectives_beside_gloo() -> None:
    pytest.importorskip("torch")
    options = ["--collective", "reduce_scatter", "--peers", "gloo", "--sizes", "4KB", "--launches", "1"]
    done = forked_bench("-n", "2", *options, "--seconds", "0.01", imports=TORCH)
    assert done.exit_code == 0, done.output
    assert "gloo / ours" in done.stdout


def test_beside_open_mpi(tmp_path: Path) -> None:
    if peers.remedy("openmpi"):
        pytest.skip("no Open MPI here")
    file = tmp_path / "result.json"
    options = ["--sizes", "4KB", "--launches", "1", "--seconds", "0.01", "--json", str(file)]
    done = multiring("bench", "-n", "2", "--peers", "openmpi", *options)
    assert done.returncode == 0, done.stderr
    assert "openmpi / ours" in done.stdout
    assert json.loads(file.read_text())["versions"]["openmpi"].split(".")[0].isdigit()


@pytest.mark.parametrize("replayed", [False, True])
def test_figures_are_kept_where_nobody_reads_what_is_printed(tmp_path: Path, replayed: bool) -> None:
    """The pipe has no reader, as after ``| head -1``."""
    kept, steps = tmp_path / "kept.json", tmp_path / "steps.json"
    save(Recording("mine", 1e-3, (Gradient(1 << 12, 1e-3),)), steps)
    options = ["--replay", str(steps), "--steps", "2"] if replayed else ["--sizes", "4KB", "--seconds", "0.01"]
    command = [sys.executable, "-m", "multiring", "bench", "-n", "2", "--launches", "1", "--json", str(kept), *options]
    reads, writes = os.pipe()
    os.close(reads)
    ended = subprocess.run(command, stdout=writes, stderr=subprocess.PIPE, text=True, timeout=220)
    os.close(writes)
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
    found = json.loads(kept.read_text())
    assert (found["ranks"], found["where"]) == (2, "on one host")


def test_a_format_that_cannot_be_written_here_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("PATH", str(tmp_path))  # where no TeX is
    with pytest.raises(ValueError, match=r"curves\.pgf: matplotlib cannot write pgf here \(.*\); png needs nothing"):
        curves.check(tmp_path / "curves.pgf")
    assert list(tmp_path.iterdir()) == []


def test_curves_know_their_formats(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    curves.check(tmp_path / "curves.PNG")
    with pytest.raises(ValueError, match=r"curves\.txt: the suffix says the format; known are"):
        curves.check(tmp_path / "curves.txt")
