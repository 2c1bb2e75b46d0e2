"""Ranks that no launcher started join jobs by the arguments of `init`, at a store that the test holds."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from free_ports import free_port

import multiring as mr

HERE = Path(__file__).parent
PATHS = [HERE, HERE.parent / "helpers", HERE.parents[1] / "src"]
LAUNCHERS = ("MULTIRING_", "SLURM_", "OMPI_", "PMI", "PET_", "TORCHELASTIC_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_")

Place = dict[str, Any]


def environment(**more: str) -> dict[str, str]:
    """Return this process's environment without the variables that a launcher sets, and with ``more``."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    path = os.pathsep.join([*map(str, PATHS), plain.get("PYTHONPATH", "")])
    return {**plain, "PYTHONPATH": path, "PYTHONWARNINGS": "error", "OMP_NUM_THREADS": "1", **more}


class Workers:
    """The processes of a test; those that still run when it ends are killed."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[str]] = []

    def start(self, function: str, *arguments: Any, **variables: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-u", str(HERE / "join_ranks.py"), function, json.dumps(arguments)],
            env=environment(**variables),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._processes.append(process)
        return process

    def end(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.communicate()


@pytest.fixture
def workers() -> Iterator[Workers]:
    found = Workers()
    yield found
    found.end()


@pytest.fixture
def store() -> Iterator[mr.StoreServer]:
    with mr.StoreServer() as found:
        yield found


def place(store: mr.StoreServer, rank: int, size: int, **more: Any) -> Place:
    meeting = {"store": list(store.addresses), "secret": store.secret.hex()}
    return {"rank": rank, "world_size": size, **meeting, **more}


def value(process: subprocess.Popen[str], seconds: float = 90) -> Any:
    """Return the function's value; AssertionError with the process's output if it failed."""
    output, error = process.communicate(timeout=seconds)
    _, _, result = output.rpartition("result ")
    assert process.returncode == 0, f"exit code {process.returncode}\n{output}\n{error}"
    return json.loads(result)


def values(processes: Sequence[subprocess.Popen[str]]) -> list[Any]:
    return [value(process) for process in processes]


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def wait_for_arrival(store: mr.StoreServer, rank: int) -> None:
    until = time.monotonic() + 60
    while store._server.peek(f"multiring//0/1/arrive/{rank}") is None:
        assert time.monotonic() < until, f"rank {rank} did not arrive"
        time.sleep(0.05)


@pytest.mark.parametrize("hosts", ["aaa", "aab", "abc"])
def test_ranks_join_by_arguments(hosts: str, store: mr.StoreServer, workers: Workers) -> None:
    found = values([workers.start("join", place(store, rank, 3, host=host)) for rank, host in enumerate(hosts)])
    for rank, host in enumerate(hosts):
        assert (found[rank]["rank"], found[rank]["size"]) == (rank, 3)
        assert found[rank]["local_size"] == hosts.count(host)
        assert "multiring is initialised, and not as init(rank=" in found[rank]["other"]


def test_a_world_of_one_needs_no_store(workers: Workers) -> None:
    assert value(workers.start("join", {"rank": 0, "world_size": 1}))["size"] == 1


def test_nobody_is_alone_where_a_launcher_speaks_of_others(workers: Workers) -> None:
    """Unless it is told so."""
    pod = {"PET_NODE_RANK": "1", "PET_MASTER_ADDR": "a", "PET_MASTER_PORT": "29500"}
    told = {"MULTIRING_RANK": "0", "MULTIRING_WORLD_SIZE": "1"}
    alone, one = workers.start("refused", {}, **pod), workers.start("refused", {}, **pod, **told)
    found = value(alone)
    assert found["error"] == "ValueError"
    assert re.match("PET_NODE_RANK=1 says .*; for a process that is alone unset PET_NODE_RANK, or set ", found["told"])
    assert all(f"{name}={text}" in found["told"] for name, text in told.items())
    assert value(one)["error"] == ""  # it has reduced in a world of one


def test_pods_of_one_rank_join_by_the_variables_of_their_trainer(workers: Workers) -> None:
    pod = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "127.0.0.1"}
    pod["PET_MASTER_PORT"] = str(free_port())
    found = values([workers.start("join_by_variables", **pod, PET_NODE_RANK=f"{rank}") for rank in (0, 1)])
    assert [(each["rank"], each["size"]) for each in found] == [(0, 2), (1, 2)]


@pytest.mark.timeout(240)
def test_workers_join_one_job_after_another(workers: Workers) -> None:
    """Other ranks, sizes, hosts, secrets and names each time; the second half of the jobs leaves no more than the
    first."""
    places: list[list[Place | None]] = [[], [], []]
    with mr.StoreServer() as one, mr.StoreServer("a secret of this test", ports=f"{free_port()}") as other:
        for number in range(12):
            size = 2 + number % 2
            for worker in range(3):
                rank = (worker + number) % 3
                host = "abc"[worker] if number % 4 > 1 else "a"
                names = {"job": f"job {number}"} if number % 3 else {}
                its = place([one, other][number % 2], rank, size, host=host, **names)
                places[worker].append(its if rank < size else None)
        found = values([workers.start("join_many", each) for each in places])
    for each, its in zip(found, places, strict=True):
        assert each["sums"] == sum(one is not None for one in its)
        assert each["held"][11] == each["held"][5], each["held"]
        assert each["mapped"][11] == each["mapped"][5], each["mapped"]


def test_jobs_meet_at_one_store_at_once(store: mr.StoreServer, workers: Workers) -> None:
    started = [workers.start("join", place(store, rank, 2, job=job)) for rank in range(2) for job in ("one", "two")]
    assert [each["rank"] for each in values(started)] == [0, 0, 1, 1]


def test_another_process_takes_the_place_of_one_that_left(store: mr.StoreServer, workers: Workers) -> None:
    """Rank 2 keeps the attempt open; rank 1 arrives and is killed, and comes again before rank 0."""
    waiting = workers.start("join", place(store, 2, 3))
    gone = workers.start("die_in_init", place(store, 1, 3), "arrived")
    wait_for_arrival(store, 2)
    wait_for_arrival(store, 1)
    gone.send_signal(signal.SIGKILL)
    gone.wait()
    time.sleep(2)  # within one the server notices
    first = workers.start("join", place(store, 0, 3))
    wait_for_arrival(store, 0)
    again = workers.start("join", place(store, 1, 3))
    assert [each["rank"] for each in values([first, again, waiting])] == [0, 1, 2]


def test_ranks_that_gave_up_meet_when_they_come_again(store: mr.StoreServer, workers: Workers) -> None:
    lonely = workers.start("refused", place(store, 1, 2, init_timeout=1))
    waiting = workers.start("refused", place(store, 0, 3, init_timeout=4))
    assert value(lonely)["error"] == "RendezvousError"
    assert value(waiting)["error"] == "RendezvousError"
    assert [each["rank"] for each in values([workers.start("join", place(store, r, 2)) for r in range(2)])] == [0, 1]


def test_the_store_may_be_closed_while_ranks_train(workers: Workers) -> None:
    with mr.StoreServer() as store:
        started = [workers.start("train", place(store, rank, 2, host="ab"[rank])) for rank in range(2)]
        assert [line(process) for process in started] == ["joined", "joined"]
    for process in started:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    assert values(started) == [{"done": True}] * 2


def test_survivors_go_on_and_join_another_job(store: mr.StoreServer, workers: Workers) -> None:
    started = [workers.start("lose", place(store, rank, 3, host="aab"[rank]), 1) for rank in range(3)]
    assert started[1].wait(60) == -signal.SIGKILL
    for rank in (0, 2):
        assert value(started[rank]) == {"blamed": 1, "members": [0, 2], "size": 2, "again": 2}


def test_forked_children_leave_the_store_to_their_parent(workers: Workers) -> None:
    holder = workers.start("hold_store")
    meeting = json.loads(line(holder))
    started = [workers.start("join", {"rank": rank, "world_size": 2, **meeting}) for rank in range(2)]
    assert [each["rank"] for each in values(started)] == [0, 1]
    assert holder.stdin is not None
    holder.stdin.write("\n")
    holder.stdin.flush()
    assert value(holder) == {"codes": [0, 0, 0]}


def test_the_time_limit_of_a_huge_world_is_kept(store: mr.StoreServer, workers: Workers) -> None:
    started = [workers.start("refused", place(store, rank, 500_000, init_timeout=2)) for rank in (0, 3)]
    for found in values(started):
        assert found["error"] == "RendezvousError"
        assert re.fullmatch(
            r"ranks 1-2, 4-(\d+) did not arrive \(arrived: 0, 3; not asked in time: \d+-499999\), within 2 s",
            found["told"],
        )
        assert found["seconds"] < 20


def test_a_dead_store_is_named(workers: Workers) -> None:
    with mr.StoreServer() as store:
        its = place(store, 0, 2, init_timeout=1)
    found = value(workers.start("refused", its))
    assert found["error"] == "RendezvousError"
    assert found["told"].startswith("the job's store did not answer within 1 s: ")
    assert "Connection refused; is what serves it (rank 0, the launcher, or who holds the StoreServer)" in found["told"]


def test_a_store_that_does_not_answer_is_named(workers: Workers) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        its = {"rank": 0, "world_size": 2, "store": f"127.0.0.1:{silent.getsockname()[1]}", "secret": bytes(16).hex()}
        found = value(workers.start("refused", {**its, "init_timeout": 1}))
    assert found["error"] == "RendezvousError"
    assert found["told"].startswith(f"the job's store did not answer within 1 s: {its['store']}: no answer; ")


def test_another_secret_is_refused_at_once(store: mr.StoreServer, workers: Workers) -> None:
    found = value(workers.start("refused", {**place(store, 0, 2), "secret": bytes(32).hex()}))
    assert found["error"] == "RendezvousError"
    assert "the job's store cannot be used: " in found["told"]
    assert "it does not know this job's secret" in found["told"]


def test_two_processes_of_one_rank(store: mr.StoreServer, workers: Workers) -> None:
    started = [workers.start("refused", place(store, rank, 3, init_timeout=20)) for rank in (0, 1, 1)]
    found = values(started)
    assert [each["error"] for each in found] == ["RendezvousError"] * 3
    assert all(each["told"].startswith("two processes say that they are rank 1 of 3, ") for each in found)
    assert all(f"process {process.pid} " in each["told"] for process in started[1:] for each in found)


def test_a_rank_that_never_comes_is_named(store: mr.StoreServer, workers: Workers) -> None:
    started = [workers.start("refused", place(store, rank, 3, init_timeout=2)) for rank in (0, 2)]
    for found in values(started):
        assert (found["error"], found["told"]) == (
            "RendezvousError",
            "rank 1 did not arrive (arrived: 0, 2), within 2 s",
        )


def test_the_store_is_closed_while_ranks_wait_for_others(workers: Workers) -> None:
    with mr.StoreServer() as store:
        started = [workers.start("refused", place(store, rank, 3, init_timeout=60)) for rank in range(2)]
        wait_for_arrival(store, 0)
        wait_for_arrival(store, 1)
    for found in values(started):
        assert (found["error"], found["told"]) == (
            "RendezvousError",
            "the job's store was lost: closed by the other side",
        )


@pytest.mark.parametrize("hosts", ["aaa", "abc"])
@pytest.mark.parametrize("when", ["arrived", "proving"])
def test_a_worker_killed_in_init_is_named(hosts: str, when: str, store: mr.StoreServer, workers: Workers) -> None:
    others = [workers.start("refused", place(store, 2, 3, host=hosts[2], init_timeout=8))]
    victim = workers.start("die_in_init", place(store, 1, 3, host=hosts[1]), when)
    if when == "arrived":
        wait_for_arrival(store, 1)
        victim.send_signal(signal.SIGKILL)
        victim.wait()
    others.append(workers.start("refused", place(store, 0, 3, host=hosts[0], init_timeout=8)))
    for found in values(others):
        assert found["error"] == "RendezvousError"
        assert "rank 1" in found["told"], found["told"]
