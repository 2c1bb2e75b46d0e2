"""``multiring top`` beside jobs that run: each test names its job, as others may run on the machine."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import other_user
import pytest
from launching import Launch, wait_until
from terminals import at_terminal, exit_code

from multiring.launch import watch

TOP = (sys.executable, "-m", "multiring", "top")

STEPS = """
    import os, time
    import numpy as np
    import multiring as mr

    rank = int(os.environ["RANK"])
    mr.init(host="aab"[rank])
    x = np.zeros(5000, np.float32)
    for step in range(4):
        x[:] = rank + step
        mr.all_reduce(x)
        assert x[step] == 3 + 3 * step
    for _ in range(2 * (rank + 1)):
        if rank < 2:
            mr.send(x, 2, tag=rank)
        else:
            mr.recv(x, 0, tag=0) if _ < 2 else mr.recv(x, 1, tag=1)
    while rank == 2 and not os.path.exists("late"):
        time.sleep(0.05)
    mr.all_reduce(x, op="max")
    print("done", 7 * rank)
    while not os.path.exists("go"):
        time.sleep(0.05)
    mr.shutdown()
"""
"""A job of 3 ranks on two hosts: 0 and 1 send 2 and 4 messages to 2, who receives 6."""

TOPOLOGY = """
links.host = { rate = "800 Mbit/s" }
[[host]]
name = "a"
[[host]]
name = "b"
rate = "80 Mbit/s"
"""


def top(launch: Launch, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*TOP, *words],
        env={**launch.environment, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )


def seen_when(job: int, condition: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
    """Wait until the launcher's answer about a job meets a condition, and return it."""
    found: dict[str, Any] = {}

    def meets() -> bool:
        found.clear()
        with watch.JobView(watch.find(str(job)).socket) as view:
            found.update(view.ask("look"))
        return condition(found)

    wait_until(lambda: is_there(job) and meets(), what, 60)
    return found


def is_there(job: int) -> bool:
    """True if a launcher has opened its socket."""
    try:
        return watch.find(str(job)).process == job
    except watch.LaunchError:
        return False


def states(look: dict[str, Any]) -> list[str]:
    return [rank["state"] for rank in look["ranks"]]


def have_counted(look: dict[str, Any]) -> bool:
    """True if all ranks have told the number of their calls."""
    statuses = [rank["status"] or {} for rank in look["ranks"]]
    return [status.get("calls") for status in statuses] == [5 + 2, 5 + 4, 5 + 6]


def are_quiet(look: dict[str, Any]) -> bool:
    """True if no rank has moved anything since its last status."""
    rates = [(rank["status"] or {}).get("rates") for rank in look["ranks"]]
    return all(each and not any(sum(of.values()) for of in each["links"].values()) for each in rates)


def waits_for_2(look: dict[str, Any]) -> bool:
    """True if a call of rank 0 has lasted 3 seconds and waits for rank 2 alone."""
    status = look["ranks"][0]["status"] or {}
    calls = status.get("in_flight", [])
    return any(call["waits_for"] == [2] and call["seconds"] >= 3 for call in calls)


def test_a_job_on_two_hosts_is_watched_until_it_ends(launch: Launch) -> None:
    script = launch.script(STEPS)
    (launch.directory / "topology.toml").write_text(TOPOLOGY)
    with launch.start("-n", "3", "--topology", "topology.toml", script, MULTIRING_HEARTBEAT_TIMEOUT="100") as process:
        look = seen_when(process.pid, waits_for_2, "rank 0 has waited for rank 2 for some seconds")
        assert states(look) == ["runs"] * 3
        assert look["ranks"][0]["status"]["rates"]["in_calls"] > 0.5
        assert look["ranks"][2]["status"]["in_flight"] == []
        shown = top(launch, str(process.pid), "--once", COLUMNS="80").stdout
        assert re.search(r"^ranks? 0(-1)? waits? for rank 2 in all_reduce, for \d+ s now$", shown, re.MULTILINE)
        (launch.directory / "late").touch()
        seen_when(process.pid, have_counted, "all ranks have told what they did")
        told = json.loads(top(launch, str(process.pid), "--json").stdout)
        assert not told["ended"]
        assert (told["process"], told["program"]) == (process.pid, [script])
        assert [rank["rank"] for rank in told["ranks"]] == [0, 1, 2]
        assert [rank["host"] for rank in told["ranks"]] == ["a", "a", "b"]
        assert states(told) == ["runs"] * 3
        assert [rank["status"]["calls"] for rank in told["ranks"]] == [7, 9, 11]
        assert [rank["status"]["link"]["up"] for rank in told["ranks"]] == [1e8, 1e8, 1e7]
        assert {tuple(line) for line in told["output"]} >= {(rank, f"done {7 * rank}") for rank in range(3)}
        seen_when(process.pid, are_quiet, "nothing moves")
        link_of_b = "link of host b: 0 of 10 MB/s out, 0 of 10 in"
        shown = top(launch, str(process.pid), "--once", COLUMNS="80")
        assert (shown.returncode, shown.stderr) == (0, "")
        assert link_of_b in shown.stdout
        assert "\n[2] done 14\n" in shown.stdout
        assert max(map(len, shown.stdout.splitlines())) <= 80

        victim = told["ranks"][1]["process"]
        os.kill(victim, signal.SIGSTOP)
        stopped = seen_when(process.pid, lambda look: (look["ranks"][1]["age"] or 0) > 3.2, "what rank 1 said is old")
        assert states(stopped) == ["runs", "stopped", "runs"]
        assert [rank["age"] < 3.2 for rank in stopped["ranks"]] == [True, False, True]
        piped = top(launch, str(process.pid))
        assert "as by --once" in piped.stderr
        assert [line.split()[:2] for line in piped.stdout.splitlines() if " old " in line] == [["1", "stopped,"]]
        os.kill(victim, signal.SIGCONT)
        seen_when(process.pid, lambda look: states(look) == ["runs"] * 3, "rank 1 goes on")

        with at_terminal(launch, *TOP, str(process.pid)) as (pid, screen):
            screen.expect(r"\[2\] done 14")
            screen.type("q")
            assert exit_code(pid) == 0
        with at_terminal(launch, *TOP, str(process.pid)) as (pid, screen):
            screen.resize(20, 80)
            screen.expect(r"\[2\] done 14")
            screen.text = ""
            screen.resize(20, 30)
            screen.expect(r"script.py\): 3[^\n]*\n[^\n]*hosts, for")
            (launch.directory / "go").touch()
            screen.expect(rf"job {process.pid} \(script.py, 3 ranks\) has ended with exit code 0\r\n")
            assert exit_code(pid) == 0
        assert process.wait(30) == 0
    gone = top(launch, str(process.pid), "--once")
    assert (gone.returncode, gone.stdout) == (2, "")
    assert gone.stderr.startswith(f"multiring top: no job named {process.pid} of this user ({os.getuid()}) runs on")


def test_agents_on_other_hosts_tell_of_their_ranks(hosts: Launch) -> None:
    script = hosts.script("""
        import os, time
        import numpy as np
        import multiring as mr

        mr.init()
        for _ in range(5):
            mr.all_reduce(x := np.arange(3) + mr.rank())
            assert list(x) == [3, 6, 9]
        while not os.path.exists("go"):
            time.sleep(0.05)
        mr.shutdown()
    """)
    with hosts.start("-H", "a:1,b:2", script) as process:
        look = seen_when(
            process.pid,
            lambda look: [(rank["status"] or {}).get("calls") for rank in look["ranks"]] == [5] * 3,
            "all ranks have told what they did",
        )
        assert [(rank["rank"], rank["host"], rank["status"]["host"]) for rank in look["ranks"]] == [
            (0, "a", "a"),
            (1, "b", "b"),
            (2, "b", "b"),
        ]
        assert len({rank["process"] for rank in look["ranks"]}) == 3
        os.kill(look["ranks"][2]["process"], signal.SIGSTOP)
        seen_when(process.pid, lambda look: states(look) == ["runs", "runs", "stopped"], "rank 2 is stopped")
        os.kill(look["ranks"][2]["process"], signal.SIGCONT)
        (hosts.directory / "go").touch()
        assert process.wait(30) == 0


