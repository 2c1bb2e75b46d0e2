"""A plan expanded for one rank: what it sends, reduces and stores, in order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple

from .methods import Reduce, steps
from .plan import FINEST_GRAIN, REDUCING, WIRES, Phase, Plan, Ring, Span, joined

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

SEND, REDUCE, STORE = "send", "reduce", "store"
REPAY, ROUND = "repay", "round"
"""Instructions that only calls with a residual execute: add the residual to what this rank contributes; round that, and
keep what is lost."""

_CODES = {kind: code for code, kind in enumerate((SEND, REDUCE, STORE, REPAY, ROUND))}
_WIRE_CODES = {wire: code for code, wire in enumerate(("", *WIRES))}


def cut(fraction: Fraction, count: int, itemsize: int, grain: int = FINEST_GRAIN) -> int:
    """The element at which a slice of ``count`` elements is cut: the one rule from span to elements.

    Cuts lie at multiples of ``grain`` bytes, so a small slice has fewer owners instead of tiny messages.
    """
    if fraction == 1:
        return count
    least = max(grain // itemsize, 1)
    return fraction.numerator * count // (fraction.denominator * least) * least


@dataclass(frozen=True, slots=True)
class Instruction:
    """Send a span to ``peers``, reduce it over ``peers``, or store it from the one peer.

    ``lo`` and ``hi`` are fractions of ``block``. ``final`` marks the reduction that completes the span. Messages are in
    the format ``wire``, and the sum is rounded to the format ``rounded``; an empty format is the buffer's own. Where
    ``keeps`` is set, what rounding the sum loses is added to the residual. ``repay`` and ``round`` have no peers;
    ``round`` rounds to ``wire``.
    """

    kind: str
    phase: int
    peers: tuple[int, ...]
    block: int
    lo: Fraction
    hi: Fraction
    final: bool = False
    wire: str = ""
    rounded: str = ""
    keeps: bool = False


class _TableRow(NamedTuple):
    """An instruction in the table for the engine: its columns as csrc/schedule.hpp lists them."""

    kind: int
    phase: int
    first_peer: int
    peer_count: int
    block: int
    lo_numerator: int
    lo_denominator: int
    hi_numerator: int
    hi_denominator: int
    final: bool
    wire: int
    rounded: int
    keeps: bool


@dataclass(frozen=True)
class Schedule:
    """The instructions that one rank executes for every segment."""

    plan_id: str
    collective: str
    rank: int
    world_size: int
    blocks: int
    segment_bytes: int
    grain: int
    instructions: tuple[Instruction, ...]

    def table(self) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """The arrays that ``Engine.install`` takes: instructions [n, 13], each a `_TableRow`, and their peers.

        ValueError when a fraction does not fit 64 bits.
        """
        import numpy as np

        rows = []
        peers: list[int] = []
        for step in self.instructions:
            if max(step.lo.denominator, step.hi.denominator) >= 1 << 63:
                raise ValueError(
                    f"plan {self.plan_id} cuts block {step.block} at {step.lo} and {step.hi}, finer than 64 bits hold; "
                    "use fewer different numbers of ranks per host"
                )
            row = _TableRow(
                kind=_CODES[step.kind],
                phase=step.phase,
                first_peer=len(peers),
                peer_count=len(step.peers),
                block=step.block,
                lo_numerator=step.lo.numerator,
                lo_denominator=step.lo.denominator,
                hi_numerator=step.hi.numerator,
                hi_denominator=step.hi.denominator,
                final=step.final,
                wire=_WIRE_CODES[step.wire],
                rounded=_WIRE_CODES[step.rounded],
                keeps=step.keeps,
            )
            rows.append(row)
            peers += step.peers
        return np.array(rows, dtype=np.int64).reshape(-1, len(_TableRow._fields)), np.array(peers, dtype=np.int32)


def schedule(plan: Plan, rank: int) -> Schedule:
    """Expand a plan for one rank: in each step of a phase the sends of all its rings, then the waits.

    Where the plan has a narrow wire, a phase that reduces begins with what it does to the residual.
    """
    if not 0 <= rank < plan.world_size:
        raise ValueError(f"rank {rank} is outside the world of {plan.world_size}")
    last_reducing = max((p for p, phase in enumerate(plan.phases) if phase.kind in REDUCING), default=-1)
    instructions: list[Instruction] = []
    residual = _Residual(plan.wire, rank)
    for number, phase in enumerate(plan.phases):
        is_last = number == last_reducing
        instructions += residual.before(phase, number, is_last)
        residual.note(phase)
        instructions += _expand(phase, number, rank, plan.blocks, is_last, plan.wire, residual)
    return Schedule(
        plan.id,
        plan.collective,
        rank,
        plan.world_size,
        plan.blocks,
        plan.segment_bytes,
        plan.grain,
        tuple(instructions),
    )


class _Residual:
    """Use of one rank's residual in each phase: the spans that it is added to, and the sums whose loss it keeps.

    A rank adds its residual only where no other rank holds the same partial sum; otherwise copies of one sum would
    differ. After an all_reduce several ranks hold a sum and round it alike; the first of them alone keeps the loss,
    which would otherwise be added several times.
    """

    def __init__(self, wire: str, rank: int) -> None:
        self._wire = wire
        self._rank = rank
        self._copied: list[Span] = []  # spans whose sum other ranks hold too
        self._kept_elsewhere: list[Span] = []  # those among them whose loss another rank keeps

    def before(self, phase: Phase, number: int, is_last: bool) -> Iterator[Instruction]:
        """The instructions with which this rank enters a phase."""
        if not self._wire or phase.kind not in REDUCING:
            return
        for ring in phase.rings_of(self._rank):
            is_alone = not _meet(ring.spans, self._copied)
            repays = is_alone and (phase.wire or phase.kind == "all_reduce" or is_last)
            rounds = phase.wire and self.keeps(ring)
            for span in ring.spans:
                if repays:
                    yield Instruction(REPAY, number, (), 0, span.lo, span.hi)
                if rounds:
                    yield Instruction(ROUND, number, (), 0, span.lo, span.hi, wire=phase.wire)

    def note(self, phase: Phase) -> None:
        """Note the spans whose sums a phase leaves with several ranks."""
        if phase.kind == "all_reduce":
            for ring in phase.rings_of(self._rank):
                self._copied += ring.spans
                if ring.members[0] != self._rank:
                    self._kept_elsewhere += ring.spans

    def keeps(self, ring: Ring) -> bool:
        """True if this rank keeps what rounding the ring's sum loses."""
        return not _meet(ring.spans, self._kept_elsewhere)


