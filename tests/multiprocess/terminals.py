"""A terminal of the tests' own, and programs that have it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager

from launching import Launch


class Screen:
    """The far end of a terminal."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.text = ""

    def type(self, text: str) -> None:
        os.write(self._descriptor, text.encode())

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self._descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def expect(self, pattern: str, seconds: float = 30.0) -> None:
        """Wait until ``pattern`` has appeared."""
        deadline = time.monotonic() + seconds
        while not re.search(pattern, self.text):
            assert time.monotonic() < deadline, f"{pattern!r} did not come, but: {self.text!r}"
            assert self._read(0.1), f"{pattern!r} did not come, but: {self.text!r}"

    def read_to_end(self) -> str:
        """All that appeared, once nobody has the terminal open any more."""
        while self._read(30.0):
            pass
        return self.text

    def _read(self, seconds: float) -> bool:
        if not select.select([self._descriptor], [], [], seconds)[0]:
            return True
        try:
            self.text += os.read(self._descriptor, 1 << 16).decode()
        except OSError:  # nobody has it open any more
            return False
        return True


@contextmanager
def at_terminal(launch: Launch, *words: str) -> Iterator[tuple[int, Screen]]:
    """The command, leader of a session whose terminal is the screen."""
    pid, descriptor = pty.fork()
    if pid == 0:
        os.chdir(launch.directory)
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
        os.execvpe(words[0], words, launch.environment)
    try:
        yield pid, Screen(descriptor)
    finally:
        os.close(descriptor)


def exit_code(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
