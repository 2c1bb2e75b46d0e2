"""The communicator: the collectives that ranks call together, on the buffers of a user."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from multiring.env import MOST_BYTES, whole_number
from multiring.errors import MultiringError
from multiring.planning.choice import Choice
from multiring.planning.plan import COLLECTIVES
from multiring.runtime.buffers import (
    Piece,
    all_of,
    apart,
    check_fit,
    check_residual,
    copy,
    exchanged,
    gathered,
    keeper,
    like,
    readable,
    scattered,
    source,
    target,
    writable,
)
from multiring.runtime.group import Group, valid_tag
from multiring.runtime.work import Work


class Communicator:
    """Ranks 0 to ``size`` - 1, which call the same collectives in the same order.

    A buffer is a NumPy array, an object with the buffer protocol, or a DLPack tensor on the CPU, always contiguous.
    With ``async_op`` a call returns a `Work` at once, and the buffers may not be touched until its `wait` has returned;
    `wait` returns what the synchronous call returns. ``timeout`` is in seconds, None the communicator's own. Every call
    raises PeerLost, CollectiveTimeout or Mismatch where other ranks do not do their part, and ValueError or TypeError
    for arguments that cannot be served, before anything is sent.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self.world = group.world
        self.members = group.members
        self.rank = group.rank
        self.size = group.size
        self.timeout = group.timeout

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
        return self._group.hosts

    @property
    def levels(self) -> tuple[str, ...]:
        """The levels of the job's topology from the inside out: rank, host, and rack and site where it has these."""
        return self.world.topology.levels

    def ranks_by(self, level: str) -> list[list[int]]:
        """The ranks of this communicator in each host, rack or site; each alone for level "rank".

        ValueError for a level that is not among `levels`.
        """
        index = {member: rank for rank, member in enumerate(self.members)}
        places = ([index[rank] for rank in place if rank in index] for place in self.world.topology.ranks_by(level))
        return sorted(sorted(place) for place in places if place)

    @property
    def oldest(self) -> int:
        """The lowest of the ranks that have been in the job for longest: the others came by `grow`, after them."""
        return self._group.oldest

    def all_reduce(
        self,
        x: Any,
        op: str = "sum",
        *,
        residual: Any = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Combine ``x`` of all ranks, element by element, in place. All ranks end with the same bits.

        ``op`` is sum, avg, min, max or prod, on integers also band, bor or bxor. Ranks agree on type and number of
        elements; shapes are not compared. ``residual`` is for sums and averages of float32 that `MULTIRING_WIRE`
        narrows: as many float32 of this rank's own, zeros at first. What is lost by rounding is kept there, and added
        in the next call that is handed it; ValueError if it is of another size or type, or lies in ``x``.
        """
        if residual is not None:
            return self._all_reduce_keeping(x, op, residual, async_op, timeout)
        if not async_op and self._group.calls.all_reduce_plain(x, op, timeout):
            return None
        return self._call("all_reduce", writable(x), op, 0, async_op, timeout)

    def _all_reduce_keeping(self, x: Any, op: str, residual: Any, async_op: bool, timeout: float | None) -> Any:
        piece, kept = writable(x), writable(residual)
        check_residual(piece, op, kept)
        if async_op:
            return Work([self._group.start("all_reduce", piece, op, timeout=timeout, residual=kept)])
        self._group.run("all_reduce", piece, op, timeout=timeout, residual=kept)
        return None

    def broadcast(self, x: Any, root: int = 0, *, async_op: bool = False, timeout: float | None = None) -> Any:
        """Copy ``x`` of rank ``root`` to ``x`` of all the others."""
        root = self._group.valid_rank("root", root)
        piece = readable(x) if self.rank == root else writable(x)
        return self._call("broadcast", piece, "sum", root, async_op, timeout)

    def reduce(
        self, x: Any, op: str = "sum", root: int = 0, *, async_op: bool = False, timeout: float | None = None
    ) -> Any:
        """Combine ``x`` of all ranks in ``x`` of rank ``root``; the others' may hold partial results afterwards."""
        root = self._group.valid_rank("root", root)
        return self._call("reduce", writable(x), op, root, async_op, timeout)

    def all_gather(self, x: Any, *, out: Any = None, async_op: bool = False, timeout: float | None = None) -> Any:
        """``x`` of all ranks, in ``out`` (``size`` times its elements) or a new array of shape (size, *x.shape)."""
        timeout = self._group.ready(timeout)
        mine = source(x)
        if out is None:
            out = like(x, mine, (self.size, *mine.shape))
        whole = target(out)
        check_fit("all_gather", whole, self.size * mine.count, mine.dtype)
        blocks = gathered(all_of(x, mine), all_of(out, whole), self.rank)
        return self._call("all_gather", blocks, "sum", 0, async_op, timeout, result=out)

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
        blocks, put = scattered(all_of(x, whole), all_of(out, mine), self.rank)

        def finish() -> Any:
            put()
            return out

        return self._call("reduce_scatter", blocks, op, 0, async_op, timeout, finish=finish)

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
        timeout = self._group.ready(timeout)
        whole = source(x)
        if splits is not None:
            return self._uneven_all_to_all(x, splits, out, async_op, timeout)
        self._block("all_to_all", whole.shape)
        if out is None:
            out = like(x, whole, whole.shape)
        received = target(out)
        check_fit("all_to_all", received, whole.count, whole.dtype)
        blocks = exchanged(all_of(x, whole), all_of(out, received), self.size)
        return self._call("all_to_all", blocks, "sum", 0, async_op, timeout, result=out)

    def barrier(self, *, async_op: bool = False, timeout: float | None = None) -> Any:
        """Return when every rank has called it."""
        if not async_op:
            return self._group.barrier(timeout=timeout)
        return Work([self._group.start("barrier", writable(np.zeros(1, np.uint8)), timeout=timeout)])

    def send(self, x: Any, dst: int, tag: int = 0, *, async_op: bool = False, timeout: float | None = None) -> Any:
        """Send ``x`` to rank ``dst``, which receives it by `recv` with the same ``tag``; in order within a tag.

        A tag is 0 or more.
        """
        return _finished(Work([self._group.send(readable(x), dst, valid_tag(tag), timeout=timeout)]), async_op)

    def recv(
        self, x: Any, src: int | None = None, tag: int = 0, *, async_op: bool = False, timeout: float | None = None
    ) -> Any:
        """Receive into ``x``, which has the type and count that are sent, and return the rank that sent it.

        ``src`` None: from whichever rank's message with this ``tag`` arrived first. Receives of the same tag that are
        called after it wait for it.
        """
        part = self._group.recv(writable(x), src, valid_tag(tag), timeout=timeout)
        return _finished(Work([part], finish=lambda: self.members.index(part.other)), async_op)

    def gather(
        self, x: Any, root: int = 0, *, out: Any = None, async_op: bool = False, timeout: float | None = None
    ) -> Any:
        """``x`` of all ranks on rank ``root``, in ``out`` or a new array of shape (size, *x.shape); None elsewhere."""
        timeout = self._group.ready(timeout)
        root = self._group.valid_rank("root", root)
        mine = source(x)
        if self.rank != root:
            return _finished(Work([self._group.send_part("gather", all_of(x, mine), root, timeout)]), async_op)
        if out is None:
            out = like(x, mine, (self.size, *mine.shape))
        whole = target(out)
        check_fit("gather", whole, self.size * mine.count, mine.dtype)
        nbytes = mine.count * mine.itemsize
        copy(whole.pointer + root * nbytes, mine.pointer, nbytes)
        blocks = {
            peer: Piece(keeper(out), whole.pointer + peer * nbytes, mine.count, mine.dtype) for peer in self._others()
        }
        parts = [self._group.recv_part("gather", block, peer, timeout) for peer, block in blocks.items()]
        return _finished(Work(parts, out), async_op)

    def scatter(
        self, x: Any, blocks: Any = None, root: int = 0, *, async_op: bool = False, timeout: float | None = None
    ) -> Any:
        """Fill ``x`` of rank r with block r of rank ``root``'s ``blocks`` (``size`` times the elements of ``x``)."""
        timeout = self._group.ready(timeout)
        root = self._group.valid_rank("root", root)
        mine = target(x)
        if self.rank != root:
            return _finished(Work([self._group.recv_part("scatter", all_of(x, mine), root, timeout)]), async_op)
        if blocks is None:
            raise ValueError(f"scatter: rank {root} is the root and has to give blocks")
        if isinstance(blocks, (list, tuple)):
            raise TypeError(
                f"scatter: blocks is a {type(blocks).__name__}, expected one buffer that has a block for each rank: "
                "hand over numpy.stack(blocks)"
            )
        found = source(blocks)
        if (found.count, found.dtype) != (self.size * mine.count, mine.dtype):
            raise ValueError(
                f"scatter: blocks are {found.count} x {found.dtype}; rank {root}, the root, has to give "
                f"{self.size * mine.count} x {mine.dtype}, a block of {mine.count} for each of {self.size} ranks"
            )
        whole = apart(all_of(blocks, found), all_of(x, mine))
        nbytes = mine.count * mine.itemsize
        copy(mine.pointer, whole.pointer + root * nbytes, nbytes)
        peers = self._others()
        pieces = [Piece(whole.owner, whole.pointer + peer * nbytes, mine.count, mine.dtype) for peer in peers]
        parts = [
            self._group.send_part("scatter", piece, peer, timeout) for peer, piece in zip(peers, pieces, strict=True)
        ]
        return _finished(Work(parts), async_op)

    def broadcast_object(self, value: Any = None, root: int = 0, *, timeout: float | None = None) -> Any:
        """``value`` of rank ``root``, on all ranks; it must be picklable."""
        return self._group.broadcast_object(value, root, timeout=timeout)

    def all_gather_object(self, value: Any, *, timeout: float | None = None) -> list[Any]:
        """``value`` of all ranks, in their order; each must be picklable."""
        return self._group.all_gather_object(value, timeout=timeout)

    def new_group(self, ranks: Sequence[int], *, timeout: float | None = None) -> Communicator | None:
        """A communicator of some of the ranks, in the given order; None to a rank that is not among them.

        All members call it, with the same ranks, in the same order as other groups they share; others may.
        """
        group = self._group.subgroup(ranks, timeout)
        return None if group is None else Communicator(group)

    def empty(self, shape: int | Sequence[int], dtype: Any = "float32") -> np.ndarray[Any, Any]:
        """A new array in the memory that the ranks of a host share: collectives read it where it lies.

        ResourceError if the arena (MULTIRING_ARENA_BYTES) is full but for an eighth, 16 MB at most, which is kept for
        staging.
        """
        kind = np.dtype(dtype)
        if kind.hasobject:
            raise TypeError(f"dtype={dtype!r}: expected numbers, such as float32: other processes cannot read objects")
        given = shape if isinstance(shape, Sequence) else (shape,)
        extents = tuple(whole_number("shape", extent, "an extent") for extent in given)
        if min(extents, default=0) < 0:
            raise ValueError(f"shape={shape}: extents are 0 or more")
        nbytes = math.prod(extents) * kind.itemsize
        if nbytes >= MOST_BYTES:
            raise ValueError(f"shape={shape}: an array has less than 2**63 bytes")
        shaped: np.ndarray[Any, Any] = self._group.engine.empty(nbytes).view(kind).reshape(extents)
        return shaped

    def plan(self, nbytes: int, collective: str = "all_reduce", root: int = 0) -> Choice:
        """The plan for a buffer of ``nbytes`` (of all blocks together); printed, it explains itself."""
        if collective not in COLLECTIVES:
            raise ValueError(f"collective={collective!r}: known are {', '.join(COLLECTIVES)}")
        nbytes = whole_number("nbytes", nbytes, "a buffer's size")
        if nbytes < 0:
            raise ValueError(f"nbytes={nbytes}: a buffer has 0 bytes or more")
        self._group.refuse_closed()
        choice = self._group.plans.choose(collective, nbytes, self._group.valid_rank("root", root))
        measured = self._group.plans.measured().get(choice.plan.id)
        return replace(choice, measured=measured) if measured and measured.calls else choice

    def stats(self) -> dict[str, Any]:
        """Counters of this process's engine, and by id what this communicator's plans have done so far.

        ``peers`` are counted by rank of the world, ``links`` by the level that joins them to this rank. ``slowest``
        says which ranks of the world keep the others waiting now, and what with, and on such a rank ``where`` in the
        program it is ("" before that is known, and elsewhere); None if nobody does. ``slow_so_far`` are all that did.
        ``slow_link`` says which link between hosts carries less than the plan counts on, or None; ``slow_links_so_far``
        are all that did.
        """
        plans = {plan: asdict(measured) for plan, measured in self._group.plans.measured().items()}
        counted = self._group.engine.statistics()
        if (slowest := counted["slowest"]) is not None:
            sampler = self.world.sampler if self.world.rank in slowest["ranks"] else None
            slowest["where"] = sampler.places.get(slowest["reason"], "") if sampler is not None else ""
        return {**counted, "links": self._by_level(counted["peers"]), "plans": plans}

    def _by_level(self, peers: dict[int, dict[str, float]]) -> dict[str, dict[str, float]]:
        sums: dict[str, Counter[str]] = {}
        for rank, counted in peers.items():
            sums.setdefault(self.world.topology.apart(self.world.rank, rank), Counter()).update(counted)
        return {level: dict(counted) for level, counted in sums.items()}

    def plans_used(self) -> list[Choice]:
        """The plans that calls were made by, each with what they took on this rank."""
        return self._group.plans.used()

    def close(self) -> None:
        """Give up a group, if that was not done. ValueError while collectives of it are in flight.

        MultiringError for the communicator of all ranks, which `multiring.shutdown` gives up.
        """
        if self._group.number == 0:
            raise MultiringError(
                "this is the communicator of all ranks, and no group that can be closed alone: call "
                "multiring.shutdown(), which leaves the job"
            )
        self._group.close()

    def _call(
        self,
        collective: str,
        piece: Piece,
        op: str,
        root: int,
        async_op: bool,
        timeout: float | None,
        *,
        result: Any = None,
        finish: Callable[[], Any] | None = None,
    ) -> Any:
        """Run or start a plan; where the buffer is blocks, ``piece`` is the first of them."""
        if async_op:
            return Work([self._group.start(collective, piece, op, root, timeout=timeout)], result, finish)
        self._group.run(collective, piece, op, root, timeout=timeout)
        return result if finish is None else finish()

    def _uneven_all_to_all(self, x: Any, splits: Sequence[int], out: Any, async_op: bool, timeout: float | None) -> Any:
        found = source(x)
        splits = [whole_number("splits", rows, "a number of rows") for rows in splits]
        rows = found.shape[0] if found.shape else 0
        if len(splits) != self.size or min(splits) < 0 or sum(splits) != rows:
            raise ValueError(f"splits={splits}: {self.size} numbers of rows that add up to {rows} are needed")
        given = None if out is None else target(out)
        if given is not None and given.dtype != found.dtype:
            raise ValueError(f"all_to_all: out is of {given.dtype}, and x of {found.dtype}")
        incoming = self.all_to_all(np.array(splits, np.int64), timeout=timeout).tolist()
        if out is None:
            out = like(x, found, (sum(incoming), *found.shape[1:]))
        received = target(out) if given is None else given
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
            parts.append(self._group.recv_part("all_to_all", incoming_piece, peer, timeout))
            outgoing_piece = Piece(
                whole.owner, whole.pointer + starts_out[peer] * size, splits[peer] * row, whole.dtype
            )
            parts.append(self._group.send_part("all_to_all", outgoing_piece, peer, timeout))
        return _finished(Work(parts, out), async_op)

    def _others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    def _block(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of one of ``size`` equal blocks along the first axis."""
        if not shape or shape[0] % self.size:
            raise ValueError(f"{name}: a buffer of shape {shape} cannot be cut into {self.size} equal blocks")
        return (shape[0] // self.size, *shape[1:])


def _finished(work: Work, async_op: bool) -> Any:
    return work if async_op else work.wait()


def group_of(communicator: Communicator) -> Group:
    """The group of a communicator, on which front ends build."""
    return communicator._group
