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
    """Reads standard input in a thread, a chunk at a time: the next one when `taken` has been called."""

    def __init__(self, on_input: Callable[[bytes], None]) -> None:
        """``on_input`` is called in the running event loop; with nothing at the end of the input."""
        self._loop = asyncio.get_running_loop()
        self._on_input = on_input
        self._may_read = threading.Semaphore(1)
        # In the background, reading the terminal shall fail instead of stopping the whole job.
        signal.signal(signal.SIGTTIN, signal.SIG_IGN)
        threading.Thread(target=self._read, daemon=True).start()

    def taken(self) -> None:
        self._may_read.release()

    def _read(self) -> None:
        data = b"-"
        while data:
            self._may_read.acquire()
            data = _read_chunk()
            try:
                self._loop.call_soon_threadsafe(self._on_input, data)
            except RuntimeError:  # the loop is closed: the job has ended
                return


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
