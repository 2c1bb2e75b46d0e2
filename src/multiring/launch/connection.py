"""The launcher's view of an agent: messages both ways, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import IO, Any, TypeVar

from multiring.launch import LaunchError
from multiring.launch.messages import LIMIT, Message, decode, encode
from multiring.net.loop import within
from multiring.version import __version__

_T = TypeVar("_T")

ANSWER_SECONDS = 30.0
END_SECONDS = 10.0
HEARD_BYTES = 2000
"""Most bytes that are kept of what an agent prints before its first message; an error shows them if none comes."""

TELLING_SECONDS = 5.0
"""Seconds for which a host may be silent after its ranks are lost to the others, which tell of that meanwhile."""

KILL_SECONDS = 1.0
HEARD_SECONDS = 0.1


def host_patience(heartbeat_timeout: float) -> float:
    """Seconds for which a host may be silent, where a rank may be so for ``heartbeat_timeout``."""
    return heartbeat_timeout + TELLING_SECONDS


class _HeardOut(asyncio.StreamReaderProtocol):
    """A connection that is lost ends what can be read, and nothing that has come before is forgotten."""

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(None)


@dataclass(frozen=True)
class AgentStreams:
    """Both directions of a connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    inward: asyncio.BaseTransport

    @classmethod
    async def of_pipes(cls, inward: IO[bytes], outward: IO[bytes]) -> AgentStreams:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(LIMIT)
        protocol = asyncio.StreamReaderProtocol(reader)
        from_agent, _ = await loop.connect_read_pipe(lambda: protocol, inward)
        to_agent, _ = await loop.connect_write_pipe(lambda: asyncio.streams.FlowControlMixin(loop), outward)
        return cls(reader, asyncio.StreamWriter(to_agent, protocol, reader, loop), from_agent)

    @classmethod
    async def of_socket(cls, sock: socket.socket) -> AgentStreams:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(LIMIT)
        transport, protocol = await loop.create_connection(lambda: _HeardOut(reader), sock=sock)
        return cls(reader, asyncio.StreamWriter(transport, protocol, reader, loop), transport)


class AgentConnection(ABC):
    """An agent as the launcher sees it."""

    def __init__(self, host: str, streams: AgentStreams) -> None:
        self.host = host
        self.machine = ""
        """Text that tells its machine from others; known once it was greeted."""
        self.process: tuple[int, int] | None = None
        """Its process there and when that began, which together no other one has; known once it was greeted."""
        self.streams = streams
        self.child: int | None = None
        """The process that leads to it, where that is a child of this one."""
        self._greeted = False
        self._heard = b""
        """Bytes that came and are no message, such as the lines that a shell prints at a login."""

    @abstractmethod
    async def why(self) -> str:
        """Return how the agent ended, once it is gone."""

    @abstractmethod
    async def end(self, seconds: float) -> None:
        """Wait for the end of the agent, but kill it after ``seconds``."""

    @property
    def gone(self) -> bool:
        return self.streams.reader.at_eof()

    def send(self, kind: str, **fields: Any) -> None:
        """Send a message, unless the agent is gone."""
        if not self.streams.writer.is_closing():
            self.streams.writer.write(encode(kind, **fields))

    async def receive(self) -> Message | None:
        """The next message; None when the agent is gone."""
        with contextlib.suppress(ConnectionError):
            while line := await self.streams.reader.readline():
                message = decode(line)
                if message is not None:
                    return message
                self._heard = (self._heard + line)[-HEARD_BYTES:]
        return None

    async def expect(self, kind: str, seconds: float = ANSWER_SECONDS) -> Message:
        """The next message, which must be of ``kind``; LaunchError if the agent answers otherwise, or not at all."""
        try:
            message = await within(seconds, self.receive())
        except asyncio.TimeoutError:
            with contextlib.suppress(asyncio.TimeoutError, ConnectionError):  # a line that was not ended
                self._heard += await within(HEARD_SECONDS, self.streams.reader.read(HEARD_BYTES))
            raise LaunchError(f"host {self.host}: no answer within {seconds:g} s{self._noise()}") from None
        if message is None:
            raise LaunchError(f"host {self.host}: {await self.why()}{self._noise()}")
        if message["kind"] == "error":
            raise LaunchError(f"host {self.host}: {message['text']}")
        if message["kind"] != kind:
            raise LaunchError(f"host {self.host}: {kind!r} was expected and {message['kind']!r} came")
        return message

    def _noise(self) -> str:
        """The end of an error's text that says what came instead of the agent's first message; empty if nothing did."""
        lines = [line for line in self._heard.decode(errors="replace").splitlines() if line.strip()]
        return "" if self._greeted or not lines else "; it said:" + "".join(f"\n    {line}" for line in lines)

    async def greet(self) -> Message:
        """The agent's hello; LaunchError if it is another version's."""
        hello = await self.expect("hello")
        if hello["version"] != __version__:
            raise LaunchError(
                f"host {self.host} has multiring {hello['version']}, this one {__version__}: install the "
                f"same everywhere"
            )
        self._greeted = True
        self.machine = hello["machine"]
        pid, began = hello["process"]
        self.process = pid, began
        return hello

    async def close(self, seconds: float = END_SECONDS) -> None:
        """Let the agent end, and wait for it for ``seconds``, or not at all if it was not greeted."""
        self.streams.writer.close()
        await self.end(seconds if self._greeted else 0.0)
        self.streams.inward.close()


async def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait for ``condition``; return True if it holds within ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.01)
    return True


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
