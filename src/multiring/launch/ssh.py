"""Agents on other hosts, started by ssh or by what stands for it."""

from __future__ import annotations

import asyncio
import math
import os
import shlex
import signal
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO

from multiring.launch import LaunchError
from multiring.launch.connection import END_SECONDS, AgentConnection, AgentStreams, host_patience, wait_until
from multiring.launch.processes import describe_exit
from multiring.net import dial
from multiring.version import __version__

OUT_OF_REACH = 255
"""Exit code of ssh itself where it gets to no shell of the host."""

MOST_UNANSWERED = 1_000_000
"""Largest number of unanswered questions that ssh is told to bear."""

STDERR_BYTES = 2000
STDERR_SECONDS = 0.2


def ssh_command(heartbeat_timeout: float) -> tuple[str, ...]:
    """The words of an ssh that asks for no password, and that ends after `host_patience` if its host vanishes."""
    seconds = host_patience(heartbeat_timeout)
    interval = dial.probing_interval(seconds)
    unanswered = min(math.ceil(seconds / interval) - 1, MOST_UNANSWERED)
    alive = f"-oServerAliveInterval={interval}", f"-oServerAliveCountMax={unanswered}"
    return ("ssh", "-oBatchMode=yes", "-oConnectTimeout=10", *alive)


@dataclass(frozen=True)
class SshTarget:
    """A host, the command that reaches it, and the Python to use there."""

    host: str
    ssh: Sequence[str]
    python: str


class SshAgent(AgentConnection):
    """An agent on another host, at the other end of ssh."""

    def __init__(
        self, target: SshTarget, streams: AgentStreams, process: subprocess.Popen[bytes], errors: IO[bytes]
    ) -> None:
        super().__init__(target.host, streams)
        self.target = target
        self.former: list[tuple[str, tuple[int, int]]] = []
        """Machine and process of the agents that were lost on this host before."""
        self._process = process
        self.child = process.pid
        self._errors = errors
        self._said = b""
        asyncio.get_running_loop().add_reader(errors, self._listen)

    @classmethod
    async def connect(cls, target: SshTarget, children: Callable[[int], object] = lambda _: None) -> SshAgent:
        """Start an agent by ``ssh host python -m multiring.launch.agent``; ``children`` is told of ssh's process."""
        try:
            process = subprocess.Popen(
                [*target.ssh, target.host, shlex.quote(target.python), "-m", "multiring.launch.agent"],
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # out of reach of the terminal's Ctrl-C, which is for the launcher
            )
        except OSError as error:
            raise LaunchError(f"cannot execute {target.ssh[0]!r} for host {target.host}: {error.strerror}") from None
        children(process.pid)
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        return cls(target, await AgentStreams.of_pipes(process.stdout, process.stdin), process, process.stderr)

    @property
    def is_out_of_reach(self) -> bool:
        """True if ssh has ended without getting there."""
        return self._process.returncode == OUT_OF_REACH

    def _listen(self) -> None:
        data = os.read(self._errors.fileno(), STDERR_BYTES)
        self._said = (self._said + data)[-STDERR_BYTES:]
        if not data:
            self._stop_listening()

    def _stop_listening(self) -> None:
        if not self._errors.closed:
            asyncio.get_running_loop().remove_reader(self._errors)
            self._errors.close()

    async def why(self) -> str:
        await self.end(END_SECONDS)
        ssh, python = self.target.ssh[0], self.target.python
        code = self._process.returncode
        lines = self._said.decode(errors="replace").splitlines()
        if code == 127:
            remedy = f"is there {python} on it? Another is given by --python"
        elif any("No module named" in line for line in lines):
            remedy = f"install multiring {__version__} for {python} on it"
        else:
            remedy = f"try by hand: {ssh} {self.host} true"
        return f"{ssh} has ended: {describe_exit(code)}; {remedy}" + "".join(f"\n    {line}" for line in lines)

    async def end(self, seconds: float) -> None:
        if not await wait_until(lambda: self._process.poll() is not None, seconds):
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        await wait_until(lambda: self._errors.closed, STDERR_SECONDS)
        self._stop_listening()
