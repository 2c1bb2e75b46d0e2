"""The rank of a process by the environment of each launcher, and the meeting place of its job."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from multiring import env
from multiring.errors import RendezvousError, ResourceError
from multiring.job import bootstrap, hints
from multiring.job.store import Server
from multiring.net import listen

SECRET = "a secret of the job"


def run(rank: int, size: int) -> dict[str, str]:
    return {"MULTIRING_RANK": str(rank), "MULTIRING_WORLD_SIZE": str(size)}


def by_hand(rank: int, size: int, **more: str) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "localhost", "MASTER_PORT": "29511", **more}


SLURM = {
    "SLURM_PROCID": "1",
    "SLURM_NTASKS": "9",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "n[03-05,7],m1",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
}
MPIRUN = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
POD = {
    "PET_NNODES": "3",
    "PET_NPROC_PER_NODE": "1",
    "PET_NODE_RANK": "2",
    "PET_MASTER_ADDR": "a",
    "PET_MASTER_PORT": "29500",
}
PMI2 = {"PMI_FD": "13", "PMI_JOBID": "77.0", "PMI_RANK": "1", "PMI_SIZE": "4"}


@pytest.mark.parametrize(
    ("environ", "launcher", "rank", "size"),
    [
        ({}, "no launcher", 0, 1),
        (run(2, 3), "multiring run", 2, 3),
        (by_hand(1, 2, TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="3"), "torchrun", 1, 2),
        (by_hand(1, 2), "RANK and WORLD_SIZE", 1, 2),
        (
            {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
            "mpirun",
            3,
            4,
        ),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, "mpirun", 0, 1),
        (SLURM, "srun", 1, 4),
        (SLURM | by_hand(0, 2), "RANK and WORLD_SIZE", 0, 2),  # torchrun inside a Slurm step
        (SLURM | run(5, 6), "multiring run", 5, 6),
        (SLURM | PMI2, "srun", 1, 4),
        (SLURM | PMI2 | {"PMI_SIZE": "8", "PMI_RANK": "5"}, "mpirun", 5, 8),  # as which MPICH's enters an allocation
        (SLURM | PMI2 | {"MPI_LOCALRANKID": "0"}, "mpirun", 1, 4),  # the same, with one rank on each host
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, "no launcher", 0, 1),  # a batch script is one process
        ({"WORLD_SIZE": "1"}, "no launcher", 0, 1),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8"}, "no launcher", 0, 1),  # a shell that salloc opened
        ({"PET_NNODES": "1", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": "0"}, "no launcher", 0, 1),
        (POD, "Kubeflow", 2, 3),
        (POD | run(5, 6), "multiring run", 5, 6),
        (POD | by_hand(1, 2), "RANK and WORLD_SIZE", 1, 2),
        ({"PET_NNODES": "1", "PET_NPROC_PER_NODE": "auto"} | by_hand(0, 1), "RANK and WORLD_SIZE", 0, 1),
        ({"PET_NNODES": "1:4"} | by_hand(0, 1), "RANK and WORLD_SIZE", 0, 1),  # an elastic PyTorchJob's
        (SLURM | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, "srun", 0, 1),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_JOB_NUM_NODES": "2"}, "no launcher", 0, 1),
        (SLURM | by_hand(0, 1, TORCHELASTIC_RUN_ID="none"), "torchrun", 0, 1),
        (MPIRUN | run(0, 1), "multiring run", 0, 1),
        (MPIRUN | by_hand(0, 4), "RANK and WORLD_SIZE", 0, 4),
        (SLURM | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}, "mpirun", 0, 1),
        ({"PET_NNODES": "2", "PET_NPROC_PER_NODE": "2"} | by_hand(1, 4), "RANK and WORLD_SIZE", 1, 4),  # torchrun's
        (SLURM | {"WORLD_SIZE": "4"}, "srun", 1, 4),  # a batch script may export it for torch
        ({"PMI_RANK": "0", "PMI_SIZE": "1", "RANK": "0"}, "mpirun", 0, 1),
        ({"RANK": "", "WORLD_SIZE": ""}, "no launcher", 0, 1),  # an empty variable is not set
        (run(2, 3) | {"RANK": "", "WORLD_SIZE": ""}, "multiring run", 2, 3),
        (SLURM | {"RANK": "", "WORLD_SIZE": "", "MASTER_ADDR": "", "OMPI_COMM_WORLD_RANK": ""}, "srun", 1, 4),
        ({"OMPI_COMM_WORLD_RANK": "", "OMPI_COMM_WORLD_SIZE": "", "PMIX_RANK": ""}, "no launcher", 0, 1),
        ({"SLURM_PROCID": "", "SLURM_STEP_NODELIST": "", "SLURM_STEP_NUM_TASKS": ""}, "no launcher", 0, 1),
        ({"PET_NNODES": "", "PET_NPROC_PER_NODE": "", "PET_NODE_RANK": ""}, "no launcher", 0, 1),
        ({"SKYPILOT_NUM_NODES": "1", "SKYPILOT_NODE_RANK": "0"}, "no launcher", 0, 1),
        ({"JOB_COMPLETION_INDEX": "0"}, "no launcher", 0, 1),
        ({"PALS_RANKID": "0", "PALS_LOCAL_SIZE": "1"}, "no launcher", 0, 1),
        ({"JOB_COMPLETION_INDEX": "1"} | run(2, 4), "multiring run", 2, 4),
        ({"PALS_RANKID": "1", "PALS_LOCAL_SIZE": "2"} | by_hand(1, 2), "RANK and WORLD_SIZE", 1, 2),
        (by_hand(1, 2, TORCHELASTIC_RESTART_COUNT=""), "RANK and WORLD_SIZE", 1, 2),
    ],
)
def test_place(environ: dict[str, str], launcher: str, rank: int, size: int) -> None:
    place = bootstrap.rank_identity(environ)
    assert (place.launcher, place.rank, place.world_size) == (launcher, rank, size)


@pytest.mark.parametrize(
    "environ",
    [
        run(1, 2),
        by_hand(1, 2),
        by_hand(1, 2, TORCHELASTIC_USE_AGENT_STORE="True"),
        {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
        {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "MULTIRING_STORE": "a:1"},
        {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},  # mpi4py shares the address
        SLURM,
        SLURM | {"MASTER_ADDR": "a", "MASTER_PORT": "1"},
        SLURM | {"MULTIRING_STORE": "a:1"},
    ],
)
def test_a_restart_counts_whoever_started_the_ranks(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "_importable", lambda package: True)
    counted = {"TORCHELASTIC_RESTART_COUNT": "3"}
    assert bootstrap.rank_identity(environ).restart == 0
    assert bootstrap.rank_identity(environ | counted).restart == 3
    assert bootstrap.rank_identity(environ | {"MULTIRING_RESTART": "2"}).restart == 2
    assert bootstrap.rank_identity(environ | counted | {"MULTIRING_RESTART": "0"}).restart == 0


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"MULTIRING_RANK": "0"}, "MULTIRING_RANK=0 and MULTIRING_WORLD_SIZE=None: set both"),
        ({"WORLD_SIZE": "2"}, "RANK=None and WORLD_SIZE=2: set both, .* or start by `multiring run`"),
        ({"RANK": "0"}, "RANK=0 and WORLD_SIZE=None: set both, and MASTER_ADDR and MASTER_PORT, or neither"),
        (run(3, 3), "the environment of multiring run says rank 3 in a world of 3: ranks are 0 to 2"),
        (by_hand(0, 2) | {"RANK": "x"}, "RANK='x': expected a whole number"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "MASTER_ADDR=a and MASTER_PORT=None: set both"),
        (SLURM | {"SLURM_JOB_ID": ""}, "SLURM_JOB_ID is not set, and others of its launcher are"),
        (by_hand(0, 2, MASTER_ADDR="tcp://a"), "MASTER_ADDR='tcp://a': expected the name or address .* alone, such as"),
        (by_hand(0, 2, MASTER_ADDR="a:29500"), "MASTER_ADDR='a:29500': .*; its port is MASTER_PORT"),
        (by_hand(0, 2, MASTER_ADDR=" a"), "MASTER_ADDR=' a': expected"),
        (by_hand(0, 2) | {"MASTER_PORT": "99999"}, "MASTER_PORT='99999': expected a whole number from 1 to 65535"),
        (by_hand(0, 1 << 20), "RANK and WORLD_SIZE says a world of 1048576: a job has 1 to 524288 ranks"),
        (by_hand(0, 0), "RANK and WORLD_SIZE says a world of 0: a job has 1 to 524288 ranks"),
        (by_hand(0, 2) | {"RANK": "\u0660"}, "RANK='\u0660': expected a whole number"),
        ({"MULTIRING_RANK": "0", "MULTIRING_WORLD_SIZE": "\u0663"}, "MULTIRING_WORLD_SIZE='\u0663': expected a whole"),
        (
            {"PET_NNODES": "2", "PET_NODE_RANK": "1"},
            "PET_NNODES=2 and PET_NODE_RANK=1 say that this process is one of several, .* `multiring run train.py`, .* "
            "alone unset PET_NNODES and PET_NODE_RANK, or set MULTIRING_RANK=0",
        ),
        ({"PET_NNODES": "two"}, "PET_NNODES='two': expected a whole number"),
        (
            {"JOB_COMPLETION_INDEX": "1"},
            "JOB_COMPLETION_INDEX=1 says .* --host-index .JOB_COMPLETION_INDEX --rendezvous HOST:PORT`, or give init",
        ),
        ({"OMPI_COMM_WORLD_RANK": "1"}, "OMPI_COMM_WORLD_SIZE is not set, and others of its launcher are"),
        ({"PMI_RANK": "1"}, "PMI_SIZE is not set, and others of its launcher are"),
        ({"MULTIRING_STORE": "a:1"}, "MULTIRING_STORE=a:1 is where a job meets, and nothing says which"),
    ],
)
def test_contradictions_name_the_values(environ: dict[str, str], message: str) -> None:
    with pytest.raises((ValueError, RendezvousError), match=message):
        bootstrap.rank_identity(environ)


ALONE = {hint.name: "01"[hint.kind is hints.Kind.SIZE] for hint in hints.TABLE}
"""Variables of all launchers, with the values that they give a process that is alone."""

OWN_SETS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
"""Variables that give a set of their own, or an error that says what is missing of it."""

SEVERAL = [(hint.name, "12"[hint.kind is hints.Kind.SIZE]) for hint in hints.TABLE if hint.name not in OWN_SETS]
WORDS = [("PET_NPROC_PER_NODE", word) for word in ("auto", "cpu", "gpu", "xpu")]


@pytest.mark.parametrize(("name", "value"), [*SEVERAL, *WORDS])
def test_nobody_is_alone_where_one_variable_speaks_of_others(name: str, value: str) -> None:
    beside = {other: text for other, text in ALONE.items() if other not in OWN_SETS}
    assert bootstrap.rank_identity(beside).launcher == "no launcher"
    for others in {}, beside, {"WORLD_SIZE": "1"}:
        with pytest.raises(ValueError, match=rf"^{name}={value} says that this process .*start it .*unset {name}, or"):
            bootstrap.rank_identity({**others, name: value})
    assert bootstrap.rank_identity({name: value, **run(0, 1)}).launcher == "multiring run"


@pytest.mark.parametrize(("name", "value"), [*SEVERAL, *((name, "1") for name in OWN_SETS)])
def test_one_by_hand_beside_a_launcher_of_several(name: str, value: str) -> None:
    assert bootstrap.rank_identity({**ALONE, **by_hand(0, 1)}).launcher == "RANK and WORLD_SIZE"
    told = rf"^RANK=0 and WORLD_SIZE=1 say .* alone, and {name}={value} that .*; for .* unset {name}, or set MULTIRING"
    with pytest.raises(ValueError, match=told):
        bootstrap.rank_identity({**ALONE, **by_hand(0, 1), name: value})
    assert bootstrap.rank_identity({**by_hand(1, 3), name: value}).world_size == 3
    assert bootstrap.rank_identity({**by_hand(0, 1, TORCHELASTIC_RUN_ID="a"), name: value}).launcher == "torchrun"


def test_all_variables_that_contradict_are_named() -> None:
    with pytest.raises(ValueError, match=r"OMPI_COMM_WORLD_SIZE=2, OMPI_COMM_WORLD_RANK=1 and OMPI_.*_RANK=1 that"):
        bootstrap.rank_identity(MPIRUN | by_hand(0, 1))


def test_mpirun_without_a_meeting_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "_importable", lambda package: False)
    with pytest.raises(
        RendezvousError, match=r"rank 1 of 2, but nothing says where .* install mpi4py, or pass on MASTER"
    ):
        bootstrap.rank_identity({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"})
    with pytest.raises(RendezvousError, match="PMIX_RANK=1 but nothing says how many"):
        bootstrap.rank_identity({"PMIX_RANK": "1"})


def test_torchrun_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    place = bootstrap.rank_identity(by_hand(0, 2, TORCHELASTIC_USE_AGENT_STORE="True"))
    monkeypatch.setattr(bootstrap, "_importable", lambda package: False)
    with pytest.raises(RendezvousError, match="install torch, or start by"), place.meet(env.Settings()):
        pass


@pytest.mark.parametrize(
    ("listed", "hosts"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1 n2"),
        ("n[03-05,7],m1", "n03 n04 n05 n7 m1"),
        ("n[3,1]", "n3 n1"),
        ("n[08-10]-ib", "n08-ib n09-ib n10-ib"),
        ("rack[2]n5", "rack2n5"),
        ("r[0-1]n[1,2]", "r0n1 r0n2 r1n1 r1n2"),
    ],
)
def test_hosts_of_a_slurm_list(listed: str, hosts: str) -> None:
    assert bootstrap.step_hosts(listed) == hosts.split()


@pytest.mark.parametrize("listed", ["", "n1,", ",n1", "n[1-", "n[1-x]", "n[]", "n1]"])
def test_what_is_no_slurm_list(listed: str) -> None:
    with pytest.raises(ValueError, match=r"^SLURM_STEP_NODELIST='.*': expected hosts such as n\[1-3\],m2$"):
        bootstrap.step_hosts(listed)


def test_secret_from_a_file_and_from_a_descriptor(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text(SECRET + "\n")
    assert bootstrap.given_secret(env.Launch(secret_file=str(file))) == SECRET.encode()
    reading, writing = os.pipe()
    os.set_inheritable(reading, True)
    os.write(writing, SECRET.encode())
    os.close(writing)
    for _ in range(2):  # init may be called again after shutdown
        assert bootstrap.given_secret(env.Launch(secret_fd=reading)) == SECRET.encode()
    os.close(reading)  # as programs do that close what they do not know
    assert bootstrap.given_secret(env.Launch(secret_fd=reading)) == SECRET.encode()
    with pytest.raises(RendezvousError, match=f"MULTIRING_SECRET_FD={reading}: Bad file descriptor"):
        bootstrap.given_secret(env.Launch(secret_fd=reading, job="another"))


def secret_in_memory(text: str) -> int:
    descriptor = os.memfd_create("secret")
    os.write(descriptor, text.encode())
    os.lseek(descriptor, 0, os.SEEK_SET)
    os.set_inheritable(descriptor, True)
    return descriptor


def test_a_file_of_the_program_is_never_taken_for_the_secret(tmp_path: Path) -> None:
    with open(tmp_path / "own", "w+") as file:
        for inheritable, said in (False, "not inherited"), (True, "yields 0 bytes"):
            os.set_inheritable(file.fileno(), inheritable)
            with pytest.raises(RendezvousError, match=rf"{said}.* A process that a rank has started is no rank"):
                bootstrap.given_secret(env.Launch(secret_fd=file.fileno(), job="of a file"))
        file.write("row")
    assert (tmp_path / "own").read_text() == "row"


def test_a_pipe_that_stays_open_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "SECRET_SECONDS", 0.2)
    reading, writing = os.pipe()
    os.set_inheritable(reading, True)
    with pytest.raises(RendezvousError, match="nobody has closed its other end within"):
        bootstrap.given_secret(env.Launch(secret_fd=reading, job="of a pipe"))
    os.close(reading)
    os.close(writing)


def open_descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("address", ["a", "node-1.example", "10.0.0.1", "fd00::1", "[fd00::1]", "fe80::1%eth0"])
def test_where_rank_0_may_be(address: str) -> None:
    assert bootstrap.rank_identity(by_hand(0, 2, MASTER_ADDR=address)).job == env.join_address(
        address.strip("[]"), 29511
    )


def test_each_job_that_a_process_joins_has_the_secret_of_its_own_descriptor() -> None:
    """Workers of Dask and Spark join job after job, and the descriptors of two may have the same number."""
    bootstrap.given_secret(env.Launch(secret_fd=secret_in_memory("an earlier secret")))
    before = open_descriptors()
    for number in range(4):
        descriptor = secret_in_memory(f"secret of job {number} ...")
        for _ in range(2):
            found = bootstrap.given_secret(env.Launch(secret_fd=descriptor))
            assert found == f"secret of job {number} ...".encode()
        if number == 2:  # the next one gets the same number
            os.close(descriptor)
    assert len(open_descriptors()) <= len(before)


def test_a_file_that_the_program_opens_after_init_is_not_read_as_the_secret() -> None:
    descriptor = secret_in_memory(SECRET)
    bootstrap.given_secret(env.Launch(secret_fd=descriptor))
    with open(__file__, "rb") as file:
        assert file.fileno() != descriptor
        assert bootstrap.given_secret(env.Launch(secret_fd=descriptor)) == SECRET.encode()
    assert not os.get_inheritable(descriptor)
    assert os.pread(descriptor, 100, 0) == b""  # what it starts finds no secret there


def test_short_and_missing_secret(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("short")
    with pytest.raises(RendezvousError, match="yields 5 bytes: a secret has 16 or more"):
        bootstrap.given_secret(env.Launch(secret_file=str(file)))
    with pytest.raises(RendezvousError, match="nothing: No such file"):
        bootstrap.given_secret(env.Launch(secret_file=str(tmp_path / "nothing")))
    place = bootstrap.rank_identity(run(0, 2) | {"MULTIRING_STORE": "localhost:1"})
    with (
        pytest.raises(RendezvousError, match="rank 0 of 2: MULTIRING_SECRET_FILE is not set"),
        place.meet(env.Settings()),
    ):
        pass


def test_ranks_meet_at_a_store_that_rank_zero_serves() -> None:
    probe = listen.bind("", None)
    port = probe.getsockname()[1]
    probe.close()
    said: dict[int, bytes] = {}

    def rank(index: int) -> None:
        place = bootstrap.rank_identity(by_hand(index, 3) | {"MASTER_PORT": str(port)})
        with place.meet(env.Settings(init_timeout=10)) as meeting:
            meeting.store.set(str(index), b"from %d" % index)
            said[index] = meeting.store.get(str((index + 1) % 3), 10)

    ranks = [threading.Thread(target=rank, args=(index,)) for index in range(3)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()
    assert said == {0: b"from 1", 1: b"from 2", 2: b"from 0"}


def test_ranks_of_a_slurm_step_meet_beside_another_job_on_the_port_of_their_first_choice() -> None:
    other = Server(b"of another job..", job="slurm 76.0")
    settings = env.Settings(init_timeout=30, ports=range(other.port, other.port + 8))
    said: dict[int, bytes] = {}

    def rank(index: int) -> None:
        place = bootstrap.rank_identity(SLURM | {"SLURM_PROCID": str(index), "SLURM_STEP_NODELIST": "localhost"})
        with place.meet(settings) as meeting:
            meeting.store.set(str(index), b"from %d" % index)
            said[index] = meeting.store.get(str(1 - index), 10)

    late = threading.Timer(0.5, rank, [0])  # the other rank has been refused by then
    late.start()
    rank(1)
    late.join()
    other.close()
    assert said == {0: b"from 1", 1: b"from 0"}


@pytest.mark.parametrize(
    ("ports", "number", "chosen"),
    [
        (range(20000, 30000), 16 * 77, [21232, 22482, 23732, 24982, 26232, 27482, 28732, 29982]),
        (range(400, 420), 5, [401, 403, 405, 407, 409, 411, 413, 415]),
        (range(400, 408), 5, [400, 401, 402, 403, 404, 405, 406, 407]),
        (range(400, 403), 5, [400, 401, 402]),
        (range(400, 401), 5, [400]),
    ],
)
def test_ports_of_a_slurm_step(ports: range, number: int, chosen: list[int]) -> None:
    assert list(bootstrap.slurm_ports(ports, number)) == chosen


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (
            lambda port: by_hand(0, 2, MASTER_PORT=str(port)),
            r"MASTER_PORT={port} is occupied on this host: choose another for all ranks \(or two .* rank 0\)",
        ),
        (
            lambda port: SLURM | {"SLURM_PROCID": "0"},
            "each of the ports {port}, which .* MULTIRING_PORTS, is occupied on this host: set other MULTIRING_PORTS",
        ),
    ],
    ids=["by hand", "slurm"],
)
def test_an_occupied_meeting_port(environ: Callable[[int], dict[str, str]], message: str) -> None:
    taken = listen.bind("", None)
    port = taken.getsockname()[1]
    place = bootstrap.rank_identity(environ(port))
    settings = env.Settings(ports=range(port, port + 1))
    with taken, pytest.raises(ResourceError, match=f"^{message.format(port=port)}"), place.meet(settings):
        pass


def test_rank_zero_tells_at_once_that_the_meeting_has_an_unknown_name(caplog: pytest.LogCaptureFixture) -> None:
    with listen.bind("", None) as free:
        port = free.getsockname()[1]
    place = bootstrap.rank_identity(by_hand(0, 2, MASTER_ADDR="nosuch.invalid", MASTER_PORT=str(port)))
    with place.meet(env.Settings(init_timeout=30)):
        until = time.monotonic() + 30
        while not caplog.records and time.monotonic() < until:
            time.sleep(0.01)
        told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1
    assert re.match(r"MASTER_ADDR=nosuch\.invalid: the host of rank 0 does not know this name \(.+\)", told[0])
