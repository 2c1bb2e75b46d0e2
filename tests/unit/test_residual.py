"""Residuals of what rounding loses, sent later: bits, sums over many calls, odd values, refusals."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from engines import COLLECTIVE, DTYPE, OP, Rank, in_threads, world
from test_wire import RACKS, SLOW_CARD, TOGETHER, UNEVEN, rounded

from multiring import _native as native
from multiring.planning.interpret import prove
from multiring.planning.plan import REDUCING, WHOLE, WIRES, Phase, Plan, Ring, Span
from multiring.planning.planner import choose
from multiring.planning.schedule import REPAY, ROUND, schedule
from multiring.planning.topology import Topology

HOSTS = Topology.flat([2, 2])
HALVES = (Span(Fraction(0), Fraction(1, 2)), Span(Fraction(1, 2), Fraction(1)))
LOCAL = (Ring((0, 1), (WHOLE,)), Ring((2, 3), (WHOLE,)))


def split(wire: str) -> Plan:
    """Two hosts of two ranks; each rank owns a quarter of the sum."""
    across = (Ring((0, 2), HALVES[:1]), Ring((1, 3), HALVES[1:]))
    phases = (
        Phase("reduce_scatter", "rank", "direct", LOCAL),
        Phase("reduce_scatter", "host", "direct", across, wire),
        Phase("all_gather", "host", "direct", across, wire),
        Phase("all_gather", "rank", "direct", LOCAL),
    )
    return Plan("all_reduce", 4, phases, 1 << 12)


def at_once(wire: str) -> Plan:
    """The same ranks; both of a host have its sum, and exchange it with those of the other."""
    across = (Ring((0, 2), (WHOLE,)), Ring((1, 3), (WHOLE,)))
    phases = (Phase("all_reduce", "rank", "direct", LOCAL), Phase("all_reduce", "host", "direct", across, wire))
    return Plan("all_reduce", 4, phases, 1 << 12)


def gradients(size: int, count: int, seed: int = 5) -> np.ndarray:
    """They differ by rank and index, and in magnitude from block to block."""
    scale = np.exp2(np.arange(count) // 256 % 5 - 2)
    return (np.random.default_rng(seed).standard_normal((size, count)) * scale).astype(np.float32)


def call(rank: Rank, plan: Plan, x: np.ndarray, residual: np.ndarray | None, op: str = "sum") -> np.ndarray:
    kept = 0 if residual is None else residual.ctypes.data
    made = native.Call(COLLECTIVE["all_reduce"], x.ctypes.data, x.size, DTYPE["float32"], 30.0, OP[op], residual=kept)
    rank.calls(plan).run(made)
    return x


def rounded_with(values: np.ndarray, residual: np.ndarray, wire: str) -> tuple[np.ndarray, np.ndarray]:
    """Return what is sent of a contribution and what is still owed, which is 0 where it is not finite."""
    wanted = values + residual
    sent = rounded(wanted, wire)
    with np.errstate(invalid="ignore"):
        owed = (wanted - sent).astype(np.float32)
    return sent, np.where(np.isfinite(owed), owed, np.float32(0))


def model(plan_of, given: np.ndarray, residuals: np.ndarray, wire: str, op: str) -> np.ndarray:
    """One call of two hosts of two ranks, by levels; changes the residuals, and returns the result."""
    count = given.shape[1]
    grain = max(16, TOGETHER[wire])
    half = count // 2 // grain * grain
    if plan_of is at_once:
        repaid = given + residuals
        hosts = [repaid[0] + repaid[1], repaid[2] + repaid[3]]
        residuals[:] = 0
        sent = [rounded_with(host, np.zeros_like(host), wire) for host in hosts]
        residuals[0], residuals[2] = sent[0][1], sent[1][1]
        owner = np.zeros(count, int)
    else:
        hosts = [given[0] + given[1], given[2] + given[3]]
        holder = (np.arange(count) >= half).astype(int)  # who holds its host's sum
        at = np.arange(count)
        sent = [rounded_with(host, residuals[2 * h + holder, at], wire) for h, host in enumerate(hosts)]
        for h in (0, 1):
            residuals[2 * h + holder, at] = sent[h][1]
        owner = holder + np.where(owned_by_second_host(count, half, wire), 2, 0)
    total = sent[0][0] + sent[1][0]
    divisor = np.float32(4 if op == "avg" else 1)
    mean = total / divisor
    result = rounded(mean, wire)
    with np.errstate(invalid="ignore"):
        owed = residuals[owner, np.arange(count)] + (mean - result) * divisor
    residuals[owner, np.arange(count)] = np.where(np.isfinite(owed), owed, 0)
    return result


def owned_by_second_host(count: int, half: int, wire: str) -> np.ndarray:
    grain = max(16, TOGETHER[wire])
    quarters = [count // 4 // grain * grain, 3 * count // 4 // grain * grain]
    at = np.arange(count)
    return np.where(at < half, at >= quarters[0], at >= quarters[1])


@pytest.mark.parametrize("plan_of", [split, at_once])
def test_results_and_residuals_are_those_of_a_model_by_levels(plan_of):
    with world(4, [0, 0, 1, 1]) as ranks:
        for wire in WIRES:
            prove(plan_of(wire))
            for op in ("sum", "avg"):
                follow_model(ranks, plan_of, wire, op)


def follow_model(ranks: list[Rank], plan_of, wire: str, op: str) -> None:
    plan, count = plan_of(wire), 1_000  # one segment, so that the model need not know of more
    given, expected = gradients(4, count), np.zeros((4, count), np.float32)
    residuals = np.zeros((4, count), np.float32)
    for step in range(8):
        at_step = given * np.float32(1 + step % 3)
        wanted = model(plan_of, at_step, expected, wire, op)
        results = in_threads(ranks, lambda r, g=at_step: call(r, plan, g[r.rank].copy(), residuals[r.rank], op))
        for result in results:
            np.testing.assert_array_equal(result.view(np.uint32), (wanted + np.float32(0)).view(np.uint32))
        np.testing.assert_array_equal(residuals, expected)
    assert np.abs(residuals).max() > 0


def plans_of(topology: Topology, levels: list[str], wire: str, count: int) -> list[Plan]:
    """Return the planner's choices for buffers of several sizes, which differ in stages and modes."""
    sizes = (256, 1 << 12, 1 << 16, 1 << 20, 1 << 24)
    found = [choose(topology, "all_reduce", size, wire=dict.fromkeys(levels, wire)).plan for size in sizes]
    return list({plan.id: plan for each in found for plan in [replace(each, segment_bytes=1 << 13)]}.values())


