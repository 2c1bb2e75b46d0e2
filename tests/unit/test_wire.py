"""Narrow wires: what is sent, how far sums may be off, that all ranks end with the same bits, what is predicted."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from engines import Rank, in_threads, world
from topologies import CORE, MBIT, card, nested, unequal

from multiring import _native as native
from multiring.planning.interpret import prove
from multiring.planning.plan import NARROW, REDUCING, SENT_FRACTION, WHOLE, WIRES, Phase, Plan, Ring
from multiring.planning.planner import choose
from multiring.planning.schedule import SEND, schedule
from multiring.planning.topology import Topology
from multiring.planning.topology_file import load
from multiring.simulate import SimulatedCall, simulate_exactly, simulate_in_lockstep

LABS = Path(__file__).parents[2] / "lab/topologies"
ROUNDING = {
    "bfloat16": 2.0**-8,
    "float16": 2.0**-11,
    "int8": 1 / 253,
    "int4": 1 / 13.9,
    "int2": 1 / 1.99,
    "float8": 1 / 27.9,
}
TOGETHER = {"bfloat16": 1, "float16": 1, "int8": 256, "int4": 64, "int2": 64, "float8": 256}
SMALLEST = {
    "bfloat16": 0.0,
    "float16": 0.0,
    "int8": 2.0**-142,
    "int4": 2.0**-142,
    "int2": 2.0**-142,
    "float8": 2.0**-117,
}
"""Absolute error that rounding may add if a block's largest is tiny."""


class Codes(NamedTuple):
    """A block's largest element as a code, the significant bits of its scale, and which scales are powers of two."""

    top: int
    significant: int
    tiny: float = 2.0**-141
    least: float = 2.0**-149


BLOCKS = {
    "int8": Codes(127, 17),
    "int4": Codes(7, 21),
    "int2": Codes(1, 24),
    "float8": Codes(448, 20, 2.0**-121, 2.0**-140),
}
RACKS = nested([[2, 2], [2, 2]], [card(200), card(400), CORE])
UNEVEN = nested([[3], [1, 2]], [card(200), card(400), CORE])
SLOW_CARD = unequal([400, 400, 400, 100])


def largest_of_block(values: np.ndarray, wire: str) -> np.ndarray:
    """The largest magnitude among what is rounded together with each element, NaN if one is no number."""
    together = TOGETHER[wire]
    starts = np.arange(0, len(values), together)
    return np.maximum.reduceat(np.abs(values), starts).repeat(together)[: len(values)]


