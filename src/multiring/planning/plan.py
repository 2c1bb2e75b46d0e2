"""A collective algorithm as a value: spans, rings, phases, plan."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import accumulate, pairwise
from typing import overload

METHODS_OF = {
    "reduce_scatter": ("ring", "direct", "halving"),
    "all_gather": ("ring", "direct", "halving"),
    "all_reduce": ("direct", "halving", "tree"),
    "broadcast": ("ring", "direct", "tree"),
    "reduce": ("ring", "direct", "tree"),
    "all_to_all": ("direct",),
}
"""The methods of each kind of phase; a ring of ``all_reduce`` is a reduce_scatter and an all_gather phase."""

KINDS = tuple(METHODS_OF)

# csrc/types.hpp has the same collectives and sets, and csrc/arithmetic.hpp the formats of `NARROW`: planning imports
# nothing that acts, and the engine reads no Python. tests/unit/test_engine.py and tests/unit/test_wire.py compare them.
REDUCING = ("reduce_scatter", "all_reduce", "reduce")
"""The kinds of phase, and the collectives, that sum."""

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "all_to_all", "barrier")
ROOTED = ("broadcast", "reduce")
"""The collectives that have a root."""

IN_BLOCKS = ("reduce_scatter", "all_gather", "all_to_all")
"""The collectives whose buffer is one block for each of n ranks; block r is the span [r/n, (r+1)/n)."""


@dataclass(frozen=True, slots=True)
class NarrowFormat:
    """A narrower format in which float32 may be sent that is summed.

    An element has ``bits``. Where ``block`` is more than 1, so many elements share a scale of 32 bits. ``error`` is the
    largest error of an element, as a fraction of its value; with a scale, of the largest value in its block (half a
    step of the codes, and the rounding of the scale). The largest code is ``steps`` times the smallest; 0 without a
    scale.
    """

    bits: int
    error: float
    block: int = 1
    steps: int = 0
    needs_residual: bool = False

    @property
    def sent_fraction(self) -> float:
        """Fraction of the bytes of float32 that is sent."""
        return self.bits / 32 + (1 / self.block if self.block > 1 else 0)


NARROW = {
    "bfloat16": NarrowFormat(16, 2.0**-8),
    "float16": NarrowFormat(16, 2.0**-11),
    # With a scale, the error is above half a step, the first number here, and the rounding of the scale, the second.
    "int8": NarrowFormat(8, 1 / 253, 256, 127),  # codes to 127: 1/254 + 2^-17
    "int4": NarrowFormat(4, 1 / 13.9, 64, 7),  # codes to 7: 1/14 + 2^-21
    "int2": NarrowFormat(2, 1 / 1.99, 64, 1, needs_residual=True),  # codes to 1: 1/2 + 2^-24
    "float8": NarrowFormat(8, 1 / 27.9, 256, 448 << 9),  # codes to 448 in steps of 32: 1/28 + 2^-20; the least is 2^-9
}
WIRES = tuple(NARROW)
LONGEST_BLOCK = max(format.block for format in NARROW.values())
SENT_FRACTION = {"": 1.0, **{wire: format.sent_fraction for wire, format in NARROW.items()}}
"""Fraction of the bytes of float32 that is sent, by wire."""

FINEST_GRAIN = 64
"""Bytes of a cache line: slices are cut at multiples of it, or of a coarser grain."""

SHARE_UNITS = 64
"""Number of equal parts to which shares by bandwidth are rounded."""


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """A half-open fraction [lo, hi) of the buffer, exact."""

    lo: Fraction
    hi: Fraction

    def __str__(self) -> str:
        return f"[{self.lo},{self.hi})"


WHOLE = Span(Fraction(0), Fraction(1))


def is_id(text: str) -> bool:
    """True if it may be the id of a plan."""
    return re.fullmatch(r"[0-9a-f]{12}", text) is not None


def joined(spans: Iterable[Span]) -> tuple[Span, ...]:
    """The same spans in the same order, neighbours that touch made one."""
    result: list[Span] = []
    for span in spans:
        if result and result[-1].hi == span.lo:
            result[-1] = Span(result[-1].lo, span.hi)
        else:
            result.append(span)
    return tuple(result)


@dataclass(frozen=True, slots=True)
class Ring:
    """Ranks that reduce or gather ``spans`` together, in the order of ``members``.

    ``shares`` are integer weights, one a member; None is equal shares. In a broadcast or reduce the first member is
    the root.
    """

    members: tuple[int, ...]
    spans: tuple[Span, ...]
    shares: tuple[int, ...] | None = None

    def pieces(self) -> tuple[tuple[Span, ...], ...]:
        """The spans of each member's share: the spans laid end to end, cut in proportion to ``shares``."""
        weights = self.shares or (1,) * len(self.members)
        per_weight = sum((span.hi - span.lo for span in self.spans), Fraction(0)) / sum(weights)
        pieces = []
        rest = list(reversed(self.spans))
        for weight in weights:
            wanted = per_weight * weight
            piece = []
            while wanted:
                span = rest.pop()
                if span.hi - span.lo > wanted:
                    cut = span.lo + wanted
                    rest.append(Span(cut, span.hi))
                    span = Span(span.lo, cut)
                piece.append(span)
                wanted -= span.hi - span.lo
            pieces.append(tuple(piece))
        return tuple(pieces)


