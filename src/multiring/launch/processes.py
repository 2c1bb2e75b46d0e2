"""Starting a rank so that it cannot outlive its agent, and finding and killing all that it started."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

GRACE_SECONDS = 5.0
"""Seconds that the ranks may take to end after a signal, before a stronger one is sent."""

# <linux/prctl.h>
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

_libc = ctypes.CDLL(None, use_errno=True)


def adopt_orphans() -> None:
    """Become the parent of all descendants whose own parent ends, so that `kill_descendants` finds them."""
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


@dataclass(frozen=True)
class Recipe:
    """The command of a rank, its directory and its environment."""

    command: Sequence[str]
    environment: Mapping[str, str]
    directory: str
    cpus: Sequence[int]
    """CPUs that it is bound to; none: all that the agent may use."""
    group: int | None = None
    """The process group to join; None: a session of its own."""
    nice: int = 0
    """Difference by which its priority is lower than the agent's."""


@dataclass(frozen=True)
class Streams:
    """Descriptors for a rank's standard input, output and error."""

    input: int
    output: int
    error: int


class AdoptedProcess:
    """A child of this process that another one has forked for it, with what `subprocess.Popen` offers."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def kill(self) -> None:
        """End it by SIGKILL, unless it is known to have ended."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


Process = subprocess.Popen[bytes] | AdoptedProcess


def end_with(parent: int, number: int) -> None:
    """Let this process, which was just forked, get signal ``number`` when the thread of ``parent`` that forked it
    ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:  # it ended before prctl
        os._exit(1)


def take_place(recipe: Recipe, agent: int) -> None:
    """Give this process, a child of its agent, the process group, cores and priority of a rank, and the agent's end."""
    end_with(agent, signal.SIGKILL)
    if recipe.group is None:
        os.setsid()
    else:
        os.setpgid(0, recipe.group)
    if recipe.cpus:
        os.sched_setaffinity(0, recipe.cpus)
    if recipe.nice:
        os.nice(recipe.nice)


def start(recipe: Recipe, streams: Streams, inherited: Collection[int]) -> subprocess.Popen[bytes]:
    """Start a rank that also has the descriptors ``inherited``; the kernel kills it when the calling thread ends."""
    return subprocess.Popen(
        recipe.command,
        env=recipe.environment,
        cwd=recipe.directory,
        stdin=streams.input,
        stdout=streams.output,
        stderr=streams.error,
        pass_fds=tuple(inherited),
        preexec_fn=partial(take_place, recipe, os.getpid()),
    )


def send_signal(process: Process, number: int) -> None:
    """Signal a rank and, where it leads a process group of its own, the whole group."""
    if process.poll() is not None:
        return
    try:
        if os.getpgid(process.pid) == process.pid:
            os.killpg(process.pid, number)
        else:
            os.kill(process.pid, number)
    except ProcessLookupError:
        pass  # it has ended meanwhile


def ask(process: Process, number: int) -> None:
    """Signal those processes of a rank alone that handle it: the signal would end a loader, or a rank that imports."""
    if process.poll() is None:
        for pid in (process.pid, *descendants(process.pid)):
            # It has ended meanwhile, or is another user's, such as what sudo has started.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if _handles(pid, number):
                    os.kill(pid, number)


def _handles(pid: int, number: int) -> bool:
    """True if a process has a handler for a signal."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:  # it has ended, or there is no descriptor left to look with
        return False
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)


def began(pid: int) -> int | None:
    """Return when a process began, in ticks since the kernel booted, which no later one of its number shares.

    None if there is none, or if it has ended but was not waited for.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()  # the name before it may hold anything
    return None if fields[0] == "Z" else int(fields[19])


def descendants(root: int) -> list[int]:
    """The processes below ``root``; those that have ended but were not waited for are left out."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                stat = (entry / "stat").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue
            state, parent = stat.rpartition(")")[2].split()[:2]  # the name before it may hold anything
            if state != "Z":
                children.setdefault(int(parent), []).append(int(entry.name))
    found: list[int] = []
    unvisited = [root]
    while unvisited:
        below = children.get(unvisited.pop(), [])
        found += below
        unvisited += below
    return found


def reap_orphans(known: Collection[int]) -> None:
    """Take the exit codes of adopted processes that have ended, which stay listed until then.

    ``known`` are the children whose exit codes others ask for; they have been asked already.
    """
    with contextlib.suppress(ChildProcessError):  # there is no child
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            if ended.si_pid in known:  # it has ended just now, and its signal is still to come
                return
            os.waitpid(ended.si_pid, 0)


def is_stopped(pid: int) -> bool:
    """True if a process is stopped, by a signal or a debugger; one that has ended is not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:  # it has ended, or there is no descriptor left to look with
        return False
    return stat.rpartition(")")[2].split()[0] in ("T", "t")  # the name before it may hold anything


def kill_former(agent: int, when: int, seconds: float = 5.0) -> list[int]:
    """Kill an agent that `began` then, if it is still there, and everything below it.

    Returns those that are still there after ``seconds``; the agent is then stopped, and keeps them below it.
    """
    deadline = time.monotonic() + seconds
    if began(agent) != when:
        return []
    with contextlib.suppress(ProcessLookupError):  # it has just ended
        os.kill(agent, signal.SIGSTOP)  # it starts nothing more, and is the parent of those whose own parent ends
        remaining = kill_descendants(seconds, agent)
        if remaining:
            return remaining
        os.kill(agent, signal.SIGKILL)
    while began(agent) == when:
        if time.monotonic() > deadline:
            return [agent]
        time.sleep(0.01)
    return []


def kill_descendants(seconds: float = 5.0, root: int | None = None) -> list[int]:
    """Kill everything below ``root`` (None: this process); those that are still there after ``seconds``."""
    deadline = time.monotonic() + seconds
    while remaining := descendants(os.getpid() if root is None else root):
        for pid in remaining:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            except PermissionError:  # it has become another user's
                pass
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    return remaining


def describe_exit(code: int) -> str:
    """An exit code as subprocess gives it, in words."""
    if code >= 0:
        return f"exit code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else "unknown"
    return f"killed by signal {-code} ({name})"


def shell_code(code: int) -> int:
    """The exit code that a shell would report."""
    return code if code >= 0 else 128 - code
