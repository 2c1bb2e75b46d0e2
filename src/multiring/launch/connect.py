"""Connections from the launcher to its agents: a fork of itself here, ssh elsewhere."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, TypeVar

import multiring
from multiring.launch import LaunchError
from multiring.launch.agent import Agent
from multiring.launch.messages import LIMIT, Message, decode, encode
from multiring.launch.processes import describe_exit

_T = TypeVar("_T")

SSH = ("ssh", "-oBatchMode=yes", "-oConnectTimeout=10", "-oServerAliveInterval=15")
"""No password can be asked for; a host that vanishes is noticed."""

ANSWER_SECONDS = 30.0
END_SECONDS = 10.0
STDERR_LINES = 10


class Connection:
    """An agent as the launcher sees it: messages both ways, and why it is gone when it is."""

    def __init__(
        self,
        host: str,
        kind: str,
        streams: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        why: Callable[[], Awaitable[str]],
        end: Callable[[], Awaitable[None]],
    ) -> None:
        """``kind`` is fork, ssh or socket; ``why`` says how the agent ended, ``end`` waits for that or causes it."""
        self.host = host
        self.kind = kind
        self._reader, self._writer = streams
        self.why = why
        self._end = end

    @property
    def gone(self) -> bool:
        return self._reader.at_eof()

    def send(self, kind: str, **fields: Any) -> None:
        if not self._writer.is_closing():
            self._writer.write(encode(kind, **fields))

    async def receive(self) -> Message | None:
        """The next message; None when the agent is gone."""
        try:
            while line := await self._reader.readline():
                message = decode(line)
                if message is not None:  # a shell may print something before the agent starts
                    return message
        except ConnectionError:
            pass
        return None

    async def expect(self, kind: str, seconds: float = ANSWER_SECONDS) -> Message:
        """The next message, which must be of ``kind``; LaunchError if the agent answers otherwise, or not at all."""
        try:
            message = await asyncio.wait_for(self.receive(), seconds)
        except asyncio.TimeoutError:
            raise LaunchError(f"host {self.host}: no answer within {seconds:g} s") from None
        if message is None:
            raise LaunchError(f"host {self.host}: {await self.why()}")
        if message["kind"] == "error":
            raise LaunchError(f"host {self.host}: {message['text']}")
        if message["kind"] != kind:
            raise LaunchError(f"host {self.host}: {kind!r} was expected and {message['kind']!r} came")
        return message

    async def greet(self) -> Message:
        """The agent's hello; LaunchError if it is another version's."""
        hello = await self.expect("hello")
        if hello["version"] != multiring.__version__:
            raise LaunchError(
                f"host {self.host} has multiring {hello['version']}, this one {multiring.__version__}: install the "
                f"same everywhere"
            )
        return hello

    async def close(self) -> None:
        """Let the agent end, and wait for it."""
        self._writer.close()
        await self._end()


def fork_agent() -> tuple[int, int, int]:
    """Start an agent on this host; its process, and the descriptors to read it and to write to it.

    To be called before this process has any thread.
    """
    agents_input, to_agent = os.pipe()
    from_agent, agents_output = os.pipe()
    process = os.fork()
    if process == 0:
        code = 1
        try:
            os.setpgid(0, 0)  # the terminal's Ctrl-C is for the launcher, which decides
            os.close(to_agent)
            os.close(from_agent)
            Agent(agents_input, agents_output, at_terminal=True).serve()
            code = 0
        except Exception:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(code)
    os.close(agents_input)
    os.close(agents_output)
    return process, from_agent, to_agent


async def connect_fork(host: str, process: int, from_agent: int, to_agent: int) -> Connection:
    """The connection to what `fork_agent` returned."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(LIMIT)
    protocol = asyncio.StreamReaderProtocol(reader)
    await loop.connect_read_pipe(lambda: protocol, os.fdopen(from_agent, "rb", 0))
    transport, _ = await loop.connect_write_pipe(
        lambda: asyncio.streams.FlowControlMixin(loop), os.fdopen(to_agent, "wb", 0)
    )
    writer = asyncio.StreamWriter(transport, protocol, reader, loop)
    status: list[int] = []

    async def wait() -> None:
        for _ in range(int(END_SECONDS / 0.01)):
            if not status:
                pid, code = os.waitpid(process, os.WNOHANG)
                if pid:
                    status.append(os.waitstatus_to_exitcode(code))
            if status:
                return
            await asyncio.sleep(0.01)
        os.kill(process, signal.SIGKILL)

    async def why() -> str:
        await wait()
        return f"its agent has ended: {describe_exit(status[0])}" if status else "its agent does not answer"

    return Connection(host, "fork", (reader, writer), why, wait)


async def connect_ssh(host: str, command: Sequence[str], python: str) -> Connection:
    """An agent on ``host``, started by ``command host python -m multiring.launch.agent``."""
    words = [*command, host, shlex.quote(python), "-m", "multiring.launch.agent"]
    try:
        process = await asyncio.create_subprocess_exec(
            *words,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=LIMIT,
            start_new_session=True,  # out of reach of the terminal's Ctrl-C, which is for the launcher
        )
    except OSError as error:
        raise LaunchError(f"cannot execute {command[0]!r} for host {host}: {error.strerror}") from None
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    said: deque[str] = deque(maxlen=STDERR_LINES)
    listening = asyncio.create_task(_collect(process.stderr, said))

    async def wait() -> None:
        try:
            await asyncio.wait_for(process.wait(), END_SECONDS)
        except asyncio.TimeoutError:
            process.kill()
            await process.wait()
        await asyncio.wait({listening}, timeout=1.0)

    async def why() -> str:
        await wait()
        code = process.returncode
        assert code is not None
        remedy = f"try by hand: {command[0]} {host} true"
        if code == 127:
            remedy = f"is there {python} on it? Another is given by --python"
        elif any("No module named" in line for line in said):
            remedy = f"install multiring {multiring.__version__} for {python} on it"
        lines = "".join(f"\n    {line}" for line in said)
        return f"{command[0]} has ended: {describe_exit(code)}; {remedy}{lines}"

    return Connection(host, "ssh", (process.stdout, process.stdin), why, wait)


async def _collect(stream: asyncio.StreamReader, lines: deque[str]) -> None:
    while line := await stream.readline():
        lines.append(line.decode(errors="replace").rstrip())


async def gather(awaitables: Iterable[Awaitable[_T]]) -> list[_T]:
    """All results; if any fails for a reason that can be told, LaunchError with all such reasons."""
    results = await asyncio.gather(*awaitables, return_exceptions=True)
    reasons = []
    for result in results:
        if isinstance(result, LaunchError):
            reasons.append(str(result))
        elif isinstance(result, BaseException):
            raise result
    if reasons:
        raise LaunchError("\n".join(reasons))
    return [result for result in results if not isinstance(result, BaseException)]
