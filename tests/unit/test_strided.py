"""Copies between layouts of one shape, against NumPy, with what lies around them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from multiring import _native

SHAPES = [(), (1,), (7,), (0, 3), (9, 8), (65, 130), (8, 1, 72), (3, 70, 5), (2, 66, 3, 17), (5, 1, 16, 9, 2)]


def copied(to: np.ndarray, origin: np.ndarray) -> None:
    strides = [[stride // x.itemsize for stride in x.strides] for x in (to, origin)]
    _native.copy_strided(to.ctypes.data, strides[0], origin.ctypes.data, strides[1], to.shape, to.itemsize)


def laid_out(shape: tuple[int, ...], order: tuple[int, ...], step: int, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Memory that counts upwards, and a view of ``shape`` whose dimensions lie there in ``order``, ``step`` apart."""
    extents = [shape[i] for i in order]
    whole = np.arange(int(np.prod(extents)) * abs(step) + 1, dtype="int64").astype(dtype)
    view = whole[: len(whole) - 1][::step].reshape(extents)
    return whole, view.transpose(np.argsort(order)) if order else view.reshape(())


@pytest.mark.parametrize("dtype", ["uint8", "int16", "float32", "float64", "complex128"])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_order_of_both_sides(shape, dtype):
    orders = list(itertools.permutations(range(len(shape))))
    chosen = [*orders[:6], orders[-1]]
    for order, other, step in itertools.product(chosen, chosen, (1, 3, -2)):
        memory, to = laid_out(shape, order, step, dtype)
        _, origin = laid_out(shape, other, 1 if step == 3 else step, dtype)
        origin = np.flip(origin) if shape and step == -2 else origin
        memory_expected, expected = laid_out(shape, order, step, dtype)
        expected[...] = origin
        copied(to, origin)
        np.testing.assert_array_equal(memory, memory_expected, err_msg=f"{order} {other} {step}")
        np.testing.assert_array_equal(to, origin)


def test_one_place_is_read_many_times():
    to, origin = np.zeros((70, 33), "float32"), np.arange(33, dtype="float32")
    copied(to, np.broadcast_to(origin, to.shape))
    np.testing.assert_array_equal(to, np.tile(origin, (70, 1)))
    copied(to.T, np.broadcast_to(origin[:, None], (33, 70)))
    np.testing.assert_array_equal(to, np.tile(origin, (70, 1)))


def test_what_is_no_layout_is_refused():
    to, origin = np.zeros(3, "float32"), np.ones(3, "float32")
    with pytest.raises(ValueError, match="1 extents, and 2 and 1 strides"):
        _native.copy_strided(to.ctypes.data, [1, 1], origin.ctypes.data, [1], [3], 4)
    with pytest.raises(ValueError, match="elements of 3 bytes: 1, 2, 4, 8 or 16"):
        _native.copy_strided(to.ctypes.data, [1], origin.ctypes.data, [1], [3], 3)
    np.testing.assert_array_equal(to, np.zeros(3))