class Tiling(Sequence[Ring]):
    """Rings that repeat: one pattern laid over many units of ranks. A ring is made when somebody asks for it.

    A *unit* is a tuple of ranks, such as those of one host. A *tile* is (pattern, units): the members of the pattern's
    rings are positions in a unit, and each unit has its own copy of these rings. In 1,280 hosts of 8 ranks the phase
    within hosts is one tile: a pattern of one ring, and 1,280 units.
    """

    def __init__(self, tiles: Iterable[tuple[Sequence[Ring], Sequence[tuple[int, ...]]]]):
        self.tiles = tuple((tuple(pattern), tuple(units)) for pattern, units in tiles)
        self._starts = tuple(accumulate((len(p) * len(u) for p, u in self.tiles), initial=0))

    def __len__(self) -> int:
        return self._starts[-1]

    @overload
    def __getitem__(self, index: int) -> Ring: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Ring, ...]: ...

    def __getitem__(self, index: int | slice) -> Ring | tuple[Ring, ...]:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        if not -len(self) <= index < len(self):
            raise IndexError(f"ring {index} of {len(self)}")
        index %= len(self)
        for start, (pattern, units) in zip(self._starts, self.tiles, strict=False):
            if index < start + len(pattern) * len(units):
                unit, ring = divmod(index - start, len(pattern))
                return _placed(pattern[ring], units[unit])
        raise IndexError(index)

    def __iter__(self) -> Iterator[Ring]:
        for pattern, units in self.tiles:
            for unit in units:
                for ring in pattern:
                    yield _placed(ring, unit)

    def of(self, rank: int) -> tuple[Ring, ...]:
        """The rings that hold ``rank``, in order."""
        rings = []
        for tile, unit, position in self._positions.get(rank, ()):
            pattern, units = self.tiles[tile]
            rings += [_placed(pattern[i], units[unit]) for i in self._rings_at[tile].get(position, ())]
        return tuple(rings)

    @cached_property
    def _positions(self) -> dict[int, list[tuple[int, int, int]]]:
        positions: dict[int, list[tuple[int, int, int]]] = {}
        for tile, (_, units) in enumerate(self.tiles):
            for number, unit in enumerate(units):
                for position, rank in enumerate(unit):
                    positions.setdefault(rank, []).append((tile, number, position))
        return positions

    @cached_property
    def _rings_at(self) -> list[dict[int, list[int]]]:
        return [_index(pattern) for pattern, _ in self.tiles]


def _placed(ring: Ring, unit: tuple[int, ...]) -> Ring:
    return Ring(tuple([unit[position] for position in ring.members]), ring.spans, ring.shares)


def _index(rings: Sequence[Ring]) -> dict[int, list[int]]:
    index: dict[int, list[int]] = {}
    for number, ring in enumerate(rings):
        for member in ring.members:
            index.setdefault(member, []).append(number)
    return index


