"""Standbys: what runs in one is what runs in a fresh interpreter, it is there at once, and none is left."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from launching import IN_STANDBY, REGROW, Launch, wait_until

from multiring.launch.standbys import _can_restore_priority

WORDS = ("-n", "2", "--min-ranks", "1", "--max-replacements", "3", "--no-summary")

MARK = """
    import os, pathlib, time

    host, words = os.environ.get("FAKE_HOST", ""), pathlib.Path("/proc/self/cmdline").read_bytes()
    kind = "standby" if b"standby.py" in words else "fresh"
    name = f"imported-{host}-{kind}-{os.getpid()}"
    pathlib.Path(f".{name}").write_text(str(time.monotonic()))
    os.replace(f".{name}", name)
"""
"""A module that tells who has imported it, ranks and standbys alike."""

STRIKES = """
    import os, pathlib, signal, sys, time
    import mark

    rank, here = os.environ["RANK"], pathlib.Path(os.environ["TEST_FOLDER"])
    (here / f"rank-{rank}-{os.getpid()}").touch()
    is_second = rank == "1" and (here / "struck").exists()

    def wait_for(pattern, count=1):
        deadline = time.monotonic() + 50
        while len(list(here.glob(pattern))) < count:
            assert time.monotonic() < deadline, f"waited for {pattern}"
            time.sleep(0.02)

    def strike():
        "Rank 1 is killed when a standby is ready; the other one waits until it has come again."
        if rank == "0":
            wait_for("done")
        elif not is_second:
            wait_for("imported-*", int(os.environ.get("TEST_IMPORTED", "3")))
            while os.environ.get("TEST_GONE") and any(
                os.path.exists("/proc/" + file.name.rpartition("-")[2]) for file in here.glob("imported-*-standby-*")
            ):
                time.sleep(0.02)
            time.sleep(0.2)
            (here / "struck").write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            (here / "done").touch()
"""

FACTS = """
    import inspect, json, pickle

    class Thing:
        pass

    def links():
        found = []
        for name in os.listdir("/proc/self/fd"):
            try:
                found.append(os.readlink("/proc/self/fd/" + name).rstrip("0123456789[]"))
            except OSError:
                pass
        return sorted(found)

    def facts():
        main = sys.modules["__main__"]
        assert vars(main) is globals()
        assert pickle.loads(pickle.dumps(Thing())).__class__ is Thing
        environment = {n: v for n, v in os.environ.items() if not n.endswith("_FD")}
        return {
            "argv": sys.argv, "orig": sys.orig_argv, "path": sys.path, "name": __name__, "file": __file__,
            "package": __package__, "spec": getattr(__spec__, "name", None), "loader": type(__loader__).__name__,
            "cached": globals().get("__cached__"), "globals": sorted(globals()), "doc": __doc__,
            "code": facts.__code__.co_filename, "source": inspect.getsource(Thing), "environment": environment,
            "directory": os.getcwd(), "stdin": sys.stdin.read(), "streams": [os.isatty(n) for n in range(3)],
            "priority": os.getpriority(os.PRIO_PROCESS, 0), "cpus": sorted(os.sched_getaffinity(0)),
            "signals": [str(signal.getsignal(n)) for n in sorted(signal.valid_signals())],
            "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])), "leads": os.getpgrp() == os.getpid(),
            "session": os.getsid(0) == os.getpid(), "flags": list(sys.flags), "warnings": sys.warnoptions,
            "options": dict(sys._xoptions), "hook": sys.excepthook is sys.__excepthook__, "descriptors": links(),
            "environ": type(os.environ).__name__, "bytes": os.environb.get(b"RANK").decode(),
            "secret": len(os.read(int(os.environ["MULTIRING_SECRET_FD"]), 99)),
            "inherited": [os.get_inheritable(int(os.environ[f"MULTIRING_{n}_FD"])) for n in ("SECRET", "REPORT")],
            "written": sys.stdout.write_through, "encoding": sys.stdout.encoding,
        }

    if rank == "1":
        (here / f"facts-{is_second:d}").write_text(json.dumps(facts()))
    strike()
