"""Starting other libraries on a lab."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from multiring.bench.peers import MPI, Command, mpi
from multiring.lab.cluster import Cluster


def start(cluster: Cluster, library: str, program: Sequence[str]) -> Command:
    """Return the command that runs Python with the arguments ``program`` on every rank of a lab, for ``library``."""
    if library in ("multiring", "gloo"):
        return Command(cluster.launch_command("--no-summary", *program))
    found = mpi(library)
    assert found is not None
    options = _open_mpi(cluster, found) if library == "openmpi" else _hydra(cluster)
    words = cluster.command(cluster.hosts[0].name, found.launcher, *options, sys.executable, *program)
    return Command(words, {**found.environment, **_NETWORK_ONLY})


# All messages go over the network, within a host as well, which is faster than shared memory there (each host has its
# own). Measured: benchmarks/results/2026-11-28-constants.md, Peers.
_NETWORK_ONLY = {
    "UCX_TLS": "tcp,self",
    "MPIR_CVAR_NOLOCAL": "1",
    "FI_PROVIDER": "tcp",
    "I_MPI_FABRICS": "ofi",
}


def _slots(cluster: Cluster) -> str:
    return ",".join(f"{host.name}:{host.ranks}" for host in cluster.hosts)


def _hydra(cluster: Cluster) -> list[str]:
    """Options for Hydra, the launcher of MPICH and Intel MPI."""
    return ["-launcher", "ssh", "-launcher-exec", str(cluster.ssh), "-hosts", _slots(cluster)]


def _open_mpi(cluster: Cluster, found: MPI) -> list[str]:
    """Open MPI cannot find out by itself what its networks are, nor that its ranks outnumber the cores."""
    networks = ",".join(address.rpartition(".")[0] + ".0/24" for address in cluster.hosts[0].addresses)
    options = [["--allow-run-as-root"], ["-H", _slots(cluster)], ["--bind-to", "none"]]
    options += [["-x", name] for name in ("PYTHONPATH", *found.environment) if name in (os.environ | found.environment)]
    options += [["--prtemca", "plm_ssh_agent", str(cluster.ssh)], ["--prtemca", "prte_if_include", networks]]
    options += [["--mca", "btl_tcp_if_include", networks], ["--mca", "mpi_yield_when_idle", "1"]]
    return [word for words in options for word in words]
