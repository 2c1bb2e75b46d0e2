"""Every data type and operation, against NumPy; n sources in one pass, in place, of any length."""

from __future__ import annotations

import array
import re
from collections.abc import Iterator

import numpy as np
import pytest
from engines import Rank, all_reduce_plan, in_threads, world

from multiring import _native as native

INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
FLOATS = ("float32", "float64", "float16")
NUMPY = {
    "sum": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "prod": np.multiply,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}
COUNTS = (1, 15, 16, 1023, 1025, 5000)


def reduced(inputs: list[np.ndarray], op: str, method: str = "at once") -> list[np.ndarray]:
    with world(len(inputs)) as ranks:
        plan = all_reduce_plan(len(inputs), method, 4096)
        return in_threads(ranks, lambda rank: rank.run(plan, inputs[rank.rank].copy(), op))


def integers(n: int, dtype: str, count: int) -> list[np.ndarray]:
    info = np.iinfo(dtype)
    generator = np.random.default_rng(count)
    return list(generator.integers(info.min, info.max, (n, count), dtype=dtype, endpoint=True))


@pytest.mark.parametrize("n", [2, 3, 6])
@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_wrap(dtype, n):
    for op, function in NUMPY.items():
        for count in COUNTS:
            inputs = integers(n, dtype, count)
            expected = inputs[0]
            for other in inputs[1:]:
                expected = function(expected, other)
            for result in reduced(inputs, op):
                np.testing.assert_array_equal(result, expected, err_msg=f"{op} {count}")


@pytest.mark.parametrize("n", [2, 3, 6, 9])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("op", ["sum", "min", "max", "prod", "avg"])
def test_floats_are_reduced_from_left_to_right(dtype, op, n):
    inputs = list(np.random.default_rng(n).standard_normal((n, 5003)).astype(dtype))
    function = NUMPY["sum" if op == "avg" else op]
    expected = inputs[0]
    for other in inputs[1:]:
        expected = function(expected, other)
    if op == "avg":
        expected = expected / np.dtype(dtype).type(n)
    for method in ("at once", "direct"):
        for result in reduced(inputs, op, method):
            np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("n", [2, 5])
