"""`multiring bench --device cuda`: what it refuses, its tables, and a whole run with memory of the CPU in its place."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import forking_launcher
import numpy as np
import pytest
import typer
from commands import TORCH, forked_bench, multiring
from numpy.typing import NDArray
from typer.testing import CliRunner

from multiring.bench import devices, report
from multiring.bench.contestants import Measurable, Planned, Task
from multiring.bench.measure import Figure, measure
from multiring.cli import bench, bench_rank

MB = 1 << 20

STAND_IN = """
import torch

class Stream:
    def __enter__(self): return self
    def __exit__(self, *_): pass
    def synchronize(self): pass

def empty(*shape, device="cpu", pin_memory=False, of=torch.empty, **options):
    return of(*shape, **options)

def zeros(*shape, pin_memory=False, of=torch.zeros, **options):
    return of(*shape, **options)

class Properties:
    name, total_memory = "Stand-in", 1 << 30

torch.version.cuda = "12.8"
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 1
torch.cuda.get_device_properties = lambda index: Properties
torch.cuda.set_device = lambda index: None
torch.cuda.synchronize = lambda: None
torch.cuda.Stream, torch.cuda.stream = Stream, lambda stream: stream
torch.empty, torch.zeros = empty, zeros
"""
"""Gives torch a device that is memory of the CPU."""


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a Python whose torch has a device."""
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("device")
    (folder / "sitecustomize.py").write_text(STAND_IN)
    return {"PYTHONPATH": f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}


RANK = """
import json, os, socket, sys, time
from dataclasses import asdict
from pathlib import Path
from multiring.bench import contestants
from multiring.bench.contestants import Api, Measurable, MemoryKind
from multiring.bench.measure import measure

found = {}
for library in ("gloo", "multiring"):
    contestant = contestants.join(library, Api.torch, MemoryKind.cuda)
    for collective in Measurable:
        figures = [measure(contestant, collective.value, size, "cuda", 0.01) for size in (4 << 10, 512 << 10)]
        found[f"{library} {collective.value}"] = [asdict(figure) for figure in figures]
    rank = contestant.rank
    contestant.close()
    # Rank 0 serves torch's store. Whoever joined the next job before it is closed would join the one that ends.
    gone = Path(sys.argv[1]).with_name(f"{library} is gone")
    until = time.monotonic() + 100
    while not gone.exists():
        assert time.monotonic() < until
        with socket.socket() as sock:
            at = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            if rank == 0 and sock.connect_ex(at) != 0:
                gone.touch()
        time.sleep(0.05)
if rank == 0:
    json.dump(found, open(sys.argv[1], "w"))
"""
"""Measures, and checks, every collective of ours and of Gloo in one launch."""


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory, stand_in: dict[str, str]) -> dict[str, list[Figure]]:
    """The figures of every collective by library and collective, which `measure` has found right on both ranks."""
    folder = tmp_path_factory.mktemp("collectives")
    (folder / "rank.py").write_text(RANK)
    words = ["run", "-n", "2", str(folder / "rank.py"), str(folder / "found.json")]
    done = forking_launcher.run(*words, imports=TORCH, environment={**os.environ, **stand_in}, timeout=220)
    assert done.returncode == 0, done.stderr
    found = json.loads((folder / "found.json").read_text())
    return {name: [Figure(**each) for each in figures] for name, figures in found.items()}


