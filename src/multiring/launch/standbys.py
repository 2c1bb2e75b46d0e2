"""The standbys of a host, seen from its agent: processes that wait to become ranks.

One interpreter does the imports of the script, and forks the others: it is their origin. Where it cannot be forked it
waits itself, beside as many more as there are to be.
"""

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
from multiring.launch.processes import AdoptedProcess, Process, Recipe, Streams
from multiring.launch.program import words_before_script
from multiring.net.loop import within

NICE = 5
"""Difference by which a standby's priority is lower than a rank's: beside a rank it has a quarter of a core."""

MOST_FAILURES = 3
"""Standbys in a row that end before they are needed: then no more are started."""

FORK_SECONDS = 5.0
"""Seconds that a rank which is to start again waits for a fork; then it starts in a fresh interpreter."""

TAIL_BYTES = 4096

OnWord = Callable[["Standby", str, str], None]


class Standby:
    """One process that waits, or has become a rank."""

    def __init__(self, recipe: Recipe, on_word: OnWord, origin: Standby | None = None, nice: int = 0) -> None:
        """``on_word(standby, kind, text)`` gets what it says; OSError if it cannot be started, or forked.

        One that ``origin`` forks has no process until it is ready.
        """
        self._on_word = on_word
        self.is_ready = False
        self.can_be_forked = False
        self._has_begun = False
        self.printed: tuple[bytes, bytes] = (b"", b"") if origin is None else origin.printed
        """Output and errors that its imports had written before it was forked."""
        self.process: Process | None = None
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.output, output = os.pipe()
        self.error, error = os.pipe()
        streams = Streams(os.open(os.devnull, os.O_RDONLY), output, error)
        try:
            if origin is None:
                self.process = _start(replace(recipe, nice=nice), streams, theirs.fileno())
            else:
                given = [streams.input, streams.output, streams.error, theirs.fileno()]
                socket.send_fds(origin._socket, [standby.FORK], given)
        except BaseException:
            self._close()
            raise
        finally:
            theirs.close()
            for descriptor in (streams.input, output, error):
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
                self._on_word(self, "silent", "")
                return
            said = json.loads(data)
            if self.process is None:
                self.process = AdoptedProcess(said["process"])
            if said["kind"] == "ready":
                self.is_ready, self.can_be_forked = True, not said["text"]
            self._has_begun = self._has_begun or said["kind"] == "begun"
            self._on_word(self, said["kind"], said["text"])

    @property
    def has_begun(self) -> bool:
        """True if it runs the script: how it ends then is how the rank ends."""
        self.hear()
        return self._has_begun

    @property
    def has_ended(self) -> bool:
        """True if it was there and is no more."""
        return self.process is not None and self.process.poll() is not None

    def become(self, recipe: Recipe, secret: int, report: int) -> Process:
        """Let it be a rank, at once or when it has done its imports; OSError if it is gone."""
        assert self.process is not None
        os.setpriority(os.PRIO_PGRP, self.process.pid, os.getpriority(os.PRIO_PROCESS, 0))
        if recipe.cpus:
            _bind(self.process.pid, recipe.cpus)
        of_the_rank = standby.UNKNOWN.difference(standby.DESCRIPTORS)  # those have other numbers there
        told = {name: value for name, value in recipe.environment.items() if name in of_the_rank}
        socket.send_fds(self._socket, [json.dumps(told).encode()], [secret, report])
        return self.process

    def last_line(self) -> str:
        """The last line of what it has written to its errors, of one that has ended."""
        return (_read(self.error)[-TAIL_BYTES:].decode(errors="replace").strip().splitlines() or [""])[-1]

    def end(self) -> None:
        """End it, and hold nothing of it any more; one that has yet to be forked ends by itself."""
        if self.process is not None:
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
    """Standbys of a host."""

    def __init__(self, recipe: Recipe, most: int, note: Callable[[str], None], *, at_start: bool = False) -> None:
        """``most`` are kept, for ranks whose recipes differ from this one in what hangs on the rank alone.

        ``at_start``: there are no ranks yet whose processors they should leave alone.
        """
        self._recipe = recipe
        self._nice = NICE if not at_start and _can_restore_priority() else 0
        self._most = most
        self._note = note
        self._said: set[str] = set()
        self._wanted = 0
        self._origin: Standby | None = None
        self._is_alone = False
        """True if an interpreter that has done the imports cannot be forked."""
        self._waiting: list[Standby] = []
        self._unborn: list[Standby] = []
        self._changed = asyncio.Event()
        """Set whenever the imports are done, one that was forked waits, or one of them will not."""
        self._failures = 0

    def are_for(self, recipe: Recipe) -> bool:
        """True if they can become a process of ``recipe``."""
        own = self._recipe
        return (own.command, own.directory, _known(own)) == (recipe.command, recipe.directory, _known(recipe))

    @property
    def children(self) -> list[Process | None]:
        """The processes of all standbys; None for each that is being forked."""
        origin = [] if self._origin is None else [self._origin]
        return [each.process for each in (*self._waiting, *self._unborn, *origin)]

    def fill(self, wanted: int) -> None:
        """Have ``wanted`` wait, or as many as are to be kept if these are fewer."""
        self._wanted = wanted
        try:
            if self._origin is None and self._most and not self._is_alone and wanted > len(self._waiting):
                self._origin = self._importing()
            while len(self._waiting) + len(self._unborn) < min(wanted, self._most):
                if self._is_alone:
                    self._waiting.append(self._importing())
                elif self._origin is not None and self._origin.can_be_forked:
                    self._unborn.append(Standby(self._recipe, self._take_word, self._origin))
                else:  # it imports
                    return
        except ConnectionError:  # the origin has just ended, which is reported
            pass
        except (OSError, subprocess.SubprocessError) as error:
            self._give_up(f"no standby can be started: {error}")

    def keep(self, most: int) -> None:
        """Keep ``most`` from now on."""
        self._most = most
        if not most:
            self._end_all()
        while len(self._waiting) > most:
            self._waiting.pop().end()

    def _importing(self) -> Standby:
        return Standby(self._recipe, self._take_word, nice=self._nice)

    async def imported(self) -> None:
        """Return once the imports are done, or when it is known that nothing will be forked."""
        while self._most and not self._is_alone and (self._origin is None or not self._origin.is_ready):
            self._changed.clear()
            await self._changed.wait()

    async def take(self) -> Standby | None:
        """One that waits, or will when it has done its imports; None if there is none that lives."""
        self.report_exits()
        deadline = asyncio.get_running_loop().time() + FORK_SECONDS
        while not self._waiting and self._most and self._origin is not None and self._origin.can_be_forked:
            self.fill(max(self._wanted, 1))
            self._changed.clear()
            try:
                await within(deadline - asyncio.get_running_loop().time(), self._changed.wait())
            except asyncio.TimeoutError:  # it is stopped, say
                if self._origin is not None:
                    self._origin.end()
                    self._origin = None
                self._note(f"no standby was forked within {FORK_SECONDS:g} s; a fresh interpreter takes its place")
                return None
        found = max(self._waiting, key=lambda each: each.is_ready, default=None)
        if found is not None:
            self._waiting.remove(found)
            self._failures = 0
        elif self._origin is not None:
            found, self._origin = self._origin, None
        return found

    def report_exits(self) -> None:
        """Have others in the place of those that have ended."""
        origin = [] if self._origin is None else [self._origin]
        ended = [each for each in (*self._waiting, *origin) if each.has_ended]
        for each in ended:
            each.hear()
            assert each.process is not None
            assert each.process.returncode is not None
            how, line = processes.describe_exit(each.process.returncode), each.last_line()
            self._count_failure(
                f"have ended before they were needed ({how})" + (f"; the last line of one: {line}" if line else "")
            )
            if each is self._origin:
                self._origin = None
            elif each in self._waiting:
                self._waiting.remove(each)
            each.end()
        if ended:
            self.fill(self._wanted)
            self._changed.set()

    def end(self) -> None:
        """End those that wait, and start no more."""
        self.keep(0)

    def _end_all(self) -> None:
        origin = [] if self._origin is None else [self._origin]
        ended = [*self._waiting, *self._unborn, *origin]
        self._waiting, self._unborn, self._origin = [], [], None
        for each in ended:
            each.end()
        self._changed.set()

    def _take_word(self, each: Standby, kind: str, text: str) -> None:
        if kind == "unfit":
            self._give_up(text)
        elif kind == "failed" and text not in self._said:
            self._said.add(text)
            self._note(f"a standby has not imported all that a rank does: {text}")
        elif kind == "stale":
            self._note(f"{text} has changed since standbys imported it: others import it anew")
            self._end_all()
            self.fill(self._wanted)
        elif kind == "ready" and each is self._origin:
            if each.can_be_forked:
                each.printed = _read(each.output), _read(each.error)
            else:
                self._is_alone = True
                self._note(f"standbys cannot be forked: {text}; each does the imports itself")
                self._waiting.append(each)
                self._origin = None
            self.fill(self._wanted)
            self._changed.set()
        elif each in self._unborn and kind in ("ready", "silent"):
            self._unborn.remove(each)
            self._changed.set()
            if kind == "ready":
                self._waiting.append(each)
            else:
                each.end()
                self._count_failure("have not been forked")

    def _count_failure(self, how: str) -> None:
        self._failures += 1
        if self._failures >= MOST_FAILURES:
            self._give_up(f"{self._failures} standbys in a row {how}")

    def _give_up(self, why: str) -> None:
        if self._most:
            self._most = 0
            self._changed.set()
            self._note(f"{why}; ranks start in fresh interpreters from now on")


