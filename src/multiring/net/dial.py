"""Dialling: connect to whichever of several addresses answers as the one that is looked for."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from multiring.env import join_address
from multiring.errors import RendezvousError
from multiring.net import auth, unix
from multiring.net.channel import ProvenChannel
from multiring.net.closing import closed_on_error
from multiring.net.loop import within

STAGGER_SECONDS = 0.05
"""Between the starts of two attempts: an address earlier in the list wins over one that is no faster to answer."""

ATTEMPT_SECONDS = 10.0

MOST_SECONDS = 1e6
"""Longest time limit that a socket is given."""

Address = tuple[str, int]
_T = TypeVar("_T")


class Unreachable(RendezvousError):
    """No address answered; ``failures`` has the reason for each."""

    def __init__(self, failures: dict[Address, Exception]) -> None:
        self.failures = failures
        super().__init__("; ".join(f"{join_address(*address)}: {_reason(e)}" for address, e in failures.items()))

    @property
    def refused(self) -> bool:
        """True if someone answered who is not the one that was looked for."""
        return any(isinstance(error, auth.Refused) for error in self.failures.values())

    @property
    def encryption_differs(self) -> auth.EncryptionDiffers | None:
        """The error about encryption, if someone answered with one."""
        return next((error for error in self.failures.values() if isinstance(error, auth.EncryptionDiffers)), None)


def _reason(error: Exception) -> str:
    if isinstance(error, asyncio.TimeoutError):
        return "no answer"
    if isinstance(error, OSError) and error.errno and error.errno > 0:  # negative ones are getaddrinfo's
        return os.strerror(error.errno)
    return str(error)


async def connect(address: Address, handshake: auth.Step, source: str = "") -> ProvenChannel:
    """A proven, non-blocking connection to one address, from the address ``source`` of this host if one is given.

    A host "\\0name" is an abstract unix socket.
    """
    if address[0].startswith("\0"):
        sock = await unix.connect_async(address[0][1:], ATTEMPT_SECONDS)
    else:
        sock = await _connect(address, source)
    with closed_on_error(sock):
        return ProvenChannel(sock, await auth.run_async(sock, handshake))


async def _connect(address: Address, source: str) -> socket.socket:
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(*address, type=socket.SOCK_STREAM)
    family, kind, protocol, _, resolved = found[0]
    sock = socket.socket(family, kind, protocol)
    with closed_on_error(sock):
        sock.setblocking(False)
        if source:
            sock.bind((source, 0))
        await within(ATTEMPT_SECONDS, loop.sock_connect(sock, resolved))
        keep_alive(sock)
    return sock


def probing_interval(seconds: float) -> int:
    """Whole seconds between two probes of a connection that is to end when none was answered for ``seconds``."""
    return max(1, min(5, int(seconds / 7)))


def keep_alive(sock: socket.socket, seconds: float | None = None) -> None:
    """Send at once, and let the connection end when the other host acknowledges nothing for ``seconds``.

    None: after half a minute if nothing is under way, and as the kernel has it for what is.
    """
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    idle, interval = (10, 5) if seconds is None else 2 * (probing_interval(seconds),)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
    if seconds is not None:  # holds for probes too, whatever their number
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * min(seconds, MOST_SECONDS)))


async def race(
    addresses: Sequence[Address],
    attempt: Callable[[Address], Awaitable[_T]],
    discard: Callable[[_T], None] = lambda _: None,
) -> _T:
    """The result of the first attempt that succeeds; the others are ended, a late result is passed to ``discard``.

    Unreachable if none succeeds.
    """
    failures: dict[Address, Exception] = {}
    waiting = list(addresses)
    running: dict[asyncio.Future[_T], Address] = {}
    try:
        while waiting or running:
            if waiting:
                address = waiting.pop(0)
                running[asyncio.ensure_future(attempt(address))] = address
            done, _ = await asyncio.wait(
                running, timeout=STAGGER_SECONDS if waiting else None, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                error = task.exception()
                if error is None:
                    del running[task]
                    return task.result()
                if not isinstance(error, (OSError, auth.Refused, asyncio.TimeoutError)):
                    raise error
                failures[running.pop(task)] = error
        raise Unreachable(failures)
    finally:
        for task in running:
            task.cancel()
        for late in await asyncio.gather(*running, return_exceptions=True):
            if not isinstance(late, BaseException):
                discard(late)


async def resolve(addresses: Sequence[Address]) -> list[Address]:
    """The addresses with names replaced by all the numeric addresses they stand for; an unknown name stays."""
    loop = asyncio.get_running_loop()
    numeric: dict[Address, None] = {}
    for host, port in addresses:
        try:
            for *_, resolved in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
                numeric[socket.getnameinfo(resolved, socket.NI_NUMERICHOST | socket.NI_NUMERICSERV)[0], port] = None
        except socket.gaierror:
            numeric[host, port] = None
    return list(numeric)
