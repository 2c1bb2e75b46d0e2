"""Running ``multiring run`` in tests, and seeing what is left of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import fork_server
import forking_launcher

REGROW = """
    import os, signal
    import numpy as np
    import multiring as mr

    mr.init(host=os.environ.get("FAKE_HOST", ""))
    if os.environ["MULTIRING_REPLACEMENT"] == "0":
        try:
            while True:
                mr.barrier()
                if os.environ["RANK"] == os.environ["TEST_VICTIM"]:
                    os.kill(os.getpid(), signal.Signals[os.environ.get("TEST_STRIKES", "SIGKILL")])
        except mr.PeerLost:
            mr.shrink()
        while mr.world_size() < int(os.environ.get("TEST_WANTED", "4")):
            mr.grow()
    x = np.arange(5) * (mr.rank() + 1)
    mr.all_reduce(x)
    print("sum", *x, "of", mr.rank(), "beside", mr.local_world_size(), "oldest", mr.oldest())
"""
"""A job of 4 ranks that loses one, and admits the one that the launcher starts in its place."""

IN_STANDBY = 'b"standby.py" in open("/proc/self/cmdline", "rb").read()'
"""Expression that is true in an interpreter held ready for forks, and in its forks."""

SSH = """#!/bin/sh
# What ssh does: it drops its own options, and hands the words after the host to a shell in another directory.
# MULTIRING_HOST keeps apart what is one machine here.
while [ "${1#-}" != "$1" ]; do shift; done
export FAKE_HOST=$1 MULTIRING_HOST=$1
shift
cd /
echo "Welcome to $FAKE_HOST"
exec sh -c "$*"
"""

COMMAND = (sys.executable, "-m", "multiring", "run")


class Launch:
    """Writes scripts into a directory of its own and launches them there.

    Launchers and the ranks that run Python are forked (`forking_launcher`). With ``fresh=True`` they have interpreters
    of their own: where their variables are looked at, or those that an interpreter reads when it starts.
    """

    def __init__(self, directory: Path, fresh: bool = False) -> None:
        self.directory = directory.resolve()
        self.fresh = fresh
        # Interpreters and what they start inherit this variable, so that what is left of a job can be found.
        self.environment = {**os.environ, "LAUNCH_TEST": str(self.directory)}

    def script(self, text: str, name: str = "script.py") -> str:
        (self.directory / name).write_text(textwrap.dedent(text))
        return name

    def run(
        self,
        *words: str,
        prefix: tuple[str, ...] = (),
        stdin: str = "",
        seconds: float = 60,
        fresh: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        """Run a job to its end; one with a command before it or with input has a fresh launcher."""
        if not (fresh or self.fresh or prefix or stdin):
            return forking_launcher.run(
                "run", *words, imports=(), environment=self.environment, directory=self.directory, timeout=seconds
            )
        return subprocess.run(
            [*prefix, *COMMAND, *words],
            cwd=self.directory,
            env=self.environment,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=seconds,
        )

    @contextmanager
    def start(self, *words: str, **environment: str) -> Iterator[fork_server.Forked | subprocess.Popen[str]]:
        """A job that runs, and whose launcher is killed in the end."""
        if self.fresh:
            with subprocess.Popen(
                [*COMMAND, *words],
                cwd=self.directory,
                env={**self.environment, **environment},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            ) as fresh:
                try:
                    yield fresh
                finally:
                    fresh.kill()
            return
        process = forking_launcher.start(
            "run",
            *words,
            imports=(),
            environment={**self.environment, **environment},
            directory=self.directory,
        )
        try:
            yield process
        finally:
            process.kill()

    def processes(self) -> list[int]:
        """The processes of all jobs launched from here that are still there."""
        mark = f"LAUNCH_TEST={self.directory}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                try:
                    environment, directory = (entry / "environ").read_bytes(), os.readlink(entry / "cwd")
                except OSError:
                    continue
                # What is forked has the variables of what it was forked from, and works where it was told to.
                if mark in environment.split(b"\0") or directory == str(self.directory):
                    found.append(int(entry.name))
        return found

    def agent_of(self, host: str) -> int:
        """The agent on a host that the stand-in for ssh led to."""
        found = []
        for pid in self.processes():
            with suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
                words, environment = (Path(f"/proc/{pid}/{name}").read_bytes() for name in ("cmdline", "environ"))
                if words.endswith(b"\0-m\0multiring.launch.agent\0") and f"FAKE_HOST={host}\0".encode() in environment:
                    found.append(pid)
        (agent,) = found
        return agent

    def kill_all(self) -> None:
        """Kill the processes that a failed test may leave behind."""
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def wait_for_file(self, name: str) -> str:
        wait_until((self.directory / name).exists, f"{name} is written")
        return (self.directory / name).read_text()


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:g} s until {what}"
        time.sleep(0.02)
