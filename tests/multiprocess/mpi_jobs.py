"""Starting ranks by the mpirun of Open MPI or MPICH in tests."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jobs
import pytest

MPIRUN = shutil.which("mpirun", path=os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")]))
MPICH = Path(sys.prefix) / "mpich" / "bin"  # where `make test` puts it
FREELY = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}
"""Variables that let Open MPI start more ranks than cores, and as root."""


def clean_environment() -> dict[str, str]:
    """Ours without the marks of any launcher."""
    own = ("MULTIRING_", "OMPI_", "PMI", "SLURM_", "TORCHELASTIC")
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(own) and name not in names}
    here = str(Path(__file__).parent)
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join([here, str(jobs.SOURCE), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
    }


def start(words: Sequence[str], **variables: str) -> subprocess.Popen[str]:
    """A process without the marks of any launcher but those among ``variables``."""
    environment = {**clean_environment(), **variables}
    return subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def directory_of(implementation: str) -> Path:
    """Directory of an MPI's mpirun, and of a Python whose mpi4py loads it."""
    if not importlib.util.find_spec("mpi4py"):
        pytest.skip("mpi4py is not installed")
    found = MPICH if implementation == "MPICH" else Path(MPIRUN or "/nowhere/mpirun").parent
    if not (found / "mpirun").exists():
        pytest.skip(f"{implementation} is not installed")
    return found


def start_ranks(
    function: Callable[..., Any], size: int, *arguments: Any, implementation: str = "Open MPI", **variables: str
) -> subprocess.Popen[str]:
    """``size`` ranks of a function in a module that needs nothing of pytest, with MULTIRING_ENGINE=mpi."""
    directory = directory_of(implementation)
    call = jobs.CALL.format(module=Path(inspect.getfile(function)).stem, function=function.__name__)
    words = [str(directory / "mpirun"), "-n", str(size), str(directory / "python"), "-W", "error", "-c", call]
    return start([*words, json.dumps(arguments)], **FREELY, MULTIRING_ENGINE="mpi", **variables)


def run_ranks(function: Callable[..., Any], size: int, *arguments: Any, **options: str) -> list[Any]:
    """Return the function's values, in any order of ranks; AssertionError with the output unless all ended well."""
    process = start_ranks(function, size, *arguments, **options)
    try:
        output, _ = process.communicate(timeout=100)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, output
    values = [json.loads(line.removeprefix("result ")) for line in output.splitlines() if line.startswith("result ")]
    assert len(values) == size, output
    return values