"""


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """Standbys are interpreters whose variables and command lines are looked at."""
    launch = Launch(tmp_path, fresh=True)
    yield launch
    launch.kill_all()


def prepare(launch: Launch, script: str, name: str = "script.py", **modules: str) -> str:
    """Write the script, whose folder has the modules."""
    launch.environment["TEST_FOLDER"] = str(launch.directory)
    path = launch.directory / name
    path.parent.mkdir(exist_ok=True, parents=True)
    for module, text in {"mark": MARK, **modules}.items():
        launch.script(text, str(Path(name).parent / f"{module}.py"))
    return launch.script(script, name)


def marked(launch: Launch, pattern: str) -> list[int]:
    """The processes that have written such files."""
    return sorted(int(file.name.rpartition("-")[2]) for file in launch.directory.glob(pattern))


def standbys(launch: Launch) -> list[int]:
    """The processes that have done the imports without being ranks."""
    return marked(launch, "imported-*-standby-*")


def nothing_is_left(launch: Launch) -> None:
    wait_until(lambda: launch.processes() == [], "all processes have ended")


def replacement(launch: Launch) -> int:
    """The process that became rank 1 in the place of the one that was killed, and was no fresh interpreter."""
    (found,) = set(marked(launch, "rank-1-*")) - set(marked(launch, "imported-*-fresh-*"))
    return found


def origin(launch: Launch) -> int:
    """The process that has done the imports, of which the one in the place of rank 1 is a fork."""
    (found,) = standbys(launch)
    assert found != replacement(launch)
    return found


def waiting(launch: Launch) -> list[int]:
    """The processes that could become ranks: not those that have imported, nor ranks."""
    others = {*marked(launch, "rank-*"), *standbys(launch)}
    found: list[int] = []
    if not standbys(launch):
        return found
    for pid in set(launch.processes()) - others:
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            if b"standby.py" in Path(f"/proc/{pid}/cmdline").read_bytes() and os.getpgid(pid) == pid:
                found.append(pid)
    return sorted(found)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("script.py", ("script.py", "--lr", "1", "-m", "x y")),
        ("script.py", ("./script.py",)),
        ("deep/er/script.py", ("link.py", "a")),
        ("deep/er/script.py", ("deep/../deep/er/script.py", "a")),
        ("package/inner.py", ("-m", "package.inner", "--lr", "1")),
        ("package/__main__.py", ("-m", "package")),
        ("script.py", (sys.executable, "-X", "dev", "-Wignore::DeprecationWarning", "-B", "script.py", "a")),
        ("script.py", ("python", "-s", "-m", "script", "a")),
    ],
)
def test_a_script_sees_what_it_sees_in_a_fresh_interpreter(launch: Launch, name: str, words: tuple[str, ...]) -> None:
    launch.environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    prepare(launch, '"""About it."""\n' + REWRITTEN, name)
    if "-m" in words and name.startswith("package"):
        launch.script(MARK, "mark.py")
        launch.script("", "package/__init__.py")
    (launch.directory / "link.py").symlink_to(name)
    result = launch.run(*WORDS, "--standby", "1", *words)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "standby" not in result.stderr
    fresh, ready = (json.loads((launch.directory / f"facts-{number}").read_text()) for number in (0, 1))
    assert ready == fresh
    struck = float((launch.directory / "struck").read_text())
    imported = launch.directory / f"imported--standby-{origin(launch)}"
    assert float(imported.read_text()) < struck  # nothing was to be waited for
    nothing_is_left(launch)


ENDS = {
    "code": "sys.exit(3)",
    "text": "sys.exit('no more')",
    "well": "pass",
    "raised": "raise ValueError(f'of rank {rank}')",
    "chained": """
    try:
        {}["missing"]
    except KeyError:
        raise RuntimeError("second")
    """,
    "interrupted": "raise KeyboardInterrupt",
    "killed": "os.kill(os.getpid(), signal.SIGTERM)",
    "interrupt": "os.kill(os.getpid(), signal.SIGINT); time.sleep(9)",
    "hook": "sys.excepthook = lambda kind, value, tb: print('hook', kind, value, tb.tb_lineno); 1 / 0",
    "thread": "import threading; threading.Thread(target=lambda: (time.sleep(0.3), print('thread'))).start()",
}


@pytest.mark.parametrize("end", ENDS)
def test_it_ends_as_in_a_fresh_interpreter(launch: Launch, end: str) -> None:
    script = f"""{REWRITTEN_STRIKES}
