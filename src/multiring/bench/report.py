"""From the figures of several launches to rows, tables and a dated record."""

from __future__ import annotations

import datetime
import os
import platform
import shlex
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from rich.console import Console
from rich.table import Table

from multiring.bench.contestants import Api, MemoryKind
from multiring.bench.measure import Figure
from multiring.bench.peers import MPIS, mpi
from multiring.units import duration, size

Launches = Sequence[Sequence[Figure]]

GB = 1e9


@dataclass(frozen=True)
class SizeRow:
    """One size and kind of buffer: our median launch, and the launches of each peer (on private buffers).

    ``peers`` are those that are called through the same ``api``, NumPy arrays or torch; ratios are the best launch of
    the peer over ``seconds``.

    ``bound`` is the least that the links allow; on one host, which has none, an in-place pass of all ranks at once, and
    for buffers on a CUDA device their bare copies by all ranks, out and back. ``predicted`` is None on one host, whose
    memory the planner does not measure. CPU seconds are those of all ranks for 10^9 bytes of the buffer.
    ``enqueue_seconds`` are those after which a call on a CUDA device returns, None on the CPU.
    """

    nbytes: int
    buffer: str
    api: str
    seconds: float
    p95: float
    algbw: float
    busbw: float
    bound: float
    fraction_of_bound: float
    predicted: float | None
    cpu_seconds_per_gb: float
    launches: tuple[float, ...]
    peers: dict[str, tuple[float, ...]]
    peer_cpu_seconds_per_gb: dict[str, float]
    ratios: dict[str, float]
    enqueue_seconds: float | None = None
    peer_enqueue_seconds: dict[str, float] = field(default_factory=dict)


def bus_factor(collective: str, world_size: int) -> float:
    """busbw over algbw: the part of the buffer that each rank's link carries, at the least."""
    part = (world_size - 1) / world_size
    return {"all_reduce": 2 * part, "broadcast": 1.0}.get(collective, part)


def summarise(
    ours: Mapping[str, Launches],
    peers: Mapping[str, Launches],
    collective: str,
    world_size: int,
    bounds: Mapping[int, float] | None = None,
) -> list[SizeRow]:
    """A row for each figure of a launch and each API that ours was called through; bandwidths in bytes a second.

    ``bounds`` are the least seconds by size; None on one host.
    """
    return [
        _row(first, api, launches, _of_api(peers, api, ours), collective, world_size, bounds)
        for api, launches in ours.items()
        for first in launches[0]
    ]


def through(peer: str) -> Api:
    """Return the library that a peer is called through."""
    return Api.torch if peer in ("gloo", "deepspeed", "nccl") else Api.numpy


def _of_api(peers: Mapping[str, Launches], api: str, ours: Mapping[str, Launches]) -> dict[str, Launches]:
    return {name: launches for name, launches in peers.items() if len(ours) == 1 or through(name).value == api}


def _row(
    first: Figure,
    api: str,
    launches: Launches,
    peers: Mapping[str, Launches],
    collective: str,
    world_size: int,
    bounds: Mapping[int, float] | None,
) -> SizeRow:
    nbytes = first.nbytes
    figures = _those_of(launches, nbytes, first.buffer)
    on_cuda = first.buffer == MemoryKind.cuda.value
    theirs = {name: _those_of(each, nbytes, first.buffer if on_cuda else "private") for name, each in peers.items()}
    seconds = statistics.median(figure.seconds for figure in figures)
    bound = bounds[nbytes] if bounds else statistics.median(figure.pass_seconds for figure in figures)
    return SizeRow(
        nbytes=nbytes,
        buffer=first.buffer,
        api=api,
        seconds=seconds,
        p95=statistics.median(figure.p95 for figure in figures),
        algbw=nbytes / seconds,
        busbw=nbytes / seconds * bus_factor(collective, world_size),
        bound=bound,
        fraction_of_bound=bound / seconds,
        predicted=first.predicted if bounds else None,
        cpu_seconds_per_gb=_cpu_per_gb(figures),
        launches=tuple(figure.seconds for figure in figures),
        peers={name: tuple(figure.seconds for figure in each) for name, each in theirs.items()},
        peer_cpu_seconds_per_gb={name: _cpu_per_gb(each) for name, each in theirs.items()},
        ratios={name: min(figure.seconds for figure in each) / seconds for name, each in theirs.items()},
        enqueue_seconds=_enqueue_seconds(figures) if on_cuda else None,
        peer_enqueue_seconds={name: _enqueue_seconds(each) for name, each in theirs.items()} if on_cuda else {},
    )