def scales(largest: np.ndarray, wire: str) -> np.ndarray:
    """The largest as the top code, in so many significant bits; where that is tiny, the next power of two."""
    top, significant, tiny, least = BLOCKS[wire]
    mantissa, exponent = np.frexp((largest / np.float32(top)).astype(np.float64))
    nearest = np.ldexp(np.floor(np.ldexp(mantissa, significant) + 0.5), exponent - significant)
    wanted = np.log2(np.maximum(largest.astype(np.float64), 1e-46) / top)
    powers = np.exp2(np.maximum(np.ceil(wanted), np.log2(least)))
    exact = ((1 << 24) - 1 << 64) // top  # the scale of the largest float32, in 2^40 parts of its last place
    unit = 1 << exact.bit_length() - significant
    most = float(exact // unit * unit) * 2.0**40
    found = np.where(largest <= np.float32(top * tiny), powers, np.minimum(nearest, most))
    return np.where(largest == 0, 0, found).astype(np.float32)


def rounded_in_blocks(values: np.ndarray, wire: str) -> np.ndarray:
    largest = largest_of_block(values, wire)
    is_finite = np.isfinite(largest)
    scale = scales(np.where(is_finite, largest, 0), wire)
    lift = np.where(scale < 2.0**-100, np.float32(2.0**64), np.float32(1))
    inverse = 1 / np.where(scale > 0, scale * lift, np.float32(1))
    exact = np.where(is_finite, values, 0).astype(np.float32) * lift * inverse
    step = 1.0
    if wire == "float8":
        step = np.exp2(np.maximum(np.frexp(exact)[1] - 1, -6) - 3.0)
    codes = np.clip(np.rint(exact / step) * step, -BLOCKS[wire].top, BLOCKS[wire].top)
    return np.where(is_finite, codes.astype(np.float32) * scale, np.float32(np.nan))


def rounded(values: np.ndarray, wire: str) -> np.ndarray:
    """Round to nearest, ties to even, by arithmetic on the bits."""
    if wire in BLOCKS:
        return rounded_in_blocks(values.astype(np.float32), wire) + np.float32(0)  # no zero has a sign
    if wire == "float16":
        return values.astype(np.float16).astype(np.float32)
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    kept = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16
    return kept.astype(np.uint32).view(np.float32)


def inputs(size: int, count: int) -> np.ndarray:
    return np.random.default_rng(5).standard_normal((size, count)).astype(np.float32)


def world_of(topology: Topology) -> AbstractContextManager[list[Rank]]:
    hosts = [sorted(set(topology.hosts)).index(host) for host in topology.hosts]
    return world(topology.world_size, hosts)


def run_in(ranks: list[Rank], plan: Plan, given: np.ndarray, op: str = "sum") -> list[np.ndarray]:
    return in_threads(ranks, lambda rank: rank.run(plan, given[rank.rank].copy(), op))


def run_on_engine(topology: Topology, plan: Plan, given: np.ndarray, op: str = "sum") -> list[np.ndarray]:
    with world_of(topology) as ranks:
        return run_in(ranks, plan, given, op)


@pytest.mark.parametrize(
    ("topology", "levels"),
    [(RACKS, ["rack"]), (RACKS, ["host"]), (RACKS, ["rack", "host"]), (UNEVEN, ["rack"]), (SLOW_CARD, ["host"])],
    ids=["racks", "hosts", "both", "uneven", "slow card"],
)
def test_sums_are_as_near_as_promised_and_the_same_everywhere(topology, levels):
    count = 70_003
    given = inputs(topology.world_size, count)
    total = given.astype(np.float64).sum(axis=0)
    with world_of(topology) as ranks:
        for wire in ROUNDING:
            plan = choose(topology, "all_reduce", 4 * count, wire=dict.fromkeys(levels, wire)).plan
            plan = replace(plan, segment_bytes=1 << 14)
            prove(plan)
            error = (1 + ROUNDING[wire]) ** (len(levels) + 1) * (1 + 2.0**-24) ** (topology.world_size + 1) - 1
            assert plan.wire_error == pytest.approx(error)
            largest = sum(largest_of_block(each.astype(np.float64), wire) for each in given)
            for op, divisor in (("sum", 1), ("avg", topology.world_size)):
                results = run_in(ranks, plan, given, op)
                bound = largest / divisor * error + 2.0**-24
                assert (np.abs(results[0] - total / divisor) <= bound).all(), (wire, op)
                for result in results:
                    np.testing.assert_array_equal(result.view(np.uint32), results[0].view(np.uint32))
                assert np.abs(results[0] - total / divisor).max() > 2.0**-22  # it was narrow indeed
                np.testing.assert_array_equal(results[0], rounded(results[0], wire))


def test_a_last_narrow_message_waits_for_a_receiver_that_is_late():
    """The data sent is a copy, so only the message itself keeps the sender in the call."""
    broadcast = Phase("broadcast", "host", "direct", (Ring((0, 1), (WHOLE,)),), "bfloat16")
    plan = Plan("all_reduce", 2, (broadcast,), 1 << 16)
    given = inputs(2, 70_003)

    def program(rank: Rank) -> np.ndarray:
        if rank.rank == 1:
            time.sleep(0.3)
        return rank.run(plan, given[rank.rank].copy())

    with world(2, [0, 1]) as ranks:
        np.testing.assert_array_equal(in_threads(ranks, program)[1], rounded(given[0], "bfloat16"))


@pytest.mark.parametrize("kinds", [("all_reduce",), ("reduce_scatter", "all_gather")])
def test_each_contribution_is_rounded_once_and_the_sum_once(kinds):
    given = inputs(3, 5_001)
    with world(3, [0, 1, 2]) as ranks:
        for wire in ROUNDING:
            phases = tuple(Phase(kind, "host", "direct", (Ring((0, 1, 2), (WHOLE,)),), wire) for kind in kinds)
            expected = rounded(sum(rounded(each, wire) for each in given), wire)
            for result in run_in(ranks, Plan("all_reduce", 3, phases, 1 << 12), given):
                np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("wire", ["bfloat16", "int4"])
@pytest.mark.parametrize(
    ("dtype", "op"), [("float64", "sum"), ("float32", "max"), ("int32", "sum"), ("float16", "sum")]
)
def test_nothing_else_is_narrowed(dtype, op, wire):
    plan = choose(RACKS, "all_reduce", 1 << 16, wire={"rack": wire}).plan
    given = (np.arange(8 * 10_001).reshape(8, -1) % 257).astype(dtype)  # 257 does not fit 8 bits
    expected = given.max(axis=0) if op == "max" else given.astype(np.float64).sum(axis=0)
    for result in run_on_engine(RACKS, plan, given, op):
        np.testing.assert_array_equal(result.astype(np.float64), expected)


def test_what_float16_cannot_hold_becomes_infinite():
    plan = choose(RACKS, "all_reduce", 1 << 16, wire={"rack": "float16"}).plan
    given = np.zeros((8, 5_000), np.float32)
    given[3, 7], given[:, 9], given[0, 11], given[1, 11] = 1e5, 10_000, 1e5, -1e5
    for result in run_on_engine(RACKS, plan, given):
        assert result[7] == np.inf  # a contribution is too large
        assert result[9] == np.inf  # the sum is
        assert result[11] == 0  # cancelled before it travels
        assert np.isfinite(np.delete(result, [7, 9])).all()


def test_the_ends_of_the_range_of_bfloat16():
    largest, tie = np.float32(3.3895314e38), np.float32(3.3961775e38)
    plan = choose(RACKS, "all_reduce", 1 << 16, wire={"rack": "bfloat16"}).plan
    given = np.zeros((8, 5_000), np.float32)
    given[3, :5] = largest, tie, np.finfo(np.float32).max, 1e-45, 1e-38
    for result in run_on_engine(RACKS, plan, given):
        np.testing.assert_array_equal(result[:4], [largest, np.inf, np.inf, 0])
        assert abs(result[4] - given[3, 4]) <= 2 * 2.0**-134  # it is rounded twice


FLOAT8 = np.array([m * 2.0**-9 if m < 8 else (8 + m % 8) * 2.0 ** (m // 8 - 10) for m in range(127)])
"""The numbers of e4m3fn that are not negative, by their codes."""


def packed(codes: np.ndarray, wire: str) -> bytes:
    """Codes of one block; the first of several in a byte is in its lowest bits, the next is a number of bytes on."""
    if wire == "float8":
        return (np.searchsorted(FLOAT8, np.abs(codes)) + 128 * (codes < 0)).astype(np.uint8).tobytes()
    bits = {"int8": 8, "int4": 4, "int2": 2}[wire]
    length = -(-len(codes) * bits // 8)
    result = np.zeros(length, np.int64)
    for k in range(8 // bits):
        part = codes[k * length : (k + 1) * length].astype(np.int64) & ((1 << bits) - 1)
        result[: len(part)] |= part << (k * bits)
    return result.astype(np.uint8).tobytes()


def in_blocks(values: np.ndarray, wire: str) -> np.ndarray:
    """The message of a format of blocks, by its definition."""
    values = values.astype(np.float32)
    scale, message = scales(largest_of_block(values, wire), wire), bytearray()
    for first in range(0, len(values), TOGETHER[wire]):
        some = rounded(values[first : first + TOGETHER[wire]], wire)
        at = scale[first]
        message += at.tobytes() + packed(some / (at if at else np.float32(1)), wire)
    return np.frombuffer(bytes(message), np.uint8)


def narrowed(values: np.ndarray, wire: str) -> tuple[np.ndarray, np.ndarray]:
    """A message as the engine writes it, and what it reads from it; nothing beside them is written."""
    code = 1 + WIRES.index(wire)
    message = np.full(native.narrow_bytes(code, len(values)) + 64, 0xA5, np.uint8)
    native.narrow(code, message.ctypes.data, values.ctypes.data, len(values))
    assert (message[-64:] == 0xA5).all()
    result = np.full(len(values) + 16, 7.5, np.float32)
    native.widen(code, result.ctypes.data, message.ctypes.data, len(values))
    assert (result[-16:] == 7.5).all()
    return message[:-64], result[:-16]


def test_the_engine_and_the_planner_have_the_same_formats():
    formats = {wire: (each.bits, each.block) for wire, each in NARROW.items()}
    assert list(native.WIRES.items()) == [("same", (32, 1)), *formats.items()]


def test_messages_are_as_long_as_predicted():
    for code, wire in enumerate(WIRES, 1):
        assert native.narrow_bytes(code, 1 << 20) == SENT_FRACTION[wire] * (4 << 20), wire


@pytest.mark.parametrize("wire", BLOCKS)
def test_messages_are_blocks_of_a_scale_and_codes(wire):
    for count in (0, 1, 2, 3, 5, 15, 17, 63, 64, 65, 67, 127, 255, 256, 257, 511, 512, 3_001):
        values = inputs(1, 4_000)[0][:count] * np.exp2(np.arange(count, dtype=np.float32) // 256)
        message, result = narrowed(values, wire)
        bits = round(32 * (SENT_FRACTION[wire] - 1 / TOGETHER[wire]))
        assert len(message) == -(-count * bits // 8) + 4 * -(-count // TOGETHER[wire])
        if count:
            np.testing.assert_array_equal(message, in_blocks(values, wire))
            np.testing.assert_array_equal(result, rounded(values, wire))
            off = np.abs(result.astype(np.float64) - values)
            assert (off <= largest_of_block(values, wire) * ROUNDING[wire]).all()
            if wire == "float8":
                assert (off <= np.maximum(np.abs(values) / 15.9, largest_of_block(values, wire) / 458_000)).all()


@pytest.mark.parametrize(
    "exponent", [-149, -147, -143, -142, -141, -135, -134, -133, -126, -120, -112, -20, 0, 100, 127]
)
@pytest.mark.parametrize("wire", BLOCKS)
def test_blocks_over_the_whole_range_of_float32(wire, exponent):
    """Denormal numbers, scales that are, and those that are as large as can be; what is rounded stays as it is."""
    mantissas = np.random.default_rng(exponent + 200).uniform(1, 2, (40, 256)) * np.exp2(np.arange(40) % 7)[:, None]
    signs = np.where(np.arange(256) % 3 == 0, -1, 1)
    wide = np.clip(signs * mantissas * 2.0**exponent, -np.finfo(np.float32).max, np.finfo(np.float32).max)
    values = wide.astype(np.float32).ravel()
    message, result = narrowed(values, wire)
    np.testing.assert_array_equal(result, rounded(values, wire))
    largest = largest_of_block(values.astype(np.float64), wire)
    assert (np.abs(result.astype(np.float64) - values) <= largest * ROUNDING[wire] + SMALLEST[wire]).all()
    again, same = narrowed(result, wire)
    if wire != "float8" or exponent > -112:  # where scales are powers of two, two may have the same products
        np.testing.assert_array_equal(again, message)
    np.testing.assert_array_equal(same.view(np.uint32), result.view(np.uint32))


def test_int8_of_zeros_ties_and_the_smallest_numbers():
    values = np.zeros(3 * 256, np.float32)
    values[5], values[7] = -0.0, 0.0
    values[256:262] = 127, 0.5, 1.5, 2.5, -0.5, -1.5  # the scale is 1
    values[512:516] = np.array([63, -2, 1, 0]) * 2.0**-149
    _, result = narrowed(values, "int8")
    assert (result[:256].view(np.uint32) == 0).all()
    np.testing.assert_array_equal(result[256:262], [127, 0, 2, 2, 0, -2])
    np.testing.assert_array_equal(result[512:516], values[512:516])


def test_ties_in_fewer_bits():
    """The scale is 1; an odd number of elements leaves the last byte part of its bits."""
    for wire, given, expected in (
        ("int4", [7, 0.5, 1.5, -2.5, -0.25, -6.5, -7], [7, 0, 2, -2, 0, -6, -7]),
        ("int2", [1, 0.5, -0.5, 0.75, -0.75, -1, 0.25], [1, 0, 0, 1, -1, -1, 0]),
        ("float8", [448, 1.0625, 1.1875, -17, -0.0, 2.0**-10, 1.5 * 2.0**-9], [448, 1, 1.25, -16, 0, 0, 2.0**-8]),
    ):
        _, result = narrowed(np.array(given, np.float32), wire)
        np.testing.assert_array_equal(result.view(np.uint32), np.array(expected, np.float32).view(np.uint32), wire)


@pytest.mark.parametrize("odd", [np.inf, -np.inf, np.nan, -np.nan])
@pytest.mark.parametrize("wire", BLOCKS)
def test_what_is_no_number_is_nan_in_the_whole_block_and_there_alone(wire, odd):
    values, block = inputs(1, 1_000)[0], TOGETHER[wire]
    values[300] = odd
    _, result = narrowed(values, wire)
    is_hit = np.arange(1_000) // block == 300 // block
    assert (result[is_hit].view(np.uint32) == 0x7FC00000).all()
    np.testing.assert_array_equal(result[~is_hit], rounded(values, wire)[~is_hit])


def test_infinity_nan_and_overflow_reach_every_rank_in_blocks():
    given = inputs(8, 5_000)
    given[3, 7], given[5, 300] = np.inf, np.nan
    given[:, 1_000] = 3e38  # the sum is too large
    given[0, 2_000], given[1, 2_000] = 3e38, -3e38  # cancelled before it travels
    with world_of(RACKS) as ranks:
        for wire in BLOCKS:
            plan, block = choose(RACKS, "all_reduce", 1 << 16, wire={"rack": wire}).plan, TOGETHER[wire]
            is_nan = np.isin(np.arange(5_000) // block, np.array([7, 300, 1_000]) // block)
            for result in run_in(ranks, plan, given):
                np.testing.assert_array_equal(np.isnan(result), is_nan)
                assert np.isfinite(result[~is_nan]).all()


def led(segment_bytes: int, wire: str) -> Plan:
    """Two hosts of two ranks; the second of each hands its part to the first, and sends nothing narrow itself."""
    local = (Ring((0, 1), (WHOLE,)), Ring((2, 3), (WHOLE,)))
    phases = (
        Phase("reduce", "rank", "direct", local),
        Phase("all_reduce", "host", "direct", (Ring((0, 2), (WHOLE,)),), wire),
        Phase("broadcast", "rank", "direct", local),
    )
    return Plan("all_reduce", 4, phases, segment_bytes)


def gathered(segment_bytes: int, wire: str, method: str, count: int = 3) -> Plan:
    """Shares of one ring, of which several travel back in one message."""
    ring = (Ring(tuple(range(count)), (WHOLE,)),)
    phases = (
        Phase("reduce_scatter", "host", "direct", ring, wire),
        Phase("all_gather", "host", method, ring, wire),
    )
    return Plan("all_reduce", count, phases, segment_bytes)


@pytest.mark.parametrize(
    ("hosts", "plan_of"),
    [
        ([0, 0, 1, 1], led),
        ([0, 1, 2], lambda size, wire: gathered(size, wire, "direct")),
        ([0, 1, 1], lambda size, wire: gathered(size, wire, "ring")),
        ([0, 1, 2, 3], lambda size, wire: gathered(size, wire, "halving", 4)),
    ],
    ids=["led", "direct", "ring", "halving"],
)
def test_bits_of_blocks_depend_neither_on_segments_nor_on_who_asks(hosts, plan_of):
    size = len(hosts)
    with world(size, hosts) as ranks:
        for wire, count in product(BLOCKS, (0, 1, 2, 67, 255, 256, 257, 1_000, 40_001)):
            given = inputs(size, count)
            parts = [given[0] + given[1], given[2] + given[3]] if plan_of is led else list(given)
            expected = np.zeros(0, np.float32) if count == 0 else rounded(sum(rounded(p, wire) for p in parts), wire)
            for segment_bytes in (64, 1_088, 1 << 12, 1 << 18) if count < 2_000 else (1 << 12, 1 << 18):
                plan = plan_of(segment_bytes, wire)
                if count == 1:
                    prove(plan)
                for result in in_threads(ranks, lambda rank, p=plan, g=given: rank.run(p, g[rank.rank].copy())):
                    np.testing.assert_array_equal(result.view(np.uint32), expected.view(np.uint32))


def test_many_calls_in_blocks_at_once():
    """More than there are lanes, of lengths that share no layout."""
    counts = [1, 100, 257, 3_000, 5_001, 10_240, 20_000, 33_333]
    wires = dict(zip(counts, [*BLOCKS, *BLOCKS], strict=True))
    given = {count: inputs(3, count) * np.float32(count) for count in counts}

    def program(rank: Rank) -> list[np.ndarray]:
        buffers = [given[count][rank.rank].copy() for count in counts]
        for work in [rank.start(gathered(1 << 12, wires[buffer.size], "direct"), buffer) for buffer in buffers]:
            work.wait(60.0)
        return buffers

    with world(3, [0, 1, 2]) as ranks:
        for results in in_threads(ranks, program):
            for count, result in zip(counts, results, strict=True):
                wire = wires[count]
                expected = rounded(sum(rounded(each, wire) for each in given[count]), wire)
                np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize(
    ("ranks", "wire"),
    [((1, 1), "int4"), ((2, 1), "float8"), ((3, 2), "int2"), ((1, 2, 1), "int4"), ((2, 2, 3), "int8")],
)
def test_worlds_of_any_shape_end_with_the_same_bits_in_blocks(ranks, wire):
    topology, count = Topology.flat(list(ranks)), 12_345
    given = inputs(topology.world_size, count)
    for nbytes in (4 * count, 8 << 20):  # different plans
        plan = choose(topology, "all_reduce", nbytes, wire={"host": wire}).plan
        results = run_on_engine(topology, plan, given)
        exact = given.astype(np.float64).sum(axis=0)
        bound = plan.wire_error * sum(largest_of_block(each.astype(np.float64), wire) for each in given)
        assert (np.abs(results[0] - exact) <= bound).all()
        for result in results:
            np.testing.assert_array_equal(result.view(np.uint32), results[0].view(np.uint32))


@pytest.mark.parametrize("left", [(0, 1, 2, 3, 4, 5, 7), (0, 2, 4), (1, 6), (5, 7), (4, 5)])
def test_survivors_of_a_world_sum_in_int8_what_is_left(left):
    """Racks, hosts of one rack or ranks of one host remain."""
    topology, count = RACKS.restrict(left), 5_001
    plan = choose(topology, "all_reduce", 4 * count, wire={"rack": "int8"}).plan
    racks = {rank // 4 for rank in left}
    assert plan.wire == ("int8" if len(racks) > 1 else "")
    given = inputs(8, count)[list(left)]
    results = run_on_engine(topology, plan, given)
    bound = plan.wire_error * sum(largest_of_block(each.astype(np.float64), "int8") for each in given) + 2.0**-20
    for result in results:
        assert (np.abs(result - given.astype(np.float64).sum(axis=0)) <= bound).all()
        np.testing.assert_array_equal(result.view(np.uint32), results[0].view(np.uint32))


@pytest.mark.parametrize("wire", ["bfloat16", "int8", "int2"])
@pytest.mark.parametrize("ranks_per_host", [2, 3, 4])
def test_a_group_within_a_place_of_the_named_level_sends_as_it_is(ranks_per_host, wire):
    """Nothing of it crosses from one such place to another."""
    topology = nested([[ranks_per_host] * 2] * 2, [card(200), card(400), CORE])
    rack, host = range(2 * ranks_per_host), range(ranks_per_host)
    for size in [1 << power for power in range(12, 24)]:
        plan = choose(topology.restrict(rack), "all_reduce", size, wire={"rack": wire}).plan
        assert {phase.wire for phase in plan.phases} == {plan.wire} == {""}
        assert choose(topology.restrict(host), "all_reduce", size, wire={"host": wire, "rack": wire}).plan.wire == ""
    for size in (4 << 10, 8 << 20):
        assert choose(topology.restrict(rack), "all_reduce", size, wire={"host": wire}).plan.wire == wire


def test_only_the_named_levels_are_narrow_and_what_follows_between_hosts():
    plan = choose(RACKS, "all_reduce", 8 << 20, wire={"rack": "bfloat16"}).plan
    reducing = [phase for phase in plan.phases if phase.kind in REDUCING]
    assert [(phase.level, phase.wire) for phase in reducing] == [("rank", ""), ("host", ""), ("rack", "bfloat16")]
    after = {phase.level: phase.wire for phase in plan.phases if phase not in reducing}
    assert (after["host"], after["rank"]) == ("bfloat16", "")
    assert {phase.method for phase in reducing if phase.wire} == {"direct"}
    left, right = set(range(4)), set(range(4, 8))
    for rank in range(8):
        here, other = (left, right) if rank in left else (right, left)
        for step in schedule(plan, rank).instructions:
            if step.kind == SEND:
                assert not (set(step.peers) & here and set(step.peers) & other)
                assert step.wire == plan.phases[step.phase].wire
                assert step.wire or not set(step.peers) & other


def test_other_collectives_travel_as_they_are():
    for collective in ("reduce_scatter", "all_gather", "broadcast", "reduce", "barrier"):
        assert choose(RACKS, collective, 8 << 20, wire={"rack": "bfloat16"}).plan.wire == ""


@pytest.mark.parametrize("run", [simulate_exactly, simulate_in_lockstep])
@pytest.mark.parametrize(
    ("wire", "part"),
    [("bfloat16", 1 / 2), ("int8", 260 / 1024), ("float8", 260 / 1024), ("int4", 36 / 256), ("int2", 20 / 256)],
)
def test_predictions_know_it(run, wire, part):
    wide = choose(RACKS, "all_reduce", 8 << 20)
    narrow = choose(RACKS, "all_reduce", 8 << 20, wire={"rack": wire})
    assert narrow.bound == pytest.approx(part * wide.bound)
    # A host sends half of S as it is to its rack, a quarter twice to the other, narrow, and half to its rack, narrow.
    assert narrow.chosen.prediction.seconds == pytest.approx((1 / 2 + part) * (8 << 20) / (400 * MBIT), rel=0.05)
    simulated = run(RACKS, [SimulatedCall(narrow.plan, 8 << 20)])
    assert simulated.seconds == pytest.approx(narrow.chosen.prediction.seconds, rel=0.1)


def test_auto_gives_up_bits_only_where_it_pays():
    assert choose(RACKS, "all_reduce", 8 << 20, wire="auto").plan.wire == "bfloat16"
    assert choose(RACKS, "all_reduce", 64, wire="auto").plan.wire == ""
    assert choose(Topology.flat([4]), "all_reduce", 8 << 20, wire="auto").plan.wire == ""
    for nbytes in (1 << 12, 1 << 16, 1 << 20):
        wide, auto = (choose(RACKS, "all_reduce", nbytes, wire=wire) for wire in ("", "auto"))
        saved = auto.chosen.prediction.seconds <= 0.9 * wide.chosen.prediction.seconds
        assert saved == bool(auto.plan.wire)


@pytest.mark.parametrize(("lab", "outer", "all_levels"), [("racks", "rack", False), ("lone-host", "rack", True)])
def test_auto_narrows_a_further_level_where_that_pays_as_well(lab, outer, all_levels):
    topology = load(LABS / f"{lab}.toml")
    one = choose(topology, "all_reduce", 64 << 20, wire={outer: "bfloat16"})
    both = choose(topology, "all_reduce", 64 << 20, wire={"host": "bfloat16", outer: "bfloat16"})
    assert (both.chosen.prediction.seconds <= 0.9 * one.chosen.prediction.seconds) == all_levels
    auto = choose(topology, "all_reduce", 64 << 20, wire="auto")
    assert auto.plan.id == (both if all_levels else one).plan.id


@pytest.mark.parametrize(
    ("wire", "message"),
    [
        ({"site": "bfloat16"}, "level 'site': the topology has host, rack"),
        ({"rank": "bfloat16"}, "level 'rank': the topology has host, rack"),
        ({"rack": "int3"}, "'int3' for level rack: known are bfloat16, float16, int8, int4, int2, float8"),
        ({"rack": "bfloat16", "host": "float16"}, "one format only"),
        ({"rack": "int8", "host": "bfloat16"}, "one format only"),
        ("bfloat16", "expected formats by level"),
        ("int8", "expected formats by level"),
    ],
)
def test_wires_that_cannot_be(wire, message):
    with pytest.raises(ValueError, match=message):
        choose(RACKS, "all_reduce", 1 << 20, wire=wire)


@pytest.mark.parametrize(
    ("phase", "collective", "message"),
    [
        (Phase("reduce_scatter", "host", "ring", (Ring((0, 1), (WHOLE,)),), "bfloat16"), "all_reduce", "method direct"),
        (Phase("all_reduce", "host", "halving", (Ring((0, 1), (WHOLE,)),), "int8"), "all_reduce", "method direct"),
        (Phase("all_gather", "host", "direct", (Ring((0, 1), (WHOLE,)),), "int8"), "all_gather", "only all_reduce"),
        (Phase("all_reduce", "host", "direct", (Ring((0, 1), (WHOLE,)),), "int3"), "all_reduce", "unknown wire"),
        (Phase("all_gather", "host", "direct", (Ring((0, 1), (WHOLE,)),), "float16"), "all_gather", "only all_reduce"),
    ],
)
def test_plans_that_no_schedule_can_be_made_of(phase, collective, message):
    with pytest.raises(ValueError, match=message):
        Plan(collective, 2, (phase,), 1 << 16)
