"""Variables by which launchers say that a process is one of several, though not which one, of how many and where."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from multiring import env
from multiring.job import pet


class Kind(Enum):
    """Quantity of a variable; the value is the most that a process has which is alone."""

    INDEX = 0
    SIZE = 1


@dataclass(frozen=True)
class Hint:
    """One variable of a launcher."""

    name: str
    kind: Kind
    launcher: str


TABLE = tuple(
    Hint(name, kind, launcher)
    for launcher, kind, names in (
        ("Kubeflow", Kind.SIZE, "PET_NNODES PET_NPROC_PER_NODE"),
        ("Kubeflow", Kind.INDEX, "PET_NODE_RANK"),
        ("Indexed Job", Kind.INDEX, "JOB_COMPLETION_INDEX"),
        ("Volcano", Kind.INDEX, "VC_TASK_INDEX"),
        ("SkyPilot", Kind.SIZE, "SKYPILOT_NUM_NODES"),
        ("SkyPilot", Kind.INDEX, "SKYPILOT_NODE_RANK"),
        # SLURM_NTASKS and SLURM_JOB_NUM_NODES are the whole allocation's, which a batch script or a shell has too.
        ("Slurm", Kind.SIZE, "SLURM_STEP_NUM_TASKS SLURM_STEP_NUM_NODES"),
        ("Slurm", Kind.INDEX, "SLURM_PROCID SLURM_NODEID SLURM_LOCALID"),
        ("Open MPI", Kind.SIZE, "OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_SIZE"),
        ("Open MPI", Kind.INDEX, "OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_LOCAL_RANK OMPI_COMM_WORLD_NODE_RANK PMIX_RANK"),
        ("MPICH", Kind.SIZE, "PMI_SIZE PMI_LOCAL_SIZE MPI_LOCALNRANKS"),
        ("MPICH", Kind.INDEX, "PMI_RANK PMI_LOCAL_RANK MPI_LOCALRANKID"),
        ("MVAPICH", Kind.SIZE, "MV2_COMM_WORLD_SIZE MV2_COMM_WORLD_LOCAL_SIZE"),
        ("MVAPICH", Kind.INDEX, "MV2_COMM_WORLD_RANK MV2_COMM_WORLD_LOCAL_RANK"),
        ("PALS", Kind.SIZE, "PALS_LOCAL_SIZE"),
        ("PALS", Kind.INDEX, "PALS_RANKID PALS_NODEID PALS_LOCAL_RANKID"),
        ("Flux", Kind.SIZE, "FLUX_JOB_SIZE"),
        ("Flux", Kind.INDEX, "FLUX_TASK_RANK FLUX_TASK_LOCAL_ID"),
        ("jsrun", Kind.SIZE, "JSM_NAMESPACE_SIZE JSM_NAMESPACE_LOCAL_SIZE"),
        ("jsrun", Kind.INDEX, "JSM_NAMESPACE_RANK JSM_NAMESPACE_LOCAL_RANK"),
        ("Horovod", Kind.SIZE, "HOROVOD_SIZE HOROVOD_LOCAL_SIZE HOROVOD_CROSS_SIZE"),
        ("Horovod", Kind.INDEX, "HOROVOD_RANK HOROVOD_LOCAL_RANK HOROVOD_CROSS_RANK"),
        ("multiring run", Kind.SIZE, "MULTIRING_LOCAL_WORLD_SIZE"),
        ("multiring run", Kind.INDEX, "MULTIRING_LOCAL_RANK"),
        ("torchrun", Kind.SIZE, "LOCAL_WORLD_SIZE GROUP_WORLD_SIZE ROLE_WORLD_SIZE"),
        ("torchrun", Kind.INDEX, "LOCAL_RANK GROUP_RANK ROLE_RANK NODE_RANK"),
    )
    for name in names.split()
)
"""Ranks are counted, or hosts that each have some. RANK and WORLD_SIZE are a set of their own (`bootstrap`)."""

_TYPED = "by `multiring run -n RANKS --hosts {0} --host-index {1} --rendezvous HOST:PORT`"

_REMEDIES = {
    "Kubeflow": "by `multiring run train.py`, which reads the variables PET_*, or by torchrun",
    "Indexed Job": "in each pod " + _TYPED.format("PODS", "$JOB_COMPLETION_INDEX"),
    "Volcano": "in each pod " + _TYPED.format("PODS", "$VC_TASK_INDEX"),
    "SkyPilot": "on each node " + _TYPED.format("$SKYPILOT_NUM_NODES", "$SKYPILOT_NODE_RANK"),
}
"""The way to start ranks by this launcher, where it is not that of all others."""

ALONE = "or set MULTIRING_RANK=0 and MULTIRING_WORLD_SIZE=1, which win"


def refuse_any(environ: Mapping[str, str]) -> None:
    """ValueError where any launcher speaks of several: whoever set that did not mean a world of one."""
    if not (found := _found(environ, words=True)):
        return
    remedy = _REMEDIES.get(found[0].launcher, "by `multiring run`, torchrun, mpirun or srun")
    says = "says" if len(found) == 1 else "say"
    raise ValueError(
        f"{_values(found, environ)} {says} that this process is one of several, and no variables that multiring reads "
        f"say which one, of how many, and where they meet: start it {remedy}, or give init() rank=, world_size=, "
        f"store= and secret=; for a process that is alone unset {_listed([hint.name for hint in found])}, {ALONE}"
    )


def refuse_beside_one(environ: Mapping[str, str]) -> None:
    """ValueError where any launcher speaks of several, and RANK and WORLD_SIZE, set by hand, of one."""
    if not (found := _found(environ, words=False)):  # a PyTorchJob of one pod says "auto"
        return
    raise ValueError(
        f"RANK={environ['RANK']} and WORLD_SIZE={environ['WORLD_SIZE']} say that this process is alone, and "
        f"{_values(found, environ)} that it is one of several: correct RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, "
        f"or unset them; for a process that is alone unset {_listed([hint.name for hint in found])}, {ALONE}"
    )


def _found(environ: Mapping[str, str], *, words: bool) -> list[Hint]:
    """The rows that speak of several; ``words``: a word in the place of a number does so too."""
    texts = ((hint, environ.get(hint.name, "")) for hint in TABLE)
    return [hint for hint, text in texts if _above(hint.kind.value, text) or (words and text in pet.WORDS)]


def _above(most: int, text: str) -> bool:
    try:
        return env.parse_whole(text.partition(":")[0]) > most  # PET_NNODES may be 2:4
    except ValueError:
        return False  # it says no number


def _values(found: list[Hint], environ: Mapping[str, str]) -> str:
    return _listed([f"{hint.name}={environ[hint.name]}" for hint in found])


def _listed(words: list[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))
