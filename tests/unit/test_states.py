"""The benchmark of states: which states it makes and takes back, and which limits it says are missed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import scripts

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "states.py"
MB = 1 << 20


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return scripts.loaded(SCRIPT)


def row(
    nbytes: int, buffer: str, launches: list[float], peers: dict[str, list[float]], of_pass: float
) -> dict[str, Any]:
    return {
        "nbytes": nbytes,
        "buffer": buffer,
        "api": "numpy",
        "seconds": sorted(launches)[len(launches) // 2],
        "launches": launches,
        "peers": peers,
        "fraction_of_bound": of_pass,
    }


@pytest.mark.parametrize(
    ("made", "missed"),
    [
        (row(4096, "private", [1e-6, 1e-6, 1.2e-6], {"gloo": [9e-6, 2e-6, 3e-6]}, 0.1), []),
        (row(4096, "private", [1e-6, 1e-6, 1.4e-6], {}, 0.1), ["worst launch"]),
        (row(MB, "private", [1e-3, 1e-3, 1e-3], {"gloo": [5e-4, 9.1e-4, 2e-3]}, 0.1), []),
        (row(MB, "private", [1e-3, 1e-3, 1e-3], {"gloo": [5e-4, 8.9e-4, 2e-3]}, 0.1), ["gloo is faster"]),
        (row(4096, "arena", [2e-6, 2e-6, 2e-6], {"mpich": [1.1e-6] * 3}, 0.1), []),  # 0.9 us less
        (row(4096, "arena", [2e-6, 2e-6, 2e-6], {"mpich": [0.9e-6] * 3}, 0.1), ["mpich is faster"]),
        (row(64 * MB, "private", [5e-3] * 3, {}, 0.61), []),
        (row(64 * MB, "private", [5e-3] * 3, {}, 0.59), ["part of the pass"]),
        (row(64 * MB, "arena", [5e-3] * 3, {}, 0.74), ["part of the pass"]),
    ],
)
def test_limits_that_are_missed_are_said(script: ModuleType, made: dict[str, Any], missed: list[str]) -> None:
    (case,) = script.cases("quiet", 2, [made])
    assert (case.state, case.ranks, case.nbytes, case.buffer) == ("quiet", 2, made["nbytes"], made["buffer"])
    assert case.worst_over_median == pytest.approx(made["launches"][2] / made["launches"][1])
    assert case.missed == missed


def test_cores_are_read_as_the_kernel_writes_them(script: ModuleType) -> None:
    assert script.cores_of("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}


def test_cores_near_and_far(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four cores of two threads, two of which share each last cache."""
    for core in range(8):
        threads = f"{core // 2 * 2}-{core // 2 * 2 + 1}"
        half = "0-3" if core < 4 else "4-7"
        for index, level, shared in ((0, 1, threads), (1, 3, half), (2, 2, threads)):
            cache = tmp_path / f"cpu{core}/cache/index{index}"
            cache.mkdir(parents=True)
            (cache / "level").write_text(f"{level}\n")
            (cache / "shared_cpu_list").write_text(f"{shared}\n")
        (tmp_path / f"cpu{core}/topology").mkdir()
        (tmp_path / f"cpu{core}/topology/thread_siblings_list").write_text(f"{threads}\n")
    monkeypatch.setattr(script, "CPUS", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    with script.STATES["near cores"]() as near, script.STATES["far cores"]() as far:
        assert (near, far) == ([0, 2], [0, 4])
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    with pytest.raises(script.CannotBeMade, match="no core is without the last cache of core 0"):
        script.STATES["far cores"]().__enter__()


def test_huge_pages_are_as_before_afterwards(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    private, shared = tmp_path / "enabled", tmp_path / "shmem_enabled"
    private.write_text("always [madvise] never\n")
    shared.write_text("always within_size advise [never] deny force\n")
    monkeypatch.setattr(script, "HUGE_PAGES", tmp_path)
    with script.STATES["huge pages"]():
        assert (private.read_text(), shared.read_text()) == ("always", "always")
    assert (private.read_text(), shared.read_text()) == ("madvise", "never")
    shared.unlink()
    shared.mkdir()
    private.write_text("always [madvise] never\n")
    with pytest.raises(script.CannotBeMade, match="shmem_enabled: Is a directory"):
        script.STATES["no huge pages"]().__enter__()
    assert private.read_text() == "madvise"


def children() -> set[str]:
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def test_what_runs_beside_ends_with_the_state(script: ModuleType) -> None:
    before = children()
    with script.STATES["spinner"]():
        (spinner,) = children() - before
    assert not Path(f"/proc/{spinner}").exists()


def test_a_run_is_kept_whole(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    words = ["--states", "spinner", "--ranks", "2", "--sizes", "4KB", "--peers", "", "--launches", "1"]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *words, "--seconds", "0.01", "--json", str(file)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    written = json.loads(file.read_text())
    assert [(run["state"], run["ranks"]) for run in written["runs"]] == [("spinner", 2)]
    assert [(case["nbytes"], case["buffer"]) for case in written["cases"]] == [(4096, "private"), (4096, "arena")]
    assert all(case["seconds"] > 0 and case["worst_over_median"] == 1 for case in written["cases"])
    assert done.stdout.startswith("2 cases, of which ")


def test_an_unknown_state_is_one_line() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), "--states", "calm"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "--states: calm: known are quiet, spinner" in done.stderr
