"""Terminals: what rank 0's output looks like where the launcher's own is a terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import termios
from dataclasses import asdict, dataclass
from typing import Any

_WINDOW = struct.Struct("HHHH")


@dataclass(frozen=True)
class Terminal:
    """The launcher's streams that are a terminal, and its size in characters."""

    output: bool
    error: bool
    rows: int = 0
    columns: int = 0

    @classmethod
    def of_this_process(cls) -> Terminal:
        output, error = os.isatty(1), os.isatty(2)
        rows, columns = window_size(1 if output else 2) if output or error else (0, 0)
        return cls(output, error, rows, columns)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def window_size(terminal: int) -> tuple[int, int]:
    """Rows and columns."""
    rows, columns, _, _ = _WINDOW.unpack(fcntl.ioctl(terminal, termios.TIOCGWINSZ, bytes(_WINDOW.size)))
    return rows, columns


def set_window_size(terminal: int, rows: int, columns: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, _WINDOW.pack(rows, columns, 0, 0))


def open_pty(rows: int, columns: int) -> tuple[int, int]:
    """Our end and the rank's end of a new terminal, which passes on bytes as they are."""
    ours, theirs = pty.openpty()
    modes = termios.tcgetattr(theirs)
    modes[1] &= ~termios.OPOST  # the launcher's own terminal turns \n into \r\n
    termios.tcsetattr(theirs, termios.TCSANOW, modes)
    set_window_size(ours, rows, columns)
    return ours, theirs


def in_foreground(terminal: int) -> bool:
    """True if ``terminal`` is one, and this process may read it and gets its Ctrl-C."""
    return os.isatty(terminal) and os.tcgetpgrp(terminal) == os.getpgrp()
