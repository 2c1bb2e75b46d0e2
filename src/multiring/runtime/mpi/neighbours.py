"""The other ranks of this host, each behind a unix socket whose end tells of its death."""

from __future__ import annotations

import os
import select
import socket


class Neighbours:
    """``nothing`` is a descriptor to hand over where ranks that share memory hand over theirs."""

    def __init__(self) -> None:
        self.nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._sockets: dict[int, tuple[int, socket.socket]] = {}
        self._poll = select.poll()

    def add(self, rank: int, descriptor: int) -> None:
        """Watch a rank; takes ownership of the socket."""
        sock = socket.socket(fileno=descriptor)
        self._sockets[descriptor] = rank, sock
        self._poll.register(descriptor, select.POLLIN)

    def dead(self) -> int | None:
        """A rank whose socket was closed without a farewell."""
        for descriptor, _ in self._poll.poll(0):
            rank, sock = self._sockets[descriptor]
            try:
                left = sock.recv(1) != b""
            except ConnectionError:
                left = False
            self._poll.unregister(descriptor)
            if not left:
                return rank
        return None

    def leave(self) -> None:
        """Say farewell, so that the end of this process is no surprise."""
        for _, sock in self._sockets.values():
            try:
                sock.send(b"\0")
            except OSError:  # it has left before
                continue

    def close(self) -> None:
        """Close everything. May be called twice."""
        for _, sock in self._sockets.values():
            sock.close()
        self._sockets.clear()
        self._poll = select.poll()
        if self.nothing >= 0:
            os.close(self.nothing)
            self.nothing = -1
