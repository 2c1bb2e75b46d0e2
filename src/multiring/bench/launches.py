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
    """One of those that take turns: a library, and the options of ``python -m multiring.cli.bench_rank`` for it."""

    contestant: str
    options: Sequence[str]


@dataclass(frozen=True)
class Written:
    """Outputs of the launches of each entry that has any, and True if no launch is missing."""

    launches: dict[str, list[Any]]
    complete: bool


def alternate(entries: Mapping[str, Entry], launches: int, start: Start, about: Callable[[Any], str]) -> Written:
    """Run the launches of all entries in turns, so that each meets the same load, and return their outputs.

    A line about each launch tells how far it is, with what ``about`` says of what it wrote. Ctrl-C ends it early, and
    in the first launch is raised. CalledProcessError if a launch fails; it has said why.
    """
    written: dict[str, list[Any]] = {}
    turns = [(name, entry) for _ in range(launches) for name, entry in entries.items()]
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # through what ends the launch
    console = Console(stderr=True, markup=False, highlight=False, soft_wrap=True)
    done = 0
    with _Interrupt() as interrupt:
        for name, entry in track(turns, "launches", console=console, transient=True):
            found = _launch(entry, start, interrupt)
            if interrupt.came:
                break
            written.setdefault(name, []).append(found)
            done += 1
            console.print(f"launch {done} of {len(turns)}, {name}: {about(found)}")
    if interrupt.came:
        if not done:
            raise KeyboardInterrupt
        console.print(f"interrupted: these are the figures of {done} of {len(turns)} launches")
    return Written(written, done == len(turns))


class _Interrupt:
    """Ctrl-C ends the launch that runs, where KeyboardInterrupt could come in the midst of anything."""

    def __init__(self) -> None:
        self.came = False
        self._launch: subprocess.Popen[bytes] | None = None
        self._former = signal.getsignal(signal.SIGINT)

    def __enter__(self) -> _Interrupt:
        if self._former is not signal.SIG_IGN:  # as nohup has it
            signal.signal(signal.SIGINT, self._end)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._former)

    def reaches(self, launch: subprocess.Popen[bytes]) -> None:
        """The launch that is to be ended from now on."""
        self._launch = launch
        if self.came:
            launch.terminate()

    def _end(self, *_: object) -> None:
        self.came = True
        if self._launch is not None:
            self._launch.terminate()


@contextmanager
def unnamed_file() -> Iterator[Path]:
    """A file that the ranks on this machine can open by its path, and that goes with this process however it ends."""
    descriptor = os.memfd_create("multiring-bench")
    try:
        yield Path(f"/proc/{os.getpid()}/fd/{descriptor}")  # launchers pass on no descriptors, and names to all ranks
    finally:
        os.close(descriptor)


def _launch(entry: Entry, start: Start, interrupt: _Interrupt) -> Any:
    """Return the output of the launch; None if it was interrupted."""
    end_with_us = partial(end_with, os.getpid(), signal.SIGTERM)
    with unnamed_file() as result:
        program = [
            "-m",
            "multiring.cli.bench_rank",
            "--library",
            entry.contestant,
            *entry.options,
            "--json",
            str(result),
        ]
        command = start(entry.contestant, program)
        environment = {**os.environ, **command.environment}
        with subprocess.Popen(command.words, env=environment, preexec_fn=end_with_us) as launch:
            try:
                interrupt.reaches(launch)
                code = launch.wait()
            except BaseException:
                launch.terminate()  # it ends its ranks
                raise
        if interrupt.came:
            return None
        if code:
            raise subprocess.CalledProcessError(code, command.words)
        return json.loads(result.read_text())
