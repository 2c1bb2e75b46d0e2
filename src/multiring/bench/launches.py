"""Launches of ours and of its peers, in turns."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import track

from multiring.bench.measure import Figure
from multiring.bench.report import Launches

Start = Callable[[str, Sequence[str]], Sequence[str]]
"""From a library and the arguments of Python to the words that run Python so on every rank."""


def alternate(libraries: Sequence[str], launches: int, start: Start, options: Sequence[str]) -> dict[str, Launches]:
    """The figures of each library's launches; they take turns, so that each meets the same moods of the machine.

    CalledProcessError if one fails; it has said why.
    """
    figures: dict[str, list[list[Figure]]] = {library: [] for library in libraries}
    for _ in track(range(launches), "launches", console=Console(stderr=True), transient=True):
        for library, done in figures.items():
            done.append(_launch(library, start, options))
    return dict(figures)


def _launch(library: str, start: Start, options: Sequence[str]) -> list[Figure]:
    with tempfile.TemporaryDirectory() as directory:
        result = Path(directory, "figures.json")
        program = ["-m", "multiring.bench", "--library", library, *options, "--json", str(result)]
        subprocess.run(start(library, program), check=True)
        return [Figure(**figure) for figure in json.loads(result.read_text())]
