"""init() under the launchers that people have: torchrun, mpirun, srun, and variables set by hand."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from free_ports import free_port, free_ports
from mpi_jobs import FREELY, MPIRUN, directory_of, start

PROGRAM = str(Path(__file__).with_name("launchers.py"))


def check(processes: Sequence[subprocess.Popen[str]], size: int) -> None:
    output = "".join([process.communicate(timeout=90)[0] for process in processes])
    assert [process.returncode for process in processes] == [0] * len(processes), output
    for rank in range(size):
        assert f"rank {rank} of {size} sums to {'1' * size}" in output, output


@pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="torch is not installed")
def test_torchrun() -> None:
    words = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port()), PROGRAM]
    check([start([sys.executable, *words])], 2)


def test_variables_set_by_hand() -> None:
    here = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    check([start([sys.executable, PROGRAM], **here, RANK=str(rank)) for rank in range(3)], 3)


def test_two_processes_that_say_they_are_one_rank() -> None:
    """All ranks hear it at once, and not after the time for all to arrive."""
    here = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    began = time.monotonic()
    processes = [start([sys.executable, PROGRAM], **here, RANK=rank) for rank in "011"]
    numbers = "|".join(str(process.pid) for process in processes[1:])
    said = rf"two processes say that they are rank 1 of 3, process ({numbers}) on host \S+ and process ({numbers}) on"
    for process in processes:
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 1
        assert re.search(said, output), output
    assert time.monotonic() - began < 40, "they waited for the end of init_timeout"


CHILD = """
import os, subprocess, sys
import numpy as np
import multiring as mr

mr.init(init_timeout=40)
mr.barrier()
if mr.rank() == 1:
    child = "import multiring as mr; mr.init(init_timeout=10)"
    started = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True)
    print("the child of rank 1:", started.returncode, started.stderr.splitlines()[-1])
x = np.array([10.0 ** mr.rank()])
mr.all_reduce(x)
print(f"rank {mr.rank()} of {mr.world_size()} sums to {x[0]:.0f}", flush=True)
"""


@pytest.mark.parametrize("launcher", ["multiring run", "torchrun"])
def test_a_child_of_a_rank_is_told_that_it_is_none(launcher: str, tmp_path: Path) -> None:
    program = tmp_path / "child.py"
    program.write_text(CHILD)
    words = ["-m", "multiring", "run", "-n", "2", str(program)]
    said = "MULTIRING_SECRET_FD=.* A process that a rank has started is no rank"
    if launcher == "torchrun":
        if not importlib.util.find_spec("torch"):
            pytest.skip("torch is not installed")
        words = [
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            "2",
            "--master-port",
            str(free_port()),
            str(program),
        ]
        said = "two processes say that they are rank 1 of 2, .* a process that a rank has started is none"
    output, _ = start([sys.executable, *words]).communicate(timeout=100)
    assert re.search(rf"the child of rank 1: 1 \S+RendezvousError: .*{said}", output), output
    for rank in range(2):
        assert f"rank {rank} of 2 sums to 11" in output, output


@pytest.fixture
def srun(tmp_path: Path) -> dict[str, str]:
    """The environment in which a command ``srun`` is found: one that stands for Slurm's, on this host."""
    command = tmp_path / "srun"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).with_name("stand_in_for_srun.py")} "$@"\n')
    command.chmod(0o755)
    ports = free_ports(4)
    return {
        "PATH": os.pathsep.join([str(tmp_path), os.environ["PATH"]]),
        "MULTIRING_PORTS": f"{ports[0]}-{ports[-1]}",
    }


@pytest.mark.parametrize("options", [[], ["--mpi", "pmi2"], ["-m", "arbitrary"]], ids=["plain", "pmi2", "arbitrary"])
def test_srun(srun: dict[str, str], options: list[str]) -> None:
    check([start(["srun", *options, "-n", "2", sys.executable, PROGRAM], **srun)], 2)


def test_srun_by_multiring_run(srun: dict[str, str]) -> None:
    check([start([sys.executable, "-m", "multiring", "run", "--launcher", "srun", "-n", "3", PROGRAM], **srun)], 3)


@pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="torch is not installed")
def test_torch_under_srun(srun: dict[str, str]) -> None:
    check([start(["srun", "--ntasks", "2", sys.executable, PROGRAM, "torch"], **srun)], 2)


def test_mpi_that_srun_has_not_started_is_refused_as_engine(srun: dict[str, str]) -> None:
    directory_of("Open MPI")
    process = start(["srun", "-n", "2", sys.executable, PROGRAM], **srun, MULTIRING_ENGINE="mpi")
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    # The first rank that says so ends the job, perhaps before the other has said it.
    assert re.search(r"srun started rank [01] of 2, but the MPI library that mpi4py has loaded \(Open MPI", said), said
    assert "knows of 1: let srun start MPI too, by --mpi=pmi2" in said


@pytest.mark.skipif(not MPIRUN, reason="mpirun is not installed")
@pytest.mark.parametrize("by_hand", [False, True])
def test_mpirun(by_hand: bool) -> None:
    words = [str(MPIRUN), "-n", "2"]
    more = dict(FREELY)
    if by_hand:
        more |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    elif not importlib.util.find_spec("mpi4py"):
        pytest.skip("mpi4py is not installed")
    check([start([*words, sys.executable, PROGRAM], **more)], 2)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("implementation", ["Open MPI", "MPICH"])
def test_mpirun_of_both_kinds_by_multiring_run(implementation: str, world_size: int) -> None:
    directory = directory_of(implementation)
    words = ["-m", "multiring", "run", "--launcher", "mpirun", "-n", str(world_size), PROGRAM]
    path = os.pathsep.join([str(directory), os.environ["PATH"]])
    check([start([str(directory / "python"), *words], PATH=path)], world_size)


@pytest.mark.parametrize("implementation", ["Open MPI", "MPICH"])
def test_torch_under_mpirun(implementation: str) -> None:
    directory = directory_of(implementation)
    words = [str(directory / "mpirun"), "-n", "3", str(directory / "python"), PROGRAM, "torch"]
    check([start(words, **FREELY)], 3)


def test_an_mpirun_that_is_not_mpi4pys_is_named() -> None:
    directory_of("Open MPI")
    process = start([sys.executable, PROGRAM], PMI_RANK="0", PMI_SIZE="2")  # as MPICH's mpirun leaves them
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "mpirun started rank 0 of 2, but the MPI library that mpi4py has loaded (Open MPI" in said
    assert "knows of 1: use the mpirun of that library" in said


def test_contradictory_environment_is_one_clear_error() -> None:
    process = start([sys.executable, PROGRAM], RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "RANK and WORLD_SIZE came with MASTER_ADDR=127.0.0.1 and MASTER_PORT=None: set both" in said
