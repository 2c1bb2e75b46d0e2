"""The agent of one host: starts the ranks there, passes on their output, and ends them when the launcher is gone.

It runs as a fork of the launcher, as ``python -m multiring.launch.agent`` at the other end of ssh, or as the
``multiring run`` that was typed on its host. The messages are those of ``messages.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import syslog
import time
from collections.abc import Collection, Coroutine, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from multiring import env
from multiring.errors import MultiringError, RendezvousError, ResourceError, system_message
from multiring.job import cores, descriptors
from multiring.launch import LaunchError, processes
from multiring.launch.hosts import Assignment, identity, own_name
from multiring.launch.lifeline import Lifeline
from multiring.launch.limits import check_room_for
from multiring.launch.messages import LIMIT, Message, decode, encode, to_bytes, to_text, write_all
from multiring.launch.processes import Recipe
from multiring.launch.program import resolve
from multiring.launch.rank import NO_REPORT, RankProcess
from multiring.launch.signals import on_signal
from multiring.launch.standbys import Standby, Standbys
from multiring.launch.terminal import Terminal
from multiring.net import interfaces, listen
from multiring.net.loop import check_room, within
from multiring.version import __version__

DRAIN_SECONDS = 0.5
"""Seconds that the agent waits for output of ranks that have ended: a process they left behind may hold it open."""

REACH_SECONDS = 3.0

JOB_VARIABLES = (
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "MULTIRING_WORLD_SIZE",
    "MULTIRING_STORE",
    "MULTIRING_JOB",
    "MULTIRING_RESTART",
    "MULTIRING_REPLACEMENT",
    "MULTIRING_MAX_REPLACEMENTS",
)
"""Variables that the launcher sets for all ranks."""

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGKILL)
"""Signals after which a rank that has not begun is not wanted any more."""

_REQUESTS = {"usr1": signal.SIGUSR1, "usr2": signal.SIGUSR2}
"""Signals by the words of MULTIRING_FLIGHT_RECORDER_SIGNAL: one asks a rank for its record, and is to end nobody."""

OF_THE_START = ("MASTER_ADDR", "MASTER_PORT")
"""Variables of a start's meeting point, which no newcomer gets: torch then names what it misses, and does not wait."""


@dataclass(frozen=True)
class TypedCommand:
    """The command that was typed on this host; ``secret`` is None if none was given."""

    program: Sequence[str]
    ranks: int
    hosts: int
    secret: bytes | None

    def as_dict(self) -> dict[str, Any]:
        return {"program": list(self.program), "ranks": self.ranks, "hosts": self.hosts}


