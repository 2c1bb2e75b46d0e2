"""One rank, seen from its agent: its process, and what it writes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from multiring.job import reports
from multiring.launch import processes
from multiring.launch.processes import Process, Recipe, Streams
from multiring.launch.standbys import Standby
from multiring.launch.terminal import Terminal, open_pty, set_window_size

CHUNK = 1 << 16

NO_REPORT = {"blames": None, "account": None, "disputed": None, "is_final": False}
"""The last report, as in `bootstrap.report`, of a rank that made none."""


class RankProcess:
    """A running rank; ``on_output(stream, data)`` gets what it writes."""

    def __init__(
        self,
        recipe: Recipe,
        secret: bytes,
        stdin: int,
        terminal: Terminal,
        on_output: Callable[[int, bytes], None],
        standby: Standby | None = None,
    ) -> None:
        """``standby`` becomes the rank, without ``stdin`` and ``terminal``; OSError if it is gone."""
        self._on_output = on_output
        self.recipe = recipe
        self.standby = standby
        """Standby that the process was, until a signal or an end of it is the rank's in any case."""
        self._open: dict[int, int] = {}
        """Our end of each stream that is still open, and its number (1 or 2)."""
        self._ptys: list[int] = []
        secret_fd = _hold("multiring-secret", secret)
        self._report_fd = _hold(reports.NAME, b"")
        if standby is None:
            self.process: Process = self._start(recipe, stdin, terminal, secret_fd)
        else:
            self._open = {standby.output: 1, standby.error: 2}
            try:
                self.process = standby.become(recipe, secret_fd, self._report_fd)
            except BaseException:
                standby.end()
                os.close(self._report_fd)
                raise
            finally:
                os.close(secret_fd)
            for stream, printed in enumerate(standby.printed, 1):
                if printed:
                    on_output(stream, printed)
        loop = asyncio.get_running_loop()
        for ours in self._open:
            loop.add_reader(ours, self._read, ours)

    def _start(self, recipe: Recipe, stdin: int, terminal: Terminal, secret_fd: int) -> subprocess.Popen[bytes]:
        output, error = self._open_streams(terminal)
        try:
            return processes.start(
                replace(
                    recipe,
                    environment={
                        **recipe.environment,
                        "MULTIRING_SECRET_FD": str(secret_fd),
                        "MULTIRING_REPORT_FD": str(self._report_fd),
                    },
                ),
                Streams(stdin, output, error),
                (secret_fd, self._report_fd),
            )
        except BaseException:
            for ours in (*self._open, self._report_fd):
                os.close(ours)
            raise
        finally:
            for theirs in {output, error, secret_fd}:
                os.close(theirs)

    def _open_streams(self, terminal: Terminal) -> tuple[int, int]:
        """The rank's ends of its output and error streams: one terminal for both where both are one."""
        theirs: list[int] = []
        for number, is_terminal in ((1, terminal.output), (2, terminal.error)):
            if is_terminal and self._ptys:
                theirs.append(theirs[0])
                continue
            if is_terminal:
                ours, end = open_pty(terminal.rows, terminal.columns)
                self._ptys.append(ours)
            else:
                ours, end = os.pipe()
            self._open[ours] = number
            theirs.append(end)
        return theirs[0], theirs[1]

    def _read(self, ours: int) -> None:
        try:
            data = os.read(ours, CHUNK)
        except OSError:  # EIO: the last process at the other end of a terminal has closed it
            data = b""
        if data:
            self._on_output(self._open[ours], data)
        else:
            self._close(ours)

    def _close(self, ours: int) -> None:
        asyncio.get_running_loop().remove_reader(ours)
        del self._open[ours]
        with contextlib.suppress(ValueError):
            self._ptys.remove(ours)
        os.close(ours)

    @property
    def silent(self) -> bool:
        """True if nothing more can come from it."""
        return not self._open

    @property
    def report(self) -> dict[str, Any]:
        """Its last report, as in `bootstrap.report`; the values are None if it made none."""
        return reports.read(self._report_fd, reports.REPORT) or NO_REPORT

    @property
    def status(self) -> dict[str, Any] | None:
        """Its last status; None if it has told none yet."""
        return reports.read(self._report_fd, reports.STATUS)

    def resize(self, rows: int, columns: int) -> None:
        for terminal in self._ptys:
            set_window_size(terminal, rows, columns)

    def close(self) -> None:
        """Read no more of its output."""
        for ours in list(self._open):
            self._close(ours)
        os.close(self._report_fd)


def _hold(name: str, content: bytes) -> int:
    """A descriptor from which ``content`` can be read, and nowhere else.

    Every rank gets one of its own, since a shared one would share its position.
    """
    descriptor = os.memfd_create(name)
    os.write(descriptor, content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor
