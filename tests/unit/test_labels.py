"""Labels, which describe a call's buffers beyond type and count."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from engines import all_reduce_plan, errors_of, in_threads, world

from multiring import _native as native
from multiring.errors import Mismatch
from multiring.training import labels
from multiring.training.labels import LONGEST_TEXT, MOST_KEPT, label, part, variable_names

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


def test_names_that_change_with_each_step_are_forgotten() -> None:
    kept = label("gradients", [KERNEL, "kept"])
    made = {int(label("metrics", [f"loss at step {step}"])): step for step in range(3000)}  # two may have one number
    assert set(explained(*made)) == {
        f"label {one:06x}: 1 metrics: loss at step {step}" for one, step in made.items() if step >= 3000 - MOST_KEPT
    }
    assert explained(kept) == [f"label {kept:06x}: 2 gradients: {KERNEL}, kept"]
    assert label("gradients", [KERNEL, "kept"]) is not kept
    assert label("gradients", [KERNEL, "kept"]) == kept
    number = int(kept)
    del kept
    labels._label.cache_clear()
    assert explained(number) == []
    for step in range(3000):
        variable_names([f"loss at {step}", "accuracy"])
    assert labels._variable_names.cache_info().currsize <= 64


def test_two_names_of_one_number_are_forgotten_one_by_one() -> None:
    first, second = native.LabelName(0xABCDEF, "first"), native.LabelName(0xABCDEF, "second")
    assert explained(0xABCDEF) == ["label abcdef: first"]
    del first
    assert explained(0xABCDEF) == ["label abcdef: second"]
    del second
    assert explained(0xABCDEF) == []


def test_labels_are_made_and_forgotten_by_several_threads() -> None:
    def work(thread: int) -> None:
        for step in range(1000):
            mine = label("metrics", [f"{step} of {thread if step % 2 else 'all'}"])
            assert explained(mine) == [f"label {mine:06x}: 1 metrics: {step} of {thread if step % 2 else 'all'}"]

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


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
        return rank.run(plan, array, label=one)

    with world(2, hosts=[0, int(apart)]) as ranks:
        assert all((found == 3).all() for found in in_threads(ranks, lambda rank: reduce(rank, shared)))
        errors = errors_of(ranks, lambda rank: [reduce(rank, mine[rank.rank]), reduce(rank, shared)])
    for error in errors:
        assert isinstance(error, Mismatch)
        assert "\nlabel " in str(error)
        assert "2 gradients: kernel (64, 10), bias (10)" in str(error)
        assert "2 gradients: bias (10), kernel (64, 10)" in str(error)


@pytest.mark.parametrize("kept", [True, False])
def test_a_mismatch_shows_what_is_kept_and_else_the_number(kept: bool) -> None:
    plan = all_reduce_plan(2, "direct")
    mine = [label("gradients", [f"kernel of rank {rank}, {kept}"]) for rank in range(2)]
    if not kept:
        mine = [int(one) for one in mine]
    for step in range(2 * MOST_KEPT):
        label("metrics", [f"loss at step {step}"])

    def reduce(rank) -> None:
        array = np.full(10, rank.rank + 1.0)
        rank.run(plan, array, label=mine[rank.rank])

    with world(2) as ranks:
        errors = errors_of(ranks, reduce)
    for error in errors:
        assert isinstance(error, Mismatch)
        for rank, one in enumerate(mine):
            assert f"label={one:06x}" in str(error).splitlines()[0]
            assert (f"\nlabel {one:06x}: 1 gradients: kernel of rank {rank}, {kept}" in str(error)) == kept


def test_a_label_has_24_bits() -> None:
    with world(1) as ranks:
        calls = ranks[0].calls(all_reduce_plan(1, "direct"))
        with pytest.raises(ValueError, match="label=16777216: a label has 24 bits"):
            calls.run(native.Call(0, 64, 1, 0, 1.0, label=1 << 24))


def test_more_elements_than_a_call_can_name_are_refused() -> None:
    with world(1) as ranks:
        calls = ranks[0].calls(all_reduce_plan(1, "direct"))
        with pytest.raises(ValueError, match="count=1099511627776: a call moves at most 1099511627775 elements"):
            calls.run(native.Call(0, 64, 1 << 40, 0, 1.0))
