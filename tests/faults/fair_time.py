"""Time as a process counts it that gets less than a core: of a second in which it had a tenth of one, a tenth.

Limits that a test sets to others hold on a machine that has time for them. Many programs beside them slow this process
as they slow those, so a thread of it computes for a moment now and then, and compares what it got with what passed.
"""

from __future__ import annotations

import threading
import time

LOOK_SECONDS, WORK_SECONDS = 0.2, 0.01


class FairTime:
    """Measures from its making on."""

    def __init__(self) -> None:
        self._looks = [(time.time(), 0.0)]
        """Time of each look, and the fair seconds until then."""
        threading.Thread(target=self._measure, name="fair time", daemon=True).start()

    def _measure(self) -> None:
        while True:
            began, computed = time.time(), time.thread_time()
            while time.thread_time() - computed < WORK_SECONDS:
                pass
            share = min(1.0, WORK_SECONDS / max(time.time() - began, WORK_SECONDS))
            time.sleep(LOOK_SECONDS)
            now, (before, fair) = time.time(), self._looks[-1]
            self._looks.append((now, fair + share * (now - before)))

    def between(self, begin: float, end: float) -> float:
        """Fair seconds from one time.time() to another; what was not measured counts in full."""
        return self._until(end) - self._until(begin)

    def _until(self, when: float) -> float:
        later = next((i for i, (at, _) in enumerate(self._looks) if at >= when), None)
        if later is None or later == 0:
            at, fair = self._looks[-1 if later is None else 0]
            return fair + when - at
        (first, low), (last, high) = self._looks[later - 1], self._looks[later]
        return low + (high - low) * (when - first) / (last - first)


FAIR = FairTime()
