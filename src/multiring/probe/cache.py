"""What a probe found is kept in the user's cache, a topology file for each set of hosts."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

KEPT = 64
"""So many files are kept, the latest; a cluster whose hosts are made anew for each job would leave no end of them."""


def path(hosts: Sequence[Any]) -> Path:
    """Where the topology of some hosts is kept: ``hosts`` is a name and whatever tells it from others, for each."""
    directory = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    identity = hashlib.sha256(json.dumps(sorted(hosts)).encode()).hexdigest()[:12]
    first = "".join(letter if letter.isalnum() or letter in "-_" else "_" for letter in str(min(hosts)[0]))
    return Path(directory, "multiring", "topologies", f"{first}-{len(hosts)}-hosts-{identity}.toml")


def keep(file: Path, text: str) -> None:
    """Write a topology's text; OSError if it cannot be."""
    file.parent.mkdir(parents=True, exist_ok=True)
    half = file.with_suffix(f".{os.getpid()}")
    half.write_text(
        f"# Measured by multiring on {date.today()}. Edit it as you like: it is used until it is removed, or measured\n"
        f"# anew by MULTIRING_PROBE=refresh. docs/topology.md says what may stand here.\n\n{text}"
    )
    half.replace(file)
    files = sorted(file.parent.glob("*.toml"), key=lambda each: each.stat().st_mtime, reverse=True)
    for old in files[KEPT:]:
        old.unlink(missing_ok=True)
