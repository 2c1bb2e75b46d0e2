"""From launches to the figures that are reported, and what the command refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from multiring.bench import parse_sizes, report
from multiring.bench.measure import Figure

MB = 1 << 20


def launches(*seconds: float, buffer: str = "private") -> list[list[Figure]]:
    return [[Figure(MB, buffer, each)] for each in seconds]


def bench(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "multiring", "bench", *options], capture_output=True, text=True)


def test_our_median_stands_beside_the_best_of_a_peer() -> None:
    (row,) = report.summarise(launches(3e-3, 1e-3, 2e-3), {"gloo": launches(9e-3, 6e-3, 7e-3)}, world_size=4)
    assert row.seconds == 2e-3
    assert row.launches == (3e-3, 1e-3, 2e-3)
    assert row.peers == {"gloo": (9e-3, 6e-3, 7e-3)}
    assert row.ratios == {"gloo": pytest.approx(3.0)}
    assert row.algbw == pytest.approx(MB / 2e-3)
    assert row.busbw == pytest.approx(MB / 2e-3 * 1.5)


def test_arena_buffers_are_compared_with_the_private_ones_of_a_peer() -> None:
    ours = [[*private, *arena] for private, arena in zip(launches(4e-3), launches(1e-3, buffer="arena"), strict=True)]
    private, arena = report.summarise(ours, {"gloo": launches(8e-3)}, world_size=2)
    assert (private.buffer, private.ratios["gloo"]) == ("private", pytest.approx(2.0))
    assert (arena.buffer, arena.ratios["gloo"]) == ("arena", pytest.approx(8.0))


def test_sizes_are_those_that_were_asked_for() -> None:
    assert parse_sizes("4KB,1MB") == [4096, MB]


@pytest.mark.parametrize(
    ("options", "offending"),
    [(["--sizes", "4KB,1XB"], "1XB"), (["--peers", "nccl"], "nccl"), (["--api", "fortran"], "fortran")],
)
def test_bad_option_is_named_before_anything_starts(options: list[str], offending: str) -> None:
    refused = bench(*options)
    assert refused.returncode == 2
    assert offending in refused.stderr


def test_two_ranks_are_measured_and_recorded(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    done = bench("-n", "2", "--sizes", "4KB,512KB", "--launches", "2", "--seconds", "0.01", "--json", str(file))
    assert done.returncode == 0, done.stderr
    record = json.loads(file.read_text())
    rows = [(row["nbytes"], row["buffer"], len(row["launches"])) for row in record["rows"]]
    assert rows == [(size << 10, kind, 2) for size in (4, 512) for kind in ("private", "arena")]
    assert all(seconds > 0 for row in record["rows"] for seconds in row["launches"])
    assert record["command"].startswith("multiring bench -n 2")
    assert record["cores"] >= 1
    assert "512 KB" in done.stdout
