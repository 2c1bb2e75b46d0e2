"""The user's cache of measurements: for a probe, a topology file for each set of hosts."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from multiring.whole_files import replace

MOST_FILES = 64
"""Number of files that are kept of a kind, the latest; a cluster whose hosts are made anew for each job would leave no
end of them."""


def path(hosts: Sequence[Any]) -> Path:
    """Path of the topology of some hosts: ``hosts`` are the name of each and a text that tells it from others."""
    identity = hashlib.sha256(json.dumps(sorted(hosts)).encode()).hexdigest()[:12]
    return folder("topologies") / f"{plain(str(min(hosts)[0]))}-{len(hosts)}-hosts-{identity}.toml"


def folder(name: str) -> Path:
    """Directory of the files of one kind."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "multiring", name)


def plain(name: str) -> str:
    """A host's name as a part of a file's."""
    return "".join(letter if letter.isalnum() or letter in "-_" else "_" for letter in name)


def keep(file: Path, text: str) -> None:
    """Write a topology's text; OSError if it cannot be."""
    write(
        file,
        f"# Measured by multiring on {date.today()}. Edit it as you like: it is used until it is removed, or measured\n"
        f"# anew by MULTIRING_PROBE=refresh. docs/topology.md says what may stand here.\n\n{text}",
    )


def write(file: Path, text: str) -> None:
    """Replace a file's text, whoever reads it meanwhile, and drop the oldest files beside it; OSError if it fails."""
    file.parent.mkdir(parents=True, exist_ok=True)
    replace(file, [text.encode()])
    files = sorted(file.parent.glob(f"*{file.suffix}"), key=lambda each: each.stat().st_mtime, reverse=True)
    for old in files[MOST_FILES:]:
        old.unlink(missing_ok=True)