import atexit
def at_end():
    print("at exit", rank, is_second, file=sys.stderr)
def fail():
{indented(ENDS[end])}
strike()
if rank == "1":
    atexit.register(at_end)
    fail()
"""
    prepare(launch, script)
    once = ("-n", "2", "--min-ranks", "1", "--max-replacements", "1", "--no-summary")
    result = launch.run(*once, "--standby", "1", "--log-dir", "logs", "script.py")
    log = (launch.directory / "logs/rank-1.log").read_text()
    fresh = subprocess.run(
        [sys.executable, "script.py"],
        cwd=launch.directory,
        env={**launch.environment, "RANK": "1", "PYTHONUNBUFFERED": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
    )
    assert log == fresh.stdout
    assert result.returncode == 0, result.stderr
    found = re.findall(r"rank 1 on host \S+ failed: (exit code \d+|killed by signal \d+)", result.stderr)
    assert found[0] == "killed by signal 9"
    code = fresh.returncode
    assert found[1:] == ([] if code == 0 else [f"exit code {code}" if code > 0 else f"killed by signal {-code}"])
    nothing_is_left(launch)


def indented(text: str) -> str:
    lines = text.strip("\n").splitlines()
    return "\n".join(line if line.startswith("    ") else f"    {line}" for line in lines)


REWRITTEN_STRIKES = "\n".join(line.removeprefix("    ") for line in STRIKES.splitlines())
REWRITTEN = REWRITTEN_STRIKES + "\n".join(line.removeprefix("    ") for line in FACTS.splitlines())


def test_the_others_admit_it(launch: Launch) -> None:
    launch.environment["TEST_VICTIM"] = "2"
    words = ("-n", "4", "--min-ranks", "3", "--max-replacements", "2", "--standby", "1", "--no-summary")
    result = launch.run(*words, launch.script(REGROW))
    assert result.returncode == 0, result.stdout + result.stderr
    for rank in range(4):
        assert f"sum 0 10 20 30 40 of {rank} beside 4" in result.stdout
    assert "standby" not in result.stderr
    nothing_is_left(launch)


def test_each_host_has_its_own(hosts: Launch) -> None:
    prepare(hosts, REWRITTEN_STRIKES + "\nstrike()\n")
    hosts.environment["TEST_IMPORTED"] = "4"
    words = ("-H", "a:1,b:1", "--python", sys.executable, *WORDS[2:], "--standby", "1")
    result = hosts.run(*words, "script.py")
    assert result.returncode == 0, result.stdout + result.stderr
    assert len(marked(hosts, "imported-a-*")) == 2
    assert len(marked(hosts, "imported-b-*")) == 2  # the replacement has not imported again
    assert replacement(hosts) not in standbys(hosts)
    nothing_is_left(hosts)


def test_one_interpreter_is_enough_for_ranks_that_are_lost_at_once(launch: Launch) -> None:
    """They have what it printed, other random numbers than each other, and those of an import that seeds."""
    draws = """
        import random, numpy, seeded
        print("imported")
        print("warned", file=__import__("sys").stderr)
    """
    seeded = "import numpy.random\nGENERATOR = numpy.random.default_rng(5)\n"
    lost = """
if rank == "0":
    wait_for("done-*", 3)
elif (here / "struck").exists():
    drawn = draws.random.random(), draws.numpy.random.rand(), draws.seeded.GENERATOR.random()
    print("drawn", rank, *drawn, flush=True)  # it may be ended once rank 0 has seen that it is done
    (here / f"done-{rank}").touch()
