"""Starting other libraries on a lab."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence

from multiring.lab.cluster import Cluster

PEERS = ("gloo", "openmpi")


def installed() -> list[str]:
    """The peers that can run here."""
    found = {
        "gloo": importlib.util.find_spec("torch") is not None,
        "openmpi": importlib.util.find_spec("mpi4py") is not None and _mpirun() is not None,
    }
    return [peer for peer in PEERS if found[peer]]


def start(cluster: Cluster, library: str, program: Sequence[str]) -> list[str]:
    """The words that run Python with the arguments ``program`` on every rank of a lab, as ``library`` needs it."""
    if library != "openmpi":
        return cluster.launch_command(*program)
    mpirun = _mpirun()
    assert mpirun is not None
    return cluster.command(cluster.hosts[0].name, mpirun, *_options(cluster), sys.executable, *program)


def _mpirun() -> str | None:
    """The launcher of Open MPI 5 or newer: that beside this Python, or else the first in the path."""
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
    mpirun = shutil.which("mpirun", path=path)
    if mpirun is None:
        return None
    version = subprocess.run([mpirun, "--version"], capture_output=True, text=True).stdout
    major = version.removeprefix("mpirun (Open MPI) ").partition(".")[0]
    return mpirun if major.isdecimal() and int(major) >= 5 else None


def _options(cluster: Cluster) -> list[str]:
    """Open MPI cannot find out by itself what its networks are, nor that its ranks outnumber the cores."""
    networks = ",".join(address.rpartition(".")[0] + ".0/24" for address in cluster.hosts[0].addresses)
    hosts = ",".join(f"{host.name}:{host.ranks}" for host in cluster.hosts)
    options = [["--allow-run-as-root"], ["-H", hosts], ["--bind-to", "none"]]
    options += [["-x", "PYTHONPATH"]] if "PYTHONPATH" in os.environ else []
    options += [["--prtemca", "plm_ssh_agent", str(cluster.ssh)], ["--prtemca", "prte_if_include", networks]]
    options += [["--mca", "btl_tcp_if_include", networks], ["--mca", "mpi_yield_when_idle", "1"]]
    return [word for words in options for word in words]
