"""Fingerprints of shared values: what differs is found wherever it is, and what rounding does is not."""

from __future__ import annotations

import numpy as np
import pytest

from multiring.training.alike import Fingerprint, Fingerprints, check_fingerprints, fingerprint


def values(dtype: type = np.float32) -> list[np.ndarray]:
    """Return arrays of sizes around that of a row of signs, with numbers that depend on the index."""
    return [
        (np.sin(np.arange(size)) + number).astype(dtype).reshape(shape)
        for number, (size, shape) in enumerate(
            [(3, (3,)), (1, ()), (0, (0, 4)), (4096, (64, 64)), (20_000, (8, 2500))],
        )
    ]


def summed(*ranks: list[np.ndarray]) -> list[float]:
    """Return the sums of what ranks add that have these values after the turn before."""
    found = []
    for each in ranks:
        prints = Fingerprints(4, 1, 0)
        prints.note(6, each)
        found.append(prints.summands(7))
    return np.sum(found, 0).tolist()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("size", [2, 3, 1000])
def test_equal_values_and_rounded_ones_are_the_same(dtype: type, size: int) -> None:
    check_fingerprints(summed(*[values(dtype)] * size), "shared values")
    rounded = [[array * dtype(1 + 1e-6 * rank / size) for array in values(dtype)] for rank in range(size)]
    check_fingerprints(summed(*rounded), "shared values")


@pytest.mark.parametrize(
    ("array", "index"), [(0, 0), (0, 2), (1, 0), (3, 0), (3, 4095), (4, 0), (4, 9999), (4, 19_999)]
)
def test_one_element_that_differs_on_one_rank_is_found(array: int, index: int) -> None:
    other = values()
    other[array].reshape(-1)[index] += 1 + array + index / 9999
    for ranks in ([other, values(), values()], [values()] * 9 + [other]):
        with pytest.raises(ValueError, match="ranks have different shared values, after an exchange that gave all the"):
            check_fingerprints(summed(*ranks), "shared values")
    assert fingerprint(other).differs(fingerprint(values()))


@pytest.mark.parametrize("size", [2, 4, 100, 4096, 1 << 20])
@pytest.mark.parametrize("scale", [False, True])
def test_values_that_are_all_shifted_or_scaled_differ(size: int, scale: bool) -> None:
    one = [np.ones(size, np.float32) if scale else np.sin(np.arange(size)).astype(np.float32)]
    check_fingerprints(summed(*[one] * 100), "shared values")
    for by in (1 / 64, -1 / 64):
        other = [one[0] * np.float32(1 + by) if scale else one[0] + np.float32(by)]
        with pytest.raises(ValueError, match="ranks have different shared values"):
            check_fingerprints(summed(one, other), "shared values")
        assert fingerprint(other).differs(fingerprint(one))


def test_values_of_another_order_differ() -> None:
    other = values()
    other[4] = other[4][:, ::-1].copy()
    assert fingerprint(other).differs(fingerprint(values()))


@pytest.mark.parametrize("what", [np.nan, np.inf, -np.inf, 3e38, -1e25])
def test_what_is_no_number_hides_nothing(what: float) -> None:
    one, other = values(), values()
    one[4][3, 7] = other[4][3, 7] = what
    check_fingerprints(summed(one, other, one), "shared values")
    other[3][5, 5] += 2
    with pytest.raises(ValueError, match="ranks have different"):
        check_fingerprints(summed(one, other, one), "shared values")


@pytest.mark.parametrize(
    ("dtype", "size"),
    [(np.float32, 1e-24), (np.float32, 1e-30), (np.float32, 1e-44), (np.float64, 1e-155), (np.float64, 1e-310)],
)
@pytest.mark.parametrize("ranks", [3, 5, 6, 7, 11])
def test_equal_values_are_the_same_however_small(dtype: type, size: float, ranks: int) -> None:
    tiny = [(np.sin(np.arange(5000)) * size).astype(dtype)]
    check_fingerprints(summed(*[tiny] * ranks), "shared values")
    assert not fingerprint(tiny).differs(fingerprint(tiny))
    if size > 1e-100:
        other = [tiny[0] * dtype(1.25)]
        assert fingerprint(tiny).differs(fingerprint(other))
        with pytest.raises(ValueError, match="ranks have different"):
            check_fingerprints(summed(*[tiny] * ranks, other), "shared values")


@pytest.mark.parametrize("size", [1e17, 1e100, 1e160, 1e308])
def test_large_values_raise_nothing_else(size: float) -> None:
    one, other = [np.sin(np.arange(5000)) * size, np.ones(3)], [np.cos(np.arange(5000)) * size, np.ones(3)]
    check_fingerprints(summed(one, one, one), "shared values")
    assert fingerprint(one).differs(fingerprint(other)) == (size < 1e18)
    assert fingerprint(one).differs(fingerprint([one[0], np.full(3, 2.0)])) == (size > 1e18)


def test_the_last_exchange_that_all_have_applied_is_compared() -> None:
    prints = Fingerprints(4, 2, 9)  # 3 exchanges of each of two parts overlap
    assert prints.summands(5) == [0.0] * 4
    for turn in range(8):
        prints.note(turn, [np.array([turn + 1.0])])
    found = fingerprint([np.array([4.0])])
    assert found == Fingerprint(found.weighted, 16.0)
    assert 2 <= abs(found.weighted) <= 6
    assert prints.summands(9) == [1.0, found.weighted, found.weighted**2, 16.0]  # turn 9 - 6
    assert prints.summands(8) == [0.0] * 4  # forgotten, as turns only go on
    prints.forget()
    assert prints.summands(10) == [0.0] * 4


@pytest.mark.parametrize("width", [4096, 8192, 1000])
def test_differences_whose_sums_over_rows_are_zero_are_found(width: int) -> None:
    """Gradients of a classifier have sums of 0 over the classes."""
    weights = np.sin(np.arange(7 * width)).reshape(7, width)
    gradient = np.cos(np.arange(7 * width)).reshape(7, width)
    other = weights - 0.01 * (gradient - gradient.mean(0))
    assert fingerprint([weights]).differs(fingerprint([other]))
