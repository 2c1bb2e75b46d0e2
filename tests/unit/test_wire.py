"""Narrow wires: what is sent, how far sums may be off, that all ranks end with the same bits, what is predicted."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from engines import Rank, in_threads, world
from topologies import CORE, MBIT, card, nested, unequal

from multiring.planning.interpret import prove
from multiring.planning.plan import REDUCING, WHOLE, Phase, Plan, Ring
from multiring.planning.planner import choose
from multiring.planning.schedule import SEND, schedule
from multiring.planning.topology import Topology
from multiring.planning.topology_file import load
from multiring.simulate import SimulatedCall, simulate_exactly, simulate_in_lockstep

LABS = Path(__file__).parents[2] / "lab/topologies"
PRECISION = {"bfloat16": 8, "float16": 11}
RACKS = nested([[2, 2], [2, 2]], [card(200), card(400), CORE])
UNEVEN = nested([[3], [1, 2]], [card(200), card(400), CORE])
SLOW_CARD = unequal([400, 400, 400, 100])


def rounded(values: np.ndarray, wire: str) -> np.ndarray:
    """To nearest, ties to even, by arithmetic on the bits."""
    if wire == "float16":
        return values.astype(np.float16).astype(np.float32)
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    kept = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16
    return kept.astype(np.uint32).view(np.float32)


def inputs(size: int, count: int) -> np.ndarray:
    return np.random.default_rng(5).standard_normal((size, count)).astype(np.float32)


def run_on_engine(topology: Topology, plan: Plan, given: np.ndarray, op: str = "sum") -> list[np.ndarray]:
    hosts = [sorted(set(topology.hosts)).index(host) for host in topology.hosts]
    with world(topology.world_size, hosts) as ranks:
        return in_threads(ranks, lambda rank: rank.run(plan, given[rank.rank].copy(), op))


@pytest.mark.parametrize("wire", PRECISION)
@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize(
    ("topology", "levels"),
    [(RACKS, ["rack"]), (RACKS, ["host"]), (RACKS, ["rack", "host"]), (UNEVEN, ["rack"]), (SLOW_CARD, ["host"])],
    ids=["racks", "hosts", "both", "uneven", "slow card"],
)
def test_sums_are_as_near_as_promised_and_the_same_everywhere(topology, levels, wire, op):
    count = 70_003
    plan = choose(topology, "all_reduce", 4 * count, wire=dict.fromkeys(levels, wire)).plan
    plan = replace(plan, segment_bytes=1 << 14)
    prove(plan)
    given = inputs(topology.world_size, count)
    results = run_on_engine(topology, plan, given, op)
    divisor = topology.world_size if op == "avg" else 1
    exact = given.astype(np.float64).sum(axis=0) / divisor
    magnitude = np.abs(given.astype(np.float64)).sum(axis=0) / divisor
    u = 2.0 ** -PRECISION[wire]
    error = (1 + u) ** (len(levels) + 1) * (1 + 2.0**-24) ** (topology.world_size + 1) - 1
    assert plan.wire_error == pytest.approx(error)
    bound = magnitude * error + 2.0**-24
    for result in results:
        assert (np.abs(result - exact) <= bound).all()
        np.testing.assert_array_equal(result.view(np.uint32), results[0].view(np.uint32))
    assert np.abs(results[0] - exact).max() > 2.0**-22  # it was narrow indeed
    np.testing.assert_array_equal(results[0], rounded(results[0], wire))


def test_a_last_narrow_message_waits_for_a_receiver_that_is_late():
    """What is sent was copied, so nothing but the message itself keeps the sender in the call."""
    broadcast = Phase("broadcast", "host", "direct", (Ring((0, 1), (WHOLE,)),), "bfloat16")
    plan = Plan("all_reduce", 2, (broadcast,), 1 << 16)
    given = inputs(2, 70_003)

    def program(rank: Rank) -> np.ndarray:
        if rank.rank == 1:
            time.sleep(0.3)
        return rank.run(plan, given[rank.rank].copy())

    with world(2, [0, 1]) as ranks:
        np.testing.assert_array_equal(in_threads(ranks, program)[1], rounded(given[0], "bfloat16"))


@pytest.mark.parametrize("wire", PRECISION)
@pytest.mark.parametrize("kinds", [("all_reduce",), ("reduce_scatter", "all_gather")])
def test_each_contribution_is_rounded_once_and_the_sum_once(wire, kinds):
    phases = tuple(Phase(kind, "host", "direct", (Ring((0, 1, 2), (WHOLE,)),), wire) for kind in kinds)
    plan = Plan("all_reduce", 3, phases, 1 << 12)
    given = inputs(3, 5_001)
    expected = rounded(given[0], wire)
    for contribution in given[1:]:
        expected = expected + rounded(contribution, wire)
    for result in run_on_engine(Topology.flat([1, 1, 1]), plan, given):
        np.testing.assert_array_equal(result, rounded(expected, wire))


@pytest.mark.parametrize(
    ("dtype", "op"), [("float64", "sum"), ("float32", "max"), ("int32", "sum"), ("float16", "sum")]
)
def test_nothing_else_is_narrowed(dtype, op):
    plan = choose(RACKS, "all_reduce", 1 << 16, wire={"rack": "bfloat16"}).plan
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
def test_predictions_know_it(run):
    wide = choose(RACKS, "all_reduce", 8 << 20)
    narrow = choose(RACKS, "all_reduce", 8 << 20, wire={"rack": "bfloat16"})
    assert narrow.bound == pytest.approx(wide.bound / 2)
    # A host sends half of S as it is to its rack, a quarter twice to the other, narrow, and half to its rack, narrow.
    assert narrow.chosen.prediction.seconds == pytest.approx((8 << 20) / (400 * MBIT), rel=0.05)
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
        ({"rack": "float8"}, "'float8' for level rack: known are bfloat16, float16"),
        ({"rack": "bfloat16", "host": "float16"}, "one format only"),
        ("bfloat16", "expected formats by level"),
    ],
)
def test_wires_that_cannot_be(wire, message):
    with pytest.raises(ValueError, match=message):
        choose(RACKS, "all_reduce", 1 << 20, wire=wire)


@pytest.mark.parametrize(
    ("phase", "collective", "message"),
    [
        (Phase("reduce_scatter", "host", "ring", (Ring((0, 1), (WHOLE,)),), "bfloat16"), "all_reduce", "method direct"),
        (Phase("all_reduce", "host", "direct", (Ring((0, 1), (WHOLE,)),), "float8"), "all_reduce", "unknown wire"),
        (Phase("all_gather", "host", "direct", (Ring((0, 1), (WHOLE,)),), "float16"), "all_gather", "only all_reduce"),
    ],
)
def test_plans_that_no_schedule_can_be_made_of(phase, collective, message):
    with pytest.raises(ValueError, match=message):
        Plan(collective, 2, (phase,), 1 << 16)
