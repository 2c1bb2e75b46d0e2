"""The acceptor: where a rank is found for as long as it is in the job, whatever the generation.

It proves whoever connects. A connection of the present generation goes to the links. A rank that looks for survivors is
told which generation this one knows, and whether it looks for survivors too; when it answers, it waits here until this
rank does.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from multiring.net import auth, framing
from multiring.net.channel import ProvenChannel
from multiring.net.closing import closed_on_error
from multiring.net.dial import Address
from multiring.net.framing import Message
from multiring.net.listen import Listener
from multiring.net.loop import LoopThread, within
from multiring.net.membership import Membership

BEAT_SECONDS = 1.0
MAX_MESSAGE = 1 << 26


class RankConnection:
    """Messages between two ranks. Each sends signs of life, so that one that falls silent is known to be lost.

    All of it runs in the acceptor's loop; ConnectionError says that the other side is gone, or silent for ``patience``
    seconds. What came before is received all the same, whatever has become of what is sent: streams of asyncio forget
    it when they cannot write.
    """

    def __init__(self, channel: ProvenChannel, patience: float) -> None:
        """Takes the proven, non-blocking connection over."""
        self._channel = channel
        self._patience = patience
        self._sending = asyncio.Lock()
        self._beats = asyncio.create_task(self._beat())
        self._parting: asyncio.Task[None] | None = None

    async def _beat(self) -> None:
        with contextlib.suppress(ConnectionError):
            while True:
                await asyncio.sleep(min(BEAT_SECONDS, self._patience / 5))
                await self._write(framing.SIGN_OF_LIFE)

    async def _write(self, content: bytes) -> None:
        async with self._sending:
            try:
                await self._channel.send_async(content)
            except OSError as error:
                raise _as_connection_error(error) from None

    async def send(self, message: Message) -> None:
        await self._write(framing.pack(message))

    async def receive(self) -> Message:
        """The next message. After an error or a cancellation the caller has to close the connection."""
        try:
            return await framing.receive_async(self._read, MAX_MESSAGE)
        except asyncio.TimeoutError:
            raise ConnectionError(f"silent for {self._patience:g} s") from None
        except OSError as error:
            raise _as_connection_error(error) from None

    async def _read(self, size: int) -> bytes:
        return await within(self._patience, self._channel.receive_async(size))

    def close(self) -> None:
        """Close the connection; data that were sent still arrive. May be called twice."""
        self._beats.cancel()
        if self._parting is None:
            self._parting = asyncio.create_task(self._part())

    async def _part(self) -> None:
        """Wait for the other side's end: the kernel resets a connection that is closed before all was read from it, and
        the last that was sent may go with it."""
        loop, sock = asyncio.get_running_loop(), self._channel.sock

        async def hear_out() -> None:
            while await loop.sock_recv(sock, 1 << 16):
                pass

        try:
            with contextlib.suppress(OSError, asyncio.TimeoutError):
                sock.shutdown(socket.SHUT_WR)
                await within(self._patience, hear_out())
        finally:
            self._channel.close()


def _as_connection_error(error: OSError) -> ConnectionError:
    """The same, as a connection can end by time-outs and missing routes too."""
    return error if isinstance(error, ConnectionError) else ConnectionError(str(error))


class Acceptor:
    """Accepts connections to this rank, and knows how to find the acceptors of the others."""

    def __init__(
        self,
        listening: Sequence[socket.socket],
        secret: bytes,
        hello: auth.Hello,
        membership: Membership,
        addresses: Mapping[int, Sequence[Address]],
        own: Sequence[Address],
        patience: float,
    ) -> None:
        """``hello`` as this rank says it now; ``membership`` is that of its generation, and ``addresses[r]`` are
        those of the acceptor of the one that was rank r at the job's start; ``own`` are those that this rank told all
        of. After ``patience`` seconds of silence another rank counts as lost."""
        self.secret = secret
        self.rank = membership.members[hello.rank]
        """The rank that it had at the job's start."""
        self.hello = hello
        self.addresses = addresses
        self.own = own
        self.patience = patience
        self.membership = membership
        self.arrived: asyncio.Queue[tuple[RankConnection, Message]] = asyncio.Queue()
        """Ranks that look for survivors, each with its first message."""
        self.shrinking = False
        """True if this rank looks for survivors."""
        self._waiting: set[RankConnection] = set()
        self._serve: Callable[[ProvenChannel], Awaitable[None]] | None = None
        self._served = asyncio.Event()
        self._serving: set[asyncio.Task[Any]] = set()
        self.loop = LoopThread("multiring-acceptor")
        self._listener = Listener(
            self.loop,
            listening,
            lambda: auth.server(secret, self.hello, (auth.DATA, auth.CONTROL, auth.PROBE, auth.SURVIVOR)),
            self._handle,
            f"rank {hello.rank}",
        )

    def open(self, serve: Callable[[ProvenChannel], Awaitable[None]]) -> None:
        """Hand on the connections of the present generation, those that wait for it included."""
        self.loop.run(self._open(serve))

    async def _open(self, serve: Callable[[ProvenChannel], Awaitable[None]]) -> None:
        self._serve = serve
        self._served.set()

    async def shut(self) -> None:
        """Hand on nothing more, and end what still negotiates."""
        self._serve = None
        self._served.clear()
        ending = set(self._serving)
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)

    async def announce(self, membership: Membership) -> None:
        """This rank knows of a later generation now, and tells those that wait here."""
        self.membership = membership
        await self._tell()

    async def look_for_survivors(self, looking: bool) -> None:
        """This rank looks for survivors from now on, or no longer, and tells those that wait here."""
        self.shrinking = looking
        await self._tell()

    async def _tell(self) -> None:
        for connection in set(self._waiting):
            with contextlib.suppress(ConnectionError):
                await connection.send(self._news())

    def take(self, connection: RankConnection) -> None:
        """A rank that has arrived is attended to now."""
        self._waiting.discard(connection)

    def close(self) -> None:
        """Stop accepting connections, and close those that wait. May be called twice."""
        if not self.loop.closed:
            self._listener.close()
            self.loop.run(self._end())
            self.loop.close()

    async def _end(self) -> None:
        for connection in self._waiting:
            connection.close()
        await asyncio.sleep(0)  # a task that is cancelled before it has begun closes nothing

    async def _handle(self, channel: ProvenChannel) -> None:
        if channel.hello.role == auth.SURVIVOR:
            await self._greet(channel)
            return
        with closed_on_error(channel):
            await self._served.wait()  # ranks of one generation are not ready for each other at the same moment
            if self._serve is None or channel.hello.generation != self.hello.generation:
                channel.close()
                return
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        try:
            await self._serve(channel)
        finally:
            self._serving.discard(task)

    async def _greet(self, channel: ProvenChannel) -> None:
        connection = RankConnection(channel, self.patience)
        self._waiting.add(connection)
        try:
            await connection.send(self._news())
            self.arrived.put_nowait((connection, await connection.receive()))
        except BaseException as error:
            self._waiting.discard(connection)
            connection.close()
            if not isinstance(error, ConnectionError):
                raise

    def _news(self) -> Message:
        return {"kind": "news", "rank": self.rank, "shrinking": self.shrinking, **self.membership.encode()}
