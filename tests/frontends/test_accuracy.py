"""Evidence for thin links: what the benchmark trains, counts and shows is what it says."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import fork_server
import pytest
import scripts
from forking_launcher import TORCH
from framework_jobs import needs, of_forks

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "accuracy.py"
RANKS, STEPS = 4, 6

pytestmark = needs("torch", "scipy", "matplotlib", seconds=300)


@pytest.fixture(scope="module")
def script() -> ModuleType:
    pytest.importorskip("torch")
    return scripts.loaded(SCRIPT)


def command(*words: str, **environment: str) -> tuple[int, str, str]:
    """The exit code of the benchmark, and what it wrote."""
    process = fork_server.start(SCRIPT, *words, environment=of_forks(**environment), imports=TORCH)
    try:
        output, error = process.communicate(240)
    finally:
        process.kill()
    return process.wait(), output, error


def alone(script: ModuleType, seed: int) -> float:
    """The loss of one process that takes the steps of all ranks."""
    import torch
    from torch.nn import functional as F
    from torch.optim.lr_scheduler import LambdaLR

    task = script.text()
    torch.manual_seed(seed)
    net = task.network()
    optimizer = task.optimizer(net.parameters())
    schedule = LambdaLR(optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / STEPS)))
    order = torch.randint(task.count, (STEPS, 32), generator=torch.Generator().manual_seed(1_000_000 + seed))
    for chosen in order:
        inputs, targets = task.samples(chosen)
        optimizer.zero_grad()
        F.cross_entropy(net(inputs).flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
        schedule.step()
    inputs, targets = task.held_out
    with torch.no_grad():
        return F.cross_entropy(net(inputs).flatten(0, 1), targets.flatten()).item()


def test_trainings_are_those_of_one_process_and_bytes_those_of_the_wire(script: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    whole = ["--models", "text", "--ranks", str(RANKS), "--steps", str(STEPS), "--seeds", "3", "--methods"]
    methods = ["float32", "int8", "int4, feedback, exempt", "averaging 10", "PowerSGD rank 4"]
    assert command(str(file), *whole, *methods[:2])[0] == 0
    code, printed, error = command(str(file), *whole, *methods)
    assert (code, error) == (0, "")
    assert [line.partition(", seed 3: loss ")[0] for line in printed.splitlines()] == [
        f"text, {m}" for m in methods[2:]
    ]

    rows = {row["method"]: row for row in json.loads(file.read_text())["rows"]}
    assert list(rows) == methods
    assert {(row["model"], row["seed"]) for row in rows.values()} == {("text", 3)}
    assert rows["float32"]["loss"] == pytest.approx(alone(script, 3), rel=1e-5)
    assert len({row["loss"] for row in rows.values()}) == len(methods)

    count = rows["float32"]["parameters"]
    flat = sum(each.numel() for each in script.text().network().parameters() if each.dim() == 1)
    assert rows["float32"]["bytes"] == STEPS * 4 * count
    assert rows["int8"]["bytes"] == STEPS * (count + 4 * math.ceil(count / 256))
    narrow = count - flat
    assert rows["int4, feedback, exempt"]["bytes"] == STEPS * (narrow / 2 + 4 * math.ceil(narrow / 64) + 4 * flat)
    # At the end alone, with three numbers and a fingerprint of four in float64, and the barrier after it.
    assert rows["averaging 10"]["bytes"] == 4 * count + 7 * 8 + 1
    assert rows["PowerSGD rank 4"]["bytes"] < rows["float32"]["bytes"] / 2

    before = file.read_text()
    code, printed, error = command(str(file), *whole, "int8", "--steps", "7")
    assert (code, printed) == (1, "")
    assert error == f"accuracy: {file}: it is of steps {STEPS}, and these are 7: name another file\n"
    code, printed, error = command(str(file), *whole, "int2, feedback", MULTIRING_PLAN="ring")
    assert (code, printed) == (1, "")
    assert error.startswith("accuracy: text, int2, feedback, seed 3: rank ")
    assert "MULTIRING_PLAN=ring" in error
    assert file.read_text() == before


def row(model: str, method: str, seed: int, loss: float, sent: float) -> dict[str, Any]:
    return {"model": model, "method": method, "seed": seed, "loss": loss, "accuracy": 1 - loss / 4, "bytes": sent}


ROWS = [
    *(row("text", "float32", seed, 1.5 + seed / 4, 4e6) for seed in range(3)),
    *(row("text", "int8", seed, 1.75 + seed / 2, 1e6) for seed in range(2)),
    row("text", "momentum 50", 0, 1.0, 2e6),
    row("glyphs", "int8", 0, 2.0, 1e6),
]


def test_the_table_has_means_with_intervals_and_differences_by_seed(script: ModuleType) -> None:
    # Student's t at 97.5 % is 12.706 with one degree of freedom and 4.303 with two; deviations are 0.25 and 0.354.
    assert script.table(ROWS).splitlines() == [
        "| text | seeds | MB | loss | from float32 | accuracy, % | from float32 |",
        "|---|---|---|---|---|---|---|",
        "| float32 | 3 | 4.00 | 1.750 ± 0.621 |  | 56.25 ± 15.53 |  |",
        "| int8 | 2 | 1.00 | 2.000 ± 3.177 | +0.375 ± 1.588 | 50.00 ± 79.41 | -9.38 ± 39.71 |",
        "| momentum 50 | 1 | 2.00 | 1.000 | -0.500 | 75.00 | +12.50 |",
        "",
        "| glyphs | seeds | MB | loss | from float32 | accuracy, % | from float32 |",
        "|---|---|---|---|---|---|---|",
        "| int8 | 1 | 1.00 | 2.000 |  | 50.00 |  |",
    ]


def test_the_picture_joins_what_nothing_beats_in_bytes_and_loss(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert [each.method for each in script.best(script.summaries(ROWS, "text"))] == ["momentum 50", "int8"]
    kept = tmp_path / "found.json"
    kept.write_text(json.dumps({"rows": ROWS}))
    monkeypatch.setattr(sys, "argv", ["accuracy", str(kept), "--picture", str(tmp_path / "found.svg"), "--table"])
    script.main()
    assert capsys.readouterr().out == script.table(ROWS) + "\n"
    drawn = (tmp_path / "found.svg").read_text()
    assert {name for name in script.METHODS if f"<!-- {name} -->" in drawn} == {"float32", "int8", "momentum 50"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ranks", "6"], "--ranks 6: 4 racks have as many ranks each: give a multiple of that"),
        (["--models", "glyphs"], "--models glyphs needs --glyphs DIR, which examples/imagenet/glyphs.py draws"),
        (["--minutes", "nan"], "--minutes nan: a number above 0 is needed"),
        (["--methods", "int3"], "argument --methods: invalid choice: 'int3'"),
        (["--picture", "{}/found.bmp"], "--picture {}/found.bmp: the suffix says the format; known are"),
        (["--table"], "{}/found.json: it has no trainings (FileNotFoundError"),
        (
            ["--glyphs", "{}"],
            "--glyphs {}: [Errno 2] No such file or directory: '{}/train': name a folder that examples",
        ),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line(
    script: ModuleType,
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = ["accuracy", "{}/found.json", *words]
    monkeypatch.setattr(sys, "argv", [word.replace("{}", str(tmp_path)) for word in given])
    with pytest.raises(SystemExit) as ended:
        script.main()
    told = ended.value.code if isinstance(ended.value.code, str) else capsys.readouterr().err.removesuffix("\n")
    assert told.startswith("accuracy: " + message.replace("{}", str(tmp_path)))
    assert "\n" not in told
    assert list(tmp_path.iterdir()) == []
