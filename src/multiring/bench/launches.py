"""Launches of ours and of its peers, in turns."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from multiring.bench.peers import Command
from multiring.launch.processes import end_with

Start = Callable[[str, Sequence[str]], Command]
"""From a library and the arguments of Python to the command that runs Python so on every rank."""


@dataclass(frozen=True)
class Entry:
    """One of those that take turns: a library, and the options of ``python -m multiring.bench`` for it."""

    contestant: str
    options: Sequence[str]


def alternate(entries: Mapping[str, Entry], launches: int, start: Start) -> dict[str, list[Any]]:
    """What each entry's launches wrote; they take turns, so that each meets the same moods of the machine.

    CalledProcessError if a launch fails; it has said why.
    """
    written: dict[str, list[Any]] = {name: [] for name in entries}
    turns = [(name, entry) for _ in range(launches) for name, entry in entries.items()]
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # through what ends the launch
    for name, entry in track(turns, "launches", console=Console(stderr=True), transient=True):
        written[name].append(_launch(entry, start))
    return written


@contextmanager
def unnamed_file() -> Iterator[Path]:
    """A file that the ranks on this machine can open by its path, and that goes with this process however it ends."""
    descriptor = os.memfd_create("multiring-bench")
    try:
        yield Path(f"/proc/{os.getpid()}/fd/{descriptor}")  # launchers pass on no descriptors, and names to all ranks
    finally:
        os.close(descriptor)


def _launch(entry: Entry, start: Start) -> Any:
    end_with_us = partial(end_with, os.getpid(), signal.SIGTERM)
    with unnamed_file() as result:
        program = ["-m", "multiring.bench", "--library", entry.contestant, *entry.options, "--json", str(result)]
        command = start(entry.contestant, program)
        environment = {**os.environ, **command.environment}
        with subprocess.Popen(command.words, env=environment, preexec_fn=end_with_us) as launch:
            try:
                code = launch.wait()
            except BaseException:
                launch.terminate()  # it ends its ranks
                raise
        if code:
            raise subprocess.CalledProcessError(code, command.words)
        return json.loads(result.read_text())