def test_two_jobs_of_one_program_of_which_one_fails(launch: Launch) -> None:
    """Their ranks are no ranks of multiring's, so nothing is known of what they do."""
    name = f"wait-{os.getpid()}.sh"
    program = launch.directory / name
    program.write_text("#!/bin/sh\nwhile ! test -e $1; do sleep 0.1; done\nexit $RANK\n")
    program.chmod(0o755)
    with launch.start("-n", "2", str(program), "one") as one, launch.start("-n", "3", str(program), "two") as two:
        for job, size in ((one, 2), (two, 3)):
            look = seen_when(job.pid, lambda look: look["ranks"][0]["process"] is not None, "the ranks are there")
            assert states(look) == ["starts"] * size
        both = top(launch, name, "--once")
        in_order = sorted([(one.pid, 2), (two.pid, 3)])
        listed = ", ".join(f"{pid} ({name}, {size} ranks)" for pid, size in in_order)
        first = min(one.pid, two.pid)
        assert (both.returncode, both.stdout) == (2, "")
        assert both.stderr == (
            f"multiring top: 2 jobs named {name} run here: {listed}; name one: multiring top {first}\n"
        )
        with watch.JobView(watch.find(str(one.pid)).socket) as view:
            (launch.directory / "one").touch()
            assert one.wait(30) == 1
            ended = view.ask("look")
        assert (ended["kind"], ended["code"]) == ("ended", 1)
        assert ended["reason"].startswith("rank 1 on host ")
        assert watch.find(name).process == two.pid
        os.kill(two.pid, signal.SIGKILL)
        two.wait()


REPLACED = """
    import os, time
    import numpy as np
    import multiring as mr

    def wait_for(name):
        while not os.path.exists(name):
            time.sleep(0.02)

    rank = int(os.environ["RANK"])
    mr.init()
    if os.environ["MULTIRING_REPLACEMENT"] == "0":
        try:
            mr.barrier()
            if rank == 1:
                os.kill(os.getpid(), 9)
            mr.barrier()
        except mr.PeerLost:
            mr.shrink()
        wait_for("grow")
        while mr.world_size() < 3:
            mr.grow()
    wait_for("lose")
    try:
        if rank == 2:
            os.kill(os.getpid(), 9)
        mr.barrier()
    except mr.PeerLost:
        mr.shrink()
    wait_for("go")
"""
"""A job of 3 ranks that loses rank 1 and admits another in its place, then loses rank 2, and goes on."""


def test_ranks_that_were_lost_and_replaced(launch: Launch) -> None:
    script = launch.script(REPLACED)
    with launch.start("-n", "3", "--min-ranks", "2", "--max-replacements", "1", script) as process:
        seen_when(process.pid, lambda look: states(look) == ["runs", "waits", "runs"], "rank 1 waits")
        look = seen_when(
            process.pid,
            lambda look: [look["ranks"][rank]["status"].get("generation") for rank in (0, 2)] == [1, 1],
            "the others have shrunk",
        )
        assert [rank["replacement"] for rank in look["ranks"]] == [0, 1, 0]
        (launch.directory / "grow").touch()
        look = seen_when(process.pid, lambda look: states(look) == ["runs", "replaced", "runs"], "rank 1 is back")
        assert [rank["status"]["rank"] for rank in look["ranks"]] == [0, 1, 2]
        (launch.directory / "lose").touch()
        seen_when(process.pid, lambda look: states(look)[2] == "lost", "rank 2 is lost")
        seen_when(
            process.pid,
            lambda look: [rank["status"].get("size") for rank in look["ranks"][:2]] == [2, 2],
            "the others have shrunk",
        )
        shown = top(launch, str(process.pid), "--once", COLUMNS="80").stdout
        assert "1 runs, 1 replaced, 1 lost\n" in shown
        assert " replaced (replacement 1)" in shown
        (launch.directory / "go").touch()
        assert process.wait(30) == 0


