"""Ranks that are forked find what `multiring run` gives to ranks, and their failures are told."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from prepared import Prepared

PROGRAM = """
import json, os, signal, sys
import multiring as mr

mr.init()
found = {"name": __name__, "words": sys.argv[1:], "hash": hash("a word"), "read": sys.stdin.read()}
print(json.dumps({"rank": mr.rank(), "size": mr.world_size(), **found}), flush=True)
print("error of", mr.rank(), file=sys.stderr, flush=True)
mr.barrier()
if "fail" in sys.argv and mr.rank() == 1:
    sys.exit(3)
if "die" in sys.argv and mr.rank() == 2:
    os.kill(os.getpid(), signal.SIGKILL)
if "hang" in sys.argv and mr.rank() == 0:
    signal.pause()
mr.shutdown()
"""


@pytest.fixture(scope="module")
def prepared() -> Iterator[Prepared]:
    processes = Prepared(["multiring.api"], {"PYTHONHASHSEED": "random"})
    yield processes
    processes.close()


@pytest.mark.timeout(200)
def test_what_forked_ranks_find(prepared: Prepared, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    done = prepared.job(tmp_path / "program.py", "a", "b c", ranks=3, timeout=100)
    assert done.returncode == 0, done.stderr
    found = list(map(json.loads, done.stdout.splitlines()))
    expected = {"size": 3, "name": "__main__", "words": ["a", "b c"], "read": ""}
    hashes = [each.pop("hash") for each in found]
    assert found == [{"rank": rank, **expected} for rank in range(3)]
    assert hashes[0] == hashes[2] != hashes[1]
    assert [f"error of {rank}" in done.stderr for rank in range(3)] == [True] * 3


@pytest.mark.timeout(300)
def test_how_forked_ranks_end(prepared: Prepared, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    done = prepared.job(tmp_path / "program.py", "fail", "die", ranks=3, timeout=100)
    assert done.returncode == 3
    assert done.stderr.startswith("exit codes [0, 3, -9]\n"), done.stderr
    done = prepared.job(tmp_path / "program.py", "hang", ranks=2, timeout=5)
    assert done.stderr.startswith("exit codes [-9, "), done.stderr