class Agent:
    """Does what the launcher says over the descriptors ``input`` and ``output``.

    ``forked``: from the launcher, so that rank 0 can have the launcher's own standard input. ``typed``: what was typed
    on this host, which then is what runs here, whatever the launcher says.
    """

    def __init__(self, input: int, output: int, *, forked: bool = False, typed: TypedCommand | None = None) -> None:
        self._input = input
        self._output = output
        self._forked = forked
        self._typed = typed
        self._code: int | None = None
        self.reason = ""
        """Reason of the job's end, in a line; empty if it ended well, or if nobody told."""
        self._leaving = False
        self._lifeline: Lifeline | None = None
        self._holding: asyncio.Task[None] | None = None
        self._is_cut_off = False
        """True if the launcher is lost, and nothing more is sent to it."""
        self._refusal = ""
        self._request: signal.Signals | None = None
        self._launcher_group = os.getpgid(os.getppid())
        self._ranks: dict[int, RankProcess] = {}
        self._former: list[RankProcess] = []
        """Processes in whose place others were started."""
        self._unborn: dict[int, int | None] = {}
        """Ranks that are forked once the imports are done; the signal that is to end one of them."""
        self._recipes: dict[int, Recipe] = {}
        self._standbys: Standbys | None = None
        self._untold: list[str] = []
        """Notes that the launcher gets when there are ranks."""
        self._left = 0
        """Replacements that are left to the job: more standbys could become nothing."""
        self._starting: set[asyncio.Task[None]] = set()
        self._secret = b""
        self._running: set[int] = set()
        self._stdin: asyncio.StreamWriter | None = None
        self._feeding: asyncio.Task[None] | None = None
        self._listening: socket.socket | None = None
        self._handlers = {
            "prepare": self._prepare,
            "listen": self._listen,
            "reach": self._reach,
            "warm": self._warm,
            "start": self._start,
            "replace": self._replace,
            "input": self._feed,
            "window": self._resize,
            "signal": self._signal,
            "look": self._look,
            "kill": self._kill,
            "finish": self._finish,
            "done": self._take_code,
            "refuse": self._take_refusal,
        }

    def serve(self) -> int | None:
        """Work until the launcher closes the connection; then nothing that was started is left.

        Returns the job's exit code, 128 + the signal that ended this agent, or None if the launcher was lost.
        LaunchError if it refused this agent.
        """
        processes.adopt_orphans()
        try:
            check_room()
            asyncio.run(self._serve())
        except ResourceError as error:  # it is for the launcher to say so
            with contextlib.suppress(ConnectionError):
                write_all(self._output, encode("error", text=str(error)))
        except (asyncio.CancelledError, ConnectionError):
            pass  # a signal came, or the launcher is gone
        finally:
            processes.kill_descendants()
        if self._refusal:
            raise LaunchError(self._refusal)
        return self._code

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
        self._end = task.cancel
        on_signal(signal.SIGCHLD, self._report_exits)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            on_signal(number, partial(self._leave, number))
        reader = asyncio.StreamReader(LIMIT)
        os.set_blocking(self._output, False)
        protocol = asyncio.StreamReaderProtocol(reader)
        if self._typed is None:
            await loop.connect_read_pipe(lambda: protocol, os.fdopen(self._input, "rb"))
        else:  # a socket, whose end is no error of this program: a pipe's transport would show a traceback
            await loop.create_connection(lambda: protocol, sock=socket.socket(fileno=self._input))
        typed = None if self._typed is None else self._typed.as_dict()
        write_all(self._output, b"\n")  # ends what a shell may have printed when it logged in
        process = os.getpid(), processes.began(os.getpid())
        self._send("hello", version=__version__, host=own_name(), machine=identity(), process=process, typed=typed)
        messages = asyncio.Queue[Message | None]()
        listening = asyncio.create_task(self._read(reader, messages))
        try:
            while (message := await messages.get()) is not None:
                try:
                    await self._handlers[message["kind"]](message)
                except (MultiringError, ValueError, OSError) as error:
                    self._send("error", text=system_message(error))
            listening.result()  # raises why there is no message any more
        finally:
            listening.cancel()
            if self._holding is not None:
                self._holding.cancel()

    async def _read(self, reader: asyncio.StreamReader, messages: asyncio.Queue[Message | None]) -> None:
        """Queue the launcher's messages, then None; answer a ``beat`` at once, also while another is carried out."""
        try:
            while line := await reader.readline():
                if self._lifeline is not None:
                    self._lifeline.hear()
                message = decode(line)
                if message is None:
                    raise ValueError(f"not a message of the launcher: {line[:100]!r}")
                if message["kind"] == "beat":
                    self._send("beat")
                else:
                    messages.put_nowait(message)
        except OSError:  # a socket whose other end acknowledges nothing: TimeoutError, or that the host is unreachable
            pass
        finally:
            messages.put_nowait(None)

    def _send(self, kind: str, **fields: Any) -> None:
        """Blocks while the launcher does not read: so do the ranks then, once their pipes are full."""
        if self._is_cut_off:
            return
        is_lost = (lambda: False) if self._lifeline is None else self._lifeline.is_lost
        try:
            if not write_all(self._output, encode(kind, **fields), is_lost):
                self._lose_launcher()
        except OSError:
            self._end()

    def _leave(self, number: int) -> None:
        """End after a signal: the ranks get it too, and have time to end, unless it is the second one."""
        self._code = 128 + number
        self.reason = f"ended by {signal.Signals(number).name}"
        if self._leaving or not self._running:
            self._send("error", text=self.reason)
            self._end()
            return
        self._send("leaving", text=self.reason)
        self._let_end(number)

    def _let_end(self, number: int) -> None:
        """Send the ranks a signal, and end when they have ended or have had time to."""
        self._leaving = True
        self._start_no_more()
        for rank in self._ranks.values():
            processes.send_signal(rank.process, number)
        asyncio.get_running_loop().call_later(processes.GRACE_SECONDS, self._end)

    async def _hold(self, lifeline: Lifeline) -> None:
        """End when the launcher is lost."""
        try:
            is_lost = await lifeline.lose()
        except RendezvousError as error:
            self._note(
                f"it cannot reach the job's store ({error}): if the launcher's host is cut off, its ranks go on as "
                "long as ssh does"
            )
            return
        if is_lost:
            self._lose_launcher()

    def _lose_launcher(self) -> None:
        """Let the ranks end, and say why where somebody may look for it."""
        if self._is_cut_off:
            return
        assert self._lifeline is not None
        self._is_cut_off = True
        told = (
            f"host {own_name()}: the launcher's host has not been heard of for {self._lifeline.seconds:g} s: all ranks "
            "here are ended"
        )
        with contextlib.suppress(OSError):
            print(f"multiring: {told}", file=sys.stderr, flush=True)
        syslog.openlog("multiring")
        syslog.syslog(syslog.LOG_ERR, told)
        if self._running and not self._leaving:
            self._let_end(signal.SIGTERM)
        elif not self._running:
            self._end()

    async def _prepare(self, message: Message) -> None:
        _check_killed([pid for agent in message["former"] for pid in processes.kill_former(*agent)])
        if message["lifeline"] is not None and self._lifeline is None:
            self._lifeline = Lifeline(message["lifeline"])
            self._holding = asyncio.create_task(self._hold(self._lifeline))
        self._assignment = Assignment(message["host"], message["first"], message["count"])
        program, given, self._directory = message["program"], message["environment"], message["directory"]
        if self._typed is not None:
            program, given, self._directory = self._typed.program, {}, os.getcwd()
        self._environment = {**os.environ, **given, "PYTHONUNBUFFERED": "1"}
        # Its content reaches the ranks as all secrets do, through MULTIRING_SECRET_FD.
        for name in ("MULTIRING_SECRET_FILE", "MULTIRING_SECRET_FD", "MULTIRING_REPORT_FD"):
            self._environment.pop(name, None)
        self._request = _REQUESTS.get(self._environment.get("MULTIRING_FLIGHT_RECORDER_SIGNAL", "").lower())
        if not os.path.isdir(self._directory):
            raise LaunchError(f"there is no directory {self._directory}: the job's directory must exist on every host")
        self._command = resolve(program, self._directory, self._environment)
        self._standby, self._fork = message["standby"], message["fork"]
        origin = self._fork or self._standby > 0  # what they are forked from
        check_room_for(self._assignment.count, standbys=self._standby + origin)
        self._shares = cores.divide(
            cores.allowed_cores(), cores.cgroup_quota(), self._assignment.count, message["binding"]
        )
        self._send("ready", shares=[str(share) for share in self._shares])

    async def _listen(self, message: Message) -> None:
        settings = env.read(env.Settings, self._environment)
        self._listening = listen.bind("", settings.ports)
        addresses = interfaces.addresses(settings.interface) if message["everywhere"] else []
        self._send("listening", port=self._listening.getsockname()[1], addresses=addresses)

    async def _reach(self, message: Message) -> None:
        answers = await asyncio.gather(*(_answers(address, message["port"]) for address in message["addresses"]))
        self._send(
            "reached", addresses=[a for a, answered in zip(message["addresses"], answers, strict=True) if answered]
        )

    async def _start(self, message: Message) -> None:
        if self._listening is not None:
            self._listening.close()
        self._secret = bytes.fromhex(message["secret"])
        if self._typed is not None and self._typed.secret is not None:
            self._secret = self._typed.secret
        self._terminal = Terminal(**message["terminal"])
        self._left = message["left"]
        self._recipes = self._recipes_for(message["variables"])
        if self._standbys is not None and not self._standbys.are_for(self._recipes[self._assignment.first]):
            self._standbys.end()
            self._standbys = None
        replacements = dict(message["replacements"])
        forked = set() if replacements or not self._fork else set(self._recipes) - {0}
        if len(forked) < 2:  # as soon done by itself
            forked.clear()
        for rank, recipe in self._recipes.items():
            await asyncio.sleep(0)  # many take their time, in which the launcher may want a sign of life
            if self._leaving:
                return
            with _naming(rank, self._command):
                if rank in replacements:
                    await self._launch_ready(rank, _of_replacement(recipe, replacements[rank]), None)
                elif not replacements and rank not in forked:
                    await self._launch(rank, recipe, self._terminal)
        if forked:
            self._in_background(self._fork_ranks(sorted(forked)))
        else:
            self._have_standbys()
            self._tell_notes()

    async def _fork_ranks(self, ranks: Sequence[int]) -> None:
        """Have the script's imports done once, then fork the ranks there."""
        if self._standbys is not None:  # those of a start before
            self._standbys.end()
        own = self._standbys = Standbys(self._recipes[ranks[0]], len(ranks), self._note, at_start=True)
        own.fill(len(ranks))
        self._unborn = dict.fromkeys(ranks)
        await own.imported()
        try:
            for rank in ranks:
                await self._fork_rank(rank)
        except LaunchError as error:
            self._send("error", text=str(error))
        self._unborn.clear()
        if self._standbys is own:
            own.keep(self._standby)
            if self._standby:
                own.fill(self._left)
            else:
                self._standbys = None
        self._tell_notes()

    async def _fork_rank(self, rank: int) -> None:
        """Start a rank; if a signal came first, report that it has ended."""
        number = self._unborn[rank]
        if number is None:
            with _naming(rank, self._command):
                await self._launch_ready(rank, self._recipes[rank], None)
            number = self._unborn.pop(rank)
            if number is not None:
                processes.send_signal(self._ranks[rank].process, number)
        else:
            self._send("exit", rank=rank, code=-number, **NO_REPORT)

    def _end_unborn(self, number: int, without: Collection[int] = ()) -> None:
        """Let a signal end the ranks that have yet to be forked."""
        self._unborn.update({rank: number for rank in self._unborn if rank not in without})
        if self._standbys is not None and self._unborn and None not in self._unborn.values():
            self._standbys.end()

    def _tell_notes(self) -> None:
        while self._ranks and self._untold:
            self._note(self._untold.pop(0))

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    async def _warm(self, message: Message) -> None:
        if self._standbys is not None:  # those of a start before
            self._standbys.end()
            self._standbys = None
        self._left = message["left"]
        self._recipes = self._recipes_for(message["variables"])
        self._have_standbys()

    def _recipes_for(self, variables: dict[str, str]) -> dict[int, Recipe]:
        """Return the recipe of each rank of this host."""
        job = {name: variables[name] for name in JOB_VARIABLES}
        recipes = {}
        for local_rank, (rank, share) in enumerate(zip(self._assignment.ranks, self._shares, strict=True)):
            place = {"RANK": rank, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": self._assignment.count}
            environment = {
                "OMP_NUM_THREADS": str(share.threads),
                **self._environment,
                **job,
                **{prefix + name: str(value) for name, value in place.items() for prefix in ("", env.PREFIX)},
            }
            recipes[rank] = Recipe(self._command, environment, self._directory, share.cpus)
        return recipes

    def _have_standbys(self) -> None:
        if self._standby and self._standbys is None:
            self._standbys = Standbys(self._recipes[self._assignment.first], self._standby, self._note)
        if self._standbys is not None:
            self._standbys.fill(self._left)

    async def _replace(self, message: Message) -> None:
        number, recipe = message["rank"], self._recipes[message["rank"]]
        terminal: Terminal | None = self._terminal
        if message["number"]:  # the others have met before
            recipe, terminal = _of_replacement(recipe, message["number"]), None
        elif number == 0 and self._stdin is not None:
            if self._feeding is not None and not self._feeding.done():
                self._feeding.cancel()  # a child of the former one may keep the pipe open, and read nothing
                self._feeding = None
                self._send("taken")
            self._stdin.close()
        self._left = message["left"]
        await self._start_again(number, recipe, terminal)

    async def _start_again(self, number: int, recipe: Recipe, terminal: Terminal | None, afresh: bool = False) -> None:
        """Start a rank in the place of one that has ended: from a standby, unless ``afresh`` or at a terminal."""
        self._former.append(self._ranks.pop(number))
        try:
            await self._launch_ready(number, recipe, terminal, afresh)
        except (OSError, subprocess.SubprocessError) as error:  # the other ranks of the host go on
            self._pass_on(number, 2, f"cannot start rank {number} again: {system_message(error)}\n".encode())
            self._send("exit", rank=number, code=1, **NO_REPORT)

    async def _launch_ready(self, number: int, recipe: Recipe, terminal: Terminal | None, afresh: bool = False) -> None:
        """Start a rank from a standby that can be had, unless ``afresh`` or at a terminal."""
        standbys = self._standbys
        if standbys is None:
            await self._launch(number, recipe, terminal)
            return
        afresh = afresh or (number == 0 and terminal is not None)
        try:
            while not afresh and (standby := await standbys.take()) is not None:
                with contextlib.suppress(OSError):  # it has just ended
                    await self._launch(number, recipe, terminal, standby)
                    return
            await self._launch(number, recipe, terminal)
        finally:
            standbys.fill(self._left)

    async def _launch(
        self, number: int, recipe: Recipe, terminal: Terminal | None, standby: Standby | None = None
    ) -> None:
        """Start a rank; that with number 0 has the ``terminal``, if there is one for it."""
        feed = None
        if number != 0 or terminal is None:
            stdin, terminal = os.open(os.devnull, os.O_RDONLY), Terminal(output=False, error=False)
        elif self._forked:
            stdin = os.dup(0)
            if os.isatty(stdin):  # only the terminal's foreground group may read from it
                recipe = replace(recipe, group=self._launcher_group)
        else:
            stdin, feed = os.pipe()
        try:
            rank = RankProcess(recipe, self._secret, stdin, terminal, partial(self._pass_on, number), standby)
        finally:
            os.close(stdin)
        self._ranks[number] = rank
        self._running.add(number)
        if feed is not None:
            self._stdin = await _open_writer(feed)

    def _pass_on(self, rank: int, stream: int, data: bytes) -> None:
        self._send("output", rank=rank, stream=stream, text=to_text(data))

    def _note(self, text: str) -> None:
        if self._ranks:
            self._send("note", text=text)
        else:  # nobody listens to a spare host
            self._untold.append(text)

    def _report_exits(self) -> None:
        for number in sorted(self._running):
            rank = self._ranks[number]
            code = rank.process.poll()
            if code is None:
                continue
            self._running.remove(number)
            if rank.standby is not None and not rank.standby.has_begun:
                # It was no rank yet, and nobody wanted its end.
                self._in_background(self._start_again(number, rank.recipe, None, afresh=True))
            else:
                self._send("exit", rank=number, code=code, **rank.report)
        if self._standbys is not None:
            self._standbys.report_exits()
        self._reap_orphans()
        if self._leaving and not self._running:  # what is left to be read is passed on meanwhile
            asyncio.get_running_loop().call_later(DRAIN_SECONDS, self._end)

    def _reap_orphans(self) -> None:
        started: list[processes.Process | None] = [rank.process for rank in (*self._ranks.values(), *self._former)]
        started += [] if self._standbys is None else self._standbys.children
        if None not in started:  # else one that is being forked may be a child already
            processes.reap_orphans({each.pid for each in started if each is not None})

    def _start_no_more(self) -> None:
        """Have no standbys any more: what ends from now on is meant to."""
        self._end_unborn(signal.SIGKILL)
        for rank in self._ranks.values():
            rank.standby = None
        if self._standbys is not None:
            self._standbys.end()
            self._standbys = None

    async def _feed(self, message: Message) -> None:
        if self._stdin is None:  # rank 0 could not be started
            return
        if message["text"]:
            self._stdin.write(to_bytes(message["text"]))
            self._feeding = asyncio.create_task(self._report_taken(self._stdin))
        else:
            self._stdin.close()

    async def _report_taken(self, stdin: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):  # rank 0 has closed it
            await stdin.drain()
        self._send("taken")

    async def _resize(self, message: Message) -> None:
        for rank in self._ranks.values():
            rank.resize(message["rows"], message["columns"])

    async def _signal(self, message: Message) -> None:
        if message["number"] in ENDING:
            self._end_unborn(message["number"], message["without"])
        for number, rank in self._ranks.items():
            if self._leaving and message["number"] == signal.SIGTERM:
                continue  # a signal came here already, after which they may be saving
            if message["number"] == self._request:
                processes.ask(rank.process, message["number"])
            elif number not in message["without"]:
                rank.standby = None  # should it end now, it was to
                processes.send_signal(rank.process, message["number"])

    async def _look(self, message: Message) -> None:
        now = time.monotonic()
        ranks = []
        for number, rank in self._ranks.items():
            status = rank.status
            ranks.append(
                {
                    "rank": number,
                    "process": rank.process.pid,
                    "stopped": number in self._running and processes.is_stopped(rank.process.pid),
                    "age": None if status is None else now - status["at"],
                    "status": status,
                }
            )
        self._send("seen", first=self._assignment.first, ranks=ranks)

    async def _kill(self, message: Message) -> None:
        self._start_no_more()
        _kill_all()

    async def _take_code(self, message: Message) -> None:
        if not self._leaving:
            self._code, self.reason = message["code"], message["reason"]

    async def _take_refusal(self, message: Message) -> None:
        self._refusal = message["text"]

    async def _finish(self, message: Message) -> None:
        self._start_no_more()
        await asyncio.gather(*self._starting)
        deadline = time.monotonic() + DRAIN_SECONDS
        ranks = [*self._ranks.values(), *self._former]
        while not all(rank.silent for rank in ranks) and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        _kill_all()
        for rank in ranks:
            rank.close()
        self._ranks.clear()
        self._former.clear()
        if self._stdin is not None:
            self._stdin.close()
            self._stdin = None
        if self._feeding is not None:
            await self._feeding
        self._send("finished")


@contextlib.contextmanager
def _naming(rank: int, command: Sequence[str]) -> Iterator[None]:
    """LaunchError that names the rank that could not be started."""
    try:
        yield
    except (OSError, subprocess.SubprocessError) as error:
        raise LaunchError(f"cannot start rank {rank}, {shlex.join(command)}: {system_message(error)}") from None


def _of_replacement(recipe: Recipe, number: int) -> Recipe:
    """Return the recipe of the replacement of that number in the place of a rank."""
    environment = {name: value for name, value in recipe.environment.items() if name not in OF_THE_START}
    return replace(recipe, environment={**environment, "MULTIRING_REPLACEMENT": str(number)})


def _kill_all() -> None:
    _check_killed(processes.kill_descendants())


def _check_killed(remaining: Sequence[int]) -> None:
    """LaunchError if any process remains of those that were to be killed."""
    if remaining:
        listed = ", ".join(map(str, remaining))
        raise LaunchError(
            f"cannot kill process {listed}: another user's, or in a wait that the kernel does not interrupt"
        )


async def _open_writer(descriptor: int) -> asyncio.StreamWriter:
    """A writer whose ``drain`` waits until everything has been written."""
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.connect_write_pipe(
        lambda: asyncio.streams.FlowControlMixin(loop), os.fdopen(descriptor, "wb", 0)
    )
    transport.set_write_buffer_limits(0)
    return asyncio.StreamWriter(transport, protocol, None, loop)


async def _answers(address: str, port: int) -> bool:
    try:
        _, writer = await within(REACH_SECONDS, asyncio.open_connection(address, port))
    except (OSError, asyncio.TimeoutError):
        return False
    writer.close()
    return True


if __name__ == "__main__":
    descriptors.fill_standard()
    sys.exit(Agent(0, 1).serve() or 0)
