"""Layout of gradients in buckets."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from multiring.training.buckets import GradientSpec, arrange, check_bucket_bytes
from multiring.training.weights import average, valid

GRADIENTS = st.lists(st.tuples(st.integers(0, 200), st.sampled_from(["float32", "float16"])), max_size=30)


def padded(gradient: GradientSpec) -> int:
    return -(-gradient.elements * {"float32": 4, "float16": 2}[gradient.dtype] // 64) * 64


@given(GRADIENTS, st.randoms(use_true_random=False), st.integers(1, 2000))
def test_every_gradient_has_one_place(described: list[tuple[int, str]], random: object, limit: int) -> None:
    gradients = [GradientSpec(*one) for one in described]
    order = list(range(len(gradients)))
    random.shuffle(order)  # type: ignore[attr-defined]
    buckets = arrange(gradients, order, limit)
    assert sorted(index for members in buckets for index in members) == sorted(order)
    moments = [[order.index(index) for index in members] for members in buckets]
    assert all(at == sorted(at) for at in moments)
    assert [at[-1] for at in moments] == sorted(at[-1] for at in moments)
    for members in buckets:
        assert len({gradients[index].dtype for index in members}) == 1
        assert len(members) == 1 or sum(padded(gradients[index]) for index in members) <= limit


@pytest.mark.parametrize("size", [0, -1, math.nan, 2.0**20, "4096", True, None])
def test_a_size_that_is_none_is_refused(size: object) -> None:
    words = f"bucket_bytes={size!r}: a number of bytes is needed, whole and 1 or more"
    for call in (check_bucket_bytes, lambda size: arrange([GradientSpec(3, "float32")], [0], size)):
        with pytest.raises(ValueError, match=re.escape(words)):
            call(size)
    assert check_bucket_bytes(np.int64(4096)) == 4096


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (1, [[3], [2], [1], [0]]),
        (128, [[3], [1], [2, 0]]),  # the types alternate; 2 waits for 0, and so comes after 1
        (1 << 20, [[3, 1], [2, 0]]),
    ],
)
def test_types_keep_apart_and_the_last_gradient_decides_the_order(limit: int, expected: list[list[int]]) -> None:
    gradients = [
        GradientSpec(16, "float32"),
        GradientSpec(20, "float16"),
        GradientSpec(3, "float32"),
        GradientSpec(64, "float16"),
    ]
    assert arrange(gradients, [3, 2, 1, 0], limit) == expected


@pytest.mark.parametrize("weight", [math.nan, math.inf, -1, 1 + 2j, np.complex64(1), "3", b"3", None, 10**400, [1]])
def test_a_weight_that_is_none_is_refused_with_its_value(weight: object) -> None:
    with pytest.raises(ValueError, match=re.escape(f"weight={weight!r}: a weight is 0 or more")):
        valid(weight)  # type: ignore[arg-type]


@pytest.mark.parametrize("metric", ["0.5", None, 1j, np.complex64(2)])
def test_a_metric_that_is_no_number_is_named(metric: object) -> None:
    """Before anything is sent: there is no communicator."""
    nobody: Any = None
    with pytest.raises(TypeError, match=re.escape(f"metrics['accuracy']={metric!r}: a metric is a real number")):
        average(nobody, {"loss": 1.5, "accuracy": metric}, 3)
    with pytest.raises(TypeError, match=re.escape(f"metrics={metric!r}: a metric is a real number")):
        average(nobody, metric)
