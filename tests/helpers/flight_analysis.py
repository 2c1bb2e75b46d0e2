"""The output of torch's analyser on flight records, and the ranks that it names."""

from __future__ import annotations

import os
import re
from pathlib import Path

import fork_server

ANALYSER = "torch.distributed.flight_recorder.fr_trace"
SOURCE = Path(__file__).parents[2] / "src"


def analysis(directory: Path, *options: str) -> str:
    """Return the output of torch's tool on the records of a directory."""
    program = f"import runpy; runpy.run_module({ANALYSER!r}, run_name='__main__', alter_sys=True)"
    path = os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    tool = fork_server.start(program, str(directory), *options, environment=environment, imports=["torch.distributed"])
    return "".join(tool.communicate(timeout=200))


def named(said: str) -> set[int]:
    """Every rank that the analyser's output names as missing, or as a culprit."""
    sets = re.findall(r"(?:missing ranks: |Missing dump files from ranks )\{([\d, ]+)\}", said)
    culprits = re.findall(r"Culprit rank (\d+)", said)
    return {int(rank) for ranks in sets for rank in ranks.split(",")} | set(map(int, culprits))
