"""The communicator: a group of ranks and the collectives they call together."""

from __future__ import annotations

import math
import operator
import pickle
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any, cast

import numpy as np

from multiring import _native
from multiring.env import MOST_BYTES
from multiring.errors import Mismatch, MultiringError, ResourceError
from multiring.planning.choice import Choice
from multiring.planning.plan import BLOCKED
from multiring.runtime.buffers import (
    COLLECTIVES,
    DTYPES,
    ITEMSIZES,
    OPS,
    OPS_OF,
    PLANNED,
    CardBuffer,
    Piece,
    all_of,
    apart,
    check_fit,
    copy,
    keeper,
    like,
    source,
    target,
)
from multiring.runtime.engine import CardPart, Engine, NativeCalls, Part
from multiring.runtime.plans import Plans
from multiring.runtime.tuner import Tuner
from multiring.runtime.work import Work, seconds_until, time_limit
from multiring.runtime.world import World

GROUPS = 1 << 12
"""The number of a group is its lowest rank times this, plus what that rank chose; the world has number 0."""

INCARNATIONS = 1 << 16
"""Groups that have the same number one after the other are told apart by as many incarnations, which go around."""

_ALL_REDUCE, _BROADCAST, _REDUCE = COLLECTIVES["all_reduce"], COLLECTIVES["broadcast"], COLLECTIVES["reduce"]
_ALL_GATHER, _REDUCE_SCATTER = COLLECTIVES["all_gather"], COLLECTIVES["reduce_scatter"]
_ALL_TO_ALL, _BARRIER = COLLECTIVES["all_to_all"], COLLECTIVES["barrier"]
_BLOCKED = frozenset(COLLECTIVES[name] for name in BLOCKED)

# Tags of the messages of which collectives that are no plans are made: a caller's are not negative.
_TAGS = {"new_group": -1, "gather": -2, "scatter": -3, "all_to_all": -4}


def _tag(tag: int) -> int:
    try:
        tag = operator.index(tag)
    except TypeError:
        raise TypeError(f"tag={tag!r}: a tag is a whole number") from None
    if not 0 <= tag < 1 << 63:
        raise ValueError(f"tag={tag}: a tag is 0 to 2**63 - 1; negative ones are multiring's own")
    return tag


