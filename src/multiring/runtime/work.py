"""A collective in flight."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

from multiring.runtime.engine import Part


def time_limit(timeout: float) -> float:
    """Seconds as a call takes them; ValueError if they are none."""
    if isinstance(timeout, (float, Real)) and timeout >= 0:
        return float(timeout)
    raise ValueError(f"timeout={timeout!r}: a time limit is in seconds, 0 or more")


def seconds_until(moment: float) -> float:
    """Seconds that are left until a time of ``time.monotonic``; 0 once it is over."""
    return max(0.0, moment - time.monotonic())


class Work:
    """Handle of an asynchronous call. The buffers are the caller's again when `wait` has returned or raised."""

    __slots__ = ("_finish", "_finishing", "_parts", "_result")

    def __init__(self, parts: Sequence[Part], result: Any = None, finish: Callable[[], Any] | None = None) -> None:
        """``finish`` is what remains to be done when all ``parts`` are complete; `wait` runs it once, and its value is
        the result."""
        self._parts = parts
        self._result = result
        self._finish = finish
        self._finishing = threading.Lock()  # several threads may wait; none returns before it is done

    def done(self) -> bool:
        """True if the call has succeeded or failed, so that `wait` would not block."""
        return all(part.done() for part in self._parts)

    def wait(self, timeout: float | None = None) -> Any:
        """Block until done and return what the synchronous call would have returned.

        ``timeout`` in seconds (None: the call's own limit); CollectiveTimeout after it, and the call goes on. Raises
        the error of a call that failed.
        """
        deadline = None if timeout is None else time.monotonic() + time_limit(timeout)
        for part in self._parts:
            part.wait(None if deadline is None else seconds_until(deadline))
        with self._finishing:
            if self._finish is not None:
                self._result = self._finish()
                self._finish = None
        return self._result
