"""``multiring bench``: all-reduce beside its peers, in alternated launches of one run."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from multiring.bench import DEFAULT_SIZES, parse_sizes, report
from multiring.bench.contestants import PEERS, Api
from multiring.bench.launches import alternate


def register(app: typer.Typer) -> None:
    app.command()(bench)


def _sizes(text: str) -> str:
    try:
        parse_sizes(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r}: expected {error}") from None
    return text


def _peers(text: str) -> str:
    for name in filter(None, text.split(",")):
        if name not in PEERS:
            raise typer.BadParameter(f"{name!r} is no known peer; known: {', '.join(PEERS)}")
    return text


def bench(
    ranks: Annotated[int, typer.Option("-n", "-np", min=2, help="Number of ranks, all on this host.")] = 2,
    sizes: Annotated[str, typer.Option(callback=_sizes, help="Sizes of the buffer.")] = DEFAULT_SIZES,
    api: Annotated[
        Api | None, typer.Option(help="What multiring is called through. [default: numpy alone, torch beside peers]")
    ] = None,
    peers: Annotated[str, typer.Option(callback=_peers, help=f"What to measure beside it: {', '.join(PEERS)}.")] = "",
    launches: Annotated[int, typer.Option(min=1, help="How often each is launched, in turns.")] = 5,
    seconds: Annotated[float, typer.Option(min=0.01, help="How long to measure each size in a launch.")] = 0.5,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write figures and conditions here.")] = None,
) -> None:
    """Measure all-reduces: the median of our launches beside the best launch of each peer."""
    named = list(filter(None, peers.split(",")))
    api = api or (Api.torch if named else Api.numpy)
    options = ["--sizes", sizes, "--api", api.value, "--seconds", str(seconds)]
    # The same launcher whatever the library, so that all are bound to the same cores.
    launcher = [sys.executable, "-m", "multiring", "run", "-n", str(ranks)]
    try:
        figures = alternate(["multiring", *named], launches, lambda library, program: [*launcher, *program], options)
    except subprocess.CalledProcessError as error:
        raise typer.Exit(error.returncode) from None
    rows = report.summarise(figures.pop("multiring"), figures, ranks)
    title = f"all_reduce, {ranks} ranks on one host, float32, through {api.value}, median of {launches} launches"
    Console().print(report.table(rows, title))
    if json_file:
        command = shlex.join(["multiring", *sys.argv[1:]])
        record = {"command": command, **report.conditions(), "rows": [asdict(row) for row in rows]}
        json_file.write_text(json.dumps(record, indent=1) + "\n")