else:
    wait_for("ready")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    prepare(launch, "import draws\n" + REWRITTEN_STRIKES + lost, draws=draws, seeded=seeded)
    words = ("-n", "4", "--min-ranks", "1", "--max-replacements", "3", "--standby", "1", "--no-summary")
    with launch.start(*words, "script.py", OPENBLAS_NUM_THREADS="2") as process:
        wait_until(lambda: len(waiting(launch)) == 1, "one waits")
        wait_until(lambda: len(marked(launch, "rank-*")) == 4, "the ranks run")
        (launch.directory / "struck").touch()
        (launch.directory / "ready").touch()
        output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert "standby" not in errors
    assert len(standbys(launch)) == 1
    drawn = [line.split()[3:] for line in output.splitlines() if "drawn" in line]
    expected = str(np.random.default_rng(5).random())
    assert [each[2] for each in drawn] == [expected] * 3
    assert len({each[0] for each in drawn}) == len({each[1] for each in drawn}) == 3
    for rank in range(1, 4):
        assert output.count(f"[{rank}] imported") == errors.count(f"[{rank}] warned") == 2
    nothing_is_left(launch)


@pytest.mark.parametrize("ends", [True, False])
def test_one_that_cannot_be_forked_any_more_is_left(launch: Launch, ends: bool) -> None:
    """It is stopped or killed while a rank waits for a fork; the rank starts again all the same."""
    twice = """
if rank == "0":
    wait_for("done")
elif len(list(here.glob("rank-1-*"))) == 3:
    (here / "done").touch()
else:
    wait_for("strike-" + os.environ["MULTIRING_REPLACEMENT"])
    os.kill(os.getpid(), signal.SIGKILL)
"""
    prepare(launch, REWRITTEN_STRIKES + twice)
    with launch.start(*WORDS, "--standby", "1", "script.py") as process:
        wait_until(lambda: len(waiting(launch)) == 1, "one waits")
        (first,) = standbys(launch)
        os.kill(first, signal.SIGSTOP)
        (launch.directory / "strike-0").touch()
        wait_until(lambda: len(marked(launch, "rank-1-*")) == 2, "rank 1 is there again")
        (launch.directory / "strike-1").touch()
        wait_until(lambda: waiting(launch) == [], "rank 1 waits for a fork")
        if ends:
            os.kill(first, signal.SIGKILL)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert errors.count("is started again") == 2
    assert ("no standby was forked within 5 s; a fresh interpreter takes its place" in errors) != ends
    nothing_is_left(launch)


LEFT_BEHIND = {
    "": "import numpy, random, threading; t = threading.Thread(target=int); t.start(); t.join()",
    r"what it imports has started threads \(1\)": """
import threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
""",
    "what it imports has opened .*/opened": "opened = open('opened', 'w')",
    "what it imports has drawn from the generator of random, or has seeded it": "import random; random.seed(1)",
    "what it imports shares memory: /dev/zero.*": "import mmap; shared = mmap.mmap(-1, 9)",
    "what it imports has started a process": """
import subprocess, sys
child = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=0)
""",
}


@pytest.mark.parametrize("why", LEFT_BEHIND)
def test_what_imports_leave_behind_keeps_it_from_being_forked(why: str, tmp_path: Path) -> None:
    program = """
import sys
from multiring.launch.standby import _Traces
traces = _Traces()
exec(sys.argv[1])
print(traces.why_not_to_fork(), flush=True)
"""
    ended = subprocess.run(
        [sys.executable, "-c", program, LEFT_BEHIND[why]],
        cwd=tmp_path,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "2"},  # its thread ends before a fork
        input="",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert re.fullmatch(why + "\n", ended.stdout), ended.stdout + ended.stderr


def test_where_it_cannot_be_forked_each_does_the_imports(launch: Launch) -> None:
    threads = """
        import threading
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    """
    prepare(launch, "import threads\n" + REWRITTEN_STRIKES + "\nstrike()\n", threads=threads)
    launch.environment["TEST_IMPORTED"] = "4"
    result = launch.run("-n", "2", *WORDS[2:], "--standby", "2", "script.py")
    assert result.returncode == 0, result.stdout + result.stderr
    told = [line for line in result.stderr.splitlines() if "standby" in line]
    assert len(told) == 1
    assert re.fullmatch(
        r"multiring: host \S+: standbys cannot be forked: what it imports has started threads \(1\); each does the "
        "imports itself",
        told[0],
    )
    assert replacement(launch) in standbys(launch)
    nothing_is_left(launch)


