"""Training steps that are recorded and replayed."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import typer
from commands import forked_bench, multiring
from typer.testing import CliRunner

from multiring.bench import replay
from multiring.cli import bench, lab
from multiring.simulate import recording
from multiring.simulate.recording import Gradient, Recording

MB = 1 << 20
STEP = Recording("three layers", 0.02, (Gradient(MB, 0.01), Gradient(MB, 0.02), Gradient(3 * MB, 0.01)))

TRAINING = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

assert sys.argv[1:] == ["--steps", sys.argv[2]], sys.argv
dist.init_process_group("gloo")
frozen = nn.Linear(4, 8).requires_grad_(False)
net = DistributedDataParallel(nn.Sequential(frozen, nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)))
optimizer = torch.optim.SGD(net.parameters())
for _ in range(int(sys.argv[2])):
    optimizer.zero_grad()
    net(torch.ones(3, 4)).sum().backward()
    optimizer.step()
with torch.no_grad():
    net(torch.ones(3, 4))
dist.destroy_process_group()
"""


@dataclass
class Recorded:
    """A contestant that notes what it was given; a sum takes no time, or ``seconds``."""

    seconds: float = 0.0
    started: list[int] = field(default_factory=list)

    def start(self, array: np.ndarray) -> Callable[[], None]:
        self.started.append(array.nbytes)
        return self.wait

    def wait(self) -> None:
        threading.Event().wait(self.seconds)

    def barrier(self) -> None: ...

    def maximum(self, values: np.ndarray) -> np.ndarray:
        return values


def refusal(*words: str) -> str:
    """Return the text on standard error of a command that is refused."""
    app = typer.Typer()
    for command in (bench, lab):
        command.register(app)
    refused = CliRunner().invoke(app, words)
    assert (refused.exit_code, refused.stdout) == (2, "")
    return refused.stderr


def test_a_step_computes_as_long_as_recorded_and_sends_its_buckets() -> None:
    contestant = Recorded()
    steps = replay.replay(contestant, STEP, steps=2)  # type: ignore[arg-type]
    assert contestant.started == [MB, 4 * MB] * (replay.WARM_UP_STEPS + 2)
    assert len(steps) == 2
    assert min(steps) >= STEP.seconds


def test_what_is_waited_for_is_exposed() -> None:
    steps = replay.replay(Recorded(seconds=0.05), STEP, steps=1)  # type: ignore[arg-type]
    (row,) = replay.rows(STEP, {"gloo": [steps]}, predicted=0.1)
    assert row.exposed >= 0.09
    assert row.efficiency == pytest.approx(0.06 / row.seconds)
    assert row.predicted is None


def test_only_ours_is_predicted() -> None:
    ours, gloo = replay.rows(STEP, {"multiring numpy": [[0.08], [0.07, 0.09]], "gloo": [[0.12]]}, predicted=0.081)
    assert (ours.seconds, ours.efficiency, ours.predicted) == (0.08, pytest.approx(0.75), 0.081)
    assert (gloo.seconds, gloo.efficiency, gloo.predicted) == (0.12, pytest.approx(0.5), None)


def test_a_recording_is_replayed_on_two_ranks(tmp_path: Path) -> None:
    file, result = tmp_path / "step.json", tmp_path / "result.json"
    recording.save(STEP, file)
    done = forked_bench("--replay", str(file), "--steps", "2", "--launches", "2", "--json", str(result))
    assert done.exit_code == 0, done.output
    assert "three layers" in done.stdout
    (row,) = json.loads(result.read_text())["rows"]
    assert row["system"] == "multiring numpy"
    assert len(row["steps"]) == 4
    assert row["exposed"] > 0


def test_gradients_that_the_machine_cannot_hold_are_refused_before_anything_starts(tmp_path: Path) -> None:
    file = tmp_path / "huge.json"
    recording.save(Recording("huge", 0.02, (Gradient(10**12, 0.01),)), file)
    refused = refusal("bench", "--replay", str(file), "-n", "999")
    assert refused.startswith("multiring bench: 999 ranks with gradients of 931.3 GB take 9.304e+05 GB at least")
    assert refused.endswith(": replay a smaller recording on fewer ranks\n")


