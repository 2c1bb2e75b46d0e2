"""``multiring simulate``: a training step on a cluster that need not be there, by every strategy."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from multiring import recording, topology_file, units
from multiring.cli.curves import plot_efficiency
from multiring.machines import MACHINES, machine
from multiring.models import MODELS, model
from multiring.recording import Recording
from multiring.simulate import Speeds
from multiring.simulate.compare import NAMES, Result, Training, simulate_strategy
from multiring.simulate.spread import slowest

USAGE_ERROR = 2
ITEMSIZES = {"float32": 4, "float16": 2}
SWEPT = ("hosts", "batch")


def register(app: typer.Typer) -> None:
    app.command("simulate")(simulate)


@dataclass(frozen=True)
class Request:
    """What is asked for, at one point of a sweep."""

    machine: str | None
    topology: Path | None
    hosts: int
    model: str
    job: Path | None
    batch: int
    speed: float | None
    gradients: str
    overlap: bool
    spread: float | None

    def training(self) -> Training:
        """The training to simulate; ValueError for what is missing or does not fit."""
        if (self.machine is None) == (self.topology is None):
            raise ValueError("give the cluster, either by --machine and --hosts or by --topology FILE")
        here = machine(self.machine) if self.machine else None
        topology = here.topology(self.hosts) if here else topology_file.load(self.topology or Path())
        speeds, spread = (here.speeds(), here.spread.value) if here else (Speeds(), 0.0)
        if self.spread is not None:
            spread = self.spread / 100
        return Training(topology, self._recording(), speeds, spread, self.overlap)

    def _recording(self) -> Recording:
        if self.job is not None:
            return recording.load(self.job)
        trained = model(self.model)
        if self.gradients not in ITEMSIZES:
            raise ValueError(f"--gradients is {self.gradients!r}; it may be {' or '.join(ITEMSIZES)}")
        if self.speed is None and self.machine is None:
            raise ValueError("a topology file does not say how fast its ranks train: give --speed, or --job FILE")
        speed = self.speed if self.speed is not None else machine(str(self.machine)).speed(trained)
        return trained.recording(self.batch, speed, ITEMSIZES[self.gradients])


@dataclass(frozen=True)
class Point:
    """A request, what it came to, and the results of all strategies."""

    request: Request
    training: Training
    results: list[Result]


def simulate(
    machine: Annotated[str | None, typer.Option(help=f"A known cluster: {', '.join(MACHINES)}.")] = None,
    hosts: Annotated[int, typer.Option(min=1, help="Hosts of the machine.")] = 16,
    topology: Annotated[Path | None, typer.Option(metavar="FILE", help="Your own cluster, as TOML.")] = None,
    model: Annotated[str, typer.Option(help=f"A known model: {', '.join(MODELS)}.")] = "resnet50",
    batch: Annotated[int, typer.Option(min=1, help="Samples a rank and step.")] = 32,
    speed: Annotated[
        float | None,
        typer.Option(min=1e-3, help="Samples a second that one rank trains on; else as the machine has it."),
    ] = None,
    job: Annotated[Path | None, typer.Option(metavar="FILE", help="Your own model: a recording, as JSON.")] = None,
    strategy: Annotated[
        str, typer.Option(help=f"all, or some of {', '.join(NAMES)}, multiring:4x8x8; comma-separated.")
    ] = "all",
    gradients: Annotated[str, typer.Option(help="How gradients travel: float32 or float16.")] = "float32",
    overlap: Annotated[bool, typer.Option(help="Whether sums begin while backward runs.")] = True,
    spread: Annotated[
        float | None, typer.Option(min=0, help="Per cent by which speeds of equal devices differ (standard deviation).")
    ] = None,
    sweep: Annotated[
        str | None,
        typer.Option(metavar="hosts=1..1024", help="Hosts or batch: doubled from one to another, or a list."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the efficiency of a sweep (needs matplotlib).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
    sources: Annotated[
        bool, typer.Option("--sources", help="Only show the machine's numbers and where they are from.")
    ] = False,
) -> None:
    """Predict a training step: time, exposed communication, scaling efficiency, busiest link."""
    console = Console()
    try:
        if sources:
            console.print(_sources(machine or ""))
            return
        request = Request(machine, topology, hosts, model, job, batch, speed, gradients, overlap, spread)
        requests = _swept(request, sweep)
        names = list(NAMES) if strategy == "all" else strategy.split(",")
        if plot is not None and sweep is None:
            raise ValueError("--plot draws a sweep: give --sweep hosts=1..1024")
        points = _simulated(requests, names)
        if plot is not None:
            key = (sweep or "").partition("=")[0]
            plot_efficiency(plot, key, [getattr(point.request, key) for point in points], _curves(points, names))
    except OSError as error:
        raise _refused(f"{error.filename}: {error.strerror}") from None
    except (ValueError, ImportError) as error:
        raise _refused(str(error)) from None
    if as_json:
        typer.echo(json.dumps([_record(point) for point in points], indent=1))
    elif sweep is None:
        console.print(_summary(points[0]), highlight=False)
        console.print(_table(points[0]))
    else:
        console.print(_summary(points[-1]), highlight=False)
        console.print(_sweep_table(points, sweep.partition("=")[0], names))


def _refused(reason: str) -> typer.Exit:
    typer.echo(f"multiring simulate: {reason}", err=True)
    return typer.Exit(USAGE_ERROR)


def _swept(request: Request, sweep: str | None) -> list[Request]:
    if sweep is None:
        return [request]
    key, _, values = sweep.partition("=")
    if key not in SWEPT:
        raise ValueError(f"--sweep {sweep!r}: {' or '.join(SWEPT)} can be swept, as in hosts=1..1024 or hosts=4,8,16")
    if key == "hosts" and request.machine is None:
        raise ValueError("hosts are swept with --machine; a topology file has its own")
    return [Request(**{**vars(request), key: value}) for value in parse_values(values)]


def parse_values(text: str) -> list[int]:
    """The numbers of ``1..1024``, doubled from the first to the last, or of ``4,8,16``."""
    if match := re.fullmatch(r"([1-9]\d*)\.\.([1-9]\d*)", text):
        value, last = map(int, match.groups())
        found = []
        while value < last:
            found.append(value)
            value *= 2
        if value == last or found:
            return [*found, last]
    elif re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text):
        return [int(part) for part in text.split(",")]
    raise ValueError(f"{text!r} is no range: write 1..1024 (doubled from one to the other) or 4,8,16")


def _simulated(requests: Sequence[Request], names: Sequence[str]) -> list[Point]:
    points = []
    progress = Console(stderr=True)
    watched = len(requests) > 1 and progress.is_terminal
    for request in track(requests, "simulating", console=progress, transient=True) if watched else requests:
        training = request.training()
        points.append(Point(request, training, [simulate_strategy(training, name) for name in names]))
    return points


def _summary(point: Point) -> str:
    training = point.training
    ranks = training.topology.world_size
    hosts = len(set(training.topology.hosts))
    late = slowest(ranks, training.spread) - 1
    return (
        f"{training.recording.name} on {hosts} hosts, {ranks} ranks: {units.duration(training.recording.seconds)} of "
        f"computation, {units.size(training.recording.nbytes)} of gradients"
        + (f"; the slowest rank needs {late:.1%} more than the mean" if late else "")
    )


def _table(point: Point) -> Table:
    table = Table("strategy", box=None, pad_edge=False)
    for heading in ("step", "exposed", "efficiency"):
        table.add_column(heading, justify="right")
    for heading in ("busiest link", ""):
        table.add_column(heading)
    for result in point.results:
        if result.seconds is None:
            table.add_row(result.strategy, "", "", "", "", result.note)
            continue
        busiest = result.busiest
        link = f"{busiest.link}, {busiest.seconds / result.seconds:.0%} busy" if busiest else ""
        times = (units.duration(result.seconds), units.duration(result.exposed), f"{result.efficiency:.1%}")
        table.add_row(result.strategy, *times, link, result.note)
    return table


def _sweep_table(points: Sequence[Point], key: str, names: Sequence[str]) -> Table:
    table = Table(key, box=None, pad_edge=False)
    for name in names:
        table.add_column(name, justify="right")
    for point in points:
        row = [f"{r.efficiency:.1%}" if r.seconds is not None else "-" for r in point.results]
        table.add_row(str(getattr(point.request, key)), *row)
    return table


def _curves(points: Sequence[Point], names: Sequence[str]) -> dict[str, list[float | None]]:
    return {
        name: [p.results[i].efficiency if p.results[i].seconds is not None else None for p in points]
        for i, name in enumerate(names)
    }


def _record(point: Point) -> dict[str, object]:
    request = {key: str(value) if isinstance(value, Path) else value for key, value in vars(point.request).items()}
    return {**request, "ranks": point.training.topology.world_size, "results": [asdict(r) for r in point.results]}


def _sources(name: str) -> Table:
    here = machine(name)
    table = Table("figure", title=here.about, title_justify="left", box=None, pad_edge=False)
    table.add_column("value", justify="right")
    table.add_column("source")
    table.add_column("year")
    for what, figure in here.figures().items():
        table.add_row(what.replace("_", " "), f"{figure.value:.4g}", figure.source, str(figure.year))
    return table
