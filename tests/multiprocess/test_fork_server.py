"""Processes of the tests' fork server run and end as fresh interpreters do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import fork_server
import jobs
import pytest

SEEN = """
import atexit, json, os, resource, signal, sys, threading, warnings
import numpy.testing  # which adds to the filters of warnings
links = {each: f"/proc/self/fd/{each}" for each in range(1000)}
found = {
    "descriptors": {each: os.readlink(link).split(":")[0] for each, link in links.items() if os.path.lexists(link)},
    "inherited": [os.get_inheritable(each) for each in (0, 1, 2, int(sys.argv[2]))],
    "read": os.read(int(sys.argv[2]), 10).decode(),
    "environment": dict(os.environ),
    "directory": os.getcwd(),
    "words": sys.argv,
    "path": sys.path,
    "flags": [repr(sys.flags), sys.warnoptions, repr(warnings.filters)],
    "signals": {int(each): repr(signal.getsignal(each)) for each in signal.valid_signals()},
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "main": [__name__, "__file__" in globals(), threading.current_thread() is threading.main_thread()],
    "threads": [threading.active_count(), len(os.listdir("/proc/self/task"))],
    "group": [os.getpgrp(), os.getsid(0)],
    "limits": [resource.getrlimit(each) for each in (resource.RLIMIT_NOFILE, resource.RLIMIT_CORE)],
    "streams": [[each.encoding, each.errors, each.line_buffering] for each in (sys.stdout, sys.stderr)],
    "unbuffered": [sys.stdout.write_through, sys.stderr.write_through],
    "user": [os.getuid(), sorted(os.sched_getaffinity(0)), os.nice(0), os.umask(0o22)],
}
with open(sys.argv[1], "w") as file:
    json.dump(found, file)
atexit.register(print, "at exit")
print("to", "output", end="\\r\\n")
print("to error", file=sys.stderr)
"""


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(jobs.SOURCE), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path, "PYTHONWARNINGS": "error", "OMP_NUM_THREADS": "1", **more}


def test_what_is_forked_finds_what_a_fresh_interpreter_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fork_server.start("", environment=environment()).communicate(timeout=60)  # the server runs before the test goes on
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HOME", raising=False)
    variables = environment(ONLY_HERE="\udcff and ä", MULTIRING_RANK="7")
    found: dict[str, dict[str, Any]] = {}
    for how in ("forked", "fresh"):
        reading, writing = os.pipe()
        os.write(writing, b"a secret")
        os.close(writing)
        words = [str(tmp_path / "seen"), str(reading)]
        process: subprocess.Popen[str] | fork_server.Forked
        if how == "forked":
            process = fork_server.start(SEEN, *words, environment=variables, pass_fds=[reading])
        else:
            process = subprocess.Popen(
                [sys.executable, "-c", SEEN, *words],
                env=variables,
                pass_fds=[reading],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        os.close(reading)
        assert process.communicate(timeout=60) == ("to output\nat exit\n", "to error\n")
        assert process.returncode == 0
        found[how] = json.loads((tmp_path / "seen").read_text())
    assert found["forked"]["environment"]["ONLY_HERE"] == "\udcff and ä"
    assert found["forked"]["read"] == "a secret"
    for name, fresh in found["fresh"].items():
        assert found["forked"][name] == fresh, name


@pytest.mark.parametrize(
    ("program", "code", "last"),
    [
        ("", 0, ""),
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit('the reason')", 1, "the reason"),
        ("raise ValueError('wrong')", 1, "ValueError: wrong"),
        ("import os; os._exit(9)", 9, ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGINT); input()", -signal.SIGINT, "KeyboardInterrupt"),
        ("import warnings; warnings.warn('old')", 1, "UserWarning: old"),
        ("import atexit, multiring._native as n; atexit.register(n.exit_with_failure)", 1, ""),
    ],
)
def test_it_ends_as_a_fresh_interpreter_does(program: str, code: int, last: str) -> None:
    process = fork_server.start(program, environment=environment())
    _, error = process.communicate(timeout=60)
    assert (process.returncode, "".join(error.splitlines()[-1:])) == (code, last), error
    words = [sys.executable, "-c", program]
    fresh = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=60)
    assert (fresh.returncode, "".join(fresh.stderr.splitlines()[-1:])) == (code, last), fresh.stderr


def test_signals_lines_and_time_limits() -> None:
    before = fork_server.seconds()
    program = (
        "import time; print('ready', flush=True); print('and', end='', flush=True); sum(range(10**7)); time.sleep(99)"
    )
    process = fork_server.start(program, environment=environment())
    assert process.poll() is None
    assert process.stdout.readline() == "ready\n"
    for call in (process.wait, process.communicate):
        with pytest.raises(subprocess.TimeoutExpired):
            call(timeout=0.1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == process.poll() == -signal.SIGTERM
    assert process.communicate() == ("and", "")
    process.kill()  # there is nobody to hear it
    assert fork_server.seconds() > before


def test_servers_that_are_prepared_import_beside_each_other(tmp_path: Path) -> None:
    (tmp_path / "met.py").write_text(f"""
