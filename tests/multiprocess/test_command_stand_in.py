"""Jobs that a shell starts by the stand-in of ``multiring run`` are forked, and in all else like the command's."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import command_stand_in
import jobs
import pytest
from launching import wait_until


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The variables of a shell in which ``multiring run`` is the stand-in, and all else says what it is."""
    (tmp_path / "own").mkdir()
    command = tmp_path / "own/multiring"
    command.write_text('#!/bin/sh\necho "the command itself: $*"\n')
    command.chmod(0o755)
    path = f"{command.parent}:{os.environ['PATH']}"
    with command_stand_in.stand_in(tmp_path / "bin", path, ["json"]) as path:
        python = os.pathsep.join(filter(None, [str(jobs.SOURCE), os.environ.get("PYTHONPATH", "")]))
        yield {**os.environ, "PYTHONPATH": python, "PATH": path}


def test_a_shell_starts_jobs_that_are_forked(shell: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/program.py").write_text(
        "import os, sys\n"
        "parent = open(f'/proc/{os.getppid()}/cmdline').read()\n"
        "print('rank', os.environ['RANK'], os.environ['GIVEN'], sys.argv[1:], 'fork_server' in parent)\n"
        "print('error', file=sys.stderr)\n"
        "sys.exit(int(sys.argv[1]))"
    )
    session = """
        cd sub
        GIVEN=one multiring run -n 1 program.py 0 'a b' 2> errors; echo code $?
        GIVEN=two multiring run -n 1 program.py 7 | tr a-z A-Z; echo code ${PIPESTATUS[0]}
        multiring plan 'a b'
        cat errors
    """
    words = ["bash", "-c", session]
    done = subprocess.run(words, env=shell, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == [
        "rank 0 one ['0', 'a b'] True",
        "code 0",
        "RANK 0 TWO ['7'] TRUE",
        "code 7",
        "the command itself: plan a b",
        "error",
    ]
    assert "exit code 7" in done.stderr


def test_a_job_ends_with_the_command_that_a_shell_started(shell: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import os, time; print(os.getpid(), flush=True); time.sleep(100)")
    words = ["multiring", "run", "-n", "1", "program.py"]
    with subprocess.Popen(words, env=shell, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as command:
        assert command.stdout is not None
        rank = int(command.stdout.readline())
        command.kill()
    wait_until(lambda: not Path("/proc", str(rank)).exists(), "the rank has ended")
