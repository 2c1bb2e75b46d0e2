"""An agent at the other end of ssh learns here that the launcher's host is cut off or down: its sshd asks for hours."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Mapping
from typing import Any

from multiring.env import split_address
from multiring.errors import RendezvousError
from multiring.net import auth, dial
from multiring.net.channel import ProvenChannel
from multiring.net.loop import within

AGAIN_SECONDS = 3.0
"""Seconds that an attempt to connect again may take."""

PAUSE_SECONDS = 1.0


class Lifeline:
    """A connection to the job's store on which nothing is said.

    The kernel of the launcher's host answers its probes, also for a launcher that is stopped. The launcher is lost when
    no probe was answered for ``seconds``, and it has said nothing for as long by ssh, which may take another way.
    """

    def __init__(self, words: Mapping[str, Any]) -> None:
        """``words`` are those of `described`, from the launcher."""
        self.seconds: float = words["seconds"]
        self._addresses = [split_address(address) for address in words["addresses"]]
        self._secret = bytes.fromhex(words["secret"])
        self._hello = auth.Hello(auth.STORE, job=words["job"], encrypted=words["encrypted"])
        self._channel: ProvenChannel | None = None
        self._is_broken = False
        self._heard = time.monotonic()

    def hear(self) -> None:
        """Take note that the launcher has said something."""
        self._heard = time.monotonic()

    async def lose(self) -> bool:
        """Wait until the launcher is lost; False if the launcher ends the connection itself, as at the job's end.

        RendezvousError if there is no way to the store from the beginning.
        """
        self._channel = await self._reach()
        while await self._breaks(self._channel):
            self._channel = None
            while self._channel is None:
                with contextlib.suppress(RendezvousError, OSError, asyncio.TimeoutError):
                    self._channel = await within(AGAIN_SECONDS, self._reach(), ProvenChannel.close)
                    self._is_broken = False
                    continue
                if self.is_lost():
                    return True
                await asyncio.sleep(PAUSE_SECONDS)
        return False

    def is_lost(self) -> bool:
        """True if the connection is broken, and nothing was heard; asks the kernel, for who cannot wait for `lose`."""
        if self._channel is not None and not self._is_broken:
            try:
                self._channel.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            except BlockingIOError:
                pass
            except OSError:  # which is told once
                self._is_broken = True
        return self._is_broken and time.monotonic() - self._heard >= self.seconds

    async def _breaks(self, channel: ProvenChannel) -> bool:
        """Wait for the end of a connection; False if the other side has closed it."""
        with channel:
            try:
                while await asyncio.get_running_loop().sock_recv(channel.sock, 1):
                    pass
            except OSError:
                self._is_broken = True
        return self._is_broken

    async def _reach(self) -> ProvenChannel:
        numeric = await dial.resolve(self._addresses)
        channel = await dial.race(
            numeric,
            lambda address: dial.connect(address, auth.client(self._secret, self._hello)),
            ProvenChannel.close,
        )
        dial.keep_alive(channel.sock, self.seconds)
        return channel


def described(
    addresses: tuple[str, ...], secret: bytes, job: str, *, encrypted: bool, seconds: float
) -> dict[str, Any]:
    """Words that lead an agent to the store; ``seconds`` as in `connection.host_patience`."""
    return {
        "addresses": addresses,
        "secret": secret.hex(),
        "job": job,
        "encrypted": encrypted,
        "seconds": seconds,
    }
