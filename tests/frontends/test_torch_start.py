"""Ways into torch beside ``init_process_group("multiring")``."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pickle
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fork_server
import losing
import pytest
import torch
import torch.distributed as dist
from fork_server import Forked
from forking_launcher import TORCH
from framework_jobs import of_forks
from free_ports import free_port
from torch.nn.parallel import DistributedDataParallel
from torch_helpers import Net, caught, close, everyone, group, own, same, steps
from torch_ranks import Outcome, run, values

import multiring
from multiring.job import bootstrap
from multiring.job.store import Server, TorchStore
from multiring.launch.processes import is_stopped

create = importlib.import_module("multiring.torch.create")

SECRET = b"the secret of a test's job"


def leave_torch_without_its_variables(addresses: tuple[str, ...], secret_file: str) -> int:
    """Set the variables that multiring reads, as under mpirun or srun, and none of torch's. Return this rank."""
    rank, size = os.environ.pop("RANK"), os.environ.pop("WORLD_SIZE")
    os.environ.update(MULTIRING_RANK=rank, MULTIRING_WORLD_SIZE=size, MULTIRING_STORE=",".join(addresses))
    os.environ.update(MULTIRING_SECRET_FILE=secret_file, MULTIRING_JOB="test")
    return int(rank)


def init_without_torchs_variables(addresses: tuple[str, ...], secret_file: str) -> None:
    from multiring.torch import init

    rank = leave_torch_without_its_variables(addresses, secret_file)
    init(timeout=30)
    size = dist.get_world_size()
    assert (rank, size) == (dist.get_rank(), multiring.world_size())
    x = own(rank, 10)
    dist.all_reduce(x)
    multiring.all_reduce(x, "max")
    same(x, everyone(size, 10).sum(0))
    gloo = dist.new_group(backend="gloo")  # finds the others in torch's store
    dist.all_reduce(x, group=gloo)
    same(x, everyone(size, 10).sum(0) * size)
    dist.destroy_process_group()
    assert not multiring.is_initialized()


def init_over_ones_own(addresses: tuple[str, ...], secret_file: str) -> list[int]:
    from multiring.torch import init, shrink

    leave_torch_without_its_variables(addresses, secret_file)
    rank = multiring.init(timeout=30).rank
    init(timeout=30)
    x = own(rank, 1000)
    caught(multiring.PeerLost, lambda: losing.the_last_between(lambda: dist.all_reduce(x)))
    shrink()
    dist.destroy_process_group()
    ranks = multiring.init().all_gather_object(rank)
    multiring.shutdown()
    return ranks


def hook_under_gloo(addresses: tuple[str, ...], secret_file: str) -> None:
    from multiring.torch import comm_hook

    with group("gloo") as (rank, size):
        leave_torch_without_its_variables(addresses, secret_file)
        multiring.init(timeout=30)
        net = DistributedDataParallel(Net(), bucket_cap_mb=0.002)
        net.register_comm_hook(None, comm_hook)
        steps(net, torch.optim.Adam(net.parameters(), 0.01), rank, size)
        close(net)
        assert multiring.stats()["plans"]
        multiring.shutdown()


def meet(tmp_path: Path, worker: Callable[..., Any], world_size: int) -> list[Outcome]:
    secret_file = tmp_path / "secret"
    secret_file.write_bytes(SECRET)
    server = Server(SECRET, job="test", bind=["127.0.0.1"])
    try:
        return run(worker, server.addresses, str(secret_file), world_size=world_size)
    finally:
        server.close()


def test_init_where_only_multiring_knows_the_ranks(tmp_path: Path) -> None:
    assert [outcome.error for outcome in meet(tmp_path, init_without_torchs_variables, 3)] == [""] * 3


def test_what_the_script_has_initialised_itself_outlives_torchs_group(tmp_path: Path) -> None:
    *survivors, killed = meet(tmp_path, init_over_ones_own, 3)
    assert killed.exitcode == -signal.SIGKILL
    assert [(survivor.error, survivor.value) for survivor in survivors] == [("", [0, 1])] * 2


def test_comm_hook(tmp_path: Path) -> None:
    assert [outcome.error for outcome in meet(tmp_path, hook_under_gloo, 2)] == [""] * 2


def init_alone() -> None:
    from multiring.torch import init

    for name in ("RANK", "WORLD_SIZE"):
        del os.environ[name]
    init()
    x = own(3, 10)
    dist.all_reduce(x)
    same(x, own(3, 10))
    assert dist.get_world_size() == 1
    dist.destroy_process_group()


