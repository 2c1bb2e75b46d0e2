"""Signals for an event loop: none is lost, and nothing complains, where very many come while it is busy."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable


def on_signal(number: int, callback: Callable[[], object]) -> None:
    """Call ``callback`` in the running loop after a signal; once for several that come before it is called."""
    loop = asyncio.get_running_loop()
    is_due = False

    def call() -> None:
        nonlocal is_due
        is_due = False
        callback()

    def note(*_: object) -> None:
        nonlocal is_due
        if not is_due:
            is_due = True
            loop.call_soon_threadsafe(call)

    loop.add_signal_handler(number, lambda: None)  # the loop wakes up by it, and forgets it when it is closed
    signal.signal(number, note)
    # The loop learns of signals by a byte each in a socket that a few hundred fill; here it only has to wake up.
    signal.set_wakeup_fd(signal.set_wakeup_fd(-1), warn_on_full_buffer=False)
