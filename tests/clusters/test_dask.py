"""Ranks in the workers of Dask: in processes of this machine, and in threads of one process, which are refused."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import dask
import dask_ranks
import numpy as np
import odd_exceptions
import pytest
from begun import processes, when_begun
from distributed import Client, LocalCluster

import multiring as mr
import multiring.dask
from multiring import lab

pytestmark = [pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore::ResourceWarning")]  # sockets of Dask's own

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples"
LAUNCHERS = ("MULTIRING_", "SLURM_", "OMPI_", "PMI", "PET_", "TORCHELASTIC_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_")
PATIENT = {  # a loaded machine needs more time
    "distributed.comm.timeouts.connect": "300s",
    "distributed.comm.timeouts.tcp": "300s",
    "distributed.deploy.lost-worker-timeout": "600s",  # after which a worker that was killed is not replaced
    "distributed.scheduler.allowed-failures": 3,  # the default: what could be run again would be
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with pytest.MonkeyPatch.context() as patch, dask.config.set(PATIENT):
        for name in [name for name in os.environ if name.startswith(LAUNCHERS)]:
            patch.delenv(name)
        with LocalCluster(n_workers=3, threads_per_worker=1, dashboard_address=":0", memory_limit=0) as cluster:
            yield cluster


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[Client]:
    """Waits until the nanny has replaced a worker that an earlier test has killed."""
    with dask.config.set(PATIENT), Client(cluster) as client:
        client.wait_for_workers(3, timeout=300)
        yield client


def assert_works(client: Client, ranks: int = 3) -> None:
    client.wait_for_workers(3, timeout=300)
    found = mr.dask.run(client, dask_ranks.total, 2, workers=ranks)
    assert [each["sum"][3] for each in found] == [ranks * (ranks + 1) // 2 * 2 * 3] * ranks


def process_of(client: Client, address: str) -> int:
    return client.run(os.getpid, workers=[address])[address]


@pytest.mark.parametrize(("workers", "ranks"), [(None, 3), (3, 3), (np.int64(2), 2), (1, 1)])
def test_results_come_by_rank(workers: int | None, ranks: int, client: Client) -> None:
    found = mr.dask.run(
        client, dask_ranks.total, 10, workers=workers, offset=1, settings={"timeout": 60, "encrypt": workers == 3}
    )
    assert [each["place"] for each in found] == [(rank, ranks, ranks) for rank in range(ranks)]
    expected = [10 * ranks * (ranks + 1) // 2 * index + ranks for index in range(5)]
    assert [each["sum"] for each in found] == [expected] * ranks
    assert len({each["process"] for each in found}) == ranks


def test_a_script_of_any_launcher_is_handed_over(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    from anywhere import main

    client.upload_file(str(EXAMPLES / "anywhere.py"))
    assert mr.dask.run(client, main) == [(rank, 3, 3.0, -2.0) for rank in range(3)]


def test_addresses_say_which_worker_is_which_rank(client: Client) -> None:
    addresses = sorted(client.nthreads(), reverse=True)[:2]
    found = mr.dask.run(client, dask_ranks.total, 1, workers=addresses)
    assert [each["worker"] for each in found] == addresses


def test_workers_are_used_again_and_keep_nothing(client: Client) -> None:
    jobs = [mr.dask.run(client, dask_ranks.total, number) for number in range(1, 11)]
    assert [job[2]["sum"][4] for job in jobs] == [4 * 6 * number for number in range(1, 11)]
    for first, last in zip(jobs[1], jobs[-1], strict=True):
        assert last["process"] == first["process"]
        assert last["descriptors"] < first["descriptors"] + 8  # as many jobs; Dask opens a few connections of its own
        assert last["threads"].count("multiring-dask-leash") == 1
        assert last["environment"] == first["environment"]
        assert not [name for name, _ in last["environment"] if name.startswith("MULTIRING_")]


def test_too_few_workers_are_refused_with_both_numbers(client: Client) -> None:
    with pytest.raises(
        ValueError, match=r"5 rank\(s\) need as many workers, and the cluster has 3: .*for_workers\(5\)"
    ):
        mr.dask.run(client, dask_ranks.total, 1, workers=5)


def test_a_cluster_without_workers_is_not_told_to_use_one() -> None:
    with (
        LocalCluster(n_workers=0, processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as client,
        pytest.raises(ValueError, match=r"^1 rank\(s\) .* has 0: client\.wait_for_workers\(1\) waits for more$"),
    ):
        mr.dask.run(client, dask_ranks.total, 1)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"workers": 0}, ValueError, "workers=0: expected 1 worker or more"),
        ({"workers": True}, ValueError, "workers=True: expected 1 worker or more"),
        ({"workers": 1.5}, TypeError, "workers=1.5: expected how many workers, or a list"),
        ({"workers": "tcp://a:1"}, TypeError, "workers='tcp://a:1': expected how many"),
        ({"workers": []}, ValueError, r"workers=\[\]: expected one address or more"),
        ({"workers": ["tcp://a:1", "tcp://a:1"]}, ValueError, "each once"),
        ({"workers": ["tcp://a:1"]}, ValueError, "has no worker tcp://a:1; its 3 workers are tcp://"),
        ({"start_timeout": 0}, ValueError, "start_timeout=0: expected seconds"),
        ({"settings": {"host": "a"}}, ValueError, "host='a': Dask says on which host"),
        ({"settings": 3}, TypeError, "settings=3: expected a dictionary"),
        ({"settings": {"tiemout": 3}}, TypeError, "unknown option 'tiemout'"),
        ({"settings": {"ports": "many"}}, ValueError, "ports='many': expected"),
        ({"lock": threading.Lock()}, TypeError, "total and its arguments cannot be pickled.*lock"),
    ],
)
def test_wrong_arguments_are_refused(arguments: Any, error: type[Exception], words: str, client: Client) -> None:
    with pytest.raises(error, match=words):
        mr.dask.run(client, dask_ranks.total, 1, **arguments)


def test_what_is_no_function_or_client_is_refused(client: Client, cluster: LocalCluster) -> None:
    with pytest.raises(TypeError, match="function=3: expected a function"):
        mr.dask.run(client, 3)
    with pytest.raises(TypeError, match=r"client='tcp://a:1': expected a distributed.Client"):
        mr.dask.run("tcp://a:1", dask_ranks.total, 1)
    other = Client(cluster)
    other.close()
    with pytest.raises(mr.MultiringError, match="is closed: make a new Client"):
        mr.dask.run(other, dask_ranks.total, 1)


def test_an_asynchronous_client_is_refused(cluster: LocalCluster) -> None:
    import asyncio

    async def attempt() -> None:
        async with Client(cluster.scheduler_address, asynchronous=True) as client:
            with pytest.raises(ValueError, match=r"is asynchronous, and run\(\) waits for its ranks"):
                mr.dask.run(client, dask_ranks.total, 1)

    asyncio.run(attempt())


@pytest.mark.parametrize("peers", ["collect", "compute"])
@pytest.mark.parametrize(("how", "error", "words"), [
    ("raise", odd_exceptions.OddData, r"\(1, 7\)"),
    ("sealed", mr.MultiringError, "rank 1 ended with Sealed: rank 1"),
    ("exit", mr.MultiringError, "rank 1 ended with SystemExit: 41"),
])  # fmt: skip
def test_what_a_rank_raises_is_raised(
    how: str, error: type[Exception], words: str, peers: str, client: Client, tmp_path: Path
) -> None:
    with pytest.raises(error, match=words) as caught:
        mr.dask.run(client, dask_ranks.fail, how, 1, str(tmp_path), peers)
    told = str(caught.value.__cause__)
    assert re.match(r"rank 1 \(worker tcp://[\d.:]+, process \d+\) of 3 raised", told)
    assert "dask_ranks.py" in told
    if peers == "compute":
        processes(tmp_path, 1, "-ended")
        assert (tmp_path / "2-ended").exists()
    else:
        assert "rank 0 saw PeerLost: rank 1" in told
        assert "rank 2 saw PeerLost: rank 1" in told
    assert_works(client)


@pytest.mark.parametrize("peers", ["collect", "compute"])
def test_a_killed_worker_is_named_and_its_rank_not_run_again(peers: str, client: Client, tmp_path: Path) -> None:
    addresses = sorted(client.nthreads())
    with pytest.raises(mr.PeerLost) as caught:
        mr.dask.run(client, dask_ranks.fail, "kill", 2, str(tmp_path), peers, workers=addresses)
    process = processes(tmp_path, 3)[2]
    told = str(caught.value)
    assert told.startswith(f"rank 2 (worker {addresses[2]}, process {process}) of 3 was lost: its process has ended")
    assert caught.value.rank == 2
    if peers == "compute":
        processes(tmp_path, 2, "-ended")
    else:
        assert "rank 0 saw PeerLost: rank 2" in told
        assert "rank 1 saw PeerLost: rank 2" in told
    assert_works(client)
    assert processes(tmp_path, 3)[2] == process  # dask_ranks.note fails where it is called twice
    assert not (tmp_path / "2-ended").exists()


def test_a_busy_worker_is_named_when_time_is_up(client: Client, tmp_path: Path) -> None:
    addresses = sorted(client.nthreads())
    ranks, enough = tmp_path / "ranks", tmp_path / "enough"
    ranks.mkdir()
    busy = client.submit(dask_ranks.occupy, str(enough), workers=[addresses[1]], pure=False)
    words = re.escape(
        f"1 of 3 ranks did not start within 3 s: rank 1 (worker {addresses[1]}), which has 1 other task(s)"
    )
    with pytest.raises(mr.RendezvousError, match=words):
        mr.dask.run(client, dask_ranks.work, str(ranks), workers=addresses, start_timeout=3)
    assert list(ranks.iterdir()) == []
    enough.touch()
    busy.result()
    assert_works(client)


def test_a_stopped_worker_is_named_when_time_is_up(client: Client, tmp_path: Path) -> None:
    addresses = sorted(client.nthreads())
    process = process_of(client, addresses[2])
    os.kill(process, signal.SIGSTOP)
    try:
        words = re.escape(f"rank 2 (worker {addresses[2]}), which has no other task, and may be stopped")
        with pytest.raises(mr.RendezvousError, match=words):
            mr.dask.run(client, dask_ranks.work, str(tmp_path), workers=addresses, start_timeout=3)
    finally:
        os.kill(process, signal.SIGCONT)
    assert_works(client)
    assert list(tmp_path.iterdir()) == []


def test_a_worker_that_leaves_before_its_rank_begins_is_named(client: Client, tmp_path: Path) -> None:
    addresses = sorted(client.nthreads())
    process = process_of(client, addresses[0])
    os.kill(process, signal.SIGSTOP)
    timer = threading.Timer(3, os.kill, (process, signal.SIGKILL))
    timer.start()
    words = re.escape(f"rank 0 (worker {addresses[0]}) of 3 was lost: it left the cluster before it began")
    with pytest.raises(mr.RendezvousError, match=words):
        mr.dask.run(client, dask_ranks.work, str(tmp_path), workers=addresses)
    timer.join()
    assert_works(client)
    assert list(tmp_path.iterdir()) == []


def test_a_result_that_cannot_be_pickled_is_named(client: Client) -> None:
    with pytest.raises(TypeError, match=r"the result of rank \d, a generator, cannot be pickled"):
        mr.dask.run(client, dask_ranks.result_of, "generator")
    assert_works(client)


@pytest.mark.parametrize("function", [dask_ranks.work, dask_ranks.miss_one, dask_ranks.stubborn])
def test_an_interrupt_ends_the_ranks(function: Callable[..., Any], client: Client, tmp_path: Path) -> None:
    arguments = {dask_ranks.miss_one: (2,), dask_ranks.stubborn: (3600,)}.get(function, ())
    thread = when_begun(tmp_path, 3, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        mr.dask.run(client, function, str(tmp_path), *arguments)
    thread.join()
    processes(tmp_path, 3, "-ended")
    assert_works(client)


def test_ranks_end_when_their_client_is_closed(
    client: Client, cluster: LocalCluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Client(cluster) as closed:
        thread = when_begun(tmp_path, 3, closed.close)
        with pytest.raises(mr.MultiringError, match=r"rank 0 is cancelled, .*was the client closed"):
            mr.dask.run(closed, dask_ranks.work, str(tmp_path))
        thread.join()
    processes(tmp_path, 3, "-ended")
    assert "did not end within" not in caplog.text  # `run` has seen that they have
    assert_works(client)


def test_ranks_end_when_their_driver_is_killed(client: Client, cluster: LocalCluster, tmp_path: Path) -> None:
    program = (
        "import sys, multiring.dask, dask_ranks\n"
        "from distributed import Client\n"
        "multiring.dask.run(Client(sys.argv[1]), dask_ranks.work, sys.argv[2])\n"
    )
    path = os.pathsep.join(sys.path)
    driver = subprocess.Popen(
        [sys.executable, "-c", program, cluster.scheduler_address, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": path},
    )
    try:
        processes(tmp_path, 3, seconds=300)
    finally:
        driver.kill()
        driver.wait()
    processes(tmp_path, 3, "-ended")
    assert_works(client)


@contextlib.contextmanager
def another_worker(
    client: Client, folder: Path, at_start: str = "", island: tuple[str, str, str] | None = None
) -> Iterator[str]:
    """A worker of the cluster in whose Python these lines are run first, perhaps on one of the `islands`."""
    (folder / "sitecustomize.py").write_text(at_start)
    path = os.pathsep.join([str(folder), *sys.path])
    before = set(client.nthreads())
    command = [sys.executable, "-m", "distributed.cli.dask_worker", "--no-nanny", "--no-dashboard", "--nthreads", "1"]
    where = [client.scheduler.address]
    if island:
        name, there, here = island
        command = ["ip", "netns", "exec", name, *command]
        where = [f"tcp://{here}:{client.scheduler.address.rpartition(':')[2]}", "--host", there]
    worker = subprocess.Popen(
        [*command, "--local-directory", str(folder), *where],
        env={**os.environ, "PYTHONPATH": path},
    )
    try:
        client.wait_for_workers(len(before) + 1, timeout=300)
        (address,) = set(client.nthreads()) - before
        yield address
    finally:
        worker.kill()
        worker.wait()
        while len(client.nthreads()) > len(before):
            time.sleep(0.05)


def test_two_jobs_at_once(client: Client, tmp_path: Path) -> None:
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
    with another_worker(client, tmp_path), ThreadPoolExecutor() as pool:
        addresses = sorted(client.nthreads())
        jobs = [
            pool.submit(mr.dask.run, client, dask_ranks.beside, mine, other, factor, workers=chosen)
            for mine, other, factor, chosen in [
                (str(folders[0]), str(folders[1]), 1, addresses[:2]),
                (str(folders[1]), str(folders[0]), 10, addresses[2:]),
            ]
        ]
        assert [job.result() for job in jobs] == [
            [[3 * factor * index for index in range(5)]] * 2 for factor in (1, 10)
        ]


@pytest.fixture
def islands() -> Iterator[list[tuple[str, str, str]]]:
    """Two network namespaces that reach this one, and not each other: name, address there, address here."""
    found = [(f"mr{os.getpid()}{i}", f"198.18.{i}.2", f"198.18.{i}.1") for i in range(2)]
    try:
        for name, there, here in found:
            for words in (
                f"netns add {name}",
                f"link add {name} type veth peer name eth0 netns {name}",
                f"addr add {here}/30 dev {name}",
                f"link set {name} up",
                f"-n {name} addr add {there}/30 dev eth0",
                f"-n {name} link set eth0 up",
                f"-n {name} link set lo up",
            ):
                subprocess.run(["ip", *words.split()], check=True)
        yield found
    finally:
        for name, _, _ in found:
            subprocess.run(["ip", "netns", "del", name], check=False)  # its link goes with it


@pytest.mark.lab
@pytest.mark.skipif(lab.obstacle() is not None, reason=str(lab.obstacle()))
def test_workers_without_a_route_between_them_are_named(islands: list[tuple[str, str, str]], tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        stack.enter_context(dask.config.set(PATIENT))
        cluster = stack.enter_context(LocalCluster(n_workers=0, host="0.0.0.0", dashboard_address=":0"))
        client = stack.enter_context(Client(f"tcp://127.0.0.1:{cluster.scheduler.port}"))
        workers = [stack.enter_context(another_worker(client, tmp_path, island=island)) for island in islands]
        with pytest.raises(mr.RendezvousError) as caught:
            mr.dask.run(client, dask_ranks.total, 1, workers=workers, settings={"init_timeout": 5})
        assert re.fullmatch(
            r"rank [01] \(host .*\) has no link after [\d.]+ s: rank [01] \(host .*\) cannot be reached .*: see "
            "MULTIRING_INTERFACE, MULTIRING_PORTS",
            str(caught.value),
        )
        assert client.run(mr.is_initialized) == dict.fromkeys(workers, False)
        assert mr.dask.run(client, dask_ranks.total, 3, workers=workers[1:])[0]["sum"] == [0, 3, 6, 9, 12]


@pytest.mark.parametrize(
    ("at_start", "words"),
    [
        ("import sys; sys.modules['multiring'] = None", f"ModuleNotFoundError: .*install multiring {mr.__version__}"),
        ("import multiring.version; multiring.version.__version__ = '0.0.1'", r"multiring 0\.0\.1, and the driver"),
    ],
)
def test_a_worker_without_this_multiring_is_named(at_start: str, words: str, client: Client, tmp_path: Path) -> None:
    mine, ranks = tmp_path / "worker", tmp_path / "ranks"
    mine.mkdir()
    ranks.mkdir()
    with another_worker(client, mine, at_start) as address:
        addresses = [*sorted(set(client.nthreads()) - {address}), address]
        started = re.escape(f"rank 3 (worker {address}) of 4 could not start: ")
        with pytest.raises(mr.RendezvousError, match=f"^{started}.*{words}"):
            mr.dask.run(client, dask_ranks.work, str(ranks), workers=addresses)
    assert list(ranks.iterdir()) == []
    assert_works(client)


@pytest.mark.parametrize(("protocol", "words"), [
    ("inproc", "workers inproc://.*, inproc://.* are threads of one process.*processes=True"),
    ("tcp", r"rank [01] \(worker tcp://.* is in one process with worker tcp://.* \(rank [01]\).*processes=True"),
])  # fmt: skip
def test_workers_that_share_a_process_are_refused(protocol: str, words: str, tmp_path: Path) -> None:
    with (
        dask.config.set(PATIENT),
        LocalCluster(
            n_workers=2, threads_per_worker=2, processes=False, protocol=protocol, dashboard_address=":0"
        ) as cluster,
        Client(cluster) as client,
    ):
        with pytest.raises((ValueError, mr.RendezvousError), match=words):
            mr.dask.run(client, dask_ranks.work, str(tmp_path))
        assert list(tmp_path.iterdir()) == []
        assert mr.dask.run(client, dask_ranks.total, 3, workers=1)[0]["sum"] == [0, 3, 6, 9, 12]


def test_a_worker_is_one_rank_at_a_time(tmp_path: Path) -> None:
    with (
        dask.config.set(PATIENT),
        LocalCluster(n_workers=1, threads_per_worker=2, dashboard_address=":0", memory_limit=0) as cluster,
        Client(cluster) as client,
    ):
        found: list[BaseException] = []

        def second() -> None:
            try:
                mr.dask.run(client, dask_ranks.total, 1)
            except mr.RendezvousError as error:
                found.append(error)
            os.kill(os.getpid(), signal.SIGINT)

        thread = when_begun(tmp_path, 1, second)
        with pytest.raises(KeyboardInterrupt):
            mr.dask.run(client, dask_ranks.work, str(tmp_path))
        thread.join()
        assert "is rank 0 of another job at present" in str(found[0])
        assert mr.dask.run(client, dask_ranks.total, 3)[0]["sum"] == [0, 3, 6, 9, 12]