@pytest.mark.parametrize(
    ("topology", "levels", "wires"),
    [
        (HOSTS, ["host"], ("bfloat16", "int8", "int2")),
        (RACKS, ["rack"], ("float16", "int4", "float8")),
        (RACKS, ["host"], ("bfloat16", "int8", "int2")),
        (RACKS, ["rack", "host"], ("float16", "int8", "int2")),
        (UNEVEN, ["rack"], ("bfloat16", "int4", "float8")),
        (UNEVEN, ["host"], ("float16", "int8", "int2")),
        (SLOW_CARD, ["host"], ("bfloat16", "int4", "float8")),
    ],
    ids=["two hosts", "racks", "hosts of racks", "both", "uneven", "uneven hosts", "slow card"],
)
def test_nothing_is_lost_for_good_whatever_the_plans(topology, levels, wires):
    hosts = [sorted(set(topology.hosts)).index(host) for host in topology.hosts]
    with world(topology.world_size, hosts) as ranks:
        for wire in wires:
            lose_nothing(ranks, topology, levels, wire)


def lose_nothing(ranks: list[Rank], topology: Topology, levels: list[str], wire: str) -> None:
    """The same gradient again and again, by plans that change: results and residuals add up to the exact sum."""
    count, size, steps = 9_001, topology.world_size, 12
    plans = plans_of(topology, levels, wire, count)
    given = gradients(size, count)
    exact = given.astype(np.float64).sum(axis=0)
    residuals, total, without = np.zeros((size, count), np.float32), np.zeros(count), np.zeros(count)
    bound = 3 * size * plans[0].wire_error * np.abs(given).max()
    for step in range(steps):
        plan, op = plans[step % len(plans)], ("sum", "avg")[step % 2]
        results = in_threads(ranks, lambda r, p=plan, o=op: call(r, p, given[r.rank].copy(), residuals[r.rank], o))
        for result in results:
            np.testing.assert_array_equal(result.view(np.uint32), results[0].view(np.uint32))
        total += results[0].astype(np.float64) * (size if op == "avg" else 1)
        assert np.abs(total + residuals.sum(axis=0, dtype=np.float64) - (step + 1) * exact).max() < 1e-3 * (step + 1)
        assert np.abs(residuals).max() <= bound  # it does not grow
    for plan in plans:
        without += in_threads(ranks, lambda r, p=plan: call(r, p, given[r.rank].copy(), None))[0]
    lost = np.abs(without / len(plans) - exact).max()
    assert np.abs(total / steps - exact).max() < max(size * bound / steps, 1e-3)
    assert lost > 0