def test_init_alone() -> None:
    values(init_alone, world_size=1)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("SKYPILOT_NUM_NODES", "start it on each node by `multiring run -n RANKS --hosts $SKYPILOT_NUM_NODES "),
        ("PET_NNODES", "start it by `multiring run train.py`, which reads the variables PET_*, or by torchrun"),
        ("PET_NPROC_PER_NODE", "start it by `multiring run train.py`, which reads the variables PET_*, or by torchrun"),
        ("SLURM_STEP_NUM_TASKS", "start it by `multiring run`, torchrun, mpirun or srun"),
    ],
)
def test_nobody_is_alone_where_a_variable_speaks_of_several_ranks(
    name: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from multiring.torch import init

    for other in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, "3")
    with pytest.raises(ValueError, match=f"^{name}=3 [^\n]*{re.escape(remedy)}[^\n]*$"):
        init()
    with pytest.raises(ValueError, match="environment variable RANK expected"):  # torch's own, of what it needs
        dist.init_process_group("multiring")
    assert not dist.is_initialized()
    assert not multiring.is_initialized()


def test_nobody_is_alone_by_hand_where_a_launcher_started_several(monkeypatch: pytest.MonkeyPatch) -> None:
    from multiring.torch import init

    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, text in {**alone, "SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4"}.items():
        monkeypatch.setenv(name, text)
    with pytest.raises(ValueError, match=r"alone, and SLURM_STEP_NUM_TASKS=4 and SLURM_PROCID=3 that it is one of"):
        init()
    assert not dist.is_initialized()


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize(
    ("given", "counted", "expected"),
    [(None, None, 0), (None, "3", 3), ("", "3", 3), ("2", "3", 2), ("0", "3", 0), ("2", None, 2)],
)
def test_restarts_are_counted_alike_by_both_ways_into_the_job(
    given: str | None, counted: str | None, expected: int, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = {"MULTIRING_RESTART": given, "TORCHELASTIC_RESTART_COUNT": counted, "RANK": str(rank), "WORLD_SIZE": "3"}
    for name, value in {**environ, "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    joined: list[bootstrap.RankIdentity] = []
    monkeypatch.setattr(create.rendezvous, "join", lambda place, settings: joined.append(place))
    create._join(SimpleNamespace(store=None, group_rank=rank, group_size=3, group_id="g"), None)
    for place in (*joined, bootstrap.rank_identity()):
        assert (place.rank, place.world_size, place.restart) == (rank, 3, expected)
    assert len(joined) == 1


def options() -> None:
    from multiring.torch import Options

    with group(pg_options=Options(arena_bytes="64M", timeout=20)):
        assert multiring.init().world.settings.arena_bytes == 64 << 20
        assert "all_reduce" in str(multiring.plan(1 << 20))
    assert not multiring.is_initialized()


def test_options_reach_multiring_and_its_functions_work_on_the_group() -> None:
    values(options)


def records_of_a_job_beside_a_group(timeline: str) -> tuple[list[str], list[int], list[list[int]]]:
    """Ask for a record, make a group that meets by itself, and say what records there are then, and what was asked for
    again: the counts of its calls, and who made them."""
    os.environ["MULTIRING_TRACE"] = timeline
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    records = Path(os.environ["FOLDER"], "records")
    os.environ.update(MULTIRING_FLIGHT_RECORDER=str(records), MULTIRING_FLIGHT_RECORDER_SIGNAL="usr1")
    with group("gloo"):
        job = dist.new_group(backend="multiring")
        dist.all_reduce(x := own(rank, 50), group=job)
        same(x, everyone(size, 50).sum(0))
        path = records / f"multiring_{rank}"
        ask_for(path)
        dist.barrier()
        pair = dist.new_group([1, 2], backend="multiring")
        if rank != 0:
            dist.all_reduce(x := own(rank, 70), group=pair)
            same(x, own(1, 70) + own(2, 70))
        dist.barrier()
        found = sorted(each.name for each in records.iterdir())
        dist.barrier()
        ask_for(path)
        record = pickle.loads(path.read_bytes())
        dist.all_reduce(x := own(rank, 60), group=job)  # the job goes on
        same(x, everyone(size, 60).sum(0))
        ranks = [json.loads(each["ranks"]) for each in record["pg_config"].values()]
        return found, [entry["input_sizes"][0][0] for entry in record["entries"]], ranks


def ask_for(path: Path) -> None:
    """Ask this rank for its record, and wait until it is there."""
    path.unlink(missing_ok=True)
    os.kill(os.getpid(), signal.SIGUSR1)
    until = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < until, "no record"
        time.sleep(0.01)


def test_a_group_that_meets_by_itself_leaves_flight_records_and_timeline_of_the_job_alone(tmp_path: Path) -> None:
    names, timeline = [f"multiring_{rank}" for rank in range(3)], tmp_path / "timeline.json"
    assert values(records_of_a_job_beside_a_group, str(timeline), world_size=3) == [(names, [50], [[0, 1, 2]])] * 3
    events = json.loads(timeline.read_text())
    bytes_of = [
        event["args"]["bytes"]
        for event in events
        if event["name"].startswith("all_reduce") and event.get("cat") == "call"
    ]
    assert sorted(bytes_of) == [200] * 3 + [240] * 3


def start(program: str, *words: object, **variables: str) -> Forked:
    """Run a program as ``python -c`` would, forked where torch is imported, and with a pipe to read from."""
    environment = of_forks(**variables)
    return fork_server.start(program, *map(str, words), environment=environment, imports=TORCH, stdin=subprocess.PIPE)


@contextlib.contextmanager
def ending(*processes: Forked) -> Iterator[None]:
    """Leave none of them behind."""
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.communicate()


SERVE = """
import sys
import time
import torch.distributed as dist

store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


def test_the_loss_of_torchs_store_is_one_of_multirings_errors() -> None:
    server = start(SERVE)
    with ending(server):
        store = TorchStore(dist.TCPStore("127.0.0.1", int(server.stdout.readline()), is_master=False))
        store.set("here", b"1")
        assert store.get("here", 30) == b"1"
    for lost in (lambda: store.get("there", 30), lambda: store.set("there", b"1")):
        with pytest.raises(multiring.RendezvousError, match=r"torch's store was lost: .* leaving an earlier group"):
            lost()


def test_a_store_whose_server_is_stopped_is_given_up() -> None:
    """torch itself would wait for it without end."""
    server = start(SERVE)
    with ending(server):
        torch_store = dist.TCPStore("127.0.0.1", int(server.stdout.readline()), is_master=False)
        store = TorchStore(torch_store, served_by=0, patience=2.0)
        store.set("key", b"value")
        server.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + 30
        while not is_stopped(server.pid):  # it may answer until it has stopped
            assert time.monotonic() < deadline, "waited 30 s until the store's process is stopped"
            time.sleep(0.01)
        for call in (lambda: store.get("key", 0.0), lambda: store.get("other", 1.0), lambda: store.set("key", b"")):
            with pytest.raises(multiring.RendezvousError, match=r"lost: no answer for 2 s \(rank 0, ") as raised:
                call()
            assert raised.value.rank == 0


WAIT_FOR_ANOTHER = """
import sys
import time
from datetime import timedelta
import torch.distributed as dist
from multiring import RendezvousError

seconds = float(sys.argv[1])
try:
    dist.init_process_group("multiring", **({"timeout": timedelta(seconds=seconds)} if seconds else {}))
except (RendezvousError, dist.DistError) as error:
    print(getattr(error, "rank", None), error, flush=True)
"""


@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    ("seconds", "init_timeout", "said"),
    [
        (0, "3", r"2 ranks 0, 2 did not arrive \(arrived: 1\), within 3 s"),
        (20, "100", r"2 ranks 0, 2 did not arrive \(arrived: 1\); torch's store was lost: "),
    ],
    ids=["torch waits longer", "torch gives up before"],
)
def test_the_rank_that_never_came_is_named_in_time(seconds: float, init_timeout: str, said: str) -> None:
    """Rank 0 waits for it in torch, before multiring hears of rank 0."""
    port = free_port()
    variables = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        start(WAIT_FOR_ANOTHER, seconds, RANK=str(rank), MULTIRING_INIT_TIMEOUT=init_timeout, **variables)
        for rank in (0, 1)
    ]
    with ending(*processes):
        assert re.match(said, line_of(processes[1]))
        if seconds:
            assert line_of(processes[0]).startswith("None ")  # torch's own words


MEET_AT_RANK_0 = """
import os, sys
from datetime import timedelta
import torch.distributed as dist
from multiring import RendezvousError

rank, port = int(sys.argv[1]), int(sys.argv[2])
os.environ.update(MULTIRING_HOST="abc"[rank], MULTIRING_INTERFACE="lo", MULTIRING_INIT_TIMEOUT="4")
limit = timedelta(seconds=60)
store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False, timeout=limit)
print("linked", flush=True)
sys.stdin.readline()
try:
    dist.init_process_group("multiring", store=store, rank=rank, world_size=3)
except RendezvousError as error:
    print(error.rank, error, flush=True)
"""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_rank_0_takes_its_store_along_and_is_named(number: signal.Signals) -> None:
    """While it waits for rank 2, which comes a moment later."""
    port = free_port()
    with contextlib.ExitStack() as stack:
        processes = []
        for rank in range(3):
            processes.append(start(MEET_AT_RANK_0, rank, port))
            stack.enter_context(ending(processes[-1]))
            assert line_of(processes[-1]) == "linked\n"
        go_on(processes[:2])
        time.sleep(1)
        processes[0].send_signal(number)
        go_on(processes[2:])
        for process in processes[1:]:
            said = line_of(process)
            assert re.match(
                r"0 torch's store was lost: .*\(rank 0, which serves it, has ended, is stopped or ", said
            ), said


MEET = """
import os, sys
from datetime import timedelta
import torch, torch.distributed as dist
from multiring import RendezvousError
from multiring.job import exchange

port, rank, size, host = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
os.environ.update(MULTIRING_HOST=host, MULTIRING_INIT_TIMEOUT="300")
exchange._process_space = lambda: host  # a machine of its own: no process is known there by its number
store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=300))
try:
    dist.init_process_group("multiring", store=store, rank=rank, world_size=size)
