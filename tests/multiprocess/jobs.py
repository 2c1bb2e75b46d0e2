"""Runs a function in real processes, one a rank, with the environment that `multiring run` makes.

The function stands in a module that needs nothing of pytest; what it returns comes back as JSON.
"""

from __future__ import annotations

import inspect
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fork_server

from multiring.job.store import Server

SECRET = b"the secret of a test's job"
SOURCE = Path(__file__).parents[2] / "src"

Process = subprocess.Popen[str] | fork_server.Forked

CALL = """
import json, sys
import {module}
result = {module}.{function}(*json.loads(sys.argv[1]))
sys.stdout.write("\\nresult " + json.dumps(result) + "\\n")
"""


@dataclass
class Outcome:
    """A rank's exit code (negative: a signal), its output and error, and the value of its function."""

    code: int
    output: str
    error: str
    job: list[Outcome] = field(repr=False, compare=False)
    """The outcomes of all processes: why one failed may stand in what another wrote."""

    @property
    def value(self) -> Any:
        """The function's value; AssertionError with the output of all if it did not return."""
        _, found, value = self.output.rpartition("\nresult ")
        assert found, "\n".join(f"exit code {each.code}\n{each.output}\n{each.error}" for each in [self, *self.job])
        return json.loads(value)


class Job:
    """The processes of a job, first those of its ranks; `wait` ends it."""

    def __init__(self, server: Server, size: int, spawn: Callable[[int, Mapping[str, str]], Process]):
        self._server = server
        self._spawn = spawn
        self.processes = [spawn(rank, {}) for rank in range(size)]
        self._replacements = 0

    def replace(self, rank: int, **environment: str) -> int:
        """Start a rank again, as the launcher does; the index of its process."""
        self._replacements += 1
        number = {"MULTIRING_REPLACEMENT": str(self._replacements)}
        self.processes.append(self._spawn(rank, {**number, **environment}))
        return len(self.processes) - 1

    @property
    def applied(self) -> int:
        """Number of processes that have asked to be admitted."""
        return int(self._server.peek("multiring/test/0/queue/join_ids") or 0)

    @property
    def store_port(self) -> int:
        """Port at which the job's store listens."""
        return self._server.port

    def line(self, rank: int) -> str:
        """The next line that a rank writes, such as a sign that it got somewhere."""
        stream = self.processes[rank].stdout
        assert stream is not None
        return stream.readline().strip()

    def signal(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to a rank."""
        self.processes[rank].send_signal(number)

    def wait(self, timeout: float = 60) -> list[Outcome]:
        """Wait for all ranks; after ``timeout`` seconds those that still run are killed, and it is an error."""
        deadline = time.monotonic() + timeout
        outcomes: list[Outcome] = []
        told, is_late = [], False
        for rank, process in enumerate(self.processes):
            try:
                output, error = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
                ended = f"ended with exit code {process.returncode}"
            except subprocess.TimeoutExpired:
                process.kill()
                output, error = process.communicate()
                ended, is_late = f"did not end within {timeout:g} s", True
            told.append(f"rank {rank} {ended}\n{output}\n{error}")
            outcomes.append(Outcome(process.returncode, output, error, outcomes))
        self._server.close()
        assert not is_late, "\n".join(told)
        return outcomes


def start(
    function: Callable[..., Any],
    size: int,
    *arguments: Any,
    hosts: Sequence[str] | None = None,
    environment: Mapping[str, str] | None = None,
    fresh: bool = False,
) -> Job:
    """Start ``size`` ranks of a function; ``hosts[r]`` is the MULTIRING_HOST of rank r.

    Ranks with different hosts reach each other by TCP, as they would on different machines. They are forked from a
    process that has imported multiring; ``fresh`` ones have an interpreter and imports of their own, for what the
    difference could change: measured memory, imports where something has run out.
    """
    server = Server(SECRET, job="test", bind=["127.0.0.1"])
    module = Path(inspect.getfile(function))

    def spawn(rank: int, own: Mapping[str, str]) -> Process:
        reading, writing = os.pipe()
        os.write(writing, SECRET)
        os.close(writing)
        job = {
            "PYTHONPATH": os.pathsep.join([str(module.parent), str(SOURCE), os.environ.get("PYTHONPATH", "")]),
            "PYTHONUNBUFFERED": "1",
            "PYTHONWARNINGS": "error",
            "OMP_NUM_THREADS": "1",
            "MULTIRING_RANK": str(rank),
            "MULTIRING_WORLD_SIZE": str(size),
            "MULTIRING_STORE": ",".join(server.addresses),
            "MULTIRING_SECRET_FD": str(reading),
            "MULTIRING_JOB": "test",
            "MULTIRING_INIT_TIMEOUT": "30",
            "MULTIRING_TIMEOUT": "30",
        }
        if hosts:
            job["MULTIRING_HOST"] = hosts[rank]
        call = CALL.format(module=module.stem, function=function.__name__)
        whole = {**os.environ, **job, **(environment or {}), **own}
        words = json.dumps(arguments)
        try:
            if not fresh:
                return fork_server.start(call, words, environment=whole, pass_fds=[reading], seat=rank)
            return subprocess.Popen(
                [sys.executable, "-c", call, words],
                env=whole,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                pass_fds=[reading],
            )
        finally:
            os.close(reading)

    return Job(server, size, spawn)


def run(function: Callable[..., Any], size: int, *arguments: Any, timeout: float = 90, **options: Any) -> list[Any]:
    """Return the function's value on each rank; AssertionError with the ranks' output unless all ended well."""
    outcomes = start(function, size, *arguments, **options).wait(timeout)
    failed = [f"rank {rank}: {o.code}\n{o.output}\n{o.error}" for rank, o in enumerate(outcomes) if o.code != 0]
    assert not failed, "\n".join(failed)
    return [outcome.value for outcome in outcomes]
