"""Options of ``multiring run`` that Kubeflow's trainer has put into a pod's environment, where none is typed."""

from __future__ import annotations

from dataclasses import dataclass

from multiring import env
from multiring.job import cores, pet
from multiring.launch import LaunchError


@dataclass(frozen=True)
class PodOptions:
    """The number of ranks in total, and what is typed on each of several hosts; None: not given."""

    ranks: int | None = None
    hosts: int | None = None
    host_index: int | None = None
    rendezvous: str | None = None
    ranks_per_host: int | None = None


def completed(typed: PodOptions, found: pet.TorchrunOptions) -> PodOptions:
    """``typed``, with what is missing from ``found``; ValueError for what cannot be taken from there."""
    if typed.ranks is not None and typed.ranks_per_host is not None:
        raise LaunchError(
            f"-n {typed.ranks} and --nproc-per-node {typed.ranks_per_host} do not go together: the one is the number "
            "of ranks in total, the other that on each host"
        )
    hosts = typed.hosts if typed.hosts is not None else found.hosts
    ranks = typed.ranks if typed.ranks is not None else _ranks(hosts or 1, typed.ranks_per_host or found.ranks_per_host)
    if typed == PodOptions(typed.ranks, ranks_per_host=typed.ranks_per_host) and hosts in (None, 1):
        if found.host_index:
            counted = "is not set" if found.hosts is None else f"is {found.hosts}"
            raise LaunchError(
                f"PET_NODE_RANK={found.host_index} says that other hosts come before this one, and PET_NNODES "
                f"{counted}: set it to their number, or give --hosts, --host-index and --rendezvous, or -H localhost:N "
                "for a job on this host alone"
            )
        return PodOptions(ranks, ranks_per_host=typed.ranks_per_host)
    index = typed.host_index if typed.host_index is not None else found.host_index
    rendezvous = typed.rendezvous
    if rendezvous is None and found.address is not None and found.port is not None:
        rendezvous = env.join_address(found.address, found.port)
    missing = [
        f"{option} or {variables}"
        for option, variables, value in (
            ("--host-index", "PET_NODE_RANK", index),
            ("--rendezvous", "PET_MASTER_ADDR and PET_MASTER_PORT", rendezvous),
        )
        if value is None
    ]
    if missing and typed.hosts is None and found.hosts is not None:
        raise LaunchError(
            f"PET_NNODES={found.hosts} asks for several hosts: set {' and '.join(missing)}, or give -H localhost:N for "
            "a job on this host alone"
        )
    return PodOptions(ranks, hosts, index, rendezvous, typed.ranks_per_host)


def _ranks(hosts: int, each: int | str | None) -> int | None:
    if isinstance(each, str):
        if each not in ("auto", "cpu"):
            raise LaunchError(f"PET_NPROC_PER_NODE={each}: ranks of multiring run on CPUs; give their number by -n")
        each = _processors()
    return None if each is None else hosts * each


def _processors() -> int:
    """The cores that this host grants."""
    return sum(share.threads for share in cores.divide(cores.allowed_cores(), cores.cgroup_quota(), 1, "core"))
