"""``multiring bench``: all-reduce beside its peers, in alternated launches of one run."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track

from multiring.bench import DEFAULT_SIZES, parse_sizes, report
from multiring.bench.contestants import PEERS, Api
from multiring.bench.measure import Figure


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
    figures = _alternate(["multiring", *named], ranks, launches, options)
    rows = report.summarise(figures.pop("multiring"), figures, ranks)
    title = f"all_reduce, {ranks} ranks on one host, float32, through {api.value}, median of {launches} launches"
    Console().print(report.table(rows, title))
    if json_file:
        command = shlex.join(["multiring", *sys.argv[1:]])
        record = {"command": command, **report.conditions(), "rows": [asdict(row) for row in rows]}
        json_file.write_text(json.dumps(record, indent=1) + "\n")


def _alternate(libraries: Sequence[str], ranks: int, launches: int, options: list[str]) -> dict[str, report.Launches]:
    """The figures of each library's launches; they take turns, so that each meets the same moods of the machine."""
    figures: dict[str, list[list[Figure]]] = {library: [] for library in libraries}
    for _ in track(range(launches), "launches", console=Console(stderr=True), transient=True):
        for library, done in figures.items():
            done.append(_launch(ranks, ["--library", library, *options]))
    return dict(figures)


def _launch(ranks: int, options: list[str]) -> list[Figure]:
    """One launch, by the same launcher whatever the library, so that all are bound to the same cores."""
    with tempfile.TemporaryDirectory() as directory:
        result = Path(directory, "figures.json")
        command = [sys.executable, "-m", "multiring", "run", "-n", str(ranks), "-m", "multiring.bench"]
        code = subprocess.run([*command, *options, "--json", result]).returncode
        if code != 0:
            raise typer.Exit(code)  # the launcher has said why
        return [Figure(**figure) for figure in json.loads(result.read_text())]