@pytest.mark.parametrize("wire", [wire for wire in WIRES if wire != "int2"])
def test_the_mean_over_steps_nears_the_exact_sum_as_one_over_their_number(wire):
    plan, count = split(wire), 2_000
    given = gradients(4, count)
    exact = given.astype(np.float64).sum(axis=0)
    residuals, total = np.zeros((4, count), np.float32), np.zeros(count)
    with world(4, [0, 0, 1, 1]) as ranks:
        off = []
        for step in range(1, 33):
            results = in_threads(ranks, lambda r: call(r, plan, given[r.rank].copy(), residuals[r.rank]))
            total += results[0]
            off.append(np.abs(total / step - exact).mean())
        plain = np.abs(in_threads(ranks, lambda r: call(r, plan, given[r.rank].copy(), None))[0] - exact).mean()
    assert off[0] == pytest.approx(plain, rel=1e-6)  # the first step is as without
    for step in (4, 8, 16, 32):
        assert off[step - 1] < 2 * plain / step


@pytest.mark.parametrize("odd", [np.inf, -np.inf, np.nan, 3.4e38])
@pytest.mark.parametrize("wire", ["bfloat16", "float16", "int8", "int2", "float8"])
def test_bad_values_stay_visible_and_leave_no_residual(wire, odd):
    plan, count = split(wire), 1_000
    given, residuals = gradients(4, count), np.zeros((4, count), np.float32)
    with world(4, [0, 0, 1, 1]) as ranks:
        in_threads(ranks, lambda r: call(r, plan, given[r.rank].copy(), residuals[r.rank]))
        bad = given.copy()
        bad[3, 700] = odd
        bad[2, 700] = 3.4e38 if odd == 3.4e38 else 1
        results = in_threads(ranks, lambda r: call(r, plan, bad[r.rank].copy(), residuals[r.rank]))
        hit = np.arange(count) // TOGETHER[wire] == 700 // TOGETHER[wire]
        for result in results:
            assert not np.isfinite(result[hit]).any()
            assert np.isfinite(result[~hit]).all()
            np.testing.assert_array_equal(result.view(np.uint32), results[0].view(np.uint32))
        assert np.isfinite(residuals).all()
        assert (residuals[1, hit] == 0).sum() + (residuals[3, hit] == 0).sum() >= hit.sum()
        good = in_threads(ranks, lambda r: call(r, plan, given[r.rank].copy(), residuals[r.rank]))
        assert np.isfinite(good[0]).all()


def test_without_a_residual_bits_and_messages_are_those_of_before():
    for wire in ("", *WIRES):
        plan = split(wire) if wire else split("")
        for rank in range(4):
            steps = schedule(plan, rank).instructions
            settling = [step for step in steps if step.kind in (REPAY, ROUND)]
            assert bool(settling) == bool(wire)
            assert all(plan.phases[step.phase].kind in REDUCING and not step.peers for step in settling)
    given = gradients(4, 5_001)
    with world(4, [0, 0, 1, 1]) as ranks:
        for wire in WIRES:
            hosts = [rounded(given[0] + given[1], wire), rounded(given[2] + given[3], wire)]
            for result in in_threads(ranks, lambda r, w=wire: call(r, split(w), given[r.rank].copy(), None)):
                np.testing.assert_array_equal(result, rounded(hosts[0] + hosts[1], wire))


