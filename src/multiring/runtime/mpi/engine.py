"""The engine over MPI: whoever waits drives all operations, and a thread does while nobody waits."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from multiring import env, errors
from multiring._native import ANY_SOURCE, COLLECTIVES, INTERNAL, Call, PlanFacts
from multiring.errors import CollectiveTimeout, MultiringError, PeerLost
from multiring.planning.plan import FINEST_GRAIN
from multiring.runtime.engine import ChoosePlan
from multiring.runtime.mpi.calls import MpiCalls
from multiring.runtime.mpi.channel import Channel, largest_tag
from multiring.runtime.mpi.messages import Inbox, ReceiveMessage, SendMessage
from multiring.runtime.mpi.neighbours import Neighbours
from multiring.runtime.mpi.notices import FailureNotice, Notices
from multiring.runtime.mpi.operation import Operation
from multiring.runtime.mpi.program import Program
from multiring.runtime.mpi.segments import CollectiveOperation
from multiring.runtime.mpi.signature import of_collective, of_message

if TYPE_CHECKING:
    from numpy.typing import NDArray

SPIN_SECONDS = 100e-6
"""Seconds that a call polls MPI before it sleeps in between, where the ranks fit the cores."""

SHORTEST_SLEEP, LONGEST_SLEEP = 20e-6, 500e-6
"""Between two looks at MPI, which wakes nobody: doubled while nothing happens."""

LEFT_SECONDS = 1.0
"""Seconds after a rank's farewell in which its earlier messages may still arrive."""

_SEND = COLLECTIVES.index("send")
_log = logging.getLogger("multiring")


class MpiWork:
    """A started operation."""

    def __init__(self, engine: MpiEngine, operation: Operation) -> None:
        self._engine = engine
        self._operation = operation

    @property
    def other(self) -> int:
        return self._operation.other if self._operation.is_complete else ANY_SOURCE

    @property
    def ended(self) -> float:
        return self._operation.ended_at

    def done(self) -> bool:
        return self._operation.has_ended

    def wait(self, timeout: float | None = None) -> None:
        self._engine.wait(self._operation, timeout)


