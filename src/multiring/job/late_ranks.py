"""Ranks that keep the survivors of a loss waiting: they live, and have not called `shrink`."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection

from multiring.net.acceptor import Acceptor
from multiring.units import ranges

RETRY_SECONDS = 0.2
"""Seconds between two looks at the others."""

_log = logging.getLogger("multiring")


class LateRanks:
    """Logs for whom this rank waits, which began to at ``began`` (monotonic seconds), after ``late_seconds``."""

    def __init__(self, acceptor: Acceptor, began: float, late_seconds: float) -> None:
        self._acceptor = acceptor
        self._began = began
        self._late_seconds = late_seconds
        self._told_of: set[int] = set()
        self.left_out: set[int] = set()
        """Ranks that were late for the whole time."""

    async def tell_of(self, late: Callable[[], Collection[int]]) -> None:
        """Log once for whom this rank waits, when it has for long."""
        while True:
            await asyncio.sleep(max(self._began + self._late_seconds - time.monotonic(), RETRY_SECONDS))
            found = set(late()) - self._told_of
            self._told_of |= found
            self._tell("has waited for others in shrink() for", found)

    def leave_out(self, late: Collection[int]) -> None:
        """Wait for these no longer."""
        self.left_out |= set(late)
        self._tell("waits no longer in shrink(), after", late)

    def _tell(self, what: str, late: Collection[int]) -> None:
        if words := self.in_words(late):
            _log.warning("this rank %s %.1f s: %s", what, time.monotonic() - self._began, words)

    def in_words(self, late: Collection[int]) -> str:
        """Return a sentence about the late ranks; "" if there are none."""
        members = self._acceptor.membership.members
        now = [members.index(rank) for rank in sorted(late) if rank in members]
        if not now:
            return ""
        live = f"rank {now[0]} lives, and has" if len(now) == 1 else f"ranks {ranges(now)} live, and have"
        return f"{live} not called shrink()"