@dataclass(frozen=True)
class Phase:
    """Rings that run side by side: one kind of collective, one level, one method, one format on the wire.

    ``wire`` is that of the buffer, or for sums of float32 one of ``WIRES``.
    """

    kind: str
    level: str
    method: str
    rings: Sequence[Ring]
    wire: str = ""

    def rings_of(self, rank: int) -> tuple[Ring, ...]:
        """The rings that hold ``rank``, in the order of ``rings``."""
        if isinstance(self.rings, Tiling):
            return self.rings.of(rank)
        return tuple(ring for ring in self.rings if rank in ring.members)

    def tiles(self) -> Sequence[tuple[Sequence[Ring], Sequence[tuple[int, ...]] | None]]:
        """The tiles of the rings. Rings that do not repeat are one pattern, whose members are ranks, with None."""
        return self.rings.tiles if isinstance(self.rings, Tiling) else ((self.rings, None),)

    def check(self, world_size: int) -> None:
        """ValueError, which names ring and rank, where no schedule can be made in a world of that size."""
        if world_size not in self._fitting_sizes:
            _check_phase(self, world_size)
            self._fitting_sizes.add(world_size)

    @cached_property
    def _fitting_sizes(self) -> set[int]:  # those checked: plans that differ in segments alone have the same phases
        return set()


@dataclass(frozen=True)
class Plan:
    """The phases of one collective, in order.

    ``segment_bytes`` is the size of a segment; where the buffer is blocks, of its slice of each block. At most
    ``window`` segments are in flight. ValueError names phase, ring and rank where no schedule can be made; whether the
    plan computes what its collective promises is for ``interpret.prove``.
    """

    collective: str
    world_size: int
    phases: tuple[Phase, ...]
    segment_bytes: int
    root: int = 0
    window: int = 16

    def __post_init__(self) -> None:
        if self.collective not in COLLECTIVES:
            raise ValueError(f"unknown collective {self.collective!r}; known are {', '.join(COLLECTIVES)}")
        if self.world_size < 1:
            raise ValueError(f"world_size is {self.world_size}; a world has at least one rank")
        if self.segment_bytes < 64:
            raise ValueError(f"segment_bytes is {self.segment_bytes}; a segment has at least 64 bytes")
        if self.window < 1:
            raise ValueError(f"window is {self.window}; at least one segment is in flight")
        if not 0 <= self.root < self.world_size:
            raise ValueError(f"root is {self.root}; the world has ranks 0 to {self.world_size - 1}")
        wires = {phase.wire for phase in self.phases if phase.wire}
        if len(wires) > 1:
            raise ValueError(f"phases send {' and '.join(sorted(wires))}: the sum can be rounded to one of them only")
        if wires and self.collective != "all_reduce":
            raise ValueError(f"{self.collective} sends what it is given, not {wires.pop()}: only all_reduce is narrow")
        for number, phase in enumerate(self.phases):
            try:
                phase.check(self.world_size)
            except ValueError as error:
                raise ValueError(f"phase {number} ({phase.kind}, level {phase.level}): {error}") from None

    @property
    def blocks(self) -> int:
        """Number of blocks of the buffer: 1 where the buffer is the caller's."""
        return self.world_size if self.collective in IN_BLOCKS else 1

    @property
    def wire(self) -> str:
        """The format in which some phases send, if it is not the buffer's; the sum is rounded to it once."""
        return max((phase.wire for phase in self.phases), default="")

    @property
    def wire_error(self) -> float:
        """Largest error of a sum by the narrow wire, as a fraction of the sum of the absolute values; 0 without one.

        Where elements are `rounded_together`, each rank's part of that sum is the largest of them.
        """
        if not self.wire:
            return 0.0
        roundings = 1 + sum(phase.wire != "" and phase.kind in REDUCING for phase in self.phases)
        return (1 + NARROW[self.wire].error) ** roundings * (1 + 2.0**-24) ** (self.world_size + 1) - 1

    @property
    def rounded_together(self) -> int:
        """Number of elements, counted from the start of the buffer, that the wire rounds by the largest of them."""
        return NARROW[self.wire].block if self.wire else 1

    @property
    def grain(self) -> int:
        """Bytes at whose multiples slices are cut.

        Elements that are `rounded_together` stay together in every message, so that rounding again changes nothing.
        """
        return max(FINEST_GRAIN, 4 * self.rounded_together)

    @cached_property
    def number(self) -> int:
        """The first 63 bits of a hash of the content: the id as the engine carries it."""
        return int(self._digest[:16], 16) >> 1

    @cached_property
    def id(self) -> str:
        """The first 12 hexadecimal digits of a hash of the content."""
        return self._digest[:12]

    @cached_property
    def _digest(self) -> str:
        content = hashlib.sha256()
        head = (self.collective, self.world_size, self.segment_bytes, self.root, self.window)
        content.update(repr(head).encode())
        for phase in self.phases:
            content.update(repr((phase.kind, phase.level, phase.method, phase.wire)).encode())
            for pattern, units in phase.tiles():
                for ring in pattern:
                    spans = " ".join(map(str, ring.spans))
                    content.update(f"{ring.members}{spans}{ring.shares}".encode())
                content.update(repr(units).encode())
        return content.hexdigest()


