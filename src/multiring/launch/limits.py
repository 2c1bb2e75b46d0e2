"""Number of ranks that a host has room for: processes and descriptors, by the limits of its kernel and of its user."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from multiring.errors import ResourceError

OF_A_RANK = 3
"""Descriptors that an agent holds for each rank: its output, its errors and its report."""

SPARE = 8
"""Descriptors, and processes, that an agent may need beside those of its ranks."""


@dataclass(frozen=True)
class Room:
    """Room under one limit: ``ranks`` more can be started."""

    ranks: int
    what: str
    """The limit and its value, in words."""
    remedy: str


def check_room_for(ranks: int, root: Path = Path("/"), *, standbys: int = 0) -> None:
    """ResourceError if a limit stands against so many ranks of this process, with the number that would fit.

    A standby takes as much as a rank.
    """
    least = min((_descriptors(root), *_processes(root)), key=lambda room: room.ranks)
    if ranks + standbys > least.ranks:
        fewer = f"start {least.ranks} {'of both ' * bool(standbys)}here at most, or " if least.ranks else ""
        wanted = f"{ranks} ranks" + (f" and {standbys} standbys" if standbys else "")
        raise ResourceError(f"{wanted} are more than {least.what} leaves room for: {fewer}{least.remedy}")


def _descriptors(root: Path) -> Room:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = limit - len(list((root / "proc/self/fd").iterdir())) - SPARE
    what = f"the limit of {limit} descriptors (ulimit -n), of which a rank takes {OF_A_RANK},"
    return Room(max(free // OF_A_RANK, 0), what, "raise it")


def _processes(root: Path) -> Iterator[Room]:
    """A rank is one process at least; what threads it starts is not known here."""
    of_user, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if of_user != resource.RLIM_INFINITY and os.getuid() != 0:  # root is exempt
        what = f"the limit of {of_user} processes of this user (ulimit -u)"
        yield Room(max(of_user - _tasks_of_user(root) - SPARE, 0), what, "raise it")
    for name in ("pid_max", "threads-max"):
        limit = _number(root / "proc/sys/kernel" / name)
        if limit is not None:
            yield Room(max(limit - SPARE, 0), f"the limit of {limit} processes (kernel.{name})", "raise it by sysctl")
    for group in _groups(root):
        limit, used = _number(group / "pids.max"), _number(group / "pids.current")
        if limit is not None and used is not None:
            what = f"the limit of {limit} processes of this container or control group ({group / 'pids.max'})"
            yield Room(max(limit - used - SPARE, 0), what, "have it raised")


def _tasks_of_user(root: Path) -> int:
    """Processes and threads, which the kernel counts alike."""
    count = 0
    for entry in (root / "proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):  # it has ended
                if entry.stat().st_uid == os.getuid():
                    count += len(list((entry / "task").iterdir()))
    return count


def _groups(root: Path) -> Iterator[Path]:
    """The control groups (v2 or v1) that count the processes of this one."""
    lines: list[str] = []
    with suppress(OSError):
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "pids" not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / ("pids" if controllers else "")
        group = mount / path.lstrip("/")
        yield from (each for each in (group, *group.parents) if each == mount or mount in each.parents)


def _number(path: Path) -> int | None:
    """Return the number in a file of the kernel; None if there is no file, or no limit in it."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # "max"
        return None
