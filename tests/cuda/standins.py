"""Where processes of these tests find a driver, and the modules that they share."""

from __future__ import annotations

import os
from pathlib import Path

import jobs

HERE = Path(__file__).parent

Environment = dict[str, str]


def paths(library: Path) -> Environment:
    """The environment of a process that is to find a driver in a directory."""
    modules = [HERE, HERE.parent / "unit", HERE.parent / "multiprocess", jobs.SOURCE]
    return {
        "LD_LIBRARY_PATH": str(library),
        "PYTHONPATH": os.pathsep.join([*map(str, modules), os.environ.get("PYTHONPATH", "")]),
        "MULTIRING_ARENA_BYTES": "96M",
    }