def test_a_spare_host_has_some_before_it_is_needed(hosts: Launch) -> None:
    job = """
if os.environ["MULTIRING_REPLACEMENT"] == "0":
    mr.init()
    (here / f"met-{rank}-{os.getpid()}").touch()
if rank == "0":
    wait_for("done-*", 2)
elif os.environ["MULTIRING_REPLACEMENT"] != "0":
    print("on", os.environ["FAKE_HOST"], "as", os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"])
    (here / f"done-{rank}").touch()
else:
    wait_for("never")
"""
    prepare(hosts, "import multiring.api\n" + REWRITTEN_STRIKES + "\nimport multiring as mr\n" + job)
    words = ("-H", "a:1,b:2", "--spares", "c:3", "--python", sys.executable, "--min-ranks", "1")
    with hosts.start(*words, "--max-replacements", "2", "--standby", "1", "script.py") as process:
        wait_until(
            lambda: len(standbys(hosts)) == len(waiting(hosts)) == 3, "one waits on each host, the spare one too"
        )
        wait_until(lambda: len(marked(hosts, "rank-*")) == 3, "the ranks run")
        wait_until(lambda: len(marked(hosts, "met-*")) == 3, "the ranks have met")
        os.kill(hosts.agent_of("b"), signal.SIGKILL)
        output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, output + errors
    for local_rank in range(2):
        assert f"[{local_rank + 1}] on c as {local_rank} 2\n" in output
    assert len(marked(hosts, "imported-c-*")) == 1  # none of its ranks has imported
    nothing_is_left(hosts)


WAITS = (
    REWRITTEN_STRIKES
    + """
import ctypes
if rank == "1" and os.environ.get("TEST_FAILS"):
    wait_for("go")
    sys.exit(7)
wait_for("never" if not os.environ.get("TEST_WELL") else "go")
"""
)


def held_by(pid: int) -> list[str]:
    """Return the files that a process holds; one just forked has those of its parent for a moment."""
    return [os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir()]


@pytest.mark.parametrize("end", ["well", "fails", "SIGINT", "SIGTERM", "launcher", "agent", "leaving"])
def test_none_is_left(launch: Launch, end: str) -> None:
    prepare(launch, WAITS)
    most = {"fails": ["--min-ranks", "2"]}.get(end, ["--min-ranks", "1"])
    environment = {"fails": {"TEST_FAILS": "1"}, "well": {"TEST_WELL": "1"}}.get(end, {})
    words = ("-n", "2", *most, "--max-replacements", "5", "--standby", "2")
    with launch.start(*words, "script.py", **environment) as process:
        wait_until(lambda: len(waiting(launch)) == 2, "the standbys are ready")
        wait_until(lambda: len(marked(launch, "rank-*")) == 2, "the ranks run")
        rank = marked(launch, "rank-1-*")[0]
        for pid in (*standbys(launch), *waiting(launch)):
            assert b"standby.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
            wait_until(lambda pid=pid: len(held_by(pid)) == 4, "it holds its standard streams and its socket")
            held = held_by(pid)
            assert not any("memfd" in each for each in held), held
            variables = Path(f"/proc/{pid}/environ").read_bytes()
            assert not re.search(rb"(^|\0)(MULTIRING_)?(LOCAL_)?RANK=|_FD=|SECRET", variables)
        agent = int(Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[1])
        if end in ("well", "fails"):
            (launch.directory / "go").touch()
        elif end == "agent":
            os.kill(agent, signal.SIGKILL)
        elif end == "launcher":
            os.kill(process.pid, signal.SIGKILL)
        elif end == "leaving":
            os.kill(agent, signal.SIGTERM)
        else:
            os.kill(process.pid, signal.Signals[end])
        process.communicate(timeout=60)
        nothing_is_left(launch)
        assert (process.returncode == 0) == (end == "well")


