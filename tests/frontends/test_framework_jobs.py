"""Ranks that are forked find what `multiring run` gives to ranks, and their failures are told."""

from __future__ import annotations

import json
from pathlib import Path

import fork_server
import pytest
from framework_jobs import forked_job

PROGRAM = """
import json, os, signal, sys
import multiring as mr

mr.init()
found = {"name": __name__, "file": __file__, "words": sys.argv, "hash": hash("a word"), "read": sys.stdin.read()}
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


IMPORTS = ["multiring.api"]


@pytest.mark.timeout(200)
def test_what_forked_ranks_find(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("FOUND = 'the module beside the program'")
    program = tmp_path / "program.py"
    program.write_text(f"import beside\n{PROGRAM}")
    done = forked_job(program, "a", "b c", ranks=3, imports=IMPORTS, timeout=100, PYTHONHASHSEED="random")
    assert done.returncode == 0, done.stderr
    found = list(map(json.loads, done.stdout.splitlines()))
    expected = {"size": 3, "name": "__main__", "file": str(program), "words": [str(program), "a", "b c"], "read": ""}
    hashes = [each.pop("hash") for each in found]
    assert found == [{"rank": rank, **expected} for rank in range(3)]
    assert hashes[0] == hashes[2] != hashes[1]
    assert [f"error of {rank}" in done.stderr for rank in range(3)] == [True] * 3


@pytest.mark.timeout(300)
def test_how_forked_ranks_end(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = forked_job(program, "fail", "die", ranks=3, imports=IMPORTS, timeout=100)
    assert done.returncode == 3
    assert done.stderr.startswith("exit codes [0, 3, -9]\n"), done.stderr
    done = forked_job(program, "hang", ranks=2, imports=IMPORTS, timeout=5)
    assert done.stderr.startswith("exit codes [-9, "), done.stderr
    assert '"rank": 0' in done.stdout


@pytest.mark.timeout(200)
def test_ranks_that_write_more_than_a_pipe_takes_do_not_wait_for_each_other(tmp_path: Path) -> None:
    """Rank 1 has written all before rank 0, which is read first, begins to."""
    program = tmp_path / "program.py"
    program.write_text("""
import multiring as mr
mr.init()
if mr.rank() == 0:
    mr.barrier()
for number in range(40_000):
    print("line", number, "of", mr.rank())
if mr.rank() == 1:
    mr.barrier()
mr.shutdown()
""")
    done = forked_job(program, ranks=2, imports=IMPORTS, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"line {number} of {rank}" for rank in (0, 1) for number in range(40_000)]


def test_servers_end_when_their_modules_are_needed_no_more(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import os; print(os.getppid())")
    servers = []
    for _ in range(2):
        done = forked_job(program, ranks=2, imports=["json.tool"], timeout=60)
        assert done.returncode == 0, done.stderr
        servers.append(done.stdout.split())
    assert servers[0] == servers[1]
    assert servers[0][0] != servers[0][1]
    fork_server.end(["json.tool"])
    assert [Path("/proc", pid).exists() for pid in servers[0]] == [False, False]
    assert forked_job(program, ranks=2, imports=["json.tool"], timeout=60).returncode == 0
    fork_server.end(["json.tool"])
