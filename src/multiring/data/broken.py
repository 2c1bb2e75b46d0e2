"""Several samples read at once, without those that are broken."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TypeVar

from multiring.data.errors import BrokenSample, DataError

BROKEN = ("raise", "skip")

MOST_BROKEN = 100
"""Samples that are skipped before any was whole; more are all broken for one reason, such as the wrong decoder."""

T = TypeVar("T")

_log = logging.getLogger("multiring")


class Skipping:
    """Reads several samples at once; ``broken`` is "raise", or "skip", which logs each that is broken and goes on.

    A sample is broken if reading it raises BrokenSample. DataError where the first hundred are all broken.
    """

    def __init__(self, broken: str) -> None:
        if broken not in BROKEN:
            raise ValueError(f"broken={broken!r}: known are {', '.join(BROKEN)}")
        self.skips = broken == "skip"
        self._seen_whole = False
        self._skipped = 0

    def __call__(self, read: Callable[[int], T], samples: Iterable[int]) -> list[T]:
        """``read(sample)`` of each sample, in their order."""
        found = []
        for sample in samples:
            try:
                found.append(read(sample))
                self._seen_whole = True
            except BrokenSample as error:
                if not self.skips:
                    raise
                self._skip(error)
        return found

    def _skip(self, error: BrokenSample) -> None:
        self._skipped += 1
        if not self._seen_whole and self._skipped >= MOST_BROKEN:
            message = f"the first {self._skipped} samples are all broken; no more were tried, and the last is {error}"
            raise DataError(message, file=error.file, member=error.member, sample=error.sample)
        if not error.is_told:
            _log.warning("skipped: %s", error)