except RendezvousError as error:
    print("refused:", error, flush=True)
else:
    print("met", flush=True)
    sys.stdin.readline()
    x = torch.arange(4.0) + rank
    dist.all_reduce(x)
    print("sum:", x.tolist(), flush=True)
    sys.stdin.readline()
    dist.destroy_process_group()
"""


@contextlib.contextmanager
def processes_that_meet() -> Iterator[Callable[[int, int, str], Forked]]:
    """Starts a process that is a rank of so many on a host, in a store that outlives them all."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with contextlib.ExitStack() as stack:

        def begin(rank: int, size: int, host: str) -> Forked:
            process = start(MEET, store.port, rank, size, host)
            stack.enter_context(ending(process))
            return process

        yield begin


def line_of(process: Forked) -> str:
    return process.stdout.readline()


def go_on(processes: Sequence[Forked]) -> None:
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()


TWO_OF_RANK_1 = r"two processes say that they are rank 1 of 3, process \d+ on host {} and process \d+ on host {}: give "


@pytest.mark.timeout(120)
def test_two_processes_of_one_rank_on_two_hosts_hear_of_each_other() -> None:
    """While the ranks wait for another one, which would be for five minutes."""
    with processes_that_meet() as begin:
        processes = [begin(0, 3, "a"), begin(1, 3, "b"), begin(1, 3, "c")]
        for process in processes:
            said = line_of(process)
            assert re.match("refused: " + TWO_OF_RANK_1.format("([bc])", "(?!\\1)[bc]"), said), said
            assert process.wait(30) == 0


@pytest.mark.timeout(120)
def test_a_second_process_of_a_rank_that_comes_late_is_refused_and_the_job_goes_on() -> None:
    with processes_that_meet() as begin:
        processes = [begin(rank, 3, host) for rank, host in enumerate("abd")]
        assert [line_of(process) for process in processes] == ["met\n"] * 3
        late = line_of(begin(1, 3, "c"))
        assert re.match("refused: " + TWO_OF_RANK_1.format("b", "c"), late), late
        go_on(processes)
        assert [line_of(process) for process in processes] == ["sum: [3.0, 6.0, 9.0, 12.0]\n"] * 3
        go_on(processes)
        assert [process.wait(30) for process in processes] == [0, 0, 0]


def test_what_is_no_address_is_told_before_torch_tries_it(monkeypatch: pytest.MonkeyPatch) -> None:
    by_hand = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "tcp://127.0.0.1", "MASTER_PORT": "29515"}
    for name, value in by_hand.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"MASTER_ADDR='tcp://127\.0\.0\.1': expected the name or address of rank 0"):
        multiring.torch.init()
