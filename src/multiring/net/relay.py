"""Relay between an encrypted connection and code that uses a socket in clear."""

from __future__ import annotations

import logging
import socket
import threading
from contextlib import suppress

from multiring.net.channel import Altered, ProvenChannel

CHUNK = 1 << 15

_log = logging.getLogger("multiring")


class Relay:
    """Passes on what comes, both ways, by two threads of this process, until either side ends.

    Takes the channel over. ``about`` names its other end, should what comes from there be altered.
    """

    def __init__(self, channel: ProvenChannel, about: str) -> None:
        self.inner, self._outer = socket.socketpair()
        """``inner`` is what the code in clear has, and closes."""
        self._channel = channel
        self._about = about
        channel.sock.setblocking(True)
        self._sealing = threading.Thread(target=self._seal, name="multiring-seal", daemon=True)
        self._opening = threading.Thread(target=self._open, name="multiring-open", daemon=True)
        self._sealing.start()
        self._opening.start()

    def _seal(self) -> None:
        with suppress(OSError):
            while content := self._outer.recv(CHUNK):
                self._channel.send(content)
            self._channel.sock.shutdown(socket.SHUT_WR)

    def _open(self) -> None:
        try:
            while content := self._channel.receive_some(CHUNK):
                self._outer.sendall(content)
        except Altered as error:
            _log.warning("the connection to %s cannot be trusted: %s", self._about, error)
        except OSError:  # either side has ended
            pass
        with suppress(OSError):
            self._outer.shutdown(socket.SHUT_RDWR)

    def end(self, seconds: float) -> None:
        """Wait at most ``seconds`` until all that was written to ``inner``, closed by now, is sent; then close all."""
        self._sealing.join(seconds)
        with suppress(OSError):
            self._channel.sock.shutdown(socket.SHUT_RDWR)  # wakes what still reads
        self._opening.join(seconds)
        self._channel.close()
        self._outer.close()