@pytest.mark.parametrize("op", ["sum", "min", "max", "prod", "avg"])
def test_float16_is_summed_in_float32_and_rounded_once(op, n):
    inputs = list(np.random.default_rng(7).standard_normal((n, 3001)).astype(np.float16))
    inputs[0][:4] = [np.inf, 6e-8, 65504, -0.0]
    wide = [array.astype(np.float32) for array in inputs]
    expected = wide[0]
    for other in wide[1:]:
        expected = NUMPY["sum" if op == "avg" else op](expected, other)
    if op == "avg":
        expected = expected / np.float32(n)
    with np.errstate(over="ignore"):
        rounded = expected.astype(np.float16)
    for result in reduced(inputs, op):
        np.testing.assert_array_equal(result, rounded)


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Round float32 to the nearest bfloat16, ties to even, kept as its 16 bits."""
    bits = values.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bfloat16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize("n", [2, 5])
def test_bfloat16_is_summed_in_float32_and_rounded_once(n):
    torch = pytest.importorskip("torch")
    inputs = [to_bfloat16(row) for row in np.random.default_rng(n).standard_normal((n, 3001)).astype(np.float32)]
    wide = from_bfloat16(inputs[0])
    for other in inputs[1:]:
        wide = wide + from_bfloat16(other)
    with world(n) as ranks:
        plan = all_reduce_plan(n, "at once", 4096)

        def program(rank: Rank) -> np.ndarray:
            tensor = torch.from_numpy(inputs[rank.rank].view(np.int16).copy()).view(torch.bfloat16)
            rank.run(plan, tensor)
            return tensor.view(torch.int16).numpy().view(np.uint16)

        for result in in_threads(ranks, program):
            np.testing.assert_array_equal(result, to_bfloat16(wide))


class Narrow:
    """An array as ml_dtypes makes it: the buffer protocol cannot express its type."""

    def __init__(self, bits: np.ndarray, dtype: str) -> None:
        self.__array_interface__ = {**bits.__array_interface__, "typestr": f"<V{bits.itemsize}"}
        self.dtype = dtype
        self.flags = bits.flags


@pytest.mark.parametrize(("dtype", "bits"), [("bfloat16", np.uint16), ("float8_e4m3fn", np.uint8)])
def test_arrays_of_ml_dtypes_are_known_by_the_name_of_their_type(dtype, bits):
    kept = np.zeros((2, 3), bits)
    found = native.describe(Narrow(kept, dtype))
    assert (found.dtype, found.shape, found.count, found.itemsize) == (dtype, (2, 3), 6, kept.itemsize)
    assert found.pointer == kept.ctypes.data
    assert found.contiguous
    assert found.writable
    assert not native.describe(Narrow(kept.T, dtype)).contiguous
    with pytest.raises(TypeError, match=r"elements of type int4 \(in .*Narrow\) are not supported"):
        native.describe(Narrow(kept, "int4"))


@pytest.mark.parametrize("op", ["sum", "avg", "prod", "max"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_the_smallest_numbers_count_in_threads_that_take_them_for_zero(dtype, op):
    """Threads of XLA and TensorFlow flush such numbers, and those of torch that ask for it."""
    torch = pytest.importorskip("torch")
    kind = getattr(torch, dtype)
    smallest = torch.finfo(kind).smallest_normal
    if smallest * 0.5 == 0 or not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush the smallest numbers")
    torch.set_flush_denormal(False)
    few = torch.arange(3001, dtype=torch.float64)
    inputs = [((few % 61 + 3 * rank) / 64 * smallest * (-1) ** rank).to(kind) for rank in range(3)]
    if op == "prod":
        inputs[1:] = [torch.full_like(inputs[0], 0.5), torch.full_like(inputs[0], 4)]
    wide = [x if dtype in ("float32", "float64") else x.float() for x in inputs]
    first = {"prod": torch.mul, "max": torch.maximum}.get(op, torch.add)
    expected = first(first(wide[0], wide[1]), wide[2])
    expected = (expected / 3 if op == "avg" else expected).to(kind)
    assert (expected != 0).sum() > 1000
    assert (expected.abs() < smallest).sum() > 1000
    with world(3) as ranks:
        plan = all_reduce_plan(3, "at once", 4096)

        def program(rank: Rank) -> tuple[torch.Tensor, float]:
            mine = inputs[rank.rank].clone()
            torch.set_flush_denormal(rank.rank != 1)  # not all ranks are alike
            try:
                rank.run(plan, mine, op)
                return mine, float(np.float32(1e-38) * np.float32(0.01))
            finally:
                torch.set_flush_denormal(False)

        results = in_threads(ranks, program)
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[kind.itemsize]
    for result, _ in results:
        assert torch.equal(result.view(bits), expected.view(bits))
    assert [other == 0 for _, other in results] == [True, False, True]  # the threads are left as they were


@pytest.mark.parametrize(
    ("x", "element"),
    [
        (array.array("u", "abc"), "'w'"),
        (memoryview(b"abc").cast("c"), "'c'"),
        (np.zeros(3, ">f4"), ">f4"),
        (np.zeros(3, "M8[s]"), "datetime64[s]"),
        (np.zeros(2, object), "object"),
    ],
)
def test_elements_that_are_not_known_are_named_with_the_remedy(x, element):
    words = f"elements of type {element} (in {type(x).__module__}.".replace("(in builtins.", "(in ")
    with pytest.raises(TypeError, match=re.escape(words) + r".* are not supported; convert them to one of float32, "):
        native.describe(x)


FLOAT8 = ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"]


@pytest.mark.parametrize("op", ["sum", "avg", "prod", "min", "max"])
@pytest.mark.parametrize("name", FLOAT8)
def test_float8_is_reduced_in_float32_and_rounded_as_torch_rounds(name, op):
    """Every number of the format with every other one."""
    torch = pytest.importorskip("torch")
    dtype = getattr(torch, name)
    codes = torch.arange(256, dtype=torch.uint8)
    inputs = [codes.repeat_interleave(256), codes.repeat(256)]
    a, b = (x.view(dtype).float() for x in inputs)
    wide = {"sum": a + b, "avg": (a + b) / 2, "prod": a * b, "min": torch.minimum(a, b), "max": torch.maximum(a, b)}[op]
    expected = wide.to(dtype)
    with world(2) as ranks:
        plan = all_reduce_plan(2, "at once", 4096)

        def program(rank: Rank) -> torch.Tensor:
            mine = inputs[rank.rank].clone()
            rank.run(plan, mine.view(dtype), op)
            return mine

        for result in in_threads(ranks, program):
            nan = expected.float().isnan()
            assert torch.equal(result.view(dtype).float().isnan(), nan)
            assert torch.equal(result[~nan], expected.view(torch.uint8)[~nan])


def test_bool_is_logical():
    inputs = list(np.random.default_rng(2).integers(0, 2, (3, 500)).astype(bool))
    for op, function in {"sum": np.logical_or, "prod": np.logical_and, "bxor": np.logical_xor}.items():
        expected = function(function(inputs[0], inputs[1]), inputs[2])
        for result in reduced(inputs, op):
            np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_complex_numbers_are_summed_as_pairs(dtype):
    generator = np.random.default_rng(4)
    inputs = [(generator.standard_normal(700) + 1j * generator.standard_normal(700)).astype(dtype) for _ in range(3)]
    for op, divisor in (("sum", 1), ("avg", 3)):
        expected = (inputs[0] + inputs[1]) + inputs[2]
        parts = expected.view(expected.real.dtype) / expected.real.dtype.type(divisor)
        for result in reduced(inputs, op):
            np.testing.assert_array_equal(result.view(parts.dtype), parts)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("op", ["min", "max"])
def test_nan_propagates_from_any_rank(dtype, op):
    n, count = 3, 300
    inputs = [np.arange(count).astype(dtype) + rank for rank in range(n)]
    for rank in range(n):
        inputs[rank][rank::7] = np.nan
    expected = inputs[0]
    for other in inputs[1:]:
        expected = NUMPY[op](expected, other)
    assert np.isnan(expected).sum() > 100
    for method in ("at once", "direct"):
        for result in reduced(inputs, op, method):
            np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize(
    ("dtype", "op"), [("int32", "avg"), ("float32", "band"), ("complex64", "max"), ("bool", "avg")]
)
def test_operations_without_meaning_are_refused(dtype, op):
    with world(2) as ranks:
        plan = all_reduce_plan(2, "direct")
        with pytest.raises(ValueError, match=f"^{op} is not defined for {dtype}: it has"):
            ranks[0].run(plan, np.zeros(4, dtype), op)


@pytest.mark.parametrize("offset", [0, 1, 16, 63])
@pytest.mark.parametrize("count", [3071, 3072, 3300, 70_001, (4 << 20) + 77])
def test_buffers_may_begin_anywhere_in_a_cache_line_and_nothing_beside_them_is_written(count, offset):
    """Thirds that are copied at once, line by line and past the caches; no two ranks' buffers lie alike."""
    size, beside = 3, 64
    own = [((np.arange(count) * 7 + 31 * rank) % 251).astype(np.uint8) for rank in range(size)]
    with world(size) as ranks:
        plan = all_reduce_plan(size, "direct", 1 << 20)

        def program(rank: Rank) -> np.ndarray:
            memory = np.full(count + 64 + 2 * beside, 255, np.uint8)
            first = beside + (offset + 5 * rank.rank - memory.ctypes.data - beside) % 64
            memory[first : first + count] = own[rank.rank]
            result = rank.run(plan, memory[first : first + count]).copy()
            memory[first : first + count] = 255
            assert (memory == 255).all()
            return result

        for result in in_threads(ranks, program):
            np.testing.assert_array_equal(result, own[0] + own[1] + own[2])


