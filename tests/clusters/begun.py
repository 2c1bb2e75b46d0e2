"""Ranks that note in a folder that they have begun, and what a test then does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path


def processes(folder: Path, ranks: int, what: str = "", seconds: float = 120) -> list[int]:
    """The processes of the ranks, when all have noted them."""
    until = time.monotonic() + seconds
    while not all((folder / f"{rank}{what}").exists() for rank in range(ranks)):
        assert time.monotonic() < until, f"only {sorted(folder.iterdir())} of {ranks} ranks are there"
        time.sleep(0.05)
    return [int((folder / f"{rank}{what}").read_text()) for rank in range(ranks)]


def when_begun(folder: Path, ranks: int, act: Callable[[], object]) -> threading.Thread:
    """Act as soon as all ranks have begun."""

    def wait() -> None:
        processes(folder, ranks)
        act()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread
