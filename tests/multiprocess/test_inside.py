"""Seeing inside a job: whom its ranks waited for, its timeline, and results that do not depend on where it runs."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import watched
from jobs import run, start
from launching import Launch

HOSTS = ["a", "b", "a"]


def timeline(path: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(path.read_text())
    return events


def seconds_waited(events: list[dict[str, Any]], rank: int) -> dict[int, float]:
    """Seconds that the threads of ``rank`` waited for each other rank."""
    threads = {
        e["tid"]
        for e in events
        if e["name"] == "thread_name" and e["pid"] == rank + 1 and "thread" in e["args"]["name"]
    }
    found: dict[int, float] = defaultdict(float)
    for e in events:
        if e["ph"] == "X" and e["cat"] == "wait" and e["pid"] == rank + 1 and e["tid"] in threads:
            found[e["args"]["rank"]] += e["dur"] / 1e6
    return found


@pytest.mark.parametrize("hosts", [None, HOSTS])
def test_who_was_waited_for(tmp_path: Path, hosts: list[str] | None) -> None:
    path = tmp_path / "t.json"
    told = run(watched.waits_for_one, 3, 1, hosts=hosts, environment={"MULTIRING_TRACE": str(path)})
    assert [stats["operations"] for stats in told] == [watched.STEPS] * 3  # and none for the timeline
    late = watched.SECONDS * watched.STEPS
    waited_for = [sum(stats["peers"].get(str(r), {}).get("seconds_waited", 0) for stats in told) for r in range(3)]
    waited = [sum(peer["seconds_waited"] for peer in stats["peers"].values()) for stats in told]
    blame = [caused - own for caused, own in zip(waited_for, waited, strict=True)]
    assert blame.index(max(blame)) == 1
    assert waited[0] > 0.9 * late
    assert waited[2] > 0.9 * late
    events = timeline(path)
    for rank in (0, 2):
        assert sum(seconds_waited(events, rank).values()) > 0.9 * late
    processes = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert processes == {f"rank {r} (host {hosts[r]})" for r in range(3)} if hosts else len(processes) == 3
    calls = [e["name"] for e in events if e["ph"] == "X" and e["cat"] == "call" and e["pid"] == 1]
    assert sum(name.startswith("all_reduce") for name in calls) == watched.STEPS
    assert {e["name"].split()[0] for e in events if e["ph"] == "X" and e["cat"] == "phase"} & {
        "all_reduce",
        "reduce_scatter",
        "reduce",
    }


def test_links_are_counted_by_level() -> None:
    for rank, stats in enumerate(run(watched.waits_for_one, 3, 1, hosts=HOSTS)):
        peers = {int(peer): counted for peer, counted in stats["peers"].items()}
        for level, counted in stats["links"].items():
            joined = [peer for peer in peers if (HOSTS[peer] != HOSTS[rank]) == (level == "host")]
            assert counted["bytes_sent"] == sum(peers[peer]["bytes_sent"] for peer in joined) > 0
            assert counted["seconds_busy"] > 0
        assert ("host" in stats["links"]) == (rank < 2)  # rank 0 speaks for its host
        assert ("rank" in stats["links"]) == (rank != 1)


def test_a_job_that_fails_has_a_timeline(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    job = start(watched.loses_one, 3, environment={"MULTIRING_TRACE": str(path)})
    assert job.line(1) == "steps done"
    job.signal(1)
    outcomes = job.wait()
    assert [outcome.code != 0 for outcome in outcomes] == [True] * 3
    events = timeline(path)
    assert {e["pid"] for e in events} == {1, 3}  # who is killed tells nothing
    for pid in (1, 3):
        unfinished = [e["name"] for e in events if e["pid"] == pid and e["ph"] == "X" and "unfinished" in e["args"]]
        assert any(name.startswith("all_reduce") for name in unfinished)


def test_ranks_agree_on_whether_there_is_a_timeline(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text("print()\n")
    for outcome in start(watched.waits_for_one, 2, 1, environment={"MULTIRING_TRACE": str(path)}).wait():
        assert outcome.code != 0
        assert f"MULTIRING_TRACE={path} exists and is no timeline" in outcome.error
    assert path.read_text() == "print()\n"


def test_multiring_run_names_the_slowest_rank(launch: Launch) -> None:
    script = launch.script("""
        import time
        import numpy as np
        import multiring as mr

        mr.init()
        for step in range(10):
            time.sleep(0.05 * (mr.rank() == 2))
            mr.all_reduce(np.ones(1000, np.float32))
    """)
    result = launch.run("-n", "3", script)
    assert (result.returncode, result.stdout) == (0, "")
    lines = result.stderr.splitlines()
    assert re.fullmatch(r"multiring: 3 ranks in [\d.]+ m?s; of one rank at most 10 calls and .* sent", lines[0])
    assert re.fullmatch(r"multiring: the median rank was in calls for .*, of these waiting for .*", lines[1])
    assert re.fullmatch(r"multiring: slowest: rank 2 \(host .*\): others waited .* for it, it waited .*", lines[2])
    assert len(lines) == 3
    silent = launch.run("-n", "3", "--no-summary", script)
    assert (silent.returncode, silent.stdout, silent.stderr) == (0, "", "")


@pytest.mark.parametrize("hosts", [None, ["a", "b", "a"], ["a", "b", "c"]])
def test_the_same_bits_wherever_it_runs(hosts: list[str] | None) -> None:
    digests = run(watched.sums_in_order, 3, hosts=hosts, environment={"MULTIRING_REPRODUCIBLE": "1"})
    assert all(digest == digests[0] for digest in digests)
    assert set(digests[0].values()) == {"as expected"}


def test_narrow_wires_are_refused() -> None:
    environment = {"MULTIRING_REPRODUCIBLE": "1", "MULTIRING_WIRE": "host=bfloat16"}
    for outcome in start(watched.sums_in_order, 2, hosts=["a", "b"], environment=environment).wait():
        assert outcome.code != 0
        assert "MULTIRING_WIRE=host=bfloat16 and MULTIRING_REPRODUCIBLE do not go together" in outcome.error


def can_have_another_clock() -> bool:
    found = shutil.which("unshare")
    return found is not None and subprocess.run([found, "-T", "true"], capture_output=True).returncode == 0


@pytest.mark.skipif(not can_have_another_clock(), reason="needs root and time namespaces")
def test_generations_and_restarts_are_shown_on_one_clock_and_apart(launch: Launch) -> None:
    script = launch.script("""
        import os, signal, sys

        if os.environ["RANK"] == "0" and "MULTIRING_HOST" not in os.environ:
            os.environ["MULTIRING_HOST"] = "b"
            words = ["unshare", "-T", "-f", "--kill-child", "--monotonic", "5000", sys.executable, *sys.argv]
            os.execvp(words[0], words)

        import numpy as np
        import multiring as mr

        mr.init(trace="t.json")
        restart = os.environ["MULTIRING_RESTART"]
        try:
            for step in range(20):
                mr.all_reduce(np.ones(1000, np.float32))
                if (restart, step, mr.rank()) == ("0", 10, 0):
                    os.kill(os.getpid(), signal.SIGKILL)
        except mr.PeerLost:
            mr.shrink()
            mr.all_reduce(np.ones(1000, np.float32))
            mr.shutdown()
            sys.exit(3)
    """)
    result = launch.run("-n", "3", "--min-ranks", "2", "--max-restarts", "1", script)
    assert result.returncode == 0, result.stderr
    events = timeline(launch.directory / "t.json")
    names = {e["pid"]: re.sub(r" \(host .*?\)", "", e["args"]["name"]) for e in events if e["name"] == "process_name"}
    assert sum(e["name"] == "process_name" for e in events) == len(names)
    assert sorted(names.values()) == sorted(
        [f"rank {r}{epoch}" for r in (0, 1) for epoch in (", generation 1", ", restart 1")]
        + ["rank 1", "rank 2", "rank 2, restart 1"]
    )
    begun, ended = {}, {}
    for epoch in ("", ", generation 1", ", restart 1"):
        of = [pid for pid, name in names.items() if name.partition(", ")[2] == epoch.removeprefix(", ")]
        calls = [e for e in events if e["ph"] == "X" and e["cat"] == "call" and e["pid"] in of]
        begun[epoch] = min(e["ts"] for e in calls)
        ended[epoch] = max(e["ts"] + e["dur"] for e in calls)
    assert 0 < begun[", generation 1"] - ended[""] < 100e6  # microseconds; the clocks are 5,000 s apart
    assert 0 < begun[", restart 1"] - ended[", generation 1"] < 100e6


@pytest.mark.skipif(not can_have_another_clock(), reason="needs root and time namespaces")
def test_hosts_whose_clocks_differ_are_shown_on_one(launch: Launch) -> None:
    script = launch.script("""
        import os, sys

        if os.environ["RANK"] == "1" and "MULTIRING_HOST" not in os.environ:
            os.environ["MULTIRING_HOST"] = "b"
            words = ["unshare", "-T", "-f", "--monotonic", "5000", sys.executable, *sys.argv]
            os.execvp(words[0], words)

        import numpy as np
        import multiring as mr

        mr.init(trace="t.json")
        for _ in range(10):
            mr.all_reduce(np.ones(1000, np.float32))
    """)
    result = launch.run("-n", "2", script)
    assert result.returncode == 0, result.stderr
    calls: dict[str, dict[int, dict[str, Any]]] = defaultdict(dict)
    for e in timeline(launch.directory / "t.json"):
        if e["ph"] == "X" and e["cat"] == "call" and e["name"].startswith("all_reduce"):
            calls[e["name"]][e["pid"]] = e
    assert len(calls) == 10
    for both in calls.values():  # none ends one before it has begun on the other
        assert max(e["ts"] for e in both.values()) <= min(e["ts"] + e["dur"] for e in both.values()) + 1e6
