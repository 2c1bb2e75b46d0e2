"""Ranks that the launcher forks find what those find which it starts as interpreters, and end as these do."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import forking_launcher
import jobs
import pytest
from launching import COMMAND, wait_until

SEEN = """
import asyncio, ctypes, json, os, resource, signal, sys, threading, warnings
import numpy.testing  # which adds to the filters of warnings

deadly = ctypes.c_int()
ctypes.CDLL(None).prctl(2, ctypes.byref(deadly))  # PR_GET_PDEATHSIG
wakes = signal.set_wakeup_fd(-1)
try:
    asyncio.get_running_loop()
    loop = True
except RuntimeError:
    loop = False
links = {each: f"/proc/self/fd/{each}" for each in range(1000)}
links = {each: os.readlink(link) for each, link in links.items() if os.path.lexists(link)}
found = {
    "descriptors": sorted(link.split(":[")[0].replace(sys.argv[1], "") for link in links.values()),
    "secret": len(os.pread(int(os.environ["MULTIRING_SECRET_FD"]), 1000, 0)),
    "read": sys.stdin.read(),
    "environment": dict(os.environ),
    "directory": os.getcwd(),
    "words": sys.argv[2:],
    "path": sys.path,
    "flags": [repr(sys.flags), sys.warnoptions, repr(warnings.filters)],
    "signals": {int(each): repr(signal.getsignal(each)) for each in signal.valid_signals()},
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "main": [__name__, globals().get("__file__"), sys.modules["__main__"].__dict__ is globals()],
    "threads": [threading.active_count(), len(os.listdir("/proc/self/task"))],
    "leads": [os.getpgrp() == os.getpid(), os.getsid(0) == os.getpid(), os.getpgid(os.getppid()) == os.getppid()],
    "limits": [resource.getrlimit(each) for each in (resource.RLIMIT_NOFILE, resource.RLIMIT_CORE)],
    "streams": [[each.encoding, each.errors, each.write_through] for each in (sys.stdout, sys.stderr)],
    "user": [os.getuid(), sorted(os.sched_getaffinity(0)), os.nice(0), os.umask(0o22)],
    "of an agent": [deadly.value, wakes, loop],
}
with open(f"{sys.argv[1]}-{os.environ['RANK']}", "w") as file:
    json.dump(found, file)
print("to output of", os.environ["RANK"])
print("to error of", os.environ["RANK"], file=sys.stderr)
"""

OWN = {"MULTIRING_STORE", "MULTIRING_JOB", "MULTIRING_SECRET_FD", "MULTIRING_REPORT_FD", "MASTER_PORT"}
"""Variables that no two jobs share."""


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(jobs.SOURCE), os.environ.get("PYTHONPATH", "")]))
    given = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **given, **more}


def run(*words: str, directory: Path, **more: str) -> subprocess.CompletedProcess[str]:
    return forking_launcher.run(
        "run", *words, imports=["json"], environment=environment(**more), directory=directory, timeout=60
    )


@pytest.mark.parametrize("as_module", [False, True], ids=["script", "module"])
def test_what_forked_ranks_find_is_what_fresh_ones_do(as_module: bool, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/seen.py").write_text(SEEN)
    program = ["-m", "sub.seen"] if as_module else ["sub/seen.py"]
    found: dict[str, list[dict[str, Any]]] = {}
    variables = {"ONLY_HERE": "\udcff and ä", "PYTHONWARNINGS": "error"}
    for how in ("forked", "fresh"):
        words = ["-n", "2", *program, str(tmp_path / how), "a", "b c"]
        if how == "forked":
            done = run(*words, directory=tmp_path, **variables)
        else:
            given = environment(**variables)
            done = subprocess.run(
                [*COMMAND, *words],
                cwd=tmp_path,
                env=given,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=60,
            )
        assert done.returncode == 0, done.stderr
        assert sorted(done.stdout.splitlines()) == ["[1] to output of 1", "to output of 0"]
        assert sorted(done.stderr.splitlines()) == ["[1] to error of 1", "to error of 0"]
        found[how] = [json.loads((tmp_path / f"{how}-{rank}").read_text()) for rank in range(2)]
    for forked, fresh in zip(*found.values(), strict=True):
        assert forked["environment"]["ONLY_HERE"] == "\udcff and ä"
        ours, theirs = (
            {name: value for name, value in each.pop("environment").items() if name not in OWN}
            for each in (forked, fresh)
        )
        assert ours == theirs
        assert forked["secret"] > 0
        for name, value in fresh.items():
            assert forked[name] == value, name


@pytest.mark.parametrize(
    ("program", "code", "told"),
    [
        ("import atexit; atexit.register(print, 'at exit'); print('begins')", 0, ""),
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit('the reason')", 1, "the reason"),
        ("raise ValueError('wrong')", 1, "ValueError: wrong"),
        ("import os; os._exit(9)", 9, ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 128 + signal.SIGKILL, "(SIGKILL)"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGINT); input()", 128 + signal.SIGINT, "KeyboardInterrupt"),
        ("import atexit, multiring._native as n; atexit.register(n.exit_with_failure)", 1, ""),
        ("class Late:\n    def __del__(self): print('late')\nlate = Late()", 0, ""),
        ("import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.2), print('last'))).start()", 0, ""),
    ],
)
def test_it_ends_as_a_fresh_interpreter_does(program: str, code: int, told: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(program)
    done = run("-n", "1", "program.py", directory=tmp_path)
    assert done.returncode == code, done.stderr
    assert told in done.stderr
    expected = {"begins": ["begins", "at exit"], "late": ["late"], "last": ["last"]}
    assert done.stdout.splitlines() == next((lines for word, lines in expected.items() if word in program), [])


def test_replacements_are_forked_too_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("""
import os, signal, subprocess
import multiring as mr

