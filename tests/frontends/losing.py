"""A rank that is killed between two steps."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import multiring as mr


def the_last_between(step: Callable[[], object]) -> None:
    """Take two steps, after the first of which the last rank is killed; the others may be in that one still."""
    for _ in range(2):
        step()
        if mr.rank() == mr.world_size() - 1:
            os.kill(os.getpid(), signal.SIGKILL)
