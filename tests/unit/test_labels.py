"""What calls say of their buffers beside type and count."""

from __future__ import annotations

import re

import numpy as np
import pytest
from engines import all_reduce_plan, in_threads, world
from test_engine_failure import errors_of

from multiring import _native as native
from multiring.errors import Mismatch
from multiring.labels import LONGEST_TEXT, label, part, variable_names

KERNEL, BIAS = part("kernel", (64, 10)), part("bias", (10,))


def test_a_label_tells_names_shapes_and_orders_apart() -> None:
    parts = [[KERNEL, BIAS], [BIAS, KERNEL], [KERNEL], [part("kernel", (10, 64)), BIAS], [f"{KERNEL}, {BIAS}"]]
    labels = {label("gradients", each) for each in parts} | {label("variables", parts[0])}
    assert len(labels) == len(parts) + 1
    assert all(0 < one < 1 << 24 for one in labels)
    assert label("gradients", parts[0]) == label("gradients", iter(parts[0]))
    assert (KERNEL, part("rate", ())) == ("kernel (64, 10)", "rate ()")


def explained(*labels: int) -> list[str]:
    return native.explain_labels(", ".join(f"label={one:06x}" for one in labels)).splitlines()[1:]


def test_of_long_labels_the_difference_is_shown() -> None:
    names = [part(f"kernel{i}", (i, 8)) for i in range(900)]
    other = part("another", (7, 8))
    for place, shown in [
        (0, "{}, ..."),
        (450, "..., {}, ..."),
        (899, "..., {}"),
    ]:
        ours, theirs = label("gradients", names), label("gradients", [*names[:place], other, *names[place + 1 :]])
        assert explained(ours, theirs) == [
            f"label {one:06x}: 900 gradients: {shown.format(what)}"
            for one, what in ((ours, names[place]), (theirs, other))
        ]
    ours, theirs = label("gradients", names), label("gradients", [*names[:5], *names[6:]])
    assert explained(ours, theirs) == [
        f"label {ours:06x}: 900 gradients: ..., {names[5]}, {names[6]}, ...",
        f"label {theirs:06x}: 899 gradients: ..., {names[6]}, ...",
    ]
    ours, theirs = label("gradients", names), label("gradients", names[::-1])
    for line, name in zip(explained(ours, theirs), (names[0], names[-1]), strict=True):
        assert re.fullmatch(r"label \w{6}: 900 gradients: (\.\.\., )?" + re.escape(name) + ".* \\.\\.\\.", line)
        assert len(line) < 1100


def test_a_label_is_compared_whole_and_has_one_line() -> None:
    names = [part(f"kernel{i}", (i,)) for i in range(10_000)]
    assert label("gradients", names) != label("gradients", [*names[:-1], "another"])
    (line,) = explained(label("gradients", names))
    assert LONGEST_TEXT < len(line) < LONGEST_TEXT + 20
    assert line.endswith(" ...")
    (line,) = explained(label("metrics", ["two\nlines", "\ud800"]))
    assert line.endswith(r": 2 metrics: two\nlines, \ud800")


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["dense_3/kernel", "dense_3/bias", "dense_5/kernel"], ["dense/kernel", "dense/bias", "dense_2/kernel"]),
        (["dense/kernel", "dense_1/kernel"], ["dense/kernel", "dense_1/kernel"]),
        (["dense_1/kernel", "dense/kernel"], ["dense_1/kernel", "dense/kernel"]),
        (["dense_1/kernel", "dense_3/kernel"], ["dense/kernel", "dense_2/kernel"]),
        (["dense_1/kernel", "dense_2/kernel"], ["dense/kernel", "dense_1/kernel"]),
        (["layer_007", "layer_009"], ["layer_007", "layer_009"]),
        (["sequential_2/tower_10/w", "sequential_2/tower_9/w"], ["sequential/tower_1/w", "sequential/tower/w"]),
        (["w", "w", "", "v"], ["w at 0", "w at 1", "variable at 2", "v"]),
    ],
)
def test_variables_are_named_as_if_a_process_had_made_only_these(names: list[str], expected: list[str]) -> None:
    assert variable_names(names) == expected


@pytest.mark.parametrize("apart", [False, True], ids=["inproc", "tcp"])
@pytest.mark.parametrize("count", [10, 100_000])
def test_other_labels_are_a_mismatch_and_the_same_are_none(apart: bool, count: int) -> None:
    plan = all_reduce_plan(2, "direct")
    shared, mine = label("gradients", [KERNEL]), [label("gradients", [KERNEL, BIAS][:: 1 - 2 * i]) for i in range(2)]

    def reduce(rank, one: int) -> np.ndarray:
        array = np.full(count, rank.rank + 1.0)
        rank.engine.run(*rank._arguments(plan, array, "sum", 30.0, rank.install(plan)), one)
        return array

    with world(2, hosts=[0, int(apart)]) as ranks:
        assert all((found == 3).all() for found in in_threads(ranks, lambda rank: reduce(rank, shared)))
        errors = errors_of(ranks, lambda rank: [reduce(rank, mine[rank.rank]), reduce(rank, shared)])
    for error in errors:
        assert isinstance(error, Mismatch)
        assert "\nlabel " in str(error)
        assert "2 gradients: kernel (64, 10), bias (10)" in str(error)
        assert "2 gradients: bias (10), kernel (64, 10)" in str(error)


def test_a_label_has_24_bits() -> None:
    with world(1) as ranks:
        handle = ranks[0].install(all_reduce_plan(1, "direct"))
        with pytest.raises(ValueError, match="label=16777216: a label has 24 bits"):
            ranks[0].engine.run(handle, 0, 64, 1, 0, 0, 0, 1.0, 1 << 24)


def test_more_elements_than_a_call_can_name_are_refused() -> None:
    with world(1) as ranks:
        handle = ranks[0].install(all_reduce_plan(1, "direct"))
        with pytest.raises(ValueError, match="count=1099511627776: a call moves at most 1099511627775 elements"):
            ranks[0].engine.run(handle, 0, 64, 1 << 40, 0, 0, 0, 1.0)