child = subprocess.Popen(["sleep", "100"])
with open(f"pids-{os.getpid()}", "w") as file:
    file.write(f"{os.getpid()} {child.pid} {os.getppid()}")
mr.init()
if os.environ["MULTIRING_REPLACEMENT"] == "0":
    try:
        mr.barrier()
        if mr.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        mr.barrier()
    except mr.PeerLost:
        mr.shrink()
    while mr.world_size() < 3:
        mr.grow()
mr.barrier()
print("rank", mr.rank(), "of", mr.world_size(), "forked", "fork_server" in open("/proc/self/cmdline").read())
mr.shutdown()
""")
    done = run("-n", "3", "--min-ranks", "2", "--max-replacements", "1", "program.py", directory=tmp_path)
    assert done.returncode == 0, done.stderr
    said = sorted(re.sub(r"^\[\d\] ", "", line) for line in done.stdout.splitlines())
    assert said == [f"rank {rank} of 3 forked True" for rank in range(3)]
    assert "rank 1 on host" in done.stderr
    ranks = [list(map(int, path.read_text().split())) for path in tmp_path.glob("pids-*")]
    assert len(ranks) == 4
    assert len({agent for _, _, agent in ranks}) == 1
    wait_until(lambda: not any(Path("/proc", str(pid)).exists() for pids in ranks for pid in pids), "all have ended")


def test_ranks_tell_their_launcher_what_they_did(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("""
import numpy as np
import multiring as mr

mr.init()
x = np.arange(5) * (mr.rank() + 1)
for _ in range(3):
    mr.all_reduce(x)
print(*x)
""")
    done = run("-n", "2", "program.py", directory=tmp_path)
    sums = " ".join(str(3 * 2**2 * i) for i in range(5))
    assert sorted(done.stdout.splitlines()) == sorted([sums, f"[1] {sums}"])
    first, *_ = done.stderr.splitlines()
    assert re.fullmatch(r"multiring: 2 ranks in .*; of one rank at most [34] calls and .* sent", first), done.stderr


def test_ranks_end_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import os, time; print(os.getpid()); time.sleep(100)")
    words = ["run", "-n", "2", "program.py"]
    process = forking_launcher.start(*words, imports=["json"], environment=environment(), directory=tmp_path)
    ranks = [int(process.stdout.readline().removeprefix("[1] ")) for _ in range(2)]
    process.kill()
    assert process.wait(30) == -signal.SIGKILL
    wait_until(lambda: not any(Path("/proc", str(rank)).exists() for rank in ranks), "both ranks have ended")


def test_what_is_late_is_killed(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import time; time.sleep(100)")
    began = time.monotonic()
    with pytest.raises(subprocess.TimeoutExpired):
        forking_launcher.run(
            *("run", "-n", "1", "program.py"),
            imports=["json"],
            environment=environment(),
            directory=tmp_path,
            timeout=1,
        )
    assert time.monotonic() - began < 60


def test_commands_that_are_no_python_are_executed(tmp_path: Path) -> None:
    done = run("-n", "2", "sh", "-c", "echo rank $RANK", directory=tmp_path)
    assert sorted(done.stdout.splitlines()) == ["[1] rank 1", "rank 0"]