def test_one_that_is_killed_is_replaced_and_none_counts_as_a_rank(launch: Launch) -> None:
    prepare(launch, WAITS)
    with launch.start(*WORDS, "--standby", "1", "script.py", TEST_WELL="1") as process:
        wait_until(lambda: len(waiting(launch)) == 1, "the standby is ready")
        (first,) = waiting(launch)
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: waiting(launch) not in ([], [first]), "another one is ready")
        os.kill(standbys(launch)[0], signal.SIGKILL)
        wait_until(lambda: len(standbys(launch)) == 2, "another interpreter imports")
        watch = [sys.executable, "-m", "multiring", "top", "--once", "--json", str(process.pid)]
        shown = subprocess.run(watch, env=launch.environment, capture_output=True, text=True, timeout=60)
        assert [rank["rank"] for rank in json.loads(shown.stdout)["ranks"]] == [0, 1], shown.stderr
        (launch.directory / "go").touch()
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0
        assert "standby" not in errors
        assert "rank" not in errors  # none was lost
    nothing_is_left(launch)


def test_one_that_dies_after_it_was_taken_makes_way_for_a_fresh_one(launch: Launch) -> None:
    sleeps = f"""
        import os, pathlib, time
        if {IN_STANDBY}:
            pathlib.Path(f"imported-asleep-{{os.getpid()}}").touch()
            while True:
                time.sleep(0.05)
    """
    prepare(launch, "import sleeps\n" + REWRITTEN_STRIKES + "\nstrike()\n", sleeps=sleeps)
    with launch.start(*WORDS, "--standby", "1", "script.py", TEST_IMPORTED="3") as process:
        wait_until((launch.directory / "struck").exists, "rank 1 is killed")
        first = marked(launch, "imported-asleep-*")[0]
        wait_until(lambda: len(marked(launch, "imported-asleep-*")) == 2, "another standby imports")
        assert os.getpriority(os.PRIO_PROCESS, first) == os.getpriority(os.PRIO_PROCESS, 0)
        os.kill(first, signal.SIGKILL)  # it was taken before it was ready
        wait_until((launch.directory / "done").exists, "rank 1 is there again")
        assert process.wait(60) == 0
        _, errors = process.communicate(timeout=60)
        assert errors.count("is started again") == 1
    nothing_is_left(launch)


@pytest.mark.parametrize("may_raise", [True, False])
def test_it_waits_at_a_lower_priority_that_it_can_leave(launch: Launch, may_raise: bool) -> None:
    if may_raise and not _can_restore_priority():
        pytest.skip("needs CAP_SYS_NICE")
    if not may_raise and os.getuid() == 0 and shutil.which("setpriv") is None:
        pytest.skip("needs setpriv, to do without CAP_SYS_NICE")
    priority = """
        import os, pathlib
        pathlib.Path(f"priority-{os.getpid()}").write_text(str(os.getpriority(os.PRIO_PROCESS, 0)))
    """
    own = os.getpriority(os.PRIO_PROCESS, 0)
    ends = f"strike()\nassert os.getpriority(os.PRIO_PROCESS, 0) == {own}\n"
    prepare(launch, f"import priority\n{REWRITTEN_STRIKES}\n{ends}", priority=priority)
    prefix = () if may_raise or os.getuid() else ("setpriv", "--bounding-set", "-sys_nice")
    result = launch.run(*WORDS, "--standby", "1", "script.py", prefix=prefix)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "failed: exit code" not in result.stderr
    assert origin(launch) in standbys(launch)
    lower = {int((launch.directory / f"priority-{pid}").read_text()) for pid in standbys(launch)}
    assert lower == {min(own + 5, 19) if may_raise else own}
    nothing_is_left(launch)


