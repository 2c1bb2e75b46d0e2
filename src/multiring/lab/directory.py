"""State of a lab outside its namespaces: a directory, and the processes in its hosts."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

LABS = Path("/run/multiring-lab")
"""Holds a directory for every lab."""

HOSTS, LOG = "hosts", "log"
"""Names of the files in a lab's directory that hold its list of hosts, and what its keeper says."""

END_SECONDS = 10.0
"""Seconds that the end of a lab's processes may take."""


def claim(directory: Path) -> int | None:
    """Lock the directory of a new lab and clear what a crashed one left there; the descriptor, None if another has
    it."""
    directory.parent.mkdir(mode=0o755, exist_ok=True)
    while True:
        directory.mkdir(mode=0o755, exist_ok=True)
        locked = lock(directory)
        if locked is None or (os.fstat(locked).st_nlink and not any(directory.iterdir())):
            return locked
        clear(directory)
        os.close(locked)


def lock(directory: Path) -> int | None:
    """A descriptor that holds the lock of ``directory``, which must exist; None if another process has the lock.

    The keeper of a lab has it for as long as it lives, and so have its forwarders.
    """
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def await_lock(directory: Path) -> int | None:
    """Return the result of `lock` once the lab's processes have had time to end: forwarders end after the keeper.
    None, too, if another process has removed the directory."""
    deadline = time.monotonic() + END_SECONDS
    with contextlib.suppress(FileNotFoundError):
        while time.monotonic() < deadline:
            if (locked := lock(directory)) is not None:
                return locked
            time.sleep(0.01)
    return None


def processes(directory: Path) -> Iterator[int]:
    """The processes in the hosts of a lab: those that see its list of hosts as /etc/hosts."""
    with contextlib.suppress(FileNotFoundError):
        hosts = (directory / HOSTS).stat()
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                try:
                    seen = (entry / "root/etc/hosts").stat()
                except OSError:  # it has ended
                    continue
                if os.path.samestat(hosts, seen):
                    yield int(entry.name)


def clear(directory: Path) -> None:
    """Kill the processes in the hosts of a lab and remove its directory."""
    deadline = time.monotonic() + END_SECONDS
    while remaining := list(processes(directory)):
        for pid in remaining:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            listed = ", ".join(map(str, remaining))
            raise TimeoutError(f"{directory}: cannot kill process {listed}")
        time.sleep(0.01)
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(directory)
