"""A job that can be watched: the launcher's socket, at which ``multiring top`` asks, and how it finds the jobs here.

The socket is an abstract one, at which another user is turned away (net/unix.py). One asks by a message of one word and
is answered by one: ``who`` by what job it is, ``look`` by that and what its ranks do. When the job ends, all who are
there are told so by ``ended``. Nothing that is asked changes the job.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

from multiring.errors import system_message
from multiring.launch import LaunchError
from multiring.launch.messages import Message
from multiring.net import auth, framing, unix
from multiring.units import count

KIND = "run"
"""Part of the names of launchers' sockets."""

MOST_ASKED = 1 << 10
MOST_ANSWERED = 1 << 28
"""Bytes of a message."""

ANSWER_SECONDS = 5.0
"""A launcher that does not answer for so long is stopped, or has too little of the machine."""

AT_ONCE = 32
"""Launchers that are asked at the same time."""

_PYTHON_VALUES = ("-W", "-X", "--check-hash-based-pycs")
"""Options of Python that have their value in the next word."""

REST_SECONDS = 1.0
"""Seconds in which nobody is accepted after that has failed, as it does without descriptors."""


class WatchSocket:
    """Answers those who watch a job, in the launcher's event loop."""

    def __init__(self, answers: dict[str, Callable[[], Awaitable[Message]]], note: Callable[[str], None]) -> None:
        """``answers`` makes those to ``who`` and ``look``; ``note`` is told once of each reason to turn one away.

        OSError if there is no socket to be had.
        """
        self._answers = answers
        self._note = note
        self._noted: set[str] = set()
        self._there: set[asyncio.StreamWriter] = set()
        self._serving: set[asyncio.Task[None]] = set()
        self._listening, self.name = unix.listen(KIND)
        self._listening.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._resting: asyncio.TimerHandle | None = None
        self._loop.add_reader(self._listening, self._accept)

    def _accept(self) -> None:
        try:
            sock = unix.accept(self._listening)
        except BlockingIOError:
            return  # it has gone again
        except auth.Refused as error:
            self._note_once(f"somebody wanted to watch this job and was turned away: {error}")
            return
        except OSError as error:
            self._note_once(f"those who want to watch this job cannot be let in: {system_message(error)}")
            self._loop.remove_reader(self._listening)
            self._resting = self._loop.call_later(REST_SECONDS, self._loop.add_reader, self._listening, self._accept)
            return
        task = self._loop.create_task(self._serve(sock))
        self._serving.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._serving.discard(task)
        if not task.cancelled():
            task.result()  # raises an error of this program, which the loop then shows

    def _note_once(self, text: str) -> None:
        if text not in self._noted:
            self._noted.add(text)
            self._note(text)

    async def _serve(self, sock: socket.socket) -> None:
        try:
            reader, writer = await asyncio.open_connection(sock=sock)
        except BaseException:
            sock.close()
            raise
        self._there.add(writer)
        try:
            while (asked := await _asked(reader)) in self._answers:
                writer.write(framing.pack(await self._answers[asked]()))
                with contextlib.suppress(ConnectionError):  # the next word that is asked is then none
                    await writer.drain()
        finally:
            self._there.discard(writer)
            writer.close()

    async def close(self, code: int, reason: str) -> None:
        """Tell all who are there how the job has ended, and let nobody in any more."""
        self._loop.remove_reader(self._listening)
        if self._resting is not None:
            self._resting.cancel()
        self._listening.close()
        for writer in self._there:
            writer.write(framing.pack({"kind": "ended", "code": code, "reason": reason}))
        tasks = list(self._serving)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _asked(reader: asyncio.StreamReader) -> str:
    """The next word that somebody asks by; none if it has gone, or has sent no such message."""
    try:
        message = await framing.receive_async(reader.readexactly, MOST_ASKED)
    except (asyncio.IncompleteReadError, ConnectionError, ValueError):
        return ""
    return str(message.get("kind")) if isinstance(message, dict) else ""


@dataclass(frozen=True)
class RunningJob:
    """A job of this user on this host, as its launcher names it."""

    socket: str
    process: int
    """The launcher's."""
    job: str
    program: tuple[str, ...]
    ranks: int

    @property
    def name(self) -> str:
        """Name of the program that was started, without its arguments."""
        return program_name(self.program)

    def __str__(self) -> str:
        return f"{self.process} ({self.name}, {count(self.ranks, 'rank')})"