@pytest.fixture
def flushing() -> Iterator[None]:
    """Threads that start in the test make 0 of denormal numbers, as those of XLA and TensorFlow do."""
    torch = pytest.importorskip("torch")
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor always keeps denormal numbers")
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


DENORMAL = [*((dtype, op) for dtype in FLOATS for op in ("sum", "avg", "min", "max")), ("complex64", "sum")]


@pytest.mark.parametrize(("dtype", "op"), DENORMAL)
def test_denormal_numbers_are_kept_whatever_thread_sums(dtype: str, op: str, flushing: None) -> None:
    real = np.dtype(dtype).type(0).real.dtype
    # The bits of small numbers, read as an integer, are how many times the smallest number they are: below 2048 for
    # float16, and further for the wider types.
    bits = np.tile([1, 2, 3, 5, 300], 500).astype(f"uint{8 * real.itemsize}")
    inputs = [(bits * (rank + 1)).astype(bits.dtype).view(real) for rank in range(3)]
    assert inputs[0][0] == np.finfo(real).smallest_subnormal
    wanted = {"sum": 6 * bits, "avg": 2 * bits, "min": bits, "max": 3 * bits}[op].astype(bits.dtype)
    if dtype == "complex64":
        inputs = [np.repeat(each, 2).view(dtype) for each in inputs]
        wanted = np.repeat(wanted, 2)
    for method in ("at once", "direct"):
        for result in reduced(inputs, op, method):
            np.testing.assert_array_equal(result.view(bits.dtype), wanted)