class _Closed:
    """Stands in for the engine of a group that was closed: whatever is asked of it raises MultiringError."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __getattr__(self, name: str) -> Any:
        raise MultiringError(self._what)


class Communicator:
    """Ranks 0 to ``size`` - 1, which call the same collectives in the same order.

    A buffer is a NumPy array, an object with the buffer protocol, or a DLPack tensor on the CPU, always contiguous.
    With ``async_op`` a call returns a `Work` at once, and the buffers may not be touched until its `wait` has returned;
    `wait` returns what the synchronous call returns. ``timeout`` is in seconds, None the communicator's own. Every call
    raises PeerLost, CollectiveTimeout or Mismatch where other ranks do not do their part, and ValueError or TypeError
    for arguments that cannot be served, before anything is sent.
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
        members, and ``incarnation`` from those before it; they agree on both (`new_group` does that)."""
        self.world = world
        self.members = tuple(range(world.topology.world_size) if members is None else members)
        self.rank = self.members.index(world.rank)
        self.size = len(self.members)
        self.timeout = world.settings.timeout if timeout is None else time_limit(timeout)
        self._engine = world.engine
        self._number, self._incarnation = number, incarnation
        self._engine.communicator(number, list(self.members), incarnation)
        world.groups.add(number)
        # Garbage may be collected in any thread, in the middle of anything: here it is only noted. MPI frees a group by
        # a collective call, which collectors of several processes cannot agree on.
        self._drop = weakref.finalize(self, world.dropped.append, number)
        self._drop.atexit = False
        if number == 0 or world.settings.engine == "mpi":
            self._drop.detach()
        self._plans = Plans(world, number, self.members)
        self._internal: Communicator | None = None
        self._tuner: Tuner | None = None
        self._native_calls = self._make_native_calls()
        if world.settings.tune and not world.settings.plan and self.size > 1 and number < _native.INTERNAL:
            self._tuner = Tuner(world, self.internal, self._plans)

    @property
    def internal(self) -> Communicator:
        """The same ranks, for the library's own calls: they take no numbers of the caller's and try no plans.

        All ranks make it together, by asking for it.
        """
        if self._internal is None:
            self._internal = Communicator(
                self.world,
                self.members,
                number=_native.INTERNAL + self._number,
                incarnation=self._incarnation,
                timeout=self.timeout,
            )
        return self._internal

    @property
    def local_rank(self) -> int:
        """Index of this rank among those of its host."""
        return self.hosts[: self.rank].count(self.hosts[self.rank])

    @property
    def local_size(self) -> int:
        """Number of ranks on this rank's host."""
        return self.hosts.count(self.hosts[self.rank])

    @property
    def hosts(self) -> tuple[str, ...]:
        """The name of each rank's host; ranks share memory where it is the same."""
        return tuple(self.world.topology.hosts[member] for member in self.members)

    @property
    def oldest(self) -> int:
        """The lowest of the ranks that have been in the job for longest: the others came by `grow`, after them."""
        return min(range(self.size), key=lambda rank: self.world.membership.entered[self.members[rank]])

    def all_reduce(
        self, x: Any, op: str = "sum", *, async_op: bool = False, timeout: float | None = None, label: int = 0
    ) -> Any:
        """Combine ``x`` of all ranks, element by element, in place. All ranks end with the same bits.

        ``op`` is sum, avg, min, max or prod, on integers also band, bor or bxor. Ranks agree on type and number of
        elements, and on ``label``, which front ends get of `multiring.training.labels.label`; shapes are not compared.
        """
        if not async_op and type(x) is not Piece and self.all_reduce_plain(x, op, timeout, label):
            return None
        return self._call(_ALL_REDUCE, all_of(x, target(x)), op, 0, async_op, timeout, label=label)

    def all_reduce_plain(self, x: Any, op: str, timeout: float | None = None, label: int = 0) -> bool:
        """`all_reduce` in one native call where ``x`` is an array or tensor that can be taken as it lies; else False,
        and nothing is done, though `all_reduce` may."""
        return self._native_calls is not None and self._native_calls.all_reduce(x, op, timeout, label)

    def broadcast(
        self, x: Any, root: int = 0, *, async_op: bool = False, timeout: float | None = None, label: int = 0
    ) -> Any:
        """Copy ``x`` of rank ``root`` to ``x`` of all the others; ``label`` as for `all_reduce`."""
        root = self._rank("root", root)
        found = source(x) if self.rank == root else target(x)
        return self._call(_BROADCAST, all_of(x, found), "sum", root, async_op, timeout, label=label)

    def reduce(
        self, x: Any, op: str = "sum", root: int = 0, *, async_op: bool = False, timeout: float | None = None
    ) -> Any:
        """Combine ``x`` of all ranks in ``x`` of rank ``root``; the others' may hold partial results afterwards."""
        root = self._rank("root", root)
        return self._call(_REDUCE, all_of(x, target(x)), op, root, async_op, timeout)

    def all_gather(self, x: Any, *, out: Any = None, async_op: bool = False, timeout: float | None = None) -> Any:
        """``x`` of all ranks, in ``out`` (``size`` times its elements) or a new array of shape (size, *x.shape)."""
        mine = source(x)
        if out is None:
            out = like(x, mine, (self.size, *mine.shape))
        whole = target(out)
        check_fit("all_gather", whole, self.size * mine.count, mine.dtype)
        nbytes = mine.count * mine.itemsize
        copy(whole.pointer + self.rank * nbytes, mine.pointer, nbytes)
        blocks = Piece(keeper(out), whole.pointer, mine.count, mine.dtype)
        return self._call(_ALL_GATHER, blocks, "sum", 0, async_op, timeout, result=out)

    def reduce_scatter(
        self, x: Any, op: str = "sum", *, out: Any = None, async_op: bool = False, timeout: float | None = None
    ) -> Any:
        """Combine ``x`` of all ranks and keep one of ``size`` equal blocks along its first axis: rank r block r.

        The block is put in ``out``, or in a new array.
        """
        whole = source(x)
        shape = self._block("reduce_scatter", whole.shape)
        count = whole.count // self.size
        if out is None:
            out = like(x, whole, shape)
        mine = target(out)
        check_fit("reduce_scatter", mine, count, whole.dtype)
        nbytes = count * whole.itemsize
        scratch = np.empty(self.size * nbytes, np.uint8)  # a plan leaves partial sums in all blocks
        address = scratch.ctypes.data
        copy(address, whole.pointer, scratch.nbytes)
        blocks = Piece(scratch, address, count, whole.dtype)

        def finish() -> Any:  # keeps scratch alive: the engine lets go of it before
            copy(mine.pointer, scratch.ctypes.data + self.rank * nbytes, nbytes)
            return out

        return self._call(_REDUCE_SCATTER, blocks, op, 0, async_op, timeout, finish=finish)

    def all_to_all(
        self,
        x: Any,
        splits: Sequence[int] | None = None,
        *,
        out: Any = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Send block r of ``x`` to rank r, along the first axis, and receive a block from each, in order of ranks.

        Blocks are equal, or have ``splits[r]`` rows; the receivers learn the number. The result is in ``out`` or a new
        array.
        """
        whole = source(x)
        if splits is not None:
            return self._uneven_all_to_all(x, splits, out, async_op, timeout)
        self._block("all_to_all", whole.shape)
        if out is None:
            out = like(x, whole, whole.shape)
        received = target(out)
        check_fit("all_to_all", received, whole.count, whole.dtype)
        copy(received.pointer, whole.pointer, whole.count * whole.itemsize)
        blocks = Piece(keeper(out), received.pointer, whole.count // self.size, whole.dtype)
        return self._call(_ALL_TO_ALL, blocks, "sum", 0, async_op, timeout, result=out)

    def barrier(self, *, async_op: bool = False, timeout: float | None = None) -> Any:
        """Return when every rank has called it."""
        if self._native_calls is not None and not async_op:
            self._native_calls.barrier(self._seconds(timeout))
            return None
        token = np.zeros(1, np.uint8)
        return self._call(_BARRIER, Piece(token, token.ctypes.data, 1, "uint8"), "sum", 0, async_op, timeout)

    def send(self, x: Any, dst: int, tag: int = 0, *, async_op: bool = False, timeout: float | None = None) -> Any:
        """Send ``x`` to rank ``dst``, which receives it by `recv` with the same ``tag``; in order within a tag.

        A tag is 0 or more.
        """
        x = all_of(x, source(x))
        return _finished(Work([self._send(x, self._other("dst", dst), _tag(tag), "send", timeout)]), async_op)

    def recv(
        self, x: Any, src: int | None = None, tag: int = 0, *, async_op: bool = False, timeout: float | None = None
    ) -> Any:
        """Receive into ``x``, which has the type and count that are sent, and return the rank that sent it.

        ``src`` None: from whichever rank's message with this ``tag`` arrived first. Receives of the same tag that are
        called after it wait for it.
        """
        piece = all_of(x, target(x))
        part = self._recv(piece, None if src is None else self._other("src", src), _tag(tag), "send", timeout)
        return _finished(Work([part], finish=lambda: self.members.index(part.other)), async_op)

    def send_part(self, collective: str, x: Any, dst: int, timeout: float | None = None) -> Work:
        """Send ``x`` as a message of a gather, scatter or all_to_all that is made of messages; not waited for."""
        return Work([self._part_to(collective, self._other("dst", dst), all_of(x, source(x)), timeout)])

    def recv_part(self, collective: str, x: Any, src: int, timeout: float | None = None) -> Work:
        """Receive such a message into ``x``; not waited for."""
        return Work([self._part_from(collective, self._other("src", src), all_of(x, target(x)), timeout)])

    def gather(
        self, x: Any, root: int = 0, *, out: Any = None, async_op: bool = False, timeout: float | None = None
    ) -> Any:
        """``x`` of all ranks on rank ``root``, in ``out`` or a new array of shape (size, *x.shape); None elsewhere."""
        root = self._rank("root", root)
        mine = source(x)
        if self.rank != root:
            return _finished(Work([self._part_to("gather", root, all_of(x, mine), timeout)]), async_op)
        if out is None:
            out = like(x, mine, (self.size, *mine.shape))
        whole = target(out)
        check_fit("gather", whole, self.size * mine.count, mine.dtype)
        nbytes = mine.count * mine.itemsize
        copy(whole.pointer + root * nbytes, mine.pointer, nbytes)
        blocks = {
            peer: Piece(keeper(out), whole.pointer + peer * nbytes, mine.count, mine.dtype) for peer in self._others()
        }
        parts = [self._part_from("gather", peer, block, timeout) for peer, block in blocks.items()]
        return _finished(Work(parts, out), async_op)

    def scatter(
        self, x: Any, blocks: Any = None, root: int = 0, *, async_op: bool = False, timeout: float | None = None
    ) -> Any:
        """Fill ``x`` of rank r with block r of rank ``root``'s ``blocks`` (``size`` times the elements of ``x``)."""
        root = self._rank("root", root)
        mine = target(x)
        if self.rank != root:
            return _finished(Work([self._part_from("scatter", root, all_of(x, mine), timeout)]), async_op)
        if blocks is None:
            raise ValueError(f"scatter: rank {root} is the root and has to give blocks")
        found = source(blocks)
        check_fit("scatter", found, self.size * mine.count, mine.dtype)
        whole = apart(all_of(blocks, found), all_of(x, mine))
        nbytes = mine.count * mine.itemsize
        copy(mine.pointer, whole.pointer + root * nbytes, nbytes)
        peers = self._others()
        pieces = [Piece(whole.owner, whole.pointer + peer * nbytes, mine.count, mine.dtype) for peer in peers]
        parts = [self._part_to("scatter", peer, piece, timeout) for peer, piece in zip(peers, pieces, strict=True)]
        return _finished(Work(parts), async_op)

    def broadcast_object(self, value: Any = None, root: int = 0, *, timeout: float | None = None) -> Any:
        """``value`` of rank ``root``, on all ranks; it must be picklable."""
        until = time.monotonic() + self._seconds(timeout)
        root = self._rank("root", root)
        packed = np.frombuffer(pickle.dumps(value) if self.rank == root else b"", np.uint8)
        size = np.array([packed.size], np.int64)
        self.broadcast(size, root, timeout=seconds_until(until))
        if self.rank != root:
            packed = np.empty(size[0], np.uint8)
        self.broadcast(packed, root, timeout=seconds_until(until))
        return value if self.rank == root else pickle.loads(packed.tobytes())

    def all_gather_object(self, value: Any, *, timeout: float | None = None) -> list[Any]:
        """``value`` of all ranks, in their order; each must be picklable."""
        until = time.monotonic() + self._seconds(timeout)
        packed = np.frombuffer(pickle.dumps(value), np.uint8)
        sizes = self.all_gather(np.array([packed.size], np.int64), timeout=seconds_until(until)).ravel()
        padded = np.zeros(sizes.max(), np.uint8)
        padded[: packed.size] = packed
        rows = self.all_gather(padded, timeout=seconds_until(until))
        return [pickle.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]

    def new_group(self, ranks: Sequence[int], *, timeout: float | None = None) -> Communicator | None:
        """A communicator of some of the ranks, in the given order; None to a rank that is not among them.

        All members call it, with the same ranks, in the same order as other groups they share; others may.
        """
        chosen = [self._rank("ranks", rank) for rank in ranks]
        if not chosen or len(set(chosen)) != len(chosen):
            raise ValueError(f"ranks={list(ranks)}: a group has at least one rank, each once")
        if self.rank not in chosen:
            return None
        members = [self.members[rank] for rank in chosen]
        self._free_dropped()
        number, incarnation = self._agree_on_number(chosen, members)
        limit = self.timeout if timeout is None else timeout
        return Communicator(self.world, members, number=number, incarnation=incarnation, timeout=limit)

    def empty(self, shape: int | Sequence[int], dtype: Any = "float32") -> np.ndarray[Any, Any]:
        """A new array in the memory that the ranks of a host share: collectives read it where it lies.

        ResourceError if the arena (MULTIRING_ARENA_BYTES) is full but for an eighth, 16 MB at most, which is kept for
        staging.
        """
        kind = np.dtype(dtype)
        extents = tuple(map(operator.index, shape if isinstance(shape, Sequence) else (shape,)))
        if min(extents, default=0) < 0:
            raise ValueError(f"shape={shape}: extents are 0 or more")
        nbytes = math.prod(extents) * kind.itemsize
        if nbytes >= MOST_BYTES:
            raise ValueError(f"shape={shape}: an array has less than 2**63 bytes")
        shaped: np.ndarray[Any, Any] = self._engine.empty(nbytes).view(kind).reshape(extents)
        return shaped

    def plan(self, nbytes: int, collective: str = "all_reduce", root: int = 0) -> Choice:
        """The plan for a buffer of ``nbytes`` (of all blocks together); printed, it explains itself."""
        if collective not in PLANNED:
            raise ValueError(f"collective={collective!r}: known are {', '.join(PLANNED)}")
        if not isinstance(nbytes, (int, np.integer)):
            raise TypeError(f"nbytes={nbytes!r}: a buffer has a whole number of bytes")
        if nbytes < 0:
            raise ValueError(f"nbytes={nbytes}: a buffer has 0 bytes or more")
        choice = self._plans.choose(collective, nbytes, self._rank("root", root))
        measured = self._plans.measured().get(choice.plan.id)
        return replace(choice, measured=measured) if measured and measured.calls else choice

    def stats(self) -> dict[str, Any]:
        """Counters of this process's engine, and by id what this communicator's plans have done so far.

        ``peers`` are counted by rank of the world, ``links`` by the level that joins them to this rank.
        """
        plans = {plan: asdict(measured) for plan, measured in self._plans.measured().items()}
        counted = self._engine.statistics()
        return {**counted, "links": self._by_level(counted["peers"]), "plans": plans}

    def _by_level(self, peers: dict[int, dict[str, float]]) -> dict[str, dict[str, float]]:
        sums: dict[str, Counter[str]] = {}
        for rank, counted in peers.items():
            sums.setdefault(self.world.topology.apart(self.world.rank, rank), Counter()).update(counted)
        return {level: dict(counted) for level, counted in sums.items()}

    def publish(self) -> int:
        """Let native code, such as XLA's, call this communicator by the number returned, until it is closed.

        Dropping it closes it no longer: that code may be all that knows it.
        """
        self._drop.detach()
        calls = self._engine.native_calls(self.rank, self.size, self.timeout, self._plans.handle)
        self._engine.publish(self._number, calls)
        return self._number

    def plans_used(self) -> list[Choice]:
        """The plans that calls were made by, each with what they took on this rank."""
        return self._plans.used()

    def close(self) -> None:
        """Give up a group, if that was not done. ValueError while collectives of it are in flight."""
        if isinstance(self._engine, _Closed):
            return
        self._free(self._number)
        self._drop.detach()
        self._free_dropped()
        if self._internal is not None:
            self._internal.close()
        self._engine = cast("Engine", _Closed(f"this group, whose lowest rank is {min(self.members)}, was closed"))
        self._native_calls = self._tuner = None

    def _free(self, number: int) -> None:
        self.world.engine.forget(number)
        self.world.engine.withdraw(number)
        self.world.groups.discard(number)

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

    def _call(
        self,
        collective: int,
        piece: Piece,
        op: str,
        root: int,
        async_op: bool,
        timeout: float | None,
        *,
        label: int = 0,
        result: Any = None,
        finish: Callable[[], Any] | None = None,
    ) -> Any:
        """Run or start a plan; where the buffer is blocks, ``piece`` is the first of them."""
        count, dtype = piece.count, piece.dtype
        nbytes = self._checked(collective, count, dtype, op)
        seconds = self._seconds(timeout)
        what = collective, piece.pointer, count, DTYPES[dtype], OPS[op], root, seconds, label
        if self._tuner and (trial := self._tuner.trial(collective, nbytes, root, seconds)):
            with trial:
                if async_op:
                    return Work([trial.started(self._engine.start(trial.handle, *what, piece))], result, finish)
                self._engine.run(trial.handle, *what)
        elif async_op:
            return Work(
                [self._engine.start(self._plans.handle(collective, nbytes, root, seconds), *what, piece)],
                result,
                finish,
            )
        else:
            self._engine.run(self._plans.handle(collective, nbytes, root, seconds), *what)
        return result if finish is None else finish()

    def start_on_card(
        self, collective: str, buffer: CardBuffer, op: str = "sum", root: int = 0, *, timeout: float | None = None
    ) -> CardPart:
        """Start a collective on blocks that lie on a card; all ranks make the same call, wherever their blocks lie."""
        code, root = COLLECTIVES[collective], self._rank("root", root)
        nbytes = self._checked(code, buffer.count, buffer.dtype, op)
        seconds = self._seconds(timeout)
        what = code, buffer.count, DTYPES[buffer.dtype], OPS[op], root, seconds, 0, buffer.owner
        if self._tuner and (trial := self._tuner.trial(code, nbytes, root, seconds)):
            with trial:
                part = self._engine.start_on_card(
                    trial.handle, *what, buffer.device, buffer.stream, buffer.out, buffer.into
                )
                trial.started(part)
                return part
        handle = self._plans.handle(code, nbytes, root, seconds)
        return self._engine.start_on_card(handle, *what, buffer.device, buffer.stream, buffer.out, buffer.into)

    def _checked(self, collective: int, count: int, dtype: str, op: str) -> int:
        """The bytes of all blocks together; ValueError for what cannot be reduced."""
        if not isinstance(op, str) or op not in OPS:
            raise ValueError(f"op={op!r}: known are {', '.join(OPS)}")
        if op not in OPS_OF[dtype] and collective in (_ALL_REDUCE, _REDUCE, _REDUCE_SCATTER):
            raise ValueError(f"{op} is not defined for {dtype}: it has {', '.join(OPS_OF[dtype])}")
        blocks = self.size if collective in _BLOCKED else 1
        return blocks * count * ITEMSIZES[dtype]

    def _make_native_calls(self) -> NativeCalls | None:
        """Native calls that know no plan yet; they ask for trials too."""
        here = weakref.ref(self)  # which will hold them

        def choose_plan(*wanted: Any) -> int | _native.Trials:
            communicator = here()
            assert communicator is not None  # whoever calls does so through it
            trials = communicator._tuner.trials(*wanted) if communicator._tuner else None
            return trials or communicator._plans.handle(*wanted)

        return self._engine.native_calls(self.rank, self.size, self.timeout, choose_plan)

    def _seconds(self, timeout: float | None) -> float:
        return self.timeout if timeout is None else time_limit(timeout)

    def _send(self, piece: Piece, dst: int, tag: int, part_of: str, timeout: float | None) -> Part:
        return self._engine.send(self._number, *self._message(piece, dst, tag, part_of, timeout))

    def _recv(self, piece: Piece, src: int | None, tag: int, part_of: str, timeout: float | None) -> Part:
        return self._engine.recv(self._number, *self._message(piece, src, tag, part_of, timeout))

    def _message(
        self, piece: Piece, rank: int | None, tag: int, part_of: str, timeout: float | None
    ) -> tuple[int, int, int, int, int, float, Any, int]:
        """What the engine wants to know of a message; ``part_of`` is the collective it belongs to, or send."""
        peer, seconds = _native.ANY_SOURCE if rank is None else self.members[rank], self._seconds(timeout)
        peers = {peer} if rank is not None else {*self.members} - {self.world.rank}
        self.world.connect(peers, seconds, any_source=rank is None)
        return peer, tag, piece.pointer, piece.count, DTYPES[piece.dtype], seconds, piece.owner, COLLECTIVES[part_of]

    def _part_to(self, collective: str, rank: int, piece: Piece, timeout: float | None) -> Part:
        return self._send(piece, rank, _TAGS[collective], collective, timeout)

    def _part_from(self, collective: str, rank: int, piece: Piece, timeout: float | None) -> Part:
        return self._recv(piece, rank, _TAGS[collective], collective, timeout)

    def _uneven_all_to_all(self, x: Any, splits: Sequence[int], out: Any, async_op: bool, timeout: float | None) -> Any:
        found = source(x)
        rows = found.shape[0] if found.shape else 0
        if len(splits) != self.size or min(splits) < 0 or sum(splits) != rows:
            raise ValueError(f"splits={list(splits)}: {self.size} numbers of rows that add up to {rows} are needed")
        incoming = self.all_to_all(np.array(splits, np.int64), timeout=timeout).tolist()
        if out is None:
            out = like(x, found, (sum(incoming), *found.shape[1:]))
        received = target(out)
        row = found.count // rows if rows else int(np.prod(found.shape[1:], dtype=np.int64))
        check_fit("all_to_all", received, sum(incoming) * row, found.dtype)
        whole = apart(all_of(x, found), all_of(out, received))
        size = row * whole.itemsize
        starts_out, starts_in = np.cumsum([0, *splits]).tolist(), np.cumsum([0, *incoming]).tolist()
        here = self.rank
        copy(received.pointer + starts_in[here] * size, whole.pointer + starts_out[here] * size, splits[here] * size)
        parts = []
        for peer in self._others():
            incoming_piece = Piece(
                keeper(out), received.pointer + starts_in[peer] * size, incoming[peer] * row, whole.dtype
            )
            parts.append(self._part_from("all_to_all", peer, incoming_piece, timeout))
            outgoing_piece = Piece(
                whole.owner, whole.pointer + starts_out[peer] * size, splits[peer] * row, whole.dtype
            )
            parts.append(self._part_to("all_to_all", peer, outgoing_piece, timeout))
        return _finished(Work(parts, out), async_op)

    def _agree_on_number(self, ranks: list[int], members: list[int]) -> tuple[int, int]:
        """A number and its incarnation: the lowest member draws and tells the others, with the members as it knows
        them."""
        leader = min(ranks, key=lambda rank: self.members[rank])
        others = [rank for rank in ranks if rank != leader]
        said = np.array([0, *members], np.int64)
        piece = all_of(said, target(said))
        first = self.members[leader] * GROUPS + 1
        if self.rank == leader:
            # One that was closed here may still be in use elsewhere: its number comes again when all others have.
            for _ in range(GROUPS - 1):
                said[0] = next(self.world.draws)
                if first + said[0] % (GROUPS - 1) not in self.world.groups:
                    break
            else:
                raise ResourceError(f"{GROUPS - 1} groups whose lowest rank is {leader} exist: close some")
            works = [self._part_to("new_group", rank, piece, None) for rank in others]
        else:
            works = [self._part_from("new_group", leader, piece, None)]
        Work(works).wait()
        if said[1:].tolist() != members:
            other = min(members)
            message = f"rank {self.world.rank} makes a group of {members}, rank {other} one of {said[1:].tolist()}"
            self._engine.fail("Mismatch", other, message)
            raise Mismatch(message, rank=other, host=self.world.topology.hosts[other], collective="new_group")
        incarnation, place = divmod(int(said[0]), GROUPS - 1)
        return first + place, incarnation % INCARNATIONS

    def _others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    def _rank(self, name: str, rank: int) -> int:
        try:
            rank = operator.index(rank)
        except TypeError:
            raise TypeError(f"{name}={rank!r}: a rank is a whole number") from None
        if not 0 <= rank < self.size:
            raise ValueError(f"{name}={rank}: ranks of this communicator are 0 to {self.size - 1}")
        return rank

    def _other(self, name: str, rank: int) -> int:
        if self._rank(name, rank) == self.rank:
            raise ValueError(f"{name}={rank} is this rank itself")
        return rank

    def _block(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of one of ``size`` equal blocks along the first axis."""
        if not shape or shape[0] % self.size:
            raise ValueError(f"{name}: a buffer of shape {shape} cannot be cut into {self.size} equal blocks")
        return (shape[0] // self.size, *shape[1:])


def _finished(work: Work, async_op: bool) -> Any:
    return work if async_op else work.wait()
