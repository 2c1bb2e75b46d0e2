"""What a lab leaves on the machine outside its namespaces: a directory, and the processes in its hosts."""

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

KILL_SECONDS = 10.0


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


def processes(directory: Path) -> Iterator[int]:
    """The processes in the hosts of a lab: those that see its list of hosts as /etc/hosts."""
    with contextlib.suppress(FileNotFoundError):
        hosts = (directory / "hosts").stat()
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
    deadline = time.monotonic() + KILL_SECONDS
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