def test_one_that_is_taken_before_it_is_ready_does_its_imports_first(launch: Launch) -> None:
    sleeps = f"""
        import os, pathlib, time
        print("imported by a", "standby" if {IN_STANDBY} else "rank", flush=True)
        while {IN_STANDBY} and not pathlib.Path("wake").exists():
            time.sleep(0.05)
    """
    prepare(launch, "import sleeps\n" + REWRITTEN_STRIKES + "\nstrike()\n", sleeps=sleeps)
    with launch.start(*WORDS, "--standby", "1", "script.py", TEST_IMPORTED="2") as process:
        wait_until((launch.directory / "struck").exists, "rank 1 is killed")
        assert not (launch.directory / "done").exists()
        (launch.directory / "wake").touch()
        output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert sorted(output.splitlines()) == [
        "[1] imported by a rank",
        "[1] imported by a standby",
        "imported by a rank",
    ]
    nothing_is_left(launch)


def test_an_import_that_fails_there_is_told_and_left_to_the_rank(launch: Launch) -> None:
    fails = f"""
        import pathlib
        if {IN_STANDBY} and not pathlib.Path("struck").exists():
            pathlib.Path("imported-failing").touch()
            raise OSError("not here yet")
    """
    script = "import mark\nimport fails\n" + REWRITTEN_STRIKES + "\nstrike()\n"
    prepare(launch, script, fails=fails)
    launch.environment["TEST_IMPORTED"] = "4"  # the last is the one that fails
    result = launch.run(*WORDS, "--standby", "1", "script.py")
    assert result.returncode == 0, result.stdout + result.stderr
    told = re.findall(r"host \S+: a standby has not imported all that a rank does: (.*)", result.stderr)
    assert told == ["OSError: not here yet"]
    nothing_is_left(launch)


def test_an_import_that_asks_for_the_rank_waits_until_it_is_known(launch: Launch) -> None:
    place = """
        import os
        OWN = [name for name, value in os.environ.items() if name.startswith("LAUNCH_")]
        NAMES = [name for name in os.environ if name in ("RANK", "LAUNCH_TEST")]
        import mark  # till here it did not wait
        RANK, NUMBER = os.environ["RANK"], os.getenv("MULTIRING_REPLACEMENT", "none")
        HAS = "MULTIRING_REPORT_FD" in os.environ
        ALL = {**os.environ}
    """
    late = "import os\nCHOSEN = os.environ['TEST_CHOSEN']\n"
    script = f"""from __future__ import annotations
import sys
class Something: pass
kind: None | Something | Unheard = 5
if kind == 6 or sys.version_info < (3,):
    import nothing_of_that_name
else:
    try:
        import nothing_of_that_name
    except ImportError:
        import place
others = [Something]
import os
os.environ["TEST_CHOSEN"] = f"by rank {{place.RANK}}"
import late
{REWRITTEN_STRIKES}
assert place.RANK == rank and place.NUMBER == "0" and place.HAS
assert place.OWN == ["LAUNCH_TEST"] and sorted(place.NAMES) == ["LAUNCH_TEST", "RANK"]
assert place.ALL["LOCAL_RANK"] == rank == place.ALL["MULTIRING_RANK"]
assert late.CHOSEN == f"by rank {{rank}}"
strike()
"""
    prepare(launch, script, place=place, late=late)
    result = launch.run(*WORDS, "--standby", "1", "script.py")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "standby" not in result.stderr
    struck = float((launch.directory / "struck").read_text())
    assert float((launch.directory / f"imported--standby-{origin(launch)}").read_text()) < struck
    nothing_is_left(launch)


def test_standbys_that_keep_dying_are_given_up(launch: Launch) -> None:
    dies = f"""
        import os, sys
        if {IN_STANDBY}:
            print("no licence", file=sys.stderr, flush=True)
            os._exit(7)
    """
    prepare(launch, REWRITTEN_STRIKES.replace("import mark", "import mark, dies") + "\nstrike()\n", dies=dies)
    launch.environment.update(TEST_IMPORTED="5", TEST_GONE="1")
    result = launch.run(*WORDS, "--standby", "1", "script.py")
    assert result.returncode == 0, result.stdout + result.stderr
    told = [line for line in result.stderr.splitlines() if "standby" in line]
    assert len(told) == 1
    assert re.fullmatch(
        r"multiring: host \S+: 3 standbys in a row have ended before they were needed \(exit code 7\); the last line "
        r"of one: no licence; ranks start in fresh interpreters from now on",
        told[0],
    )
    nothing_is_left(launch)