DISAGREE = """
    import os, time
    import numpy as np
    import multiring as mr

    mr.init()
    mr.all_reduce(np.arange(5) + mr.rank())
    try:
        for count in (4, 6 if mr.rank() == 2 else 5):
            mr.all_reduce(np.zeros(count, np.int64))
        mr.barrier()
    except mr.Mismatch as error:
        print("rank", mr.rank(), "knows of it", flush=True)
        while not os.path.exists(f"go{mr.rank()}"):
            time.sleep(0.05)
        raise
"""
ODD = (
    "rank 2 called all_reduce(dtype=int64, count=6, op=sum) where ranks 0, 1 and 3 called "
    "all_reduce(dtype=int64, count=5, op=sum): call number 2 of communicator 0"
)


def test_the_rank_whose_call_differs_is_named_while_ranks_live_and_when_some_have_ended(launch: Launch) -> None:
    with launch.start("-n", "4", launch.script(DISAGREE)) as process:
        look = seen_when(
            process.pid,
            lambda look: all((rank["status"] or {}).get("disputed") for rank in look["ranks"]),
            "all ranks have told of it",
        )
        assert look["failure"] == {"kind": "Mismatch", "ranks": [2], "text": ODD}
        shown = top(launch, str(process.pid), "--once", COLUMNS="200").stdout
        assert f"\nMismatch: {ODD}\n" in shown
        assert json.loads(top(launch, str(process.pid), "--json").stdout)["failure"]["ranks"] == [2]
        (launch.directory / "go2").touch()
        look = seen_when(process.pid, lambda look: states(look)[2] == "lost", "rank 2 has ended")
        assert look["failure"] == {"kind": "Mismatch", "ranks": [2], "text": ODD}
        with watch.JobView(watch.find(str(process.pid)).socket) as view:
            for rank in (0, 1, 3):
                (launch.directory / f"go{rank}").touch()
            assert process.wait(30) == 1
            ended = view.ask("look")
        assert ended["reason"].endswith(f"; {ODD}")
        _, errors = process.communicate()
        assert f"; {ODD}; its last lines:" in errors


ANOTHER_USER = """
import os, sys
import concurrent.futures.thread
from multiring.launch import watch
os.setgroups([])
os.setresgid(*[int(sys.argv[1])] * 3)
os.setresuid(*[int(sys.argv[1])] * 3)
for wanted in (sys.argv[2], "no such program"):
    try:
        watch.find(wanted)
    except watch.LaunchError as error:
        print(error)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_user_sees_nothing(launch: Launch) -> None:
    nobody = other_user.NOBODY
    with launch.start("-n", "1", "sh", "-c", "while ! test -e go; do sleep 0.1; done") as process:
        wait_until(lambda: is_there(process.pid), "the launcher is there")
        name = watch.find(str(process.pid)).socket
        words = [sys.executable, "-c", ANOTHER_USER, str(nobody), str(process.pid)]
        told = subprocess.run(words, capture_output=True, text=True, timeout=60)
        assert told.stderr == ""
        first, second = told.stdout.splitlines()
        assert first == f"process {process.pid} is of user 0, this one of user {nobody}: who started a job may watch it"
        assert f"of this user ({nobody}) runs on this host; there are jobs of other users (0), who alone" in second
        knock = f"import os, socket; os.setresuid({nobody}, {nobody}, {nobody}); s = socket.socket(socket.AF_UNIX)"
        knock += f"; s.connect('\\0{name}'); s.settimeout(20); print(s.recv(1))"
        assert subprocess.run([sys.executable, "-c", knock], capture_output=True, text=True).stdout == "b''\n"
        (launch.directory / "go").touch()
        _, errors = process.communicate(timeout=30)
    line = f"somebody wanted to watch this job and was turned away: it runs as user {nobody}, this process as user 0"
    assert errors == f"multiring: {line}\n"
