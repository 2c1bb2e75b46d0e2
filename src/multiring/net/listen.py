"""Listening: bind a port, prove whoever connects, hand the proven connection on."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import time
import weakref
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from multiring.errors import ResourceError, system_message
from multiring.net import auth, unix
from multiring.net.channel import ProvenChannel
from multiring.net.closing import closed_on_error
from multiring.net.dial import keep_alive
from multiring.net.loop import LoopThread

BACKLOG = 4096
UNPROVEN = 256
"""Most connections in their handshake at once; the others wait in the backlog."""

ACCEPTED_AT_ONCE = 64
"""Before the loop does something else."""

CROWDED_SECONDS = 1.0
"""While others wait, a handshake gets so long only: strangers that say nothing hold up nobody for longer."""

LOGGED_STRANGERS = 100
"""Addresses of strangers that are logged, so that many of them fill neither the log nor the memory."""

_log = logging.getLogger("multiring")


class NoFreePort(ResourceError):
    """No port of those to choose from can be had; ``forbidden`` if the last was refused to this user."""

    def __init__(self, message: str, *, forbidden: bool) -> None:
        super().__init__(message)
        self.forbidden = forbidden


def bind(host: str, ports: range | None) -> socket.socket:
    """A non-blocking TCP socket that listens on ``host`` ("" for every address, IPv4 and IPv6), on the first free port
    of ``ports`` (any if None); NoFreePort, which is a ResourceError, if there is none."""
    forbidden = False
    for port in ports or (0,):
        try:
            return _bind(host, port)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise ResourceError(f"cannot listen on {host or 'any address'}: {error.strerror}") from error
            forbidden = error.errno == errno.EACCES
    wider = "widen MULTIRING_PORTS (a rank takes one, and a second one in grow())"
    span = f"in {ports[0]}-{ports[-1]}: {wider}" if ports else "at all: raise the system's port range"
    message = f"no free port on {host or 'any address'} {span}, or end what occupies them"
    raise NoFreePort(message, forbidden=forbidden)


def _bind(host: str, port: int) -> socket.socket:
    if host:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    else:
        family, address = (socket.AF_INET6, ("::", port)) if _has_ipv6() else (socket.AF_INET, ("0.0.0.0", port))
    sock = socket.socket(family, socket.SOCK_STREAM)
    with closed_on_error(sock):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(bool(host)))
        sock.setblocking(False)
        sock.bind(address)
        sock.listen(BACKLOG)
    return sock


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::", 0))
    except OSError:
        return False
    return True


@dataclass(frozen=True)
class _Handshake:
    task: asyncio.Task[None]
    began: float


class Listener:
    """Accepts connections in a `LoopThread`; a stranger is refused, and logged once for each address it comes from."""

    def __init__(
        self,
        loop: LoopThread,
        sockets: Sequence[socket.socket],
        handshake: Callable[[], auth.Step],
        handle: Callable[[ProvenChannel], Awaitable[None]],
        about: str,
    ) -> None:
        """``handle`` owns the proven connection; ``about`` says in the log what strangers knocked at."""
        self._loop = loop
        self._sockets = list(sockets)
        self._handshake = handshake
        self._handle = handle
        self._about = about
        self._strangers: set[str] = set()
        self._unproven: dict[socket.socket, _Handshake] = {}  # the oldest first
        self._connections: set[asyncio.Task[None]] = set()
        self._makes_room = False
        self._is_short = False  # whether descriptors are short: said once
        self._closed = False
        _open_listeners.add(self)
        loop.run(self._begin())

    async def _begin(self) -> None:
        self._watch()

    def _watch(self) -> None:
        if not self._closed:
            for listening in self._sockets:
                asyncio.get_running_loop().add_reader(listening, self._accept, listening)

    def _unwatch(self) -> None:
        for listening in self._sockets:
            asyncio.get_running_loop().remove_reader(listening)

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            if len(self._unproven) >= UNPROVEN or not self._accept_one(listening):
                return

    def _accept_one(self, listening: socket.socket) -> bool:
        """Take one from the backlog; False if that is empty, or descriptors are short."""
        address = None
        try:
            if listening.family == socket.AF_UNIX:
                sock = unix.accept(listening)
            else:
                sock, address = listening.accept()
        except auth.Refused as error:
            self._refuse("this host", str(error))
            return True
        except BlockingIOError:  # it was gone before it was accepted
            return False
        except OSError as error:
            if not self._is_short:
                _log.warning("%s cannot accept connections: %s", self._about, system_message(error))
            self._is_short = True
            self._unwatch()
            asyncio.get_running_loop().call_later(1.0, self._watch)  # descriptors may be free by then
            return False
        sock.setblocking(False)
        task = asyncio.create_task(self._serve(sock, address[0] if address else "this host"))
        self._unproven[sock] = _Handshake(task, time.monotonic())
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)
        if len(self._unproven) == UNPROVEN:
            self._unwatch()
            if not self._makes_room:
                self._makes_room = True
                asyncio.get_running_loop().call_soon(self._make_room)
        return True

    def _make_room(self) -> None:
        """While others wait, end the handshakes that take long."""
        self._makes_room = not self._closed and len(self._unproven) >= UNPROVEN
        if not self._makes_room:
            return
        for handshake in self._unproven.values():
            if time.monotonic() - handshake.began >= CROWDED_SECONDS:
                handshake.task.cancel()
        asyncio.get_running_loop().call_later(CROWDED_SECONDS / 10, self._make_room)

    async def _serve(self, sock: socket.socket, host: str) -> None:
        try:
            keep_alive(sock)
            channel = ProvenChannel(sock, await auth.run_async(sock, self._handshake()))
        except ConnectionError:  # whoever found a better address closes the others
            sock.close()
            return
        except (OSError, auth.Refused, asyncio.TimeoutError) as error:
            sock.close()
            late = isinstance(error, asyncio.TimeoutError)
            self._refuse(host, "it did not prove itself in time" if late else str(error))
            return
        except asyncio.CancelledError:
            sock.close()
            if not self._closed:
                self._refuse(host, "it did not prove itself while others waited")
            raise
        finally:
            if len(self._unproven) == UNPROVEN:
                self._watch()
            self._unproven.pop(sock, None)
        if self._closed:
            sock.close()
        else:
            await self._handle(channel)

    def _refuse(self, host: str, reason: str) -> None:
        host = host.removeprefix("::ffff:")
        if host in self._strangers or len(self._strangers) == LOGGED_STRANGERS:
            return
        self._strangers.add(host)
        _log.warning("%s refused a connection from %s: %s", self._about, host, reason)
        if len(self._strangers) == LOGGED_STRANGERS:
            _log.warning("%s has refused %d addresses, and names no more of them", self._about, LOGGED_STRANGERS)

    async def drain(self, seconds: float) -> None:
        """Wait until every proven connection has been closed by the other side, at most ``seconds``."""
        proven = self._connections - {handshake.task for handshake in self._unproven.values()}
        if proven:
            await asyncio.wait(proven, timeout=seconds)

    def close(self) -> None:
        """Stop listening; connections that were handed on stay open."""
        self._loop.run(self._end())
        self.close_sockets()

    async def _end(self) -> None:
        self._closed = True
        self._unwatch()
        unproven = dict(self._unproven)
        for handshake in unproven.values():
            handshake.task.cancel()
        await asyncio.gather(*(handshake.task for handshake in unproven.values()), return_exceptions=True)
        for sock in unproven:
            sock.close()

    def close_sockets(self) -> None:
        for sock in self._sockets:
            sock.close()


_open_listeners: weakref.WeakSet[Listener] = weakref.WeakSet()


def _close_in_child() -> None:
    for listener in _open_listeners:
        listener.close_sockets()


os.register_at_fork(after_in_child=_close_in_child)
