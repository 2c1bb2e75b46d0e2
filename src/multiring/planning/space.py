"""Candidates of the planner: grids, and for each grid the modes and methods of its dimensions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate, groupby, product

from .balance import fastest_shares
from .layout import Dimension, Grid, Shape, shape_in
from .plan import IN_BLOCKS, METHODS_OF
from .stages import ALL, LEAD, SPLIT, Stage
from .traffic import LARGEST_TREE, LONGEST_RING

FACTORISATIONS = 2
"""Number of ways to cut one level in several dimensions that are considered, the most even first."""

SMALLEST_FACTORISED = 12
"""Fewest members of a level that is cut in several dimensions: a step costs as much as ten messages (``speeds``,
``topology``), so that fewer members gain nothing by it."""

Options = list[list[Stage]]
"""The stages that each dimension of a grid may run; any choice of one stage for each dimension is a plan."""


def grids(tree: Shape, levels: tuple[str, ...], collective: str, ordered: bool = False) -> list[Grid]:
    """The grids for a ``canonical`` shape, those of fewer dimensions first.

    ``ordered``: only grids in which all ranks are in one ring, however long it is.
    """
    counts = {level: _sizes(here) for level, here in zip(levels, tree.by_depth, strict=True)}
    found = [
        tuple(dimension for dimensions in grid for dimension in dimensions)
        for merged in _merged(levels, counts)
        if collective == "all_to_all"
        or ordered
        or all(_width(tree, levels, m) <= LARGEST_TREE for m in merged if len(m) > 1)
        for grid in product(*(_dimensions(together, counts) for together in merged))
    ]
    if ordered:
        found = [grid for grid in found if sum(max(_sizes(s)) > 1 for s in shape_in(tree, levels, grid).by_depth) <= 1]
    return sorted(found, key=len)


def options(
    grid: Grid, shape: Shape, collective: str, wire: Mapping[str, str], ordered: bool = False
) -> Iterator[Options]:
    """The choices of modes and shares for a shape arranged in a grid, each with its methods for each dimension.

    ``wire`` is the format between the places of a level, by level. ``ordered``: each sum is made in one step, in the
    order of the ranks.
    """
    wires = [
        {wire.get(level, "") for level in dimension.levels} if max(_sizes(here)) > 1 else {""}
        for dimension, here in zip(grid, shape.by_depth, strict=True)
    ]
    if all(len(formats) == 1 for formats in wires):
        for choice in _as_wide_as_given(grid, shape, collective, ordered):
            narrow = [_narrowed(stages, min(formats)) for stages, formats in zip(choice, wires, strict=True)]
            if all(narrow):
                yield narrow


def _narrowed(stages: Sequence[Stage], wire: str) -> list[Stage]:
    """The stages that may send in a narrow format, in that format: only method direct rounds a contribution once."""
    return [replace(stage, wire=wire) for stage in stages if not wire or stage.method == "direct"]


def _as_wide_as_given(grid: Grid, shape: Shape, collective: str, ordered: bool) -> Iterator[Options]:
    shapes = shape.by_depth
    for modes in _modes(collective, grid, shapes):
        plain = [
            [
                Stage(dimension, mode, method, ordered=ordered)
                for method in (["direct"] if ordered else _methods(collective, mode, here, shapes))
            ]
            for dimension, mode, here in zip(grid, modes, shapes, strict=True)
        ]
        if all(plain):
            yield plain
            if collective not in IN_BLOCKS:
                yield from _weighted(plain, shape)


def _merged(levels: tuple[str, ...], counts: dict[str, set[int]]) -> Iterator[list[tuple[str, ...]]]:
    """All ways to merge neighbouring levels. A level where nothing branches is merged only between two that do."""
    for keep_apart in product((True, False), repeat=len(levels) - 1):
        merged = [levels[:1]]
        for level, apart in zip(levels[1:], keep_apart, strict=True):
            merged = [*merged, (level,)] if apart else [*merged[:-1], (*merged[-1], level)]
        if all(max(counts[m[0]]) > 1 < max(counts[m[-1]]) for m in merged if len(m) > 1):
            yield merged


def _width(tree: Shape, levels: tuple[str, ...], merged: tuple[str, ...]) -> int:
    """Return the number of members of the longest ring where these levels are merged."""

    @cache
    def below(shape: Shape, generations: int) -> int:
        return sum(below(child, generations - 1) for child in shape.children) if generations else 1

    return max(below(shape, len(merged)) for shape in tree.by_depth[levels.index(merged[-1])])


def _dimensions(levels: tuple[str, ...], counts: dict[str, set[int]]) -> list[Grid]:
    """One dimension for the levels; for a single level also several, with rings of fewer members."""
    whole = Dimension(levels)
    if len(levels) > 1:
        return [(whole,)]
    sizes = counts[levels[0]]
    splits = _factorisations(max(sizes)) if len(sizes) == 1 else []
    if not splits and max(sizes) > LONGEST_RING:
        splits = [_nearly_even_split(max(sizes))]
    return [(whole,), *((*(Dimension(levels, size) for size in split), whole) for split in splits)]


def _factorisations(count: int) -> list[tuple[int, ...]]:
    """The most even factorisations into two and three, without the last factor: of 64 (4, 4) and (8,)."""
    if count < SMALLEST_FACTORISED:
        return []
    pairs = [(a, count // a) for a in range(2, count) if a * a <= count and count % a == 0]
    triples = [(a, c, b // c) for a, b in pairs for c in range(a, b) if c * c <= b and b % c == 0]
    fitting = [split for split in pairs + triples if max(split) <= LONGEST_RING]
    return [split[:-1] for split in sorted(fitting, key=lambda split: (sum(split), split))[:FACTORISATIONS]]


def _nearly_even_split(count: int) -> tuple[int, ...]:
    """The sizes of as few dimensions as keep the rings short, without the last: of 1021 (32,)."""
    dimensions = 2
    while LONGEST_RING**dimensions < count:
        dimensions += 1
    size = next(size for size in range(2, count) if size**dimensions >= count)
    return (size,) * (dimensions - 1)


def _modes(collective: str, grid: Grid, shapes: Sequence[Sequence[Shape]]) -> Iterator[list[str]]:
    """The modes of all dimensions, innermost first: lead, then split, then all."""
    live = [depth for depth, here in enumerate(shapes) if max(_sizes(here)) > 1]
    if collective == "all_to_all" and len(live) > 1:
        return  # a block goes straight to its rank
    for sequence in _mode_sequences(collective, [grid[depth].levels for depth in live]):
        modes: list[str] = []
        remaining = list(sequence)
        for depth in range(len(shapes)):
            # A dimension without rings runs nothing; it takes the mode of the one within.
            modes.append(remaining.pop(0) if depth in live else modes[-1] if modes else SPLIT)
        copied = [here for mode, here in zip(modes, shapes, strict=True) if mode == ALL][:-1]
        if all(len(_sizes(here)) == 1 for here in copied):
            yield modes


def _mode_sequences(collective: str, levels: Sequence[tuple[str, ...]]) -> list[list[str]]:
    """All sequences of modes for dimensions of these levels.

    In an all_reduce, ``lead`` covers no level, some of the inner levels, or all of them; ``all`` covers nothing, the
    outermost dimension, the outermost level, or all that ``lead`` leaves.
    """
    count = len(levels)
    if collective not in ("all_reduce", "barrier"):
        return [[{"broadcast": LEAD, "reduce": LEAD, "all_to_all": ALL}.get(collective, SPLIT)] * count]
    led = [0, *accumulate(len(list(same)) for _, same in groupby(levels))]
    outermost = sum(1 for level in levels if level == levels[-1])
    return [
        [LEAD] * leads + [SPLIT] * (count - leads - alls) + [ALL] * alls
        for leads in led
        for alls in sorted({0, min(1, count - leads), min(outermost, count - leads), count - leads})
    ]


def _methods(collective: str, mode: str, here: Sequence[Shape], shapes: Sequence[Sequence[Shape]]) -> list[str]:
    """The methods that a dimension can have, without those whose steps or messages are far too many."""
    if collective == "all_to_all":
        return list(METHODS_OF["all_to_all"])
    sizes = _sizes(here)
    if max(sizes) > LARGEST_TREE:
        return []
    if max(sizes) <= 2:  # two members do the same by most methods
        return ["direct", "tree"] if mode == ALL else ["direct"]
    short = max(sizes) <= LONGEST_RING
    if mode == LEAD:
        return ["direct", "tree", "ring"] if short else ["tree"]
    if mode == ALL:
        return ["direct", "halving", "tree"] if short else ["halving", "tree"]
    if collective in IN_BLOCKS and any(len(_sizes(depth)) > 1 for depth in shapes):
        return ["direct"] if short else []  # shares are whole blocks, and not equally many
    halving = ["halving"] if all(size & (size - 1) == 0 for size in sizes) else []
    return (["direct", "ring"] if short else []) + halving


def _weighted(plain: Options, whole: Shape) -> Iterator[Options]:
    """The same stages with shares by bandwidth in each dimension whose links are unequal; nothing if all are equal."""
    unequal = [any(fastest_shares(shape, whole) for shape in here) for here in whole.by_depth]
    weighted = [
        [replace(stages[0], method="direct", weighted=True)] if uneven and stages[0].mode == SPLIT else stages
        for stages, uneven in zip(plain, unequal, strict=True)
    ]
    if weighted != plain:
        yield weighted


def _sizes(shapes: Sequence[Shape]) -> set[int]:
    return {len(shape.children) for shape in shapes}
