"""From the figures of several launches to rows, a table and a dated record."""

from __future__ import annotations

import datetime
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from rich.table import Table

from multiring.bench.measure import Figure
from multiring.units import duration, size

Launches = Sequence[Sequence[Figure]]


@dataclass(frozen=True)
class Row:
    """One size and kind of buffer: our median launch, and the best launch of each peer (on private buffers)."""

    nbytes: int
    buffer: str
    seconds: float
    algbw: float
    busbw: float
    launches: tuple[float, ...]
    peers: dict[str, tuple[float, ...]]
    ratios: dict[str, float]


def summarise(ours: Launches, peers: Mapping[str, Launches], world_size: int) -> list[Row]:
    """A row for each figure of a launch; bandwidths in bytes a second, ratios are the peer's time over ours."""
    rows = []
    for figure in ours[0]:
        launches = _times(ours, figure.nbytes, figure.buffer)
        seconds = statistics.median(launches)
        algbw = figure.nbytes / seconds
        theirs = {name: _times(launch, figure.nbytes, "private") for name, launch in peers.items()}
        rows.append(
            Row(
                figure.nbytes,
                figure.buffer,
                seconds,
                algbw,
                algbw * 2 * (world_size - 1) / world_size,
                launches,
                theirs,
                {name: min(times) / seconds for name, times in theirs.items()},
            )
        )
    return rows


def _times(launches: Launches, nbytes: int, buffer: str) -> tuple[float, ...]:
    return tuple(f.seconds for launch in launches for f in launch if (f.nbytes, f.buffer) == (nbytes, buffer))


def table(rows: Sequence[Row], title: str) -> Table:
    """The rows as people read them."""
    peers = list(rows[0].peers)
    result = Table(title=title, title_justify="left")
    for heading in ("size", "buffer", "time", "algbw GB/s", "busbw GB/s"):
        result.add_column(heading, justify="left" if heading == "buffer" else "right")
    for name in peers:
        result.add_column(f"{name} (best)", justify="right")
        result.add_column(f"{name} / ours", justify="right")
    for row in rows:
        cells = [
            size(row.nbytes),
            row.buffer,
            duration(row.seconds),
            f"{row.algbw / 1e9:.3g}",
            f"{row.busbw / 1e9:.3g}",
        ]
        for name in peers:
            cells += [duration(min(row.peers[name])), f"{row.ratios[name]:.3g}"]
        result.add_row(*cells)
    return result


def conditions() -> dict[str, object]:
    """When and on what: a result without them says nothing."""
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in ("multiring", "numpy", "torch")},
    }


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
