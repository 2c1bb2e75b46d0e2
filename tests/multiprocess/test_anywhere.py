"""One script, started unchanged by each of the launchers."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import pytest
from free_ports import free_port, free_ports
from mpi_jobs import FREELY, directory_of, start

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPT = str(EXAMPLES / "anywhere.py")
RUN = [sys.executable, "-m", "multiring", "run"]


def check(processes: Sequence[subprocess.Popen[str]], size: int) -> None:
    try:
        output = "".join([process.communicate(timeout=120)[0] for process in processes])
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0] * len(processes), output
    for rank in range(size):
        assert f"rank {rank} of {size}: y = 3.0 x + -2.0" in output, output


def test_alone() -> None:
    check([start([sys.executable, SCRIPT])], 1)


def test_multiring_run() -> None:
    check([start([*RUN, "-n", "3", SCRIPT])], 3)


@pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="torch is not installed")
def test_torchrun() -> None:
    words = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port()), SCRIPT]
    check([start([sys.executable, *words])], 2)


@pytest.mark.parametrize("implementation", ["Open MPI", "MPICH"])
def test_mpirun(implementation: str) -> None:
    directory = directory_of(implementation)
    check([start([str(directory / "mpirun"), "-n", "3", str(directory / "python"), SCRIPT], **FREELY)], 3)


def test_srun() -> None:
    """The command that stands for Slurm's on this host."""
    ports = free_ports(4)
    srun = [sys.executable, str(Path(__file__).with_name("stand_in_for_srun.py"))]
    check([start([*srun, "-n", "2", sys.executable, SCRIPT], MULTIRING_PORTS=f"{ports[0]}-{ports[-1]}")], 2)


def test_two_pods_of_kubeflow() -> None:
    pod = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "2", "PET_MASTER_ADDR": "127.0.0.1"}
    pod["PET_MASTER_PORT"] = str(free_port())
    check([start([*RUN, SCRIPT], **pod, PET_NODE_RANK=node) for node in "01"], 4)


def test_two_nodes_of_skypilot() -> None:
    """The command of the example, by which each node's script finds the first one."""
    _, _, indented = (EXAMPLES / "skypilot.yaml").read_text().partition("run: |\n")
    command = textwrap.dedent(indented).replace(":29400", f":{free_port()}")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    node = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.2\n", "PATH": path}
    words = ["bash", "-c", f"cd {EXAMPLES.parent} && {command}"]
    check([start(words, **node, SKYPILOT_NODE_RANK=number) for number in "01"], 8)
