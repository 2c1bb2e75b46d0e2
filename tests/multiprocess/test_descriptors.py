"""Programs that are started without standard input, output or error."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from free_ports import free_port
from launching import COMMAND, Launch

FLAT = Path(__file__).parents[2] / "lab/topologies/flat.toml"

SUM = """
    import os, subprocess
    import numpy as np
    import multiring as mr

    mr.init()
    print("printed by Python", flush=True)
    os.system("echo printed by a shell; echo and there >&2; cat")
    x = np.arange(5) * 10**mr.rank()
    mr.all_reduce(x)
    links = [os.readlink(f"/proc/self/fd/{number}") for number in range(3)]
    with open(f"sum-{mr.rank()}", "w") as file:
        print(*x, file=file)
        print(*(link for link in links if link.startswith("socket")), file=file)
"""
CLOSED = ["<&- >&-", "<&-", ">&-", "2>&-", "<&- >&- 2>&-"]


@pytest.mark.parametrize("closed", CLOSED)
def test_a_job_whose_launcher_has_closed_descriptors(launch: Launch, closed: str) -> None:
    words = ("sh", "-c", f'"$@" {closed}', "sh", *COMMAND, "-n", "3", launch.script(SUM))
    ended = subprocess.run(words, cwd=launch.directory, env=launch.environment, capture_output=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    for rank in range(3):
        assert (launch.directory / f"sum-{rank}").read_text() == "0 111 222 333 444\n\n"


@pytest.mark.parametrize("closed", CLOSED)
def test_ranks_by_hand_with_closed_descriptors(launch: Launch, closed: str) -> None:
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    words = ("sh", "-c", f'"$@" {closed}', "sh", sys.executable, launch.script(SUM))
    ranks = [
        subprocess.Popen(
            words,
            cwd=launch.directory,
            env={**launch.environment, **place, "RANK": str(rank)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    for rank in ranks:
        _, errors = rank.communicate(timeout=60)
        assert rank.returncode == 0, errors
    for number in range(2):
        assert (launch.directory / f"sum-{number}").read_text() == "0 11 22 33 44\n\n"


def test_a_command_without_standard_output(launch: Launch) -> None:
    words = (
        "sh",
        "-c",
        '"$@" >&-',
        "sh",
        sys.executable,
        "-m",
        "multiring",
        "plan",
        "--topology",
        str(FLAT),
        "--size",
        "1MB",
    )
    ended = subprocess.run(words, env=launch.environment, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_rank_that_may_write_no_file_ends_well(launch: Launch) -> None:
    script = launch.script(
        """
        import resource
        import numpy as np
        import multiring as mr

        mr.init()
        if mr.rank() == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        x = np.arange(5) * 10**mr.rank()
        mr.all_reduce(x)
        print("sum", *x, flush=True)
        mr.shutdown()
        """
    )
    ended = launch.run("-n", "2", "--no-summary", script)
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.splitlines()) == ["[1] sum 0 11 22 33 44", "sum 0 11 22 33 44"]
    why = "[Errno 27] File too large (raise ulimit -f)"
    assert ended.stderr == f"[1] this rank cannot tell its launcher what it does: {why}\n"
