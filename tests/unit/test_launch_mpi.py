"""The words by which another launcher is started."""

from __future__ import annotations

import pytest

from multiring.launch import LaunchError
from multiring.launch.hosts import parse_hosts, place
from multiring.launch.mpi import command, version

HERE, TWO = place(parse_hosts("here:3"), 3), place(parse_hosts("a:2,b:1"), 3)
OPEN_MPI, MPICH = "mpirun (Open MPI) 5.0.11", "HYDRA build details:\n    Version: 5.0.2"
FREELY = "--map-by :OVERSUBSCRIBE --bind-to none"


@pytest.mark.parametrize(
    ("launcher", "said", "listed", "root", "expected"),
    [
        ("mpirun", OPEN_MPI, False, False, f"mpirun {FREELY} -n 3 python x.py"),
        ("mpirun", OPEN_MPI, True, True, f"mpirun --allow-run-as-root {FREELY} -n 3 --host a:2,b:1 python x.py"),
        ("mpirun", MPICH, False, True, "mpirun -n 3 python x.py"),
        ("mpirun", MPICH, True, False, "mpirun -n 3 -hosts a:2,b:1 python x.py"),
        ("srun", "slurm 24.05", False, False, "srun -n 3 python x.py"),
        ("srun", "slurm 24.05", True, False, "srun -n 3 --nodelist a,b python x.py"),
    ],
)
def test_words(launcher: str, said: str, listed: bool, root: bool, expected: str) -> None:
    assignments = TWO if listed else HERE
    assert command(launcher, said, assignments, ["python", "x.py"], listed=listed, root=root) == expected.split()


def test_a_launcher_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(LaunchError, match="--launcher srun: no such command on PATH; srun belongs to Slurm"):
        version("srun")
