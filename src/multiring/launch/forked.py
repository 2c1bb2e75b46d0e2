"""The agent on the launcher's own host: a fork of it."""

from __future__ import annotations

import os
import signal
import sys

from multiring.errors import system_message
from multiring.launch import LaunchError
from multiring.launch.agent import Agent
from multiring.launch.connection import END_SECONDS, KILL_SECONDS, AgentConnection, AgentStreams, wait_until
from multiring.launch.processes import describe_exit


class ForkedAgent(AgentConnection):
    """An agent on this host."""

    def __init__(self, host: str, streams: AgentStreams, process: int) -> None:
        super().__init__(host, streams)
        self._process = self.child = process
        self._code: int | None = None

    @classmethod
    async def connect(cls, host: str, process: int, from_agent: int, to_agent: int) -> ForkedAgent:
        """The connection to what `fork_agent` returned."""
        return cls(host, await AgentStreams.of_pipes(open(from_agent, "rb", 0), open(to_agent, "wb", 0)), process)

    async def why(self) -> str:
        await self.end(END_SECONDS)
        return (
            "its agent cannot be killed" if self._code is None else f"its agent has ended: {describe_exit(self._code)}"
        )

    async def end(self, seconds: float) -> None:
        if not await wait_until(self._has_ended, seconds):
            os.kill(self._process, signal.SIGKILL)
            await wait_until(self._has_ended, KILL_SECONDS)

    def _has_ended(self) -> bool:
        if self._code is None:
            pid, status = os.waitpid(self._process, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code is not None


def fork_agent() -> tuple[int, int, int]:
    """Start an agent on this host; its process, and the descriptors to read it and to write to it.

    To be called before this process has any thread.
    """
    try:
        agents_input, to_agent = os.pipe()
        from_agent, agents_output = os.pipe()
        process = os.fork()
    except OSError as error:
        raise LaunchError(f"cannot start an agent on this host: {system_message(error)}") from None
    if process == 0:
        code = 1
        try:
            os.setpgid(0, 0)  # the terminal's Ctrl-C is for the launcher, which decides
            os.close(to_agent)
            os.close(from_agent)
            Agent(agents_input, agents_output, forked=True).serve()
            code = 0
        except Exception:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(code)
    os.close(agents_input)
    os.close(agents_output)
    return process, from_agent, to_agent
