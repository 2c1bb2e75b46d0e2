"""``multiring simulate``: a training step on a cluster that need not be there, by every strategy."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from multiring.bench.curves import check as check_picture
from multiring.cli import output
from multiring.cli.curves import plot_efficiency
from multiring.cli.errors import given, leave_out, one_line_errors
from multiring.cli.options import check_kept, number, output_file, wire_of_environment
from multiring.cli.scenario import (
    CELLS,
    Batch,
    Cluster,
    Gradients,
    Hosts,
    Job,
    Model,
    Point,
    Request,
    Speed,
    Strategies,
    TopologyFile,
    answer_of,
    approximation_of,
    asynchrony_of,
    cells_of,
    check_given,
    check_sweep,
    chosen,
    curves_of,
    gaps_of,
    simulated,
    summary_of,
    sweep_option,
    swept,
)
from multiring.simulate.machines import machine


def register(app: typer.Typer) -> None:
    app.command("simulate")(simulate)


def simulate(
    context: typer.Context,
    machine: Cluster = None,
    hosts: Hosts = 16,
    topology: TopologyFile = None,
    model: Model = "resnet50",
    batch: Batch = 32,
    speed: Speed = None,
    job: Job = None,
    strategy: Strategies = "all",
    gradients: Annotated[Gradients, typer.Option(help="How gradients travel.")] = Gradients.float32,
    overlap: Annotated[bool, typer.Option(help="Whether sums begin while backward runs.")] = True,
    spread: Annotated[
        float | None,
        typer.Option(
            parser=number(0), metavar="N", help="Per cent by which speeds of equal devices differ (standard deviation)."
        ),
    ] = None,
    sweep: Annotated[str | None, sweep_option("Hosts or batch: doubled from one to another, or a list.")] = None,
    plot: Annotated[
        Path | None,
        typer.Option(parser=output_file, metavar="FILE", help="Draw the efficiency of a sweep (needs matplotlib)."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
    sources: Annotated[
        bool, typer.Option("--sources", help="Only show the machine's numbers and where they are from.")
    ] = False,
) -> None:
    """Predict a training step: time, exposed communication, scaling efficiency, busiest link."""
    console = output.console()
    with one_line_errors("simulate"):
        if sources:
            leave_out(context, given(context) - {"sources", "machine"}, "--sources simulates nothing")
            if machine is None:
                raise ValueError("--sources shows the numbers of a machine: give --machine")
            console.print(output.folded(_sources(machine)))
            return
        check_given(context)
        check_kept({"--plot": plot}, {"--topology": topology, "--job": job})
        check_sweep(context, sweep)
        wire = wire_of_environment()
        request = Request(machine, topology, hosts, model, job, batch, speed, gradients.value, overlap, spread, wire)
        requests = swept(request, sweep)
        names = chosen(strategy)
        if plot is not None and sweep is None:
            raise ValueError("--plot draws a sweep: give --sweep hosts=1..1024")
        if plot is not None:
            check_picture(plot)
        points = simulated(requests, names)
    try:
        _show(console, points, names, sweep, as_json)
    finally:  # whether or not somebody reads what is printed
        if plot is not None:
            with one_line_errors("simulate"):
                key = (sweep or "").partition("=")[0]
                values = [getattr(point.request, key) for point in points]
                last = points[-1]
                plot_efficiency(plot, key, values, curves_of(points, names), answer_of(last, key), summary_of(last))


def _show(console: Console, points: Sequence[Point], names: Sequence[str], sweep: str | None, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps([_record(point) for point in points], indent=1))
    elif sweep is None:
        console.print(summary_of(points[0]), highlight=False)
        console.print(output.folded(_table(points[0])))
    else:
        console.print(summary_of(points[-1]), highlight=False)
        key = sweep.partition("=")[0]
        console.print(output.folded(_sweep_table(points, key, names)))
        for line in gaps_of(points, key):
            typer.echo(line)
    for line in filter(None, () if as_json else (asynchrony_of(points), approximation_of(points))):
        typer.echo(line)


def _table(point: Point) -> Table:
    table = Table("strategy", box=None, pad_edge=False)
    for heading in CELLS[:-1]:
        table.add_column(heading, justify="right")
    for heading in (CELLS[-1], ""):
        table.add_column(heading)
    for result in point.results:
        table.add_row(result.strategy, *cells_of(result), result.note)
    return table


def _sweep_table(points: Sequence[Point], key: str, names: Sequence[str]) -> Table:
    table = Table(key, box=None, pad_edge=False)
    for name in names:
        table.add_column(name, justify="right")
    for point in points:
        row = [f"{r.efficiency:.1%}" if r.seconds is not None else "-" for r in point.results]
        table.add_row(str(getattr(point.request, key)), *row)
    return table


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