import os, pathlib, time
here = pathlib.Path({str(tmp_path)!r})
(here / f"{{os.getpid()}}.begun").touch()
deadline = time.monotonic() + 60
while len(list(here.glob("*.begun"))) < 2:
    assert time.monotonic() < deadline, "the other server has not begun"
    time.sleep(0.01)
(here / f"{{os.getpid()}}.done").touch()
""")
    given = environment(PYTHONPATH=os.pathsep.join([str(tmp_path), str(jobs.SOURCE)]))
    fork_server.prepare(environment=given, seats=range(3), imports=["met"])
    done = {path.stem for path in tmp_path.glob("*.done")}
    parents = []
    for seat in range(3):
        process = fork_server.start("import os; print(os.getppid())", environment=given, seat=seat, imports=["met"])
        output, error = process.communicate(timeout=60)
        assert error == ""
        parents.append(output.strip())
    fork_server.end(["met"])
    assert parents[0] == parents[2] != parents[1]
    assert done == set(parents)


def test_what_processes_took_is_counted_once() -> None:
    """While their server runs, by itself; after its end with the children of this process."""

    def spent() -> float:
        times = os.times()
        return times.children_user + times.children_system + fork_server.seconds()

    program = "import time; sum(range(3 * 10**7)); print(time.process_time())"
    before = spent()
    output, error = fork_server.start(program, environment=environment(), imports=["json.tool"]).communicate(60)
    taken = float(output)
    assert error == ""
    running = spent()
    fork_server.end(["json.tool"])
    assert before + taken < running <= spent() < running + taken / 2


def test_ranks_beside_each_other_have_other_seeds_of_hashes_and_random_numbers() -> None:
    program = "import random, numpy; print(hash('a'), random.random(), numpy.random.random(), sep='\\n')"
    found = []
    for seat in (0, 1, 2, 3):
        process = fork_server.start(program, environment=environment(PYTHONHASHSEED="random"), seat=seat)
        output, error = process.communicate(timeout=60)
        assert error == ""
        found.append(output.splitlines())
    hashes, *numbers = zip(*found, strict=True)
    assert hashes[0] != hashes[1]
    assert [len(set(each)) for each in numbers] == [4, 4]


def test_what_an_interpreter_reads_when_it_starts_is_as_given() -> None:
    program = "import sys; print(sys.flags.dev_mode, hash('a'), sys.path[1:3])"
    for seed in ("1", "2"):
        given = environment(
            PYTHONHASHSEED=seed, PYTHONDEVMODE="1", PYTHONWARNINGS="", PYTHONPATH=f"/nowhere:{jobs.SOURCE}"
        )
        words = [sys.executable, "-c", program]
        expected = subprocess.run(words, env=given, capture_output=True, text=True, timeout=60, check=True).stdout
        forked = fork_server.start(program, environment=given)
        assert forked.communicate(timeout=60)[0] == expected


def test_who_cannot_be_given_what_was_asked_says_so_and_the_next_is_served(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"a request of \d+ bytes: at most 131072 can be sent to a fork server"):
        fork_server.start("#" * (1 << 17), environment=environment())
    process = fork_server.start("print('served')", environment=environment())
    assert process.communicate(timeout=60) == ("served\n", "")


def test_a_server_that_has_ended_fails_who_relies_on_it_and_the_next_rank_has_another() -> None:
    mine = environment(LANGUAGE="of this test")
    process = fork_server.start("import os, time; print(os.getppid(), flush=True); time.sleep(99)", environment=mine)
    server = int(process.stdout.readline())
    os.kill(server, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="the fork server has ended, with exit code -9"):
        process.wait(30)
    os.kill(process.pid, signal.SIGKILL)
    after = fork_server.start("import os; print(os.getppid())", environment=mine)
    output, error = after.communicate(timeout=60)
    assert (int(output) not in (server, os.getpid()), error) == (True, "")