class MpiEngine:
    """A `multiring.runtime.engine.Engine` for the ranks of ``world``, whose hosts are called ``hosts``."""

    def __init__(self, world: MPI.Intracomm, hosts: list[str], settings: env.Settings) -> None:
        self._rank = world.Get_rank()
        self._world = world
        self._neighbours = Neighbours()
        self._hosts = hosts
        self._late_seconds = settings.late_warning
        self._spin_seconds = _spin_seconds(hosts.count(hosts[self._rank]), settings.spin_seconds)
        self._process = os.getpid()
        self._lock = threading.RLock()
        self._channels: dict[int, Channel] = {}
        self._inboxes: dict[int, Inbox] = {}
        self._programs: list[Program] = []
        self._active: list[Operation] = []
        self._abandoned: list[Operation] = []
        self._failure: FailureNotice | None = None
        self._drivers = 0
        self._is_connected = self._closing = False
        self._busy = threading.Event()
        self._thread: threading.Thread | None = None
        self._operations = self._segments = 0
        self._seconds_in_calls = self._seconds_waiting = 0.0
        self._peers: dict[int, dict[str, float]] = {}
        self._collectives: dict[str, dict[str, float]] = {}

    # --- the other ranks ---

    @property
    def memory_fd(self) -> int:
        """Ranks of a host share no memory here; what they pass each other instead."""
        return self._neighbours.nothing

    doorbell_fd = memory_fd

    def attach_local(self, peer: int, memory_fd: int, doorbell_fd: int, socket_fd: int) -> None:
        """A rank of this host; the unix socket tells of its death."""
        os.close(memory_fd)
        os.close(doorbell_fd)
        self._neighbours.add(peer, socket_fd)

    def attached(self, peer: int) -> bool:
        """MPI connects by itself."""
        return True

    def departed(self, peer: int) -> bool:
        """True if a rank has said farewell."""
        return peer in self._notices.left

    def miss_connection(self, peer: int, seconds: float) -> None:
        """MPI has all connections, or ends the job."""
        raise NotImplementedError(f"no connection to rank {peer} is missed: MPI connects by itself")

    def connect(self) -> None:
        """Get communicators of MPI that are multiring's own; all ranks call it."""
        self._notices = Notices(self._world.Dup(), self._hosts)
        self._world = self._world.Dup()
        self._is_connected = True
        atexit.register(self._end_job)

    # --- communicators and schedules ---

    def communicator(self, id: int, members: list[int], incarnation: int = 0) -> None:
        """MPI itself tells a communicator from those before it."""
        self._check_usable()
        everybody = members == list(range(len(self._hosts)))
        mpi = self._world if everybody and id == 0 else self._subset(id, members)
        with self._lock:
            self._channels[id] = channel = Channel(mpi, members, self._count, is_internal=id >= INTERNAL)
            self._inboxes[id] = Inbox(channel)

    def _subset(self, id: int, members: list[int]) -> MPI.Intracomm:
        # Not under the lock: a member that is late may wait for what this rank's thread has to move.
        wanted = self._world.Get_group().Incl(members)
        return self._world.Create_group(wanted, id % largest_tag(self._world))

    def forget(self, id: int) -> None:
        with self._lock:
            channel = self._channels[id]
            if any(operation.channel is channel for operation in self._active):
                raise ValueError(f"communicator {id} has operations in flight")
            del self._channels[id], self._inboxes[id]
        if channel.mpi is not self._world and self._failure is None:
            channel.mpi.Free()

    def install(
        self,
        communicator: int,
        instructions: NDArray[np.int64],
        peers: NDArray[np.int32],
        facts: PlanFacts,
    ) -> int:
        own = self._channels[communicator].own
        program = Program(communicator, instructions, peers, own, facts)
        with self._lock:
            self._programs.append(program)
            return len(self._programs) - 1

    # --- operations ---

    def calls(
        self, rank: int, size: int, timeout: float, choose_plan: ChoosePlan, need_residual: bool = False
    ) -> MpiCalls:
        return MpiCalls(size, choose_plan, self._run, self._start, need_residual)

    def _run(self, schedule: int, call: Call) -> None:
        self.wait(self._begin(schedule, call, None))

    def _start(self, schedule: int, call: Call, owner: object) -> MpiWork:
        return self._in_background(self._begin(schedule, call, owner))

    def _begin(self, schedule: int, call: Call, owner: object) -> CollectiveOperation:
        program = self._programs[schedule]
        with self._calling(program.communicator):
            channel = self._channels[program.communicator]
            number, channel.next_number = channel.next_number, channel.next_number + 1
            operation = CollectiveOperation(
                channel, program, of_collective(call, number, program.facts.plan), call, owner
            )
            self._active.append(operation)
            if program.communicator < INTERNAL:
                self._segments += operation.segments
        return operation

    def start_message(self, communicator: int, peer: int, call: Call, owner: object) -> MpiWork:
        begin = self._send if call.collective == _SEND else self._receive
        with self._calling(communicator):
            operation = begin(communicator, peer, call, owner)
            self._active.append(operation)
        return self._in_background(operation)

    def _send(self, communicator: int, dst: int, call: Call, owner: object) -> Operation:
        channel = self._channels[communicator]
        member = channel.members.index(dst)
        number = channel.numbers_sent[member]
        channel.numbers_sent[member] += 1
        return SendMessage(channel, of_message(call, number), call, member, owner)

    def _receive(self, communicator: int, src: int, call: Call, owner: object) -> Operation:
        channel = self._channels[communicator]
        if src == ANY_SOURCE and len(channel.members) == 1:
            raise ValueError(f"rank {self._rank} is alone in communicator {communicator}: nobody can send to it")
        member = src if src == ANY_SOURCE else channel.members.index(src)
        operation = ReceiveMessage(channel, of_message(call, 0), call, member, owner)
        self._inboxes[communicator].want(operation)
        return operation

    @contextlib.contextmanager
    def _calling(self, communicator: int) -> Iterator[None]:
        self._check_usable()
        with self._lock:
            self._operations += communicator < INTERNAL
            yield

    def _in_background(self, operation: Operation) -> MpiWork:
        self._look()
        if not operation.has_ended:
            if self._thread is None:
                self._thread = threading.Thread(target=self._drive_alone, name="multiring-mpi", daemon=True)
                self._thread.start()
            self._busy.set()
        return MpiWork(self, operation)

    # --- driving ---

    def wait(self, operation: Operation, timeout: float | None = None) -> None:
        """Drive all operations until this one has ended; CollectiveTimeout after ``timeout``, and it goes on."""
        began = time.monotonic()
        with self._lock:
            self._drivers += 1
        try:
            self._drive(operation, None if timeout is None else began + timeout)
        except MultiringError:
            raise
        except BaseException as error:  # Ctrl-C, say: the buffer is in use, so there is no way back
            what = f"{_called(operation)} on {self._name(self._rank)} was ended by {type(error).__name__}"
            self.fail("PeerLost", self._rank, what)
            raise
        finally:
            with self._lock:
                self._drivers -= 1
            self._seconds_in_calls += time.monotonic() - began
        if operation.error is not None:
            raise operation.error

    def _drive(self, operation: Operation, deadline: float | None) -> None:
        pause, idle_since = SHORTEST_SLEEP, time.monotonic()
        while not operation.has_ended:
            if self._look():
                pause, idle_since = SHORTEST_SLEEP, time.monotonic()
                continue
            now = time.monotonic()
            if deadline is not None and now >= deadline:
                raise self._timeout_of(operation, f", after {now - operation.began:.3g} s; the work goes on")
            if now - idle_since < self._spin_seconds:
                continue
            self._look_for_dead()
            time.sleep(pause)
            self._note_waiting(operation, time.monotonic() - now)
            pause = min(2 * pause, LONGEST_SLEEP)

    def _note_waiting(self, operation: Operation, seconds: float) -> None:
        with self._lock:
            self._seconds_waiting += seconds
            for rank in operation.waits_for():
                self._counted(rank)["seconds_waited"] += seconds

    def _drive_alone(self) -> None:
        """The thread: drive what nobody waits for."""
        pause = SHORTEST_SLEEP
        while True:
            self._busy.wait()
            with self._lock:
                if self._closing:
                    return
                if not self._active:
                    self._busy.clear()
                    continue
                watched = self._drivers > 0
            pause = SHORTEST_SLEEP if not watched and self._look() else min(2 * pause, LONGEST_SLEEP)
            self._look_for_dead()
            time.sleep(pause)

    def _look(self) -> bool:
        """Let everything go on as far as it can; whether anything did. What fails, fails everything."""
        with self._lock:
            if self._failure is not None:
                return False
            try:
                told = self._notices.heard()
                if told is not None:
                    self._give_up(told)
                    return True
                return self._advance()
            except MultiringError as error:
                self._fail(error)
            except MPI.Exception as error:
                self.fail("PeerLost", -1, f"MPI on {self._name(self._rank)} says: {error}")
            return True

    def _look_for_dead(self) -> None:
        """mpirun ends the job when a rank dies; who it was is said here first."""
        with self._lock:
            dead = self._neighbours.dead() if self._failure is None else None
            if dead is not None:
                reason = f"{self._name(dead)} was lost: its process has ended"
                _log.error("%s", reason)
                self.fail("PeerLost", dead, reason)

    def _advance(self) -> bool:
        progressed = any([inbox.match() for inbox in self._inboxes.values()])
        now = time.monotonic()
        for operation in self._active:
            progressed |= operation.advance()
            if not operation.is_complete:
                self._check_time(operation, now)
            elif not operation.channel.is_internal:
                self._count_done(operation)
        self._active = [operation for operation in self._active if not operation.is_complete]
        return progressed

    def _count_done(self, operation: Operation) -> None:
        none = {"operations": 0, "bytes": 0, "seconds": 0.0}
        counted = self._collectives.setdefault(operation.counted_as, none)
        counted["operations"] += 1
        counted["bytes"] += operation.nbytes
        counted["seconds"] += operation.ended_at - operation.began

    def _check_time(self, operation: Operation, now: float) -> None:
        """Log for whom a call waits, and end it when its time is up or who is waited for has left."""
        waited = now - operation.began
        if waited >= operation.timeout:
            raise self._timeout_of(operation, f", and its {operation.timeout:g} s are up")
        if waited >= operation.late_at * self._late_seconds:
            operation.late_at *= 2
            _log.warning("%s", self._waiting(operation) + f", for {waited:.0f} s now")
        for rank in operation.waits_for() if self._notices.left else ():
            if now - self._notices.left.get(rank, now) > LEFT_SECONDS:
                raise PeerLost(
                    f"{self._name(rank)} has left the job, and {self._waiting(operation)}", rank=rank, seconds=waited
                )

    def _waiting(self, operation: Operation) -> str:
        waited_for = ", ".join(map(self._name, operation.waits_for())) or "an earlier call"
        return f"{_called(operation)} on {self._name(self._rank)} waits for {waited_for}"

    def _timeout_of(self, operation: Operation, why: str) -> CollectiveTimeout:
        ranks = operation.waits_for()
        return CollectiveTimeout(
            self._waiting(operation) + why,
            rank=ranks[0] if ranks else -1,
            collective=COLLECTIVES[operation.signature.part_of],
            number=operation.signature.number,
            seconds=time.monotonic() - operation.began,
        )

    # --- failure and leaving ---

    def fail(self, kind: str, rank: int, message: str) -> None:
        self._fail(getattr(errors, kind)(message, rank=rank))

    def _fail(self, error: MultiringError) -> None:
        with self._lock:
            if self._failure is None:
                host = self._hosts[error.rank] if error.rank >= 0 else ""
                failure = FailureNotice(
                    type(error).__name__, str(error), error.rank, host, error.collective, error.number, error.seconds
                )
                self._give_up(failure)
                with contextlib.suppress(MPI.Exception):  # then it is MPI that has failed, and ends the job itself
                    self._notices.fail(failure)

    def _give_up(self, failure: FailureNotice) -> None:
        self._failure = failure
        for operation in self._active:
            operation.error = failure.error()
        self._abandoned += self._active  # MPI may still use their buffers
        self._active = []

    def failure(self) -> BaseException | None:
        return self._failure.error() if self._failure else None

    def _check_usable(self) -> None:
        if os.getpid() != self._process:
            raise MultiringError("this process was forked from a rank: collectives are the rank's own")
        if self._failure is not None:
            raise self._failure.error()
        if self._closing:
            raise MultiringError("this rank has left the job: call multiring.init() first")

    def shutdown(self, timeout: float = 5.0) -> None:
        if os.getpid() != self._process or self._closing:
            return
        if not self._is_connected:
            self._neighbours.close()
            return
        with self._lock:
            if self._failure is None:
                self._notices.leave()
            self._neighbours.leave()
        deadline = time.monotonic() + timeout
        while self._failure is None and time.monotonic() < deadline:
            self._look()
            if self._notices.sent() and not any(isinstance(operation, SendMessage) for operation in self._active):
                break
            time.sleep(SHORTEST_SLEEP)
        with self._lock:
            if self._active:
                self._give_up(FailureNotice("MultiringError", f"{self._name(self._rank)} leaves the job"))
            self._closing = True
            self._neighbours.close()
            self._busy.set()
        if self._thread is not None:
            self._thread.join()
        if self._failure is None:
            atexit.unregister(self._end_job)

    def _end_job(self) -> None:
        """At exit after a failure: calls are left open on some rank, so MPI could not end in order."""
        if self._failure is None or os.getpid() != self._process:
            return
        sys.stdout.flush()
        own, failure = self._name(self._rank), self._failure
        print(f"multiring: {own} ends the job: {failure.kind}: {failure.message}", file=sys.stderr, flush=True)
        MPI.COMM_WORLD.Abort(1)

    def _name(self, rank: int) -> str:
        return f"rank {rank} (host {self._hosts[rank]})"

    # --- memory, statistics, compiled callers ---

    def empty(self, nbytes: int, copy: bool = False) -> Any:
        """A uint8 array of ``nbytes``, 64-byte aligned; MPI has no memory that ranks share."""
        memory = np.empty(nbytes + FINEST_GRAIN, np.uint8)
        start = -memory.ctypes.data % FINEST_GRAIN
        return memory[start : start + nbytes]

    def expect_links(self, links: list[tuple[list[int], float, float]]) -> None:
        """MPI does not say what a link carries."""

    def publish(self, communicator: int, calls: Any) -> None:
        raise MultiringError(
            "MULTIRING_ENGINE=mpi cannot be called from compiled code, such as jitted functions of JAX and C programs: "
            "unset it, and the native engine moves the data"
        )

    def withdraw(self, communicator: int) -> None:
        """Nothing is ever published."""

    def statistics(self) -> dict[str, Any]:
        return {
            "operations": self._operations,
            "segments": self._segments,
            "arena_allocated": 0,
            "arena_committed": 0,
            "seconds_in_calls": self._seconds_in_calls,
            "seconds_waiting": self._seconds_waiting,
            "peers": {rank: dict(counted) for rank, counted in self._peers.items()},
            "collectives": {name: dict(done) for name, done in self._collectives.items()},
            "in_flight": [],  # MPI does not say what it waits for
            "slowest": None,  # the native engine's signs of life tell of it
            "slow_so_far": [],
            "slow_link": None,
            "slow_links_so_far": [],
        }

    def installed_record(self, handle: int) -> tuple[int, int, float]:
        program = self._programs[handle]
        return program.operations, program.bytes, program.seconds

    def _count(self, rank: int, sent: int, received: int) -> None:
        counted = self._counted(rank)
        counted["messages_sent"] += sent > 0
        counted["bytes_sent"] += sent
        counted["messages_received"] += received > 0
        counted["bytes_received"] += received

    def _counted(self, rank: int) -> dict[str, float]:
        names = ("messages_sent", "bytes_sent", "messages_received", "bytes_received", "connections", "seconds_busy")
        return self._peers.setdefault(rank, {**dict.fromkeys(names, 0), "seconds_waited": 0.0})

    def completed(self, communicator: int) -> int:
        raise MultiringError(
            "MULTIRING_ENGINE=mpi cannot go on without the ranks that were lost, as MPI ends the job: shrink() needs "
            "the native engine"
        )

    def recorded(self) -> bytes:
        """Nothing: the rendezvous refuses MULTIRING_FLIGHT_RECORDER."""
        return b""

    def traced(self) -> list[tuple[int, bool, int, bytes]]:
        """Nothing: the rendezvous refuses MULTIRING_TRACE."""
        return []


def _spin_seconds(ranks: int, wanted: float | None) -> float:
    if wanted is not None:
        return wanted
    return SPIN_SECONDS if ranks <= len(os.sched_getaffinity(0)) else 0.0


def _called(operation: Operation) -> str:
    return f"{operation.described()} number {operation.signature.number}"