def _check_phase(phase: Phase, world_size: int) -> None:
    if phase.kind not in METHODS_OF:
        raise ValueError(f"unknown kind {phase.kind!r}; known are {', '.join(KINDS)}")
    if phase.method not in METHODS_OF[phase.kind]:
        raise ValueError(f"{phase.kind} has no method {phase.method!r}; it has {', '.join(METHODS_OF[phase.kind])}")
    if phase.wire not in ("", *WIRES):
        raise ValueError(f"unknown wire {phase.wire!r}; known are {', '.join(WIRES)}")
    if phase.wire and phase.kind in REDUCING and phase.method != "direct":
        raise ValueError(f"wire {phase.wire} needs method direct, not {phase.method}: partial sums would be rounded")
    for pattern, units in phase.tiles():
        for unit in units or ():
            _check_ranks(unit, world_size)
        size = world_size if units is None else min(map(len, units), default=0)
        for number, ring in enumerate(pattern):
            try:
                _check_ranks(ring.members, size)
                _check_spans(ring.spans)
                _check_method(phase, ring)
            except ValueError as error:
                raise ValueError(f"ring {number} {shortened(ring.members)}: {error}") from None


def _check_ranks(ranks: tuple[int, ...], size: int) -> None:
    if not ranks:
        raise ValueError("it has no members")
    if min(ranks) < 0 or max(ranks) >= size:
        stranger = next(rank for rank in ranks if not 0 <= rank < size)
        raise ValueError(f"rank {stranger} is outside 0 to {size - 1}")
    if len(set(ranks)) != len(ranks):
        twice = next(rank for rank in ranks if ranks.count(rank) > 1)
        raise ValueError(f"rank {twice} is in it twice")


def _check_spans(spans: tuple[Span, ...]) -> None:
    if not spans:
        raise ValueError("it has no spans")
    for span in spans:
        if not 0 <= span.lo < span.hi <= 1:
            raise ValueError(f"span {span} is not a part of [0,1)")
    ordered = sorted(spans)
    for a, b in pairwise(ordered):
        if b.lo < a.hi:
            raise ValueError(f"spans {a} and {b} overlap")


def _check_method(phase: Phase, ring: Ring) -> None:
    size = len(ring.members)
    if size < 2:
        raise ValueError("a ring has at least two members")
    if ring.shares is not None:
        if len(ring.shares) != size:
            raise ValueError(f"{len(ring.shares)} shares for {size} members")
        if min(ring.shares) < 0 or sum(ring.shares) == 0:
            raise ValueError(f"shares {shortened(ring.shares)} are not weights")
        if phase.kind not in ("reduce_scatter", "all_gather"):
            raise ValueError(f"{phase.kind} has no shares")
        if phase.method != "direct":
            raise ValueError(f"unequal shares need method direct, not {phase.method}")
    if phase.method == "halving" and phase.kind != "all_reduce" and size & (size - 1):
        raise ValueError(f"{phase.kind} by halving needs a power of two members, not {size}")


def shortened(values: Sequence[int]) -> str:
    """The first few of many numbers, for messages."""
    shown = " ".join(map(str, values[:8]))
    return f"({shown} ...)" if len(values) > 8 else f"({shown})"