def test_a_real_job_is_recorded(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    program, file = tmp_path / "train.py", tmp_path / "job.json"
    program.write_text(TRAINING)
    done = multiring("bench", "--record", str(file), str(program), "--steps", "9")
    assert done.returncode == 0, done.stderr
    job = recording.load(file)
    assert job.name == "train"
    assert job.forward > 0
    # Backward begins at the last layer; of the frozen one there is no gradient.
    assert sorted(gradient.nbytes for gradient in job.gradients[:2]) == [2 * 4, 16 * 2 * 4]
    assert sorted(gradient.nbytes for gradient in job.gradients[2:]) == [16 * 4, 8 * 16 * 4]
    assert "4 gradients" in done.stdout


def test_too_short_a_job_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    program, file = tmp_path / "train.py", tmp_path / "job.json"
    program.write_text(TRAINING)
    done = multiring("bench", "--record", str(file), str(program), "--steps", "7")
    assert done.returncode == 2
    assert "nothing was recorded" in done.stderr
    assert "7 training steps were seen; 8 are needed" in done.stderr
    assert not file.exists()


@pytest.mark.parametrize(
    ("options", "offending"),
    [
        (["--replay", "resnet5"], "resnet5"),
        (["--record", "job.json"], "train.py"),
        (["train.py"], "'train.py': a program is run with --record"),
    ],
)
def test_what_cannot_be_replayed_or_recorded_is_named(options: list[str], offending: str) -> None:
    refused = multiring("bench", *options)
    assert refused.returncode == 2
    assert offending in refused.stderr
    assert refused.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "option",
    [
        *("--collective all_reduce", "--sizes 4KB", "--api numpy", "--peers gloo", "--launches 5", "--seconds 0.5"),
        *("--json figures.json", "--plot curves.png", "--replay resnet50", "--samples 32", "--speed 32", "--steps 5"),
    ],
)
def test_a_recording_refuses_what_only_a_measurement_heeds(option: str, tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.touch()
    refused = refusal("bench", "--record", str(tmp_path / "job.json"), *option.split(), str(program))
    name = option.split()[0]
    assert refused == f"multiring bench: --record FILE measures nothing: leave out {name}\n"


def test_a_peer_without_a_network_is_none_for_a_lab() -> None:
    known = "known: gloo, openmpi, mpich, impi"
    refused = refusal("lab", "peers", "--peers", "deepspeed")
    assert refused == f"multiring lab peers: --peers deepspeed: it knows no network, and a lab has one; {known}\n"
    refused = refusal("lab", "peers", "--peers", "nccl")
    remedy = "it moves tensors of CUDA devices (multiring bench --device cuda)"
    assert refused == f"multiring lab peers: --peers nccl: {remedy}; {known}\n"
    refused = refusal("lab", "peers", "--peers", "smoke")
    assert refused == f"multiring lab peers: --peers smoke: no such peer; {known}\n"


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ("--replay vgg16 --collective all_reduce", "--replay measures training steps: leave out --collective"),
        ("--replay vgg16 --sizes 4KB", "--replay measures training steps: leave out --sizes"),
        ("--replay vgg16 --plot a.png --seconds 1", "--replay measures training steps: leave out --seconds, --plot"),
        ("--replay STEP --samples 32", "--replay STEP says itself how long it computes: leave out --samples"),
        ("--replay STEP --speed 32", "--replay STEP says itself how long it computes: leave out --speed"),
        ("--steps 5", "without --replay collectives are measured: leave out --steps"),
        ("--speed 3 --samples 9", "without --replay collectives are measured: leave out --samples, --speed"),
    ],
)
@pytest.mark.parametrize("command", ["bench", "lab peers"])
def test_an_option_without_a_meaning_is_refused(command: str, options: str, line: str, tmp_path: Path) -> None:
    file = tmp_path / "step.json"
    recording.save(STEP, file)
    refused = refusal(*command.split(), *options.replace("STEP", str(file)).split())
    assert refused == f"multiring {command}: {line}\n".replace("STEP", str(file))