def _known(recipe: Recipe) -> dict[str, str]:
    """Return the part of a rank's environment that is the same for every rank."""
    return {name: value for name, value in recipe.environment.items() if name not in standby.UNKNOWN}


def _start(recipe: Recipe, streams: Streams, descriptor: int) -> subprocess.Popen[bytes]:
    """An interpreter that does the imports of the script, and hears at ``descriptor`` what is to become of it."""
    before = words_before_script(recipe.command)
    command = [*recipe.command[:before], standby.__file__, str(descriptor), *recipe.command[before:]]
    started = replace(recipe, command=command, environment=_known(recipe), cpus=(), group=None)
    return processes.start(started, streams, (descriptor,))


def _read(descriptor: int) -> bytes:
    """Return the bytes that can be read from a pipe at once."""
    os.set_blocking(descriptor, False)
    text = bytearray()
    with suppress(BlockingIOError):
        while data := os.read(descriptor, TAIL_BYTES):
            text += data
    return bytes(text)


def _bind(process: int, cpus: Sequence[int]) -> None:
    """Bind all threads of a process; twice, for those that were started meanwhile."""
    for _ in range(2):
        for thread in Path(f"/proc/{process}/task").iterdir():
            with suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread.name), cpus)


def _can_restore_priority() -> bool:
    """True if the priority of a process that was lowered can be raised again: not without CAP_SYS_NICE or a limit."""
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