def program_name(program: Sequence[str]) -> str:
    """Return the program's name without its arguments: a module, or a file without its directory, Python left out."""
    first, *others = program
    name = first.rpartition("/")[2]
    if name.startswith("python") or first == "-m":
        words = iter(others)
        for word in words:
            if word == "-c":
                break
            if word in _PYTHON_VALUES:
                next(words, "")
            elif not word.startswith("-"):
                return word.rpartition("/")[2]
    return name


def find(wanted: str | None) -> RunningJob:
    """The job that is ``wanted``, by its launcher's process, its identity or its program's name; None: the only one.

    LaunchError if there is none, or more than one.
    """
    found, silent, others = _running_jobs()
    if wanted is not None and wanted.isdecimal():
        _check_owner(wanted)
    jobs = [each for each in found if wanted is None or wanted in (str(each.process), each.job, each.name)]
    if len(jobs) == 1:
        return jobs[0]
    named = "" if wanted is None else f" named {wanted}"
    if jobs:
        listed = ", ".join(map(str, jobs))
        raise LaunchError(f"{len(jobs)} jobs{named} run here: {listed}; name one: multiring top {jobs[0].process}")
    told = f"no job{named} of this user ({os.getuid()}) runs on this host"
    if wanted is not None and found:
        told += f", where {', '.join(map(str, found))} {'do' if len(found) > 1 else 'does'}"
    if silent:
        told += (
            f"; launcher {', '.join(map(str, silent))} does not answer within {ANSWER_SECONDS:g} s: if it is stopped, "
            "let it go on (kill -CONT)"
        )
    if others:
        told += f"; there are jobs of other users ({', '.join(map(str, others))}), who alone may watch them"
    raise LaunchError(f"{told}; a job that `multiring run` started is watched on the host where that was typed")


def _check_owner(process: str) -> None:
    """LaunchError if the process of this number is another user's."""
    try:
        user = os.stat(f"/proc/{process}").st_uid
    except FileNotFoundError:
        return  # there is none, which is said where it is looked for
    if user != os.getuid():
        raise LaunchError(
            f"process {process} is of user {user}, this one of user {os.getuid()}: who started a job may watch it"
        )


def _running_jobs() -> tuple[list[RunningJob], list[int], list[int]]:
    """This user's jobs, those of its launchers that do not answer, by process, and other users that have sockets."""
    jobs: list[RunningJob] = []
    silent, others = set[int](), set[int]()
    names = unix.names(KIND)
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        for found in pool.map(_introduced, names):
            if isinstance(found, RunningJob):
                jobs.append(found)
            elif found is not None:
                (others if found.is_user else silent).add(found.number)
    return sorted(jobs, key=lambda each: each.process), sorted(silent), sorted(others)


@dataclass(frozen=True)
class _NoAnswer:
    """A socket whose owner does not answer; ``number`` is another user (``is_user``) or a process of this one."""

    number: int
    is_user: bool


def _introduced(name: str) -> RunningJob | _NoAnswer | None:
    """The job behind a socket; None if it has gone, or stays full."""
    try:
        with JobView(name) as view:
            try:
                who = view.ask("who")
            except TimeoutError:
                return _NoAnswer(view.process, is_user=False)
    except unix.AnotherUser as error:
        return _NoAnswer(error.user, is_user=True)
    except (ConnectionError, TimeoutError):
        return None
    if who["kind"] != "who":
        return None
    return RunningJob(name, who["process"], who["job"], tuple(who["program"]), who["ranks"])


class JobView:
    """A connection to the launcher of a job, from which one sees what it does; `close` ends it."""

    def __init__(self, name: str) -> None:
        """``name`` is that of the socket. Refused if it is another user's, OSError if it is gone or stays full."""
        self._sock = unix.connect(name, ANSWER_SECONDS)
        self.process, _ = unix.peer(self._sock)

    def ask(self, kind: str) -> Message:
        """The answer to ``who`` or ``look``; one of kind ``ended`` if the job has ended.

        TimeoutError after `ANSWER_SECONDS`.
        """
        deadline = time.monotonic() + ANSWER_SECONDS
        with contextlib.suppress(ConnectionError):
            # What it said last can be read also where it hears nothing any more.
            with contextlib.suppress(BrokenPipeError):
                self._sock.sendall(framing.pack({"kind": kind}))
            return framing.receive(lambda size: auth.receive(self._sock, size, deadline), MOST_ANSWERED)
        return {"kind": "ended", "code": None, "reason": "its launcher has gone"}

    def close(self) -> None:
        """End the connection; the job does not notice."""
        self._sock.close()

    def __enter__(self) -> JobView:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
