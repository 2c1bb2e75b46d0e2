"""A group of ranks, and the calls that it makes on pieces of memory.

`multiring.Communicator` describes a user's buffers and calls on its group. Front ends know their tensors, and may say
by a label what a buffer holds: they call on the group itself, which `multiring.runtime.comm.group_of` hands them.
"""

from __future__ import annotations

import pickle
import time
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn, cast

import numpy as np

from multiring import _native
from multiring._native import Call
from multiring.env import whole_number
from multiring.errors import Mismatch, MultiringError, ResourceError
from multiring.runtime.buffers import COLLECTIVES, DTYPES, OPS, DeviceBuffer, Piece, readable, writable
from multiring.runtime.engine import Calls, ChoosePlan, DevicePart, Engine, Part
from multiring.runtime.plans import Plans
from multiring.runtime.tuner import Tuner
from multiring.runtime.work import Work, seconds_until, time_limit
from multiring.runtime.world import World

GROUPS = 1 << 12
"""The number of a group is its lowest rank times this, plus what that rank chose; the world has number 0."""

# Tags of the messages of which collectives that are no plans are made: a caller's are not negative.
_TAGS = {"new_group": -1, "gather": -2, "scatter": -3, "all_to_all": -4, "broadcast": -5}


class _Closed:
    """Stands in for what a group that was closed had: whatever is asked of it raises MultiringError."""

    def __init__(self, what: str) -> None:
        self._what = what

    def refuse(self) -> NoReturn:
        raise MultiringError(self._what)

    def __getattr__(self, name: str) -> Any:
        self.refuse()


def valid_tag(tag: int) -> int:
    """A tag as a caller of messages may choose it; ValueError for others."""
    tag = whole_number("tag", tag, "a tag")
    if not 0 <= tag < 1 << 63:
        raise ValueError(f"tag={tag}: a tag is 0 to 2**63 - 1; negative ones are multiring's own")
    return tag


class Group:
    """Ranks 0 to ``size`` - 1, which make the same calls in the same order.

    A piece describes the elements of a call. In a collective over blocks it is the first block; the others follow it.
    ``timeout`` is in seconds, None the group's own; ``label`` is what `multiring.training.labels.label` returns, the
    same on all ranks; ``residual`` is what `multiring.runtime.buffers.check_residual` has let pass. Errors are those of
    `multiring.Communicator`. What is no piece yet, and plain, is reduced in one native call by
    ``calls.all_reduce_plain``.
    """

    def __init__(
        self,
        world: World,
        members: Sequence[int] | None = None,
        *,
        number: int = 0,
        incarnation: int = 0,
        timeout: float | None = None,
    ) -> None:
        """``members`` are ranks of the world, None for all; ``number`` tells this group from every other one of its
        members, and ``incarnation`` from those before it; they agree on both (`subgroup` does that)."""
        self.world = world
        self.members = tuple(range(world.topology.world_size) if members is None else members)
        self.rank = self.members.index(world.rank)
        self.size = len(self.members)
        self.number = number
        self.timeout = world.settings.timeout if timeout is None else time_limit(timeout)
        self.engine: Engine = world.engine
        self._incarnation = incarnation
        self.engine.communicator(number, list(self.members), incarnation)
        world.groups[number] = self.size
        if world.recorder is not None and number < _native.INTERNAL:
            world.recorder.know(number, incarnation, self.members)
        # Garbage may be collected in any thread, in the middle of anything: here it is only noted. MPI frees a group by
        # a collective call, which collectors of several processes cannot agree on.
        self._drop = weakref.finalize(self, world.dropped.append, number)
        self._drop.atexit = False
        if number == 0 or world.settings.engine == "mpi":
            self._drop.detach()
        self._internal: Group | None = None
        self.plans = Plans(world, number, self.members)
        self.tuner: Tuner | None = None
        if world.settings.tune and not world.settings.plan and self.size > 1 and number < _native.INTERNAL:
            self.tuner = Tuner(world, self.internal, self.plans)
        self.calls = self._new_calls(_chooser(self.plans, self.tuner))
        if number == 0 and world.settings.engine == "native" and not (self.tuner or world.settings.plan):
            self.plans.make_ahead()

    @property
    def internal(self) -> Group:
        """The same ranks, for the library's own calls: they take no numbers of the caller's and try no plans.

        All ranks make it together, by asking for it.
        """
        if self._internal is None:
            self._internal = Group(
                self.world,
                self.members,
                number=_native.INTERNAL + self.number,
                incarnation=self._incarnation,
                timeout=self.timeout,
            )
        return self._internal

    @property
    def hosts(self) -> tuple[str, ...]:
        """The name of each rank's host; ranks share memory where it is the same."""
        return tuple(self.world.topology.hosts[member] for member in self.members)

    @property
    def oldest(self) -> int:
        """The lowest of the ranks that have been in the job for longest: the others came by `grow`, after them."""
        return min(range(self.size), key=lambda rank: self.world.membership.entered[self.members[rank]])

    # --- collectives ---

    def run(
        self,
        collective: str,
        piece: Piece,
        op: str = "sum",
        root: int = 0,
        *,
        timeout: float | None = None,
        label: int = 0,
        residual: Piece | None = None,
    ) -> None:
        """Make a collective, and return when it is done here."""
        self.calls.run(self._call(collective, piece, op, root, timeout, label, residual))

    def start(
        self,
        collective: str,
        piece: Piece,
        op: str = "sum",
        root: int = 0,
        *,
        timeout: float | None = None,
        label: int = 0,
        residual: Piece | None = None,
    ) -> Part:
        """Begin a collective; the pieces may not be touched until it has ended."""
        owner = piece.owner if residual is None else (piece.owner, residual.owner)
        return self.calls.start(self._call(collective, piece, op, root, timeout, label, residual), owner)

    def start_on_device(
        self, collective: str, buffer: DeviceBuffer, op: str = "sum", root: int = 0, *, timeout: float | None = None
    ) -> DevicePart:
        """Begin a collective on blocks of a CUDA device; all ranks make the same call, wherever their blocks lie."""
        nowhere = Piece(None, 0, buffer.count, buffer.dtype)
        call = self._call(collective, nowhere, op, root, timeout, 0)
        return self.calls.start_on_device(call, buffer.owner, buffer.device, buffer.stream, buffer.out, buffer.into)

    def barrier(self, *, timeout: float | None = None) -> None:
        """Return when every rank has called it."""
        self.calls.barrier(self.ready(timeout))

    def broadcast_object(self, value: Any = None, root: int = 0, *, timeout: float | None = None) -> Any:
        """``value`` of rank ``root``, on all ranks; it must be picklable."""
        until = time.monotonic() + self.ready(timeout)
        root = self.valid_rank("root", root)
        packed = np.frombuffer(pickle.dumps(value) if self.rank == root else b"", np.uint8)
        size = np.array([packed.size], np.int64)
        self.run("broadcast", writable(size), root=root, timeout=seconds_until(until))
        if self.rank != root:
            packed = np.empty(size[0], np.uint8)
        self.run("broadcast", readable(packed), root=root, timeout=seconds_until(until))
        return value if self.rank == root else pickle.loads(packed.tobytes())

    def all_gather_object(self, value: Any, *, timeout: float | None = None) -> list[Any]:
        """``value`` of all ranks, in their order; each must be picklable."""
        until = time.monotonic() + self.ready(timeout)
        packed = np.frombuffer(pickle.dumps(value), np.uint8)
        sizes = self._rows(np.array([packed.size], np.int64), seconds_until(until)).ravel()
        padded = np.zeros(sizes.max(), np.uint8)
        padded[: packed.size] = packed
        rows = self._rows(padded, seconds_until(until))
        return [pickle.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]

    def _rows(self, mine: np.ndarray[Any, Any], timeout: float) -> np.ndarray[Any, Any]:
        """The arrays of all ranks, which are alike."""
        rows = np.empty((self.size, *mine.shape), mine.dtype)
        rows[self.rank] = mine
        self.run("all_gather", Piece(rows, rows.ctypes.data, mine.size, mine.dtype.name), timeout=timeout)
        return rows

    def _call(
        self,
        collective: str,
        piece: Piece,
        op: str,
        root: int,
        timeout: float | None,
        label: int,
        residual: Piece | None = None,
    ) -> Call:
        if not isinstance(op, str) or op not in OPS:
            raise ValueError(f"op={op!r}: known are {', '.join(OPS)}")
        return Call(
            COLLECTIVES[collective],
            piece.pointer,
            piece.count,
            DTYPES[piece.dtype],
            self.ready(timeout),
            OPS[op],
            self.valid_rank("root", root),
            label,
            residual=0 if residual is None else residual.pointer,
        )

    # --- messages ---

    def send(
        self, piece: Piece, dst: int, tag: int = 0, *, timeout: float | None = None, part_of: str = "send"
    ) -> Part:
        """Begin to send a message to rank ``dst``; ``part_of`` is the collective that it belongs to, if it is one's."""
        return self._message("send", piece, self.members[self.other_rank("dst", dst)], tag, timeout, part_of)

    def recv(
        self, piece: Piece, src: int | None, tag: int = 0, *, timeout: float | None = None, part_of: str = "send"
    ) -> Part:
        """Begin to receive one; ``src`` None: from whichever rank's arrived first."""
        peer = _native.ANY_SOURCE if src is None else self.members[self.other_rank("src", src)]
        return self._message("recv", piece, peer, tag, timeout, part_of)

    def send_part(self, collective: str, piece: Piece, dst: int, timeout: float | None = None) -> Part:
        """Begin to send a message of a collective that is made of messages."""
        return self.send(piece, dst, _TAGS[collective], timeout=timeout, part_of=collective)

    def recv_part(self, collective: str, piece: Piece, src: int, timeout: float | None = None) -> Part:
        """Begin to receive a message of a collective that is made of messages."""
        return self.recv(piece, src, _TAGS[collective], timeout=timeout, part_of=collective)

    def _message(self, direction: str, piece: Piece, peer: int, tag: int, timeout: float | None, part_of: str) -> Part:
        """``peer`` is a rank of the world, or ANY_SOURCE."""
        seconds, any_source = self.ready(timeout), peer == _native.ANY_SOURCE
        peers = {*self.members} - {self.world.rank} if any_source else {peer}
        self.world.connect(peers, seconds, any_source=any_source)
        call = Call(
            COLLECTIVES[direction],
            piece.pointer,
            piece.count,
            DTYPES[piece.dtype],
            seconds,
            tag=tag,
            part_of=COLLECTIVES[part_of],
        )
        return self.engine.start_message(self.number, peer, call, piece.owner)

    # --- arguments ---

    def valid_rank(self, name: str, rank: int) -> int:
        """A rank of this group that was given as ``name``; TypeError or ValueError if it is none."""
        if type(rank) is not int:
            rank = whole_number(name, rank, "a rank")
        if not 0 <= rank < self.size:
            raise ValueError(f"{name}={rank}: ranks of this communicator are 0 to {self.size - 1}")
        return rank

    def other_rank(self, name: str, rank: int) -> int:
        """The same for a rank that is not this one."""
        rank = self.valid_rank(name, rank)
        if rank == self.rank:
            raise ValueError(f"{name}={rank} is this rank itself")
        return rank

    def ready(self, timeout: float | None) -> float:
        """The seconds that a call has, asked before it writes or sends anything.

        ValueError for a wrong time limit, MultiringError if this group was closed or its job was left.
        """
        seconds = self.timeout if timeout is None else time_limit(timeout)
        self.refuse_closed()
        if self.world.left.is_set():
            raise MultiringError(
                "this communicator was shut down: call multiring.init() again and use the one it returns"
            )
        return seconds

    def refuse_closed(self) -> None:
        """MultiringError if this group was closed."""
        if isinstance(self.engine, _Closed):
            self.engine.refuse()

    # --- groups of some of the ranks, and their ends ---

    def subgroup(self, ranks: Sequence[int], timeout: float | None) -> Group | None:
        """A group of some of the ranks, in the given order; None to a rank that is not among them.

        All members call it, with the same ranks, in the same order as other groups they share; others may.
        """
        if isinstance(ranks, (str, bytes)) or not isinstance(ranks, Iterable):
            raise TypeError(f"ranks={ranks!r}: expected a list of ranks, such as [0, 1]")
        chosen = [self.valid_rank(f"ranks[{index}]", rank) for index, rank in enumerate(ranks)]
        if not chosen or len(set(chosen)) != len(chosen):
            raise ValueError(f"ranks={chosen}: a group has at least one rank, each once")
        if self.rank not in chosen:
            return None
        members = [self.members[rank] for rank in chosen]
        self._free_dropped()
        number, incarnation = self._agree_on_number(chosen, members)
        limit = self.timeout if timeout is None else timeout
        return Group(self.world, members, number=number, incarnation=incarnation, timeout=limit)

    def publish(self) -> int:
        """Let native code, such as XLA's, call this group by the number returned, until it is closed.

        Dropping it closes it no longer: that code may be all that knows it.
        """
        self._drop.detach()
        calls = self.calls
        if self.tuner is not None:
            # Such calls come from threads of their own, and may not wait for the end of a rung: they try no plans.
            calls = self._new_calls(_chooser(self.plans, None))
        self.engine.publish(self.number, calls)
        return self.number

    def close(self) -> None:
        """Give up a group, if that was not done. ValueError while collectives of it are in flight."""
        if isinstance(self.engine, _Closed):
            return
        self._free(self.number)
        self._drop.detach()
        self._free_dropped()
        if self._internal is not None:
            self._internal.close()
        closed = _Closed(
            f"this group, whose lowest rank is {min(self.members)}, was closed: make a new one by new_group(), or "
            "after Outer.rebuild() make Feedback, DistributedOptimizer and what else had it anew with outer.group"
        )
        self.engine, self.calls, self.tuner = cast("Engine", closed), cast("Calls", closed), None

    def _new_calls(self, choose_plan: ChoosePlan) -> Calls:
        return self.engine.calls(self.rank, self.size, self.timeout, choose_plan, self.plans.need_residual)

    def _free(self, number: int) -> None:
        self.world.engine.forget(number)
        self.world.engine.withdraw(number)
        self.world.groups.pop(number, None)

    def _free_dropped(self) -> None:
        """Free the groups that were dropped so far; one with operations in flight has its turn later."""
        dropped = self.world.dropped
        for _ in range(len(dropped)):
            try:
                number = dropped.popleft()
            except IndexError:  # another thread is at it
                return
            try:
                self._free(number)
            except ValueError:
                dropped.append(number)

    def _agree_on_number(self, ranks: list[int], members: list[int]) -> tuple[int, int]:
        """A number and its incarnation: the lowest member draws and tells the others, with the members as it knows
        them."""
        leader = min(ranks, key=lambda rank: self.members[rank])
        others = [rank for rank in ranks if rank != leader]
        said = np.array([0, *members], np.int64)
        piece = writable(said)
        first = self.members[leader] * GROUPS + 1
        if self.rank == leader:
            # One that was closed here may still be in use elsewhere: its number comes again when all others have.
            for _ in range(GROUPS - 1):
                said[0] = next(self.world.draws)
                if first + said[0] % (GROUPS - 1) not in self.world.groups:
                    break
            else:
                raise ResourceError(f"{GROUPS - 1} groups whose lowest rank is {leader} exist: close some")
            works = [self.send_part("new_group", piece, rank) for rank in others]
        else:
            works = [self.recv_part("new_group", piece, leader)]
        Work(works).wait()
        if said[1:].tolist() != members:
            other = min(members)
            message = f"rank {self.world.rank} makes a group of {members}, rank {other} one of {said[1:].tolist()}"
            self.engine.fail("Mismatch", other, message)
            raise Mismatch(message, rank=other, host=self.world.topology.hosts[other], collective="new_group")
        incarnation, place = divmod(int(said[0]), GROUPS - 1)
        return first + place, incarnation % _native.INCARNATIONS


def _chooser(plans: Plans, tuner: Tuner | None) -> ChoosePlan:
    """Return the chooser of plans for a group's calls; it does not refer to the group, which owns those calls."""
    if tuner is None:
        return plans.handle
    return lambda *wanted: tuner.trials(*wanted) or plans.handle(*wanted)
