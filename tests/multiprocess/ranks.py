"""Starts the ranks of a script as processes, with the environment that `multiring run` makes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from multiring.store import Server

SECRET = b"the secret of a test's job"
SOURCE = Path(__file__).parents[2] / "src"


@dataclass
class Outcome:
    """How a rank ended: its exit code (negative: a signal), and what it wrote."""

    code: int
    output: str
    error: str

    def result(self) -> Any:
        """The last line of the output, which the script printed as JSON."""
        return json.loads(self.output.splitlines()[-1])


@dataclass
class Job:
    """The processes of a job; `wait` ends it."""

    processes: list[subprocess.Popen[str]]
    server: Server
    started: float = field(default_factory=time.monotonic)

    def line(self, rank: int) -> str:
        """The next line that a rank writes, such as a sign that it got somewhere."""
        stream = self.processes[rank].stdout
        assert stream is not None
        return stream.readline().strip()

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to a rank."""
        self.processes[rank].send_signal(number)

    def wait(self, timeout: float = 60) -> list[Outcome]:
        """Wait for all ranks; those that have not ended after ``timeout`` seconds are killed and it is an error."""
        deadline = time.monotonic() + timeout
        outcomes = []
        try:
            for process in self.processes:
                output, error = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
                outcomes.append(Outcome(process.returncode, output, error))
        finally:
            for process in self.processes:
                if process.poll() is None:
                    process.kill()
                    output, error = process.communicate()
                    print(f"killed by the test; it had written:\n{output}\n{error}")
            self.server.close()
        return outcomes


def start(
    script: str,
    size: int,
    *,
    hosts: Sequence[str] | None = None,
    environment: Mapping[str, str] | None = None,
    arguments: Sequence[str] = (),
) -> Job:
    """Start ``size`` ranks of a script (its text); ``hosts[r]`` is the MULTIRING_HOST of rank r.

    Ranks with different hosts reach each other by TCP, as they would on different machines.
    """
    server = Server(SECRET, job="test", bind=["127.0.0.1"])
    processes = []
    for rank in range(size):
        reading, writing = os.pipe()
        os.write(writing, SECRET)
        os.close(writing)
        job = {
            "PYTHONPATH": os.pathsep.join([str(SOURCE), *sys.path]),
            "PYTHONWARNINGS": "error",
            "OMP_NUM_THREADS": "1",
            "MULTIRING_RANK": str(rank),
            "MULTIRING_WORLD_SIZE": str(size),
            "MULTIRING_STORE": ",".join(server.addresses),
            "MULTIRING_SECRET_FD": str(reading),
            "MULTIRING_JOB": "test",
            "MULTIRING_INIT_TIMEOUT": "30",
            "MULTIRING_TIMEOUT": "30",
            **({"MULTIRING_HOST": hosts[rank]} if hosts else {}),
        }
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", script, *arguments],
                env={**os.environ, **job, **(environment or {})},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                pass_fds=[reading],
            )
        )
        os.close(reading)
    return Job(processes, server)


def run(script: str, size: int, *, timeout: float = 60, **options: Any) -> list[Outcome]:
    """Start the ranks and wait for them; AssertionError with what they wrote unless all end well."""
    outcomes = start(script, size, **options).wait(timeout)
    failed = [f"rank {rank}: {o.code}\n{o.output}{o.error}" for rank, o in enumerate(outcomes) if o.code != 0]
    assert not failed, "\n".join(failed)
    return outcomes
