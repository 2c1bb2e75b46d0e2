"""Environment in which processes of these tests find a driver and shared modules."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jobs

HERE = Path(__file__).parent

Environment = dict[str, str]
Standin = Callable[..., Environment]
"""The fixture that makes the environment in which a process finds the stand-in driver."""


def run(program: Callable[..., object], size: int, hosts: str | None, environment: Environment, *what: object) -> Any:
    """Return the results of the ranks, all on one host unless ``hosts`` has a letter for the host of each."""
    return jobs.run(program, size, *what, hosts=hosts and list(hosts), environment=environment, timeout=60)


def paths(library: Path) -> Environment:
    """The environment of a process that is to find a driver in a directory."""
    modules = [HERE, HERE.parent / "unit", HERE.parent / "multiprocess", jobs.SOURCE]
    return {
        "LD_LIBRARY_PATH": str(library),
        "PYTHONPATH": os.pathsep.join([*map(str, modules), os.environ.get("PYTHONPATH", "")]),
        "MULTIRING_ARENA_BYTES": "96M",
    }
