"""``multiring report``: one page about a cluster, what training on it would take, and how it is planned."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from multiring import units
from multiring.cli.errors import one_line_errors
from multiring.cli.options import check_kept, output_file, wire_of_environment
from multiring.cli.scenario import (
    CELLS,
    Batch,
    Cluster,
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
    chosen,
    curves_of,
    exposed_of,
    simulated,
    summary_of,
    sweep_option,
    swept,
)
from multiring.files import write_text
from multiring.launch import summary
from multiring.pages import page
from multiring.pages.pictures import percent
from multiring.planning import planner
from multiring.planning.choice import Table
from multiring.runtime.trace import slow_spans
from multiring.simulate.compare import Result
from multiring.simulate.recording import buckets
from multiring.simulate.training import BUCKET_BYTES


def register(app: typer.Typer) -> None:
    app.command("report")(write)


def write(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(parser=output_file, metavar="FILE.html", help="Where to write the page.")],
    machine: Cluster = None,
    hosts: Hosts = 16,
    topology: TopologyFile = None,
    model: Model = "resnet50",
    batch: Batch = 32,
    speed: Speed = None,
    job: Job = None,
    strategy: Strategies = "all",
    timeline: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also tell which ranks were slow in a job, and why: its MULTIRING_TRACE."),
    ] = None,
    sweep: Annotated[str | None, sweep_option("Also draw efficiency over hosts or batch.")] = None,
) -> None:
    """Simulate training on a cluster and write one page about it, to be opened in a browser.

    The page of a job that runs is written by the job itself: multiring.report("job.html") on all ranks.
    """
    with one_line_errors("report"):
        check_given(context)
        check_kept({"FILE.html": file}, {"--topology": topology, "--job": job, "--timeline": timeline})
        wire = wire_of_environment()
        request = Request(machine, topology, hosts, model, job, batch, speed, "float32", True, None, wire)
        names = chosen(strategy)
        slow = [] if timeline is None else _slow(timeline)
        point, *points = simulated([request, *(swept(request, sweep) if sweep else ())], names)
        write_text(file, _page(point, points, names, (sweep or "").partition("=")[0], slow))
        typer.echo(f"{file}: {units.size(file.stat().st_size)}")


def _slow(timeline: Path) -> list[str]:
    """Return in words what a timeline says of slow ranks."""
    lines = summary.slow_spans(slow_spans(timeline))
    return [f"In {timeline.name}, {line}." for line in lines or ["no rank kept the others waiting"]]


def _page(point: Point, points: list[Point], names: list[str], key: str, slow: list[str]) -> str:
    training = point.training
    nbytes = max(bucket.nbytes for bucket in buckets(training.recording, BUCKET_BYTES))
    choice = planner.choose(training.topology, "all_reduce", nbytes, wire=training.wire, speeds=training.speeds)
    curve = ""
    if points:
        values = [getattr(each.request, key) for each in points]
        curve = page.curves(answer_of(points[-1], key), key, values, curves_of(points, names))
    where = point.request.machine or Path(point.request.topology or "").stem
    about = [summary_of(point), f"The plan below is that of the largest bucket of gradients, {units.size(nbytes)}."]
    for line in filter(None, (asynchrony_of([point]), approximation_of([point, *points]))):
        about.append(f"{line[0].upper()}{line[1:]}.")
    about += slow
    title = f"{training.recording.name} on {where}"
    bars = [page.Bar(result.strategy, result.exposed, _said(result)) for result in point.results]
    answer = answer_of(point, "hosts")
    return page.of_simulation(title, answer, training.topology, choice, bars, _results(point), curve, about)


def _said(result: Result) -> str:
    """Return the text at the end of a strategy's bar."""
    if result.seconds is None:
        return ""
    return f"{exposed_of(result)} of {units.precise_duration(result.seconds)}, efficiency {percent(result.efficiency)}"


def _results(point: Point) -> Table:
    rows = []
    for result in point.results:
        *cells, link = cells_of(result)
        rows.append((result.strategy, *cells, link or result.note))
    return Table("a training step by each strategy", ("strategy", *CELLS), tuple(rows))
