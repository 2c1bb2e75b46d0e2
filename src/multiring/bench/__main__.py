"""``multiring run -n N -m multiring.bench``: measure one launch of multiring, or of a peer."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from multiring.bench import DEFAULT_SIZES, contestants, parse_sizes, report
from multiring.bench.measure import measure


def main(
    sizes: Annotated[str, typer.Option(help="Sizes of the buffer.")] = DEFAULT_SIZES,
    api: Annotated[contestants.Api, typer.Option(help="What multiring is called through.")] = contestants.Api.numpy,
    library: Annotated[str, typer.Option(help=f"multiring, or a peer: {', '.join(contestants.PEERS)}.")] = "multiring",
    seconds: Annotated[float, typer.Option(help="How long to measure each size.")] = 0.5,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here instead of a table.")] = None,
) -> None:
    """Measure all-reduces over the ranks of this job."""
    contestant = contestants.join(library, api)
    figures = [measure(contestant, size, kind, seconds) for size in parse_sizes(sizes) for kind in contestant.buffers]
    if contestant.rank == 0 and json_file:
        json_file.write_text(json.dumps([asdict(figure) for figure in figures]))
    elif contestant.rank == 0:
        rows = report.summarise([figures], {}, contestant.world_size)
        Console().print(report.table(rows, f"all_reduce, {contestant.world_size} ranks, {library}"))
    contestant.close()


app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
app.command()(main)
app()
