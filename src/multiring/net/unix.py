"""Abstract unix sockets, at which ranks of one host find each other: every connection passes here, at both ends.

Any user in the network namespace can reach such a socket, fill its backlog and keep it full. So nothing here waits
without a deadline, and whoever belongs to another user is turned away when it is accepted, before anything is read.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import secrets
import socket
import struct
import time
from pathlib import Path

from multiring.errors import ResourceError
from multiring.net import auth
from multiring.net.closing import closed_on_error

SOCKETS = Path("/proc/net/unix")

BACKLOG = 4096
"""Ranks look and connect while the listener is still dialling others; none should find it full."""

TURN_SECONDS = 0.5
"""A connection waits so long for room in a full backlog, in the order in which others wait, before the next look at
the deadline."""

_CREDENTIALS = struct.Struct("3i")
_TIME_LIMIT = struct.Struct("ll")


class AnotherUser(auth.Refused):
    """The other end is a process of another ``user``."""

    def __init__(self, user: int) -> None:
        super().__init__(f"it runs as user {user}, this process as user {os.getuid()}")
        self.user = user


def listen(kind: str = "") -> tuple[socket.socket, str]:
    """A listening abstract unix socket, and its name, by which `names` finds those of a ``kind``."""
    name = _prefix(kind) + secrets.token_hex(16)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.bind("\0" + name)
    sock.listen(BACKLOG)
    return sock, name


def names(kind: str) -> list[str]:
    """The sockets of a ``kind`` in this network namespace, whoever's they are; ResourceError without /proc."""
    try:
        lines = SOCKETS.read_bytes().split(b"\n")  # names of others may be any bytes
    except OSError as error:
        remedy = "mount /proc in this container or chroot (mount -t proc proc /proc)"
        raise ResourceError(f"cannot tell which sockets there are: {SOCKETS}: {error.strerror}; {remedy}") from None
    ours = re.compile(rf".* @({re.escape(_prefix(kind))}[0-9a-f]{{32}})".encode())
    return sorted({match[1].decode() for line in lines if (match := ours.fullmatch(line))})


def _prefix(kind: str) -> str:
    return f"multiring-{kind}-" if kind else "multiring-"


def exists(name: str) -> bool:
    """True if a socket of that name listens in this network namespace; one whose backlog is full does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.setblocking(False)
        try:
            sock.connect("\0" + name)
        except ConnectionRefusedError:
            return False
        except BlockingIOError:
            return True
    return True


def accept(listening: socket.socket) -> socket.socket:
    """The next connection; Refused if the kernel knows its other end as a process of another user."""
    sock, _ = listening.accept()
    with closed_on_error(sock):
        _check_user(sock)
    return sock


def connect(name: str, seconds: float) -> socket.socket:
    """A connection to the socket of that name, which has no time limit then.

    TimeoutError if its backlog stays full for ``seconds``; Refused if it belongs to another user.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with closed_on_error(sock):
        _take_turns(sock, name, time.monotonic() + seconds)
        _check_user(sock)
    return sock


async def connect_async(name: str, seconds: float) -> socket.socket:
    """Connect as `connect` does, in the running event loop; the connection does not block."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with closed_on_error(sock):
        sock.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            sock.connect("\0" + name)
        if not _is_connected(sock):
            waiting = sock.dup()  # the thread may outlast this call
            await asyncio.get_running_loop().run_in_executor(None, _wait_in_thread, waiting, name, seconds)
            sock.setblocking(False)
        _check_user(sock)
    return sock


def _wait_in_thread(sock: socket.socket, name: str, seconds: float) -> None:
    with sock:
        _take_turns(sock, name, time.monotonic() + seconds)


def _take_turns(sock: socket.socket, name: str, deadline: float) -> None:
    """Connect, waiting in the kernel's queue for room: who only tries again would seldom meet it."""
    sock.setblocking(True)
    while not _is_connected(sock):
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError("its backlog is full, and it accepts nobody")
        turn = min(remaining, TURN_SECONDS)
        _limit(sock, turn)
        with contextlib.suppress(BlockingIOError):  # the turn is over
            sock.connect("\0" + name)
    _limit(sock, 0.0)


def _limit(sock: socket.socket, seconds: float) -> None:
    """Set the seconds that the kernel lets the socket wait to connect, and to send; 0 is no limit."""
    whole = int(seconds)
    limit = _TIME_LIMIT.pack(whole, max(round(1e6 * (seconds - whole)), 1 if seconds else 0))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def _is_connected(sock: socket.socket) -> bool:
    """True if connect() has connected: after a signal Python returns from it as if it had."""
    try:
        sock.getpeername()
    except OSError as error:
        if error.errno != errno.ENOTCONN:
            raise
        return False
    return True


def peer(sock: socket.socket) -> tuple[int, int]:
    """The process at the other end of a connection, or that which made the socket listen, and its user."""
    process, user, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return process, user


def _check_user(sock: socket.socket) -> None:
    """Refused unless the kernel knows the other end as a process of this one's user."""
    _, user = peer(sock)
    if user != os.getuid():
        raise AnotherUser(user)
