"""The scenario of `multiring simulate` and `multiring report`, from their options, and its simulation."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import islice, product
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track
from typer.models import OptionInfo

from multiring import env, units
from multiring.cli.errors import given, leave_out
from multiring.cli.options import number, whole
from multiring.pages.pictures import best_and_worst
from multiring.planning import planner, topology_file
from multiring.planning.speeds import NATIVE
from multiring.planning.strategies import ASYNCHRONOUS
from multiring.simulate import recording
from multiring.simulate.compare import NAMES, Result, Training, check_name, simulate_strategy
from multiring.simulate.machines import MACHINES, machine
from multiring.simulate.models import MODELS, model
from multiring.simulate.recording import Recording
from multiring.simulate.spread import slowest, slowness


class Gradients(str, Enum):
    """The type of gradients that travel."""

    float32 = "float32"
    float16 = "float16"


ITEMSIZES = {Gradients.float32.value: 4, Gradients.float16.value: 2}
SWEPT = ("hosts", "batch")

Cluster = Annotated[str | None, typer.Option(help=f"A known cluster: {', '.join(MACHINES)}.")]
MOST = 1_000_000
"""Hosts, ranks or samples that are asked for at most."""

Hosts = Annotated[int, typer.Option(parser=whole(1, MOST), metavar="N", help="Hosts of the machine.")]
TopologyFile = Annotated[Path | None, typer.Option(metavar="FILE", help="Your own cluster, as TOML.")]
Model = Annotated[str, typer.Option(help=f"A known model: {', '.join(MODELS)}.")]
Batch = Annotated[int, typer.Option(parser=whole(1, MOST), metavar="N", help="Samples a rank and step.")]
Speed = Annotated[
    float | None,
    typer.Option(
        parser=number(1e-3), metavar="N", help="Samples a second that one rank trains on; else as the machine has it."
    ),
]
Job = Annotated[Path | None, typer.Option(metavar="FILE", help="Your own model: a recording, as JSON.")]
Strategies = Annotated[
    str,
    typer.Option(
        help=f"all, or some of {', '.join(NAMES)}, multiring:4x8x8, masters:16, outer:rack:50 (LEVEL:EVERY[:FRAGMENTS"
        "[:DELAY]]); comma-separated."
    ),
]


def sweep_option(about: str) -> OptionInfo:
    """The option of what a command does at several numbers of hosts or samples; ``about`` is its help."""
    option: OptionInfo = typer.Option(metavar="hosts=1..1024", help=about)
    return option


@dataclass(frozen=True)
class Request:
    """A scenario as the options ask for it, at one point of a sweep."""

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
    wire: str = ""

    def training(self) -> Training:
        """The training to simulate; ValueError for what is missing or does not fit."""
        if (self.machine is None) == (self.topology is None):
            raise ValueError("give the cluster, either by --machine and --hosts or by --topology FILE")
        here = machine(self.machine) if self.machine is not None else None
        if here and here.ranks * self.hosts > MOST:
            raise ValueError(f"{self.hosts} hosts are {here.ranks * self.hosts} ranks; {MOST} can be simulated at most")
        topology = here.topology(self.hosts) if here else topology_file.load(self.topology or Path())
        speeds, spread = (here.speeds(), here.spread.value) if here else (NATIVE, 0.0)
        if self.spread is not None:
            spread = self.spread / 100
        if slowness(0, topology.world_size, spread) <= 0:
            raise ValueError(
                f"--spread is {100 * spread:g}: the fastest of {topology.world_size} ranks would need no time"
            )
        wire = env.parse_wire(self.wire) if self._travels_narrow() else ""
        try:
            planner.check_wire(wire, topology)
        except ValueError as error:
            raise ValueError(f"MULTIRING_WIRE={self.wire}: {error}") from None
        return Training(topology, self._recording(), speeds, spread, self.overlap, wire)

    def _travels_narrow(self) -> bool:
        """True if the gradients are of a type that a narrow wire takes."""
        return self.job is not None or self.gradients == Gradients.float32.value

    def _recording(self) -> Recording:
        if self.job is not None:
            return recording.load(self.job)
        trained = model(self.model)
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


def chosen(strategies: str) -> list[str]:
    """The strategies of an option; ValueError for a name that is none."""
    if strategies == "all":
        return list(NAMES)
    names = [name.strip() for name in strategies.split(",")]
    for name in names:
        check_name(name)
    return names


def check_given(context: typer.Context) -> None:
    """ValueError for an option on the command line that another one there leaves without a meaning."""
    named = given(context)
    if "job" in named:
        leave_out(context, ("model", "batch", "speed", "gradients"), "--job FILE describes its own job")
    if "topology" in named:
        leave_out(context, ("hosts",), "--topology FILE describes its own hosts")


def check_sweep(context: typer.Context, sweep: str | None) -> None:
    """ValueError for an option on the command line whose values a sweep gives."""
    key = (sweep or "").partition("=")[0]
    leave_out(context, (key,), f"--sweep gives the values of {key}")


def swept(request: Request, sweep: str | None) -> list[Request]:
    """A request for each value of a sweep."""
    if sweep is None:
        return [request]
    key, _, values = sweep.partition("=")
    if key not in SWEPT:
        raise ValueError(f"--sweep {sweep!r}: {' or '.join(SWEPT)} can be swept, as in hosts=1..1024 or hosts=4,8,16")
    if key == "hosts" and request.machine is None:
        raise ValueError("hosts are swept with --machine; a topology file has its own")
    if key == "batch" and request.job is not None:
        raise ValueError("batch is swept with --model; a recording has its own")
    return [Request(**{**vars(request), key: value}) for value in parse_values(values)]


def parse_values(text: str) -> list[int]:
    """The numbers of ``1..1024``, doubled from the first to the last, or of ``4,8,16``."""
    numbers = [int(part) if len(part) < 20 else MOST + 1 for part in re.findall(r"[0-9]+", text)]
    if any(number > MOST for number in numbers):
        raise ValueError(f"{text!r} goes beyond {MOST}")
    if re.fullmatch(r"[1-9][0-9]*\.\.[1-9][0-9]*", text):
        value, last = numbers
        found = []
        while value < last:
            found.append(value)
            value *= 2
        if value == last or found:
            return [*found, last]
    elif re.fullmatch(r"[1-9][0-9]*(,[1-9][0-9]*)*", text):
        return numbers
    raise ValueError(f"{text!r} is no range: write 1..1024 (doubled from one to the other) or 4,8,16")


def simulated(requests: Sequence[Request], names: Sequence[str]) -> list[Point]:
    """Each request by each strategy; ValueError before the first if one does not fit."""
    trainings = [request.training() for request in requests]
    progress = Console(stderr=True)
    pairs = list(product(trainings, names))
    watched = len(pairs) > 1 and progress.is_terminal
    shown = track(pairs, "simulating", console=progress, transient=True) if watched else pairs
    results = iter([simulate_strategy(training, name) for training, name in shown])
    return [Point(*where, list(islice(results, len(names)))) for where in zip(requests, trainings, strict=True)]


def summary_of(point: Point) -> str:
    """Return model, batch and cluster in a line."""
    training = point.training
    ranks = training.topology.world_size
    where = f"{_count(len(set(training.topology.hosts)), 'host')}, {_count(ranks, 'rank')}"
    late = slowest(ranks, training.spread) - 1
    return (
        f"{training.recording.name} on {where}: {units.duration(training.recording.seconds)} of computation, "
        f"{units.size(training.recording.nbytes)} of gradients"
        + (f"; the slowest rank needs {late:.1%} more than the mean" if late else "")
        + (f"; MULTIRING_WIRE={point.request.wire} for multiring and outer alone" if training.wire else "")
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def answer_of(point: Point, key: str) -> str:
    """A sentence that says how efficient the best and the worst strategy are at a point of a sweep of ``key``."""
    hosts = len(set(point.training.topology.hosts))
    where = f"on {units.count(hosts, 'host')}" if key == "hosts" else f"at {key} {getattr(point.request, key)}"
    results = {result.strategy: result for result in point.results}
    return best_and_worst(where, {name: r.efficiency if r.seconds is not None else None for name, r in results.items()})


def approximation_of(points: Sequence[Point]) -> str:
    """A line that names the strategies whose results are approximate; empty if none is."""
    names = dict.fromkeys(result.strategy for point in points for result in point.results if result.approximate)
    if not names:
        return ""
    return (
        f"approximate: {', '.join(names)}; ranks differ and send too many messages to be simulated one by one, "
        "so all take each step together"
    )


def gaps_of(points: Sequence[Point], key: str) -> list[str]:
    """Return a line for each strategy without a result: the points of the sweep, and the reason at the first."""
    lines = []
    for results in zip(*(point.results for point in points), strict=True):
        gaps = [(p.request, r) for p, r in zip(points, results, strict=True) if r.seconds is None]
        if gaps:
            where = ", ".join(str(getattr(request, key)) for request, _ in gaps)
            lines.append(f"no {gaps[0][1].strategy} at {key} {where}: {gaps[0][1].note}")
    return lines


def exposed_of(result: Result) -> str:
    """Its exposed communication, in a cell of a table."""
    return "-" if result.exposed is None else units.precise_duration(result.exposed)


CELLS = ("step", "exposed", "efficiency", "busiest link")
"""The headings of what `cells_of` gives."""


def cells_of(result: Result) -> tuple[str, str, str, str]:
    """A strategy's result in the cells of a table; all are empty where it has none."""
    if result.seconds is None:
        return "", "", "", ""
    busiest = result.busiest
    link = f"{busiest.link}, {busiest.seconds / result.seconds:.0%} busy" if busiest else ""
    return units.precise_duration(result.seconds), exposed_of(result), f"{result.efficiency:.1%}", link


def asynchrony_of(points: Sequence[Point]) -> str:
    """Return a line on the step of a strategy whose ranks do not wait for each other; "" if there is none."""
    names = [r.strategy for r in points[0].results if r.strategy in ASYNCHRONOUS and r.seconds is not None]
    if not names:
        return ""
    return (
        f"asynchronous: {', '.join(names)}; a step is the mean cycle of one worker, computation and exchange, "
        "and nothing is exposed, as nobody waits for the others"
    )


def curves_of(points: Sequence[Point], names: Sequence[str]) -> dict[str, list[float | None]]:
    """The efficiency at each point, by strategy; None where a strategy has no result."""
    return {
        name: [p.results[i].efficiency if p.results[i].seconds is not None else None for p in points]
        for i, name in enumerate(names)
    }