def test_a_plan_that_is_not_narrow_leaves_the_residual_as_it_is():
    given, owed = gradients(4, 3_000), gradients(4, 3_000, seed=7)
    residuals = owed.copy()
    with world(4, [0, 0, 1, 1]) as ranks:
        results = in_threads(ranks, lambda r: call(r, split(""), given[r.rank].copy(), residuals[r.rank]))
    np.testing.assert_array_equal(residuals, owed)
    np.testing.assert_array_equal(results[0], (given[0] + given[1]) + (given[2] + given[3]))


def test_elements_that_a_rank_never_rounds_keep_their_residual():
    given, owed = gradients(4, 1_024), gradients(4, 1_024, seed=7)
    residuals = owed.copy()
    with world(4, [0, 0, 1, 1]) as ranks:
        in_threads(ranks, lambda r: call(r, split("int8"), given[r.rank].copy(), residuals[r.rank]))
    for rank in range(4):
        own = slice(0, 512) if rank % 2 == 0 else slice(512, 1_024)
        other = slice(512, 1_024) if rank % 2 == 0 else slice(0, 512)
        np.testing.assert_array_equal(residuals[rank, other], owed[rank, other])
        assert (residuals[rank, own] != owed[rank, own]).mean() > 0.9


def test_calls_in_flight_together_keep_their_own_residuals():
    plan, counts = split("int8"), [1, 257, 3_000, 10_240, 33_333]
    given = {count: gradients(4, count, seed=count) for count in counts}

    def program(rank: Rank) -> list[list[np.ndarray]]:
        found = []
        kept = {count: np.zeros(count, np.float32) for count in counts}
        for _ in range(4):
            buffers = {count: given[count][rank.rank].copy() for count in counts}
            works = [
                rank.calls(plan).start(
                    native.Call(0, x.ctypes.data, count, 0, 30.0, 0, residual=kept[count].ctypes.data),
                    (x, kept[count]),
                )
                for count, x in buffers.items()
            ]
            for work in works:
                work.wait(60.0)
            found.append(list(buffers.values()))
        return [*found, list(kept.values())]

    with world(4, [0, 0, 1, 1]) as ranks:
        everyones = in_threads(ranks, program)
    for number, count in enumerate(counts):
        exact = 4 * given[count].astype(np.float64).sum(axis=0)
        total = sum(everyones[0][step][number].astype(np.float64) for step in range(4))
        owed = sum(ranks[-1][number].astype(np.float64) for ranks in everyones)
        assert np.abs(total + owed - exact).max() < 1e-3


@pytest.mark.parametrize(
    ("collective", "dtype", "op"),
    [("all_reduce", "float64", "sum"), ("all_reduce", "float32", "max"), ("reduce", "float32", "sum")],
)
def test_a_call_that_rounds_nothing_takes_no_residual(collective, dtype, op):
    x, kept = np.zeros(8, dtype), np.zeros(8, np.float32)
    with pytest.raises(ValueError, match=rf"residual: .*{collective} of {dtype} by {op}: leave it out"):
        native.Call(COLLECTIVE[collective], x.ctypes.data, 8, DTYPE[dtype], 1.0, OP[op], residual=kept.ctypes.data)


@pytest.mark.parametrize("wire", range(1, 1 + len(WIRES)))
def test_rounding_in_place_keeps_exactly_what_is_lost(wire):
    values = gradients(1, 3_333)[0]
    values[100], values[700] = np.nan, np.inf
    before, owed = values.copy(), gradients(1, 3_333, seed=9)[0]
    kept = owed.copy()
    native.round(wire, values.ctypes.data, kept.ctypes.data, values.size)
    expected = rounded(before, WIRES[wire - 1])
    np.testing.assert_array_equal(values, expected)
    with np.errstate(invalid="ignore"):
        wanted = owed + (before - expected)
    np.testing.assert_array_equal(kept, np.where(np.isfinite(wanted), wanted, 0))
    native.repay(values.ctypes.data, kept.ctypes.data, values.size)
    assert (kept == 0).all()