def _those_of(launches: Launches, nbytes: int, buffer: str) -> list[Figure]:
    return [figure for launch in launches for figure in launch if (figure.nbytes, figure.buffer) == (nbytes, buffer)]


def _enqueue_seconds(figures: Sequence[Figure]) -> float:
    return statistics.median(figure.enqueue_seconds or 0.0 for figure in figures)


def _cpu_per_gb(figures: Sequence[Figure]) -> float:
    return statistics.median(figure.cpu_seconds / figure.nbytes * GB for figure in figures)


def show(rows: Sequence[SizeRow], title: str) -> None:
    """Print the rows as people read them: ours, and beside the peers."""
    # What is piped or kept in a file is as wide as it has to be.
    console = Console() if Console().is_terminal else Console(width=160)
    console.print(title, highlight=False)
    console.print(_ours(rows))
    for beside in _beside(rows):
        console.print("\nbeside the best launch of each peer", highlight=False)
        console.print(beside)


def _ours(rows: Sequence[SizeRow]) -> Table:
    on_cuda = any(row.enqueue_seconds is not None for row in rows)
    least = "bare copies" if on_cuda else "bound"
    headings = ["size", "buffer", "median", "p95", "algbw", "busbw", least, "of it", "CPU s/GB"]
    predicted = any(row.predicted is not None for row in rows)
    table = _table([*headings, *(["predicted"] if predicted else []), *(["enqueue"] if on_cuda else [])])
    for row in rows:
        table.add_row(
            *_what(row),
            duration(row.p95),
            f"{row.algbw / GB:.3g}",
            f"{row.busbw / GB:.3g}",
            duration(row.bound),
            f"{row.fraction_of_bound:.0%}",
            f"{row.cpu_seconds_per_gb:.3g}",
            *(duration(each) for each in (row.predicted, row.enqueue_seconds) if each is not None),
        )
    return table


def _beside(rows: Sequence[SizeRow]) -> Iterator[Table]:
    """A table of times and ratios for each API with peers."""
    for api in dict.fromkeys(row.api for row in rows if row.peers):
        some = [row for row in rows if row.api == api]
        names = list(some[0].peers)
        more = ["enqueue"] if some[0].peer_enqueue_seconds else []
        table = _table(["size", "buffer", "ours", *(word for name in names for word in (name, "/ ours", *more))])
        for row in some:
            cells = [
                (
                    duration(min(row.peers[name])),
                    f"{row.ratios[name]:.3g}",
                    *(duration(row.peer_enqueue_seconds[name]) for _ in more),
                )
                for name in names
            ]
            table.add_row(*_what(row), *(word for pair in cells for word in pair))
        yield table


def _table(headings: Sequence[str]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "buffer" else "right", no_wrap=True)
    return table


def _what(row: SizeRow) -> tuple[str, ...]:
    return size(row.nbytes), f"{row.api} {row.buffer}", duration(row.seconds)


def record(rows: Sequence[object], peers: Sequence[str] = (), **about: object) -> dict[str, object]:
    """Rows with when, by what, beside whom and on what they were measured: a result without that says nothing."""
    mpis = {peer: found.version for peer in peers if peer in MPIS and (found := mpi(peer))}
    return {
        "command": shlex.join(["multiring", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": {name: version for name in _DISTRIBUTIONS if (version := _version(name))} | mpis,
        **about,
        "rows": list(rows),
    }


_DISTRIBUTIONS = ("multiring", "numpy", "torch", "mpi4py", "deepspeed")


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
