"""The standbys of a host, seen from its agent: interpreters that wait to become ranks in the place of lost ones."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from multiring.launch import processes, standby
from multiring.launch.processes import Recipe, Streams
from multiring.launch.program import words_before_script

NICE = 5
"""How much a standby's priority is below that of ranks: on one core with a rank it has a quarter of the time."""

MOST_FAILURES = 3
"""Standbys in a row that end before they are needed: then no more are started."""

TAIL_BYTES = 4096


class Standby:
    """One interpreter that waits, or has become a rank."""

    def __init__(self, recipe: Recipe, on_word: Callable[[Standby, str, str], None]) -> None:
        """``on_word(standby, kind, text)`` gets what it says."""
        self._on_word = on_word
        self.is_ready = False
        self._has_begun = False
        before = words_before_script(recipe.command)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.output, output = os.pipe()
        self.error, error = os.pipe()
        stdin = os.open(os.devnull, os.O_RDONLY)
        command = [
            *recipe.command[:before],
            standby.__file__,
            str(theirs.fileno()),
            *recipe.command[before:],
        ]
        environment = {name: value for name, value in recipe.environment.items() if name not in standby.UNKNOWN}
        nice = NICE if _can_restore_priority() else 0
        try:
            self.process: subprocess.Popen[bytes] = processes.start(
                replace(recipe, command=command, environment=environment, cpus=(), group=None, nice=nice),
                Streams(stdin, output, error),
                (theirs.fileno(),),
            )
        except BaseException:
            self._close()
            raise
        finally:
            theirs.close()
            for descriptor in (stdin, output, error):
                os.close(descriptor)
        self._socket.setblocking(False)
        asyncio.get_running_loop().add_reader(self._socket, self.hear)

    def hear(self) -> None:
        """Take what it has said so far."""
        while self._socket.fileno() >= 0:
            try:
                data = self._socket.recv(standby.MESSAGE_BYTES)
            except BlockingIOError:
                return
            except ConnectionError:
                data = b""
            if not data:
                self._hang_up()
                return
            said = json.loads(data)
            self.is_ready = self.is_ready or said["kind"] == "ready"
            self._has_begun = self._has_begun or said["kind"] == "begun"
            self._on_word(self, said["kind"], said["text"])

    @property
    def has_begun(self) -> bool:
        """Whether it runs the script: how it ends then is how the rank ends."""
        self.hear()
        return self._has_begun

    def become(self, recipe: Recipe, secret: int, report: int) -> None:
        """Let it be a rank, at once or when it has done its imports; OSError if it is gone."""
        os.setpriority(os.PRIO_PGRP, self.process.pid, os.getpriority(os.PRIO_PROCESS, 0))
        if recipe.cpus:
            _bind(self.process.pid, recipe.cpus)
        of_the_rank = standby.UNKNOWN.difference(standby.DESCRIPTORS)  # those have other numbers there
        told = {name: value for name, value in recipe.environment.items() if name in of_the_rank}
        socket.send_fds(self._socket, [json.dumps(told).encode()], [secret, report])

    def last_line(self) -> str:
        """The last line of what it has written to its errors, of one that has ended."""
        os.set_blocking(self.error, False)
        text = b""
        with suppress(BlockingIOError):
            while data := os.read(self.error, TAIL_BYTES):
                text = (text + data)[-TAIL_BYTES:]
        return (text.decode(errors="replace").strip().splitlines() or [""])[-1]

    def end(self) -> None:
        """End it, and hold nothing of it any more."""
        self.process.kill()
        self.process.poll()
        self._close()

    def _close(self) -> None:
        self._hang_up()
        os.close(self.output)
        os.close(self.error)

    def _hang_up(self) -> None:
        if self._socket.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()


class Standbys:
    """Those of a host that wait."""

    def __init__(self, recipe: Recipe, most: int, note: Callable[[str], None]) -> None:
        """``most`` are kept, for ranks whose recipes differ from this one in what hangs on the rank alone."""
        self._recipe = recipe
        self._most = most
        self._note = note
        self._said: set[str] = set()
        self._waiting: list[Standby] = []
        self._failures = 0

    def fill(self, wanted: int) -> None:
        """Have so many wait, or as many as are to be kept if these are fewer."""
        while len(self._waiting) < min(wanted, self._most):
            try:
                self._waiting.append(Standby(self._recipe, self._take_word))
            except (OSError, subprocess.SubprocessError) as error:
                self._give_up(f"no standby can be started: {error}")

    def take(self) -> Standby | None:
        """One that waits, or will when it has done its imports; None if there is none that lives."""
        self.report_exits()
        found = max(self._waiting, key=lambda each: each.is_ready, default=None)
        if found is not None:
            self._waiting.remove(found)
            self._failures = 0
        return found

    def report_exits(self) -> int:
        """Leave out those that have ended; how many these were."""
        ended = [each for each in self._waiting if each.process.poll() is not None]
        for each in ended:
            each.hear()
            self._failures += 1
            if self._failures >= MOST_FAILURES:
                how, line = processes.describe_exit(each.process.returncode), each.last_line()
                self._give_up(
                    f"{self._failures} standbys in a row have ended before they were needed ({how})"
                    + (f"; the last line of one: {line}" if line else "")
                )
            if each in self._waiting:
                self._waiting.remove(each)
                each.end()
        return len(ended)

    def end(self) -> None:
        """End those that wait, and start no more."""
        self._most = 0
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            each.end()

    def _take_word(self, each: Standby, kind: str, text: str) -> None:
        if kind == "unfit":
            self._give_up(text)
        elif kind == "failed" and text not in self._said:
            self._said.add(text)
            self._note(f"a standby has not imported all that a rank does: {text}")

    def _give_up(self, why: str) -> None:
        if self._most:
            self._most = 0
            self._note(f"{why}; replacements are started without standbys from now on")


def _bind(process: int, cpus: Sequence[int]) -> None:
    """Bind all threads of a process; twice, for those that were started meanwhile."""
    for _ in range(2):
        for thread in Path(f"/proc/{process}/task").iterdir():
            with suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread.name), cpus)


def _can_restore_priority() -> bool:
    """Whether the priority of a process that was lowered can be raised again: not without CAP_SYS_NICE or a limit."""
    found: list[bool] = []

    def try_it() -> None:  # the kernel keeps it by thread
        own = os.getpriority(os.PRIO_PROCESS, 0)
        os.setpriority(os.PRIO_PROCESS, 0, own + 1)
        try:
            os.setpriority(os.PRIO_PROCESS, 0, own)
        except PermissionError:
            return
        found.append(True)

    thread = threading.Thread(target=try_it)
    thread.start()
    thread.join()
    return bool(found)