def test_descriptors_of_whom_the_launcher_was_started_by_are_not_for_standbys(launch: Launch) -> None:
    """A launcher that a rank of another job starts has such descriptors."""
    read = """
if rank == "1":
    (here / f"secret-{is_second:d}").write_bytes(os.read(int(os.environ["MULTIRING_SECRET_FD"]), 99))
strike()
"""
    (launch.directory / "other").write_text("the secret of another job")
    prepare(launch, REWRITTEN_STRIKES + read)
    launch.environment.update(MULTIRING_SECRET_FD="33", MULTIRING_REPORT_FD="44")
    result = launch.run(*WORDS, "--standby", "1", "script.py", prefix=("bash", "-c", 'exec "$@" 33< other', "bash"))
    assert result.returncode == 0, result.stdout + result.stderr
    assert origin(launch) in standbys(launch)
    first, its = [(launch.directory / f"secret-{number}").read_text() for number in (0, 1)]
    assert first == its
    assert re.fullmatch("[0-9a-f]{64}", its)
    nothing_is_left(launch)


def test_a_module_that_has_changed_is_imported_anew(launch: Launch) -> None:
    written = """
if rank == "1":
    (here / f"version-{is_second:d}").write_text(str(versioned.VERSION))
strike()
"""
    prepare(launch, "import versioned\n" + REWRITTEN_STRIKES + written, versioned="VERSION = 1\n")
    with launch.start(*WORDS, "--standby", "1", "script.py", TEST_IMPORTED="4") as process:
        wait_until(lambda: len(waiting(launch)) == 1, "one waits")
        wait_until((launch.directory / "version-0").exists, "rank 1 runs")
        launch.script("VERSION = 2222\n", "versioned.py")
        (launch.directory / "imported-enough-0").touch()
        wait_until((launch.directory / "done").exists, "rank 1 is there again")
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert [(launch.directory / f"version-{number}").read_text() for number in (0, 1)] == ["1", "2222"]
    assert errors.count("versioned.py has changed since standbys imported it: others import it anew") == 1
    assert errors.count("is started again") == 1
    nothing_is_left(launch)


def test_a_file_that_hides_what_a_standby_needs_is_named(launch: Launch) -> None:
    prepare(launch, REWRITTEN_STRIKES + "\nstrike()\n", "beside/script.py", socket="")
    launch.environment["TEST_IMPORTED"] = "2"
    result = launch.run(*WORDS, "--standby", "1", "beside/script.py")
    assert result.returncode == 0, result.stdout + result.stderr
    told = [line for line in result.stderr.splitlines() if "standby" in line]
    assert len(told) == 1
    assert f"socket.py in {launch.directory}/beside bears the name of a module that a standby needs itself" in told[0]
    nothing_is_left(launch)


@pytest.mark.parametrize(
    ("program", "why"),
    [
        (("sh", "-c", "exit 0"), r"sh is no script \(train.py\) and no module \(-m\) of Python"),
        ((sys.executable, "-V", "script.py"), r"-V before a script .* is no option that a standby can keep"),
        ((sys.executable, "-c", "pass"), r"-c before a script .* is no option that a standby can keep"),
    ],
)
def test_it_is_told_once_where_none_can_stand_by(launch: Launch, program: tuple[str, ...], why: str) -> None:
    launch.script("")
    result = launch.run(*WORDS, "--standby", "1", *program)
    assert result.returncode == 0, result.stderr
    lines = result.stderr.splitlines()
    assert len(lines) == 1
    assert re.fullmatch(rf"multiring: --standby 1 is of no use: {why}; replacements are started without", lines[0])


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--min-ranks", "1"), "--standby 1 needs --max-replacements N: standbys take the places"),
        (("--launcher", "mpirun"), "--standby and --launcher do not go together"),
    ],
)
def test_what_makes_no_sense_is_refused(launch: Launch, words: tuple[str, ...], why: str) -> None:
    result = launch.run("-n", "2", *words, "--standby", "1", "true")
    assert result.returncode == 2
    assert f"multiring run: {why}" in result.stderr
    assert len(result.stderr.splitlines()) == 1
