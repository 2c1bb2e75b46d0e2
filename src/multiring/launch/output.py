"""Output of the ranks: passed on, prefixed by line, logged, and its end remembered."""

from __future__ import annotations

import asyncio
import os
import re
from collections import defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from multiring.errors import system_message
from multiring.launch import LaunchError
from multiring.launch.messages import write_all
from multiring.launch.tracebacks import Tracebacks

TAIL_LINES = 20
LATEST_LINES = 20
"""Number of the ranks' last lines that are kept for watchers, all ranks together."""

MAX_LINE = 1 << 16
"""Bytes; a longer line is cut."""

STREAMS = {1: "standard output", 2: "standard error"}

HOLD_SECONDS = 0.05
"""Seconds that another rank's line waits for rank 0 to end its own."""

TRACEBACK_SECONDS = 1.0
"""Seconds that the lines of a traceback are held back if it does not end."""

_LINE_END = re.compile(rb"\r\n|\n|\r")


class Lines:
    """Cuts a stream into lines; ``\\r`` ends one too, as progress bars mean it."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that ``data`` ends."""
        data = self._rest + data
        held = b""
        if data.endswith(b"\r"):  # the \n that belongs to it may be still to come
            data, held = data[:-1], b"\r"
        lines = []
        begin = 0
        for end in _LINE_END.finditer(data):
            if end.start() > begin or end.group() != b"\r":
                lines.append(data[begin : end.start()])
            begin = end.end()
        self._rest = data[begin:] + held
        if len(self._rest) > MAX_LINE:
            lines += self.end()
        return lines

    def end(self) -> list[bytes]:
        """Return the line that was not ended."""
        rest, self._rest = self._rest.rstrip(b"\r"), b""
        return [rest] if rest else []


class Output:
    """Passes rank 0's output on as it is, and that of the others as lines ``[rank] text``.

    Where rank 0 stands in the middle of a line, another's waits a little and then begins a new one. A traceback that
    another rank has shown is left out.
    """

    def __init__(self, log_dir: Path | None, ranks: int, on_broken: Callable[[], None]) -> None:
        """``log_dir`` gets a file for each rank; ``on_broken`` is called once if nobody reads what is written any more.

        LaunchError if the files cannot be made.
        """
        self._on_broken = on_broken
        self._broken = False
        self._logs: dict[int, BinaryIO] = {}
        self._lines: dict[tuple[int, int], Lines] = defaultdict(Lines)
        self._tails: dict[int, deque[bytes]] = defaultdict(lambda: deque(maxlen=TAIL_LINES))
        self.latest: deque[tuple[int | None, bytes]] = deque(maxlen=LATEST_LINES)
        """The last lines of all ranks, each with its rank; None for one of the launcher's own."""
        self._tracebacks = Tracebacks()
        self._full: set[int] = set()
        self._mid_line: set[object] = set()
        self._held: list[tuple[int, bytes]] = []
        # On one terminal, a line on either stream disturbs the other.
        self._place: dict[int, object] = {fd: "terminal" if os.isatty(fd) else fd for fd in (1, 2)}
        if log_dir is not None:
            try:
                log_dir.mkdir(parents=True, exist_ok=True)
                for rank in range(ranks):
                    self._logs[rank] = (log_dir / f"rank-{rank}.log").open("wb", buffering=0)
            except OSError as error:
                raise LaunchError(f"cannot create --log-dir {log_dir}: {system_message(error)}") from None

    def write(self, rank: int, stream: int, data: bytes) -> None:
        """Pass on what a rank wrote to its output (1) or error (2) stream."""
        if self._logs:
            self._write(self._logs[rank].fileno(), self._logs[rank].name, data)
        lines, remembered = self._tracebacks.feed((rank, stream), self._lines[rank, stream].feed(data))
        self._remember(rank, remembered)
        if self._tracebacks.is_open((rank, stream)):
            asyncio.get_running_loop().call_later(TRACEBACK_SECONDS, self._show_unended, rank, stream)
        if rank == 0:
            self._write_rank_0(stream, data)
        else:
            self._write_lines(rank, stream, lines)

    def end_streams(self) -> None:
        """The ranks have ended: pass on the lines that they left unfinished."""
        for (rank, stream), lines in self._lines.items():
            self._show_unended(rank, stream)
            rest = lines.end()
            self._remember(rank, rest)
            if rank != 0:
                self._write_lines(rank, stream, rest)
        self._release()
        self._begin_line(2)
        for log in self._logs.values():
            log.flush()

    def note(self, text: str) -> None:
        """A line of the launcher's own."""
        self._begin_line(2)
        self._emit(2, f"multiring: {text}\n".encode())
        self.latest.extend((None, line.encode()) for line in text.splitlines())

    def take_tail(self, rank: int) -> list[str]:
        """The last lines of a rank, which are forgotten then."""
        return [line.decode(errors="replace") for line in self._tails.pop(rank, ())]

    def close(self) -> None:
        for log in self._logs.values():
            log.close()

    def _remember(self, rank: int, lines: list[bytes]) -> None:
        self._tails[rank].extend(lines)
        self.latest.extend((rank, line) for line in lines)

    def _show_unended(self, rank: int, stream: int) -> None:
        lines = self._tracebacks.flush((rank, stream))
        self._remember(rank, lines)
        if rank != 0:
            self._write_lines(rank, stream, lines)

    def _write_rank_0(self, stream: int, data: bytes) -> None:
        self._emit(stream, data)
        place = self._place[stream]
        if data.endswith(b"\n"):
            self._mid_line.discard(place)
            self._release()
        else:
            self._mid_line.add(place)

    def _write_lines(self, rank: int, stream: int, lines: list[bytes]) -> None:
        prefixed = b"".join(b"[%d] %s\n" % (rank, line) for line in lines)
        if not prefixed:
            return
        if self._held or self._place[stream] in self._mid_line:
            if not self._held:
                asyncio.get_running_loop().call_later(HOLD_SECONDS, self._release)
            self._held.append((stream, prefixed))
        else:
            self._emit(stream, prefixed)

    def _release(self) -> None:
        held, self._held = self._held, []
        for stream, lines in held:
            self._begin_line(stream)
            self._emit(stream, lines)

    def _begin_line(self, stream: int) -> None:
        place = self._place[stream]
        if place in self._mid_line:
            self._mid_line.discard(place)
            self._emit(stream, b"\n")

    def _emit(self, stream: int, data: bytes) -> None:
        try:
            self._write(stream, STREAMS[stream], data)
        except BrokenPipeError:
            if not self._broken:
                self._broken = True
                self._on_broken()

    def _write(self, descriptor: int, name: str, data: bytes) -> None:
        """Write until it fails for the first time: a full disk does not end the job, and is told once."""
        if descriptor in self._full:
            return
        try:
            write_all(descriptor, data)
        except BrokenPipeError:
            raise
        except OSError as error:
            self._full.add(descriptor)
            self.note(f"cannot write to {name}: {error.strerror}; what else should go there is lost")
