"""The launcher's standard input, for a rank 0 on another host."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import threading
import time
from collections.abc import Callable

CHUNK = 1 << 14
"""Fits into the pipe to the agent, so that a write never waits for an agent that itself waits for the launcher."""


class Input:
    """Reads standard input in a thread, a chunk at a time, and hands it on while there is a rank 0."""

    def __init__(self, send: Callable[[bytes], None]) -> None:
        """``send`` is called in the running event loop; with nothing at the end of the input."""
        self._loop = asyncio.get_running_loop()
        self._send = send
        self._attached = False
        self._waiting: bytes | None = None
        """Bytes that were read and not handed on; the end stays here, for every rank 0 to come."""
        self._may_read = threading.Semaphore(1)
        # Reading the terminal from the background shall fail instead of stopping the whole job.
        signal.signal(signal.SIGTTIN, signal.SIG_IGN)
        threading.Thread(target=self._read, daemon=True).start()

    def attach(self) -> None:
        """Begin to hand input on: rank 0 runs."""
        self._attached = True
        self._hand_on()

    def detach(self) -> None:
        """There is none any more, and its agent has nowhere to put what comes."""
        self._attached = False

    def taken(self) -> None:
        """Rank 0 has got what was handed on."""
        self._may_read.release()

    def _read(self) -> None:
        data = b"-"
        while data:
            self._may_read.acquire()
            data = _read_chunk()
            try:
                self._loop.call_soon_threadsafe(self._arrive, data)
            except RuntimeError:  # the loop is closed: the job has ended
                return

    def _arrive(self, data: bytes) -> None:
        self._waiting = data
        self._hand_on()

    def _hand_on(self) -> None:
        if self._attached and self._waiting is not None:
            self._send(self._waiting)
            self._waiting = None if self._waiting else b""


def _read_chunk() -> bytes:
    while True:
        try:
            return os.read(0, CHUNK)
        except OSError as error:
            if error.errno == errno.EBADF:
                return b""
            if error.errno not in (errno.EIO, errno.EAGAIN):
                raise
            time.sleep(0.2)  # in the background: perhaps it comes to the foreground
