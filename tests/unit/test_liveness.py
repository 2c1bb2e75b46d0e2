"""News of ranks that a rank does not hear itself, passed on by others (``csrc/liveness.hpp``)."""

from __future__ import annotations

import itertools
import subprocess
from pathlib import Path

import pytest
from compiling import compiled

SOURCES = ("liveness", "memory", "mailbox", "errors", "wait", "system_files")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled("liveness", SOURCES, tmp_path_factory.mktemp("liveness"))


def test_a_rank_forgets_what_the_one_that_tells_it_has_forgotten(program: Path) -> None:
    """Rank 0 hears rank 2, which tells of rank 3, and tells rank 1 of both. Rank 2 falls silent, then comes back."""
    looks = "+" * 5 + "." * 32 + "+" * 2
    output = subprocess.run([program, *looks], capture_output=True, text=True, check=True, timeout=60).stdout
    known = [tuple(map(int, line.split())) for line in output.splitlines()]
    assert len(known) == len(looks)
    assert all(line[:3] == line[3:] for line in known), output  # rank 1 knows no more and no less than rank 0
    assert [line[:3] for line in known[:5]] == [(1, 1, beats) for beats in range(1, 6)]
    silent = [key for key, _ in itertools.groupby(line[:3] for line in known[5:-2])]
    assert silent == [(1, 1, 5), (0, 1, 5), (0, 0, 0)]  # rank 2 is quiet after 1 s; what it told holds for 2 s
    assert [line[:3] for line in known[-2:]] == [(1, 1, 38), (1, 1, 39)]
