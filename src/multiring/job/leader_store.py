"""The store in which the members of a decided generation meet: what they tell one another goes by their leader."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import time

from multiring.errors import RendezvousError
from multiring.net.acceptor import Acceptor, RankConnection
from multiring.net.loop import within


class LeaderStore:
    """A `KeyValueStore` over the connections of the agreement.

    What the leader sets reaches all; what others set reaches the leader.
    """

    def __init__(self, acceptor: Acceptor, connections: dict[int, RankConnection], completed: int) -> None:
        self.completed = completed
        """Number of collectives that all ranks have completed."""
        self._acceptor = acceptor
        self._connections = connections
        self._values: dict[str, bytes] = {}
        self._lost: RendezvousError | None = None
        self._changed = asyncio.Event()
        self._pumps = [asyncio.create_task(self._pump(rank, connection)) for rank, connection in connections.items()]

    async def _pump(self, rank: int, connection: RankConnection) -> None:
        try:
            while True:
                told = await connection.receive()
                self._values[told["key"]] = base64.b64decode(told["value"])
                self._changed.set()
        except (ConnectionError, KeyError) as error:
            before = self._acceptor.membership.members
            self._lost = RendezvousError(f"rank {before.index(rank)} of the survivors was lost: {error}")
            self._changed.set()

    def failure(self) -> BaseException | None:
        """The loss of another one, if there was one."""
        return self._lost

    def set(self, key: str, value: bytes) -> None:
        """Set ``key`` to ``value``."""
        self._acceptor.loop.run(self._set(key, value))

    async def _set(self, key: str, value: bytes) -> None:
        self._values[key] = value
        message = {"key": key, "value": base64.b64encode(value).decode()}
        with contextlib.suppress(ConnectionError):  # its pump tells
            await asyncio.gather(*(connection.send(message) for connection in self._connections.values()))

    def get(self, key: str, timeout: float) -> bytes:
        """The value of ``key``, waiting up to ``timeout`` seconds for it to be set; TimeoutError after that."""
        return self._acceptor.loop.run(self._get(key, timeout))

    async def _get(self, key: str, timeout: float) -> bytes:
        until = time.monotonic() + timeout
        while key not in self._values:
            if self._lost is not None:
                raise self._lost
            self._changed.clear()
            try:
                await within(until - time.monotonic(), self._changed.wait())
            except asyncio.TimeoutError:
                raise TimeoutError(f"{key!r} was not set within {timeout:g} s") from None
        return self._values[key]

    def close(self) -> None:
        """Part from the others."""
        self._acceptor.loop.run(self._end())

    async def _end(self) -> None:
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)
        for connection in self._connections.values():
            connection.close()