def _meet(spans: Sequence[Span], others: Sequence[Span]) -> bool:
    return any(span.lo < other.hi and other.lo < span.hi for span in spans for other in others)


def _expand(
    phase: Phase, number: int, rank: int, blocks: int, final: bool, wire: str, residual: _Residual
) -> Iterator[Instruction]:
    rings = phase.rings_of(rank)
    pieces = [_Pieces(ring) for ring in rings]
    programs = [steps(phase.kind, phase.method, len(ring.members), ring.members.index(rank)) for ring in rings]
    for step in range(max(map(len, programs), default=0)):
        running = [
            (ring, piece, program[step])
            for ring, piece, program in zip(rings, pieces, programs, strict=True)
            if step < len(program)
        ]
        for ring, piece, now in running:
            for send in now.sends:
                peers = tuple(ring.members[i] for i in send.peers)
                for block, lo, hi in in_blocks(piece.of(send.shares), blocks):
                    yield Instruction(SEND, number, peers, block, lo, hi, wire=phase.wire)
        for ring, piece, now in running:
            for wait in now.waits:
                kind = REDUCE if isinstance(wait, Reduce) else STORE
                completes = isinstance(wait, Reduce) and wait.completes and final
                rounded = wire if completes else ""
                keeps = bool(rounded) and residual.keeps(ring)
                peers = tuple(ring.members[i] for i in wait.peers)
                for block, lo, hi in in_blocks(piece.of(wait.shares), blocks):
                    yield Instruction(kind, number, peers, block, lo, hi, completes, phase.wire, rounded, keeps)


class _Pieces:
    """The spans of any run of a ring's shares."""

    def __init__(self, ring: Ring):
        self._ring = ring
        self._pieces: tuple[tuple[Span, ...], ...] | None = None

    def of(self, shares: range) -> tuple[Span, ...]:
        if len(shares) == len(self._ring.members):
            return joined(self._ring.spans)
        if self._pieces is None:
            self._pieces = self._ring.pieces()
        return joined(span for i in shares for span in self._pieces[i])


def in_blocks(spans: tuple[Span, ...], blocks: int) -> Iterator[tuple[int, Fraction, Fraction]]:
    """Cut spans of the buffer at the edges of its blocks: (block, lo, hi), lo and hi relative to the block."""
    for span in spans:
        first, lo = _block(span.lo, blocks)
        last, hi = _block(span.hi, blocks)
        for block in range(first, last):
            yield block, lo, _ONE
            lo = _ZERO
        if hi:
            yield last, lo, hi


_ZERO, _ONE = Fraction(0), Fraction(1)


def _block(fraction: Fraction, blocks: int) -> tuple[int, Fraction]:
    """The block that a fraction of the buffer is in, and where in it."""
    block, rest = divmod(fraction.numerator * blocks, fraction.denominator)
    return block, Fraction(rest, fraction.denominator) if rest else _ZERO
