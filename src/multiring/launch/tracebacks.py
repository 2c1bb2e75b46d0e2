"""A traceback that several ranks print alike is shown once, and of the others its last line."""

from __future__ import annotations

from collections.abc import Sequence

BEGIN = b"Traceback (most recent call last):"
MOST_LINES = 1000
"""Most lines of a traceback that are held back; the lines after these are passed on as they come."""

MOST_KNOWN = 100
"""Tracebacks that are remembered, of those that came first; more are shown as they come."""

_Stream = tuple[int, int]


class Tracebacks:
    """Takes the lines of all ranks' streams, (rank, stream), and holds back those of a traceback until it has ended."""

    def __init__(self) -> None:
        self._shown: dict[tuple[bytes, ...], int] = {}
        """The rank that printed each traceback first."""
        self._open: dict[_Stream, list[bytes]] = {}

    def feed(self, stream: _Stream, lines: Sequence[bytes]) -> tuple[list[bytes], list[bytes]]:
        """The lines to show, and those to remember: of a traceback only its last line."""
        shown: list[bytes] = []
        kept: list[bytes] = []
        for line in lines:
            block = self._open.get(stream)
            if block is not None:
                block.append(line)
                if not line.startswith(b" ") or len(block) == MOST_LINES:
                    shown += self._end(stream)
                    kept.append(line)
            elif line == BEGIN:
                self._open[stream] = [line]
            else:
                shown.append(line)
                kept.append(line)
        return shown, kept

    def is_open(self, stream: _Stream) -> bool:
        """True if lines are held back."""
        return stream in self._open

    def flush(self, stream: _Stream) -> list[bytes]:
        """Return the lines that were held back of a traceback that does not end."""
        return self._open.pop(stream, [])

    def _end(self, stream: _Stream) -> list[bytes]:
        block = self._open.pop(stream)
        rank, _ = stream
        known = tuple(block)
        if len(self._shown) < MOST_KNOWN:
            self._shown.setdefault(known, rank)
        first = self._shown.get(known, rank)
        return block if first == rank else [b"(the traceback of rank %d) %s" % (first, block[-1])]