def refused(monkeypatch: pytest.MonkeyPatch, found: devices.Devices | None, *options: str) -> str:
    """Refusal that the command prints if these devices are found."""

    def measured(*_: object) -> None:
        raise AssertionError("nothing may be started")

    if found is not None:
        monkeypatch.setattr(devices, "ask", lambda: found)
    monkeypatch.setattr("multiring.cli.comparison.alternate", measured)
    app = typer.Typer()
    bench.register(app)
    result = CliRunner().invoke(app, list(options))
    assert result.exit_code == 2, result.output
    return result.output


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ("--device cuda --api numpy", "--device cuda: NumPy's arrays lie in memory of the CPU; leave out --api numpy"),
        ("--device cuda --peers openmpi", "--peers openmpi: --device cuda measures beside gloo and nccl only"),
        ("--device cuda --peers gloo,deepspeed", "--peers deepspeed: --device cuda measures beside gloo and nccl only"),
        ("--device cuda --peers x", "--peers x: no such peer; known: gloo, nccl"),
        ("--device cuda --replay vgg16", "--replay measures training steps: leave out --device"),
        ("--apart --replay vgg16", "--replay measures training steps: leave out --apart"),
        (
            "--peers nccl",
            "--peers nccl: it moves tensors of CUDA devices (multiring bench --device cuda); known: gloo, openmpi, "
            "mpich, impi, deepspeed",
        ),
        (
            "-n 4 --device cuda --sizes 2GB",
            "2 ranks on a CUDA device with buffers of 2 GB take 4 GB at least, and it has 3 GB: "
            "measure smaller --sizes",
        ),
        ("--device cuda --peers nccl", "--peers nccl: the torch that is installed, for CUDA 12.8, has no NCCL"),
    ],
)
def test_what_cannot_be_measured_on_devices_is_one_line(
    options: str, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("multiring.cli.comparison.remedy", lambda peer: None)
    found = devices.Devices(2, "H100", 3 << 30, "12.8", None)
    assert refused(monkeypatch, found, *options.split()) == f"multiring bench: {line}\n"


def test_a_peer_that_shares_memory_is_not_measured_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multiring.cli.comparison.remedy", lambda peer: None)
    said = refused(monkeypatch, None, "--apart", "--peers", "gloo,mpich")
    assert said == "multiring bench: --peers mpich: it shares memory within a host, and --apart makes ranks hosts\n"


@pytest.mark.parametrize(
    ("torch", "line"),
    [
        ("raise ImportError('no torch here')", "it needs torch, and here it cannot be imported (no torch here)"),
        (
            "class version: cuda = None\n__version__ = '2.13.0+cpu'",
            "torch 2.13.0+cpu is built without CUDA; install one that is built with it",
        ),
        (
            "class version: cuda = '12.8'\nclass cuda: is_available = lambda: False\n__version__ = '2.13.0'",
            f"torch 2.13.0 finds no CUDA device ({devices.UNSEEN})",
        ),
    ],
)
def test_a_host_without_devices_says_why(torch: str, line: str, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(torch)
    path = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    done = multiring("bench", "--device", "cuda", PYTHONPATH=path)
    assert (done.returncode, done.stderr) == (2, f"multiring bench: --device cuda: {line}\n")


def test_a_rank_says_so_too() -> None:
    done = CliRunner().invoke(bench_rank.app, ["--device", "cuda", "--library", "openmpi"], env={"RANK": "0"})
    line = "multiring bench: --library 'openmpi': known on cuda are multiring, gloo, nccl\n"
    assert (done.exit_code, done.output) == (2, line)


def test_ranks_are_hosts_of_their_own_only_if_they_are_ranks() -> None:
    done = CliRunner().invoke(bench_rank.app, ["--apart"], env={"RANK": None})
    line = "multiring bench: --apart: it takes ranks on one host that `multiring run` or torchrun has started\n"
    assert (done.exit_code, done.output) == (2, line)


def launches(*seconds: float, enqueue: float) -> list[list[Figure]]:
    return [[Figure(MB, "cuda", each, 2 * each, 3 * each, 5e-4, None, None, enqueue * each)] for each in seconds]


def test_a_device_has_columns_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    ours = {"torch": launches(3e-3, 1e-3, 2e-3, enqueue=0.01)}
    peers = {"gloo": launches(9e-3, 6e-3, enqueue=0.5), "nccl": launches(4e-3, enqueue=0.02)}
    (row,) = report.summarise(ours, peers, "all_reduce", 2)
    assert (row.buffer, row.bound, row.fraction_of_bound) == ("cuda", 5e-4, pytest.approx(0.25))
    assert row.enqueue_seconds == pytest.approx(20e-6)
    assert row.peer_enqueue_seconds == {"gloo": pytest.approx(3.75e-3), "nccl": pytest.approx(80e-6)}
    assert row.ratios == {"gloo": pytest.approx(3.0), "nccl": pytest.approx(2.0)}
    report.show([row], "on devices")
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[1] == "size buffer median p95 algbw busbw bare copies of it CPU s/GB enqueue"
    assert lines[2] == "1 MB torch cuda 2 ms 4 ms 0.524 0.524 500 us 25% 5.72 20 us"
    assert lines[5] == "size buffer ours gloo / ours enqueue nccl / ours enqueue"
    assert lines[6] == "1 MB torch cuda 2 ms 6 ms 3 3.75 ms 4 ms 2 80 us"


def test_the_cpu_has_no_such_columns(capsys: pytest.CaptureFixture[str]) -> None:
    figure = Figure(MB, "private", 1e-3, 2e-3, 3e-3, 5e-4, None, None)
    (row,) = report.summarise({"torch": [[figure]]}, {"gloo": [[figure]]}, "all_reduce", 2)
    assert (row.enqueue_seconds, row.peer_enqueue_seconds) == (None, {})
    report.show([row], "on the CPU")
    shown = capsys.readouterr().out
    assert "enqueue" not in shown
    assert "bare copies" not in shown


class Alone:
    """A contestant of one rank, whose calls are done when somebody waits for them."""

    rank, world_size = 0, 1
    buffers = ("cuda",)

    def __init__(self) -> None:
        self.log: list[str] = []
        self._array = np.zeros(0, np.float32)

    def task(self, collective: str, count: int, kind: str) -> Task:
        self._array = np.zeros(count, np.float32)
        return Task(self._note("call"), self._array, self._array, self._note("finish"), self._note("bare"))

    def _note(self, word: str) -> Callable[[], None]:
        return lambda: self.log.append(word)

    def start(self, array: NDArray[np.float32]) -> Callable[[], object]:
        raise NotImplementedError

    def maximum(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        return values

    total = maximum

    def barrier(self) -> None:
        self.log.append("barrier")

    def planned(self, collective: str, nbytes: int) -> Planned | None:
        return None

    def close(self) -> None: ...


@pytest.mark.parametrize("nbytes", [4096, MB])
def test_a_call_on_a_device_is_timed_until_the_device_is_done(nbytes: int) -> None:
    alone = Alone()
    figure = measure(alone, "all_reduce", nbytes, "cuda", 1e-6)
    before = "barrier " if nbytes == MB else ""
    timed, _, passes = " ".join(alone.log[1:]).partition(" bare ")  # after the call that is checked
    assert timed.count("call") == timed.count("call finish")
    assert timed.endswith(f"{before}call finish")
    assert set(passes.split()) == {"barrier", "bare"}
    assert figure.enqueue_seconds is not None
    assert 0 < figure.enqueue_seconds <= figure.seconds
    assert figure.pass_seconds >= 0


@pytest.mark.parametrize("collective", list(Measurable))
def test_each_collective_is_right_on_a_device(collective: Measurable, measured: dict[str, list[Figure]]) -> None:
    ours, theirs = measured[f"multiring {collective.value}"], measured[f"gloo {collective.value}"]
    rows = report.summarise({"torch": [ours]}, {"gloo": [theirs]}, collective.value, 2)
    assert [(row.nbytes, row.buffer, row.api) for row in rows] == [
        (4 << 10, "cuda", "torch"),
        (512 << 10, "cuda", "torch"),
    ]
    for row in rows:
        assert row.enqueue_seconds is not None
        assert 0 < row.enqueue_seconds <= row.seconds
        assert list(row.peer_enqueue_seconds) == ["gloo"]


def test_a_whole_run(tmp_path: Path, stand_in: dict[str, str]) -> None:
    file, collective = tmp_path / "result.json", "all_gather"
    options = ["--device", "cuda", "--peers", "gloo", "--sizes", "4KB,512KB", "--launches", "1", "--seconds", "0.01"]
    words = ["-n", "2", "--collective", collective, *options, "--json", str(file)]
    done = forked_bench(*words, imports=TORCH, **stand_in)
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith(f"{collective}, 2 ranks on one host, 1 CUDA device (Stand-in), float32, 1 launch;")
    assert "bare copies" in done.stdout
    record = json.loads(file.read_text())
    assert (record["devices"], record["device"], record["cuda"]) == (1, "Stand-in", "12.8")
    assert [(row["nbytes"], row["buffer"], row["api"]) for row in record["rows"]] == [
        (4 << 10, "cuda", "torch"),
        (512 << 10, "cuda", "torch"),
    ]
    for row in record["rows"]:
        assert 0 < row["enqueue_seconds"] <= row["seconds"]
        assert list(row["peer_enqueue_seconds"]) == ["gloo"]


def test_ranks_that_are_hosts_of_their_own_use_the_network(tmp_path: Path) -> None:
    program = tmp_path / "apart.py"
    program.write_text(
        "import multiring as mr\n"
        "import numpy as np\n"
        "from multiring.bench.contestants import stand_apart\n"
        "stand_apart()\n"
        "mr.init()\n"
        "assert mr.local_world_size() == 1\n"
        "x = np.full(10, float(mr.rank()))\n"
        "mr.all_reduce(x)\n"
        "assert (x == 1).all()\n"
        "mr.shutdown()\n"
    )
    command = [sys.executable, "-m", "multiring", "run", "-n", "2", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=220)
    assert done.returncode == 0, done.stderr


def test_nccl_is_told_to_use_sockets_where_ranks_share_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    monkeypatch.setenv("WORLD_SIZE", "6")
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert [devices.ranks_share(count) for count in (1, 2, 3, 8)] == [True, True, False, False]
    assert [devices.own_device(count) for count in (1, 2, 3, 8)] == [0, 0, 2, 2]
    for name in ("NCCL_HOSTID", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "before")
    devices.make_nccl_send_by_sockets(2)
    told = {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}
    assert told.items() >= {"NCCL_HOSTID": "rank2", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}.items()
    assert told["NCCL_SOCKET_IFNAME"] == "before"  # other ranks are on other hosts
    monkeypatch.setenv("WORLD_SIZE", "3")
    devices.make_nccl_send_by_sockets(2)
    assert os.environ["NCCL_SOCKET_IFNAME"] == "lo"
