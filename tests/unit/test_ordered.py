"""Ordered plans: the same bits whatever the topology, the plan, the segments and how a gradient is cut into buckets."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from engines import Rank, in_threads, world

from multiring.planning import planner
from multiring.planning.interpret import prove
from multiring.planning.plan import REDUCING, Plan
from multiring.planning.schedule import schedule
from multiring.planning.topology import Link, Place, Topology, ranks_in_host

SLOW = Link(up=1e8, down=1e8, latency=50e-6)
UNEQUAL = Topology(
    ("rank", "host"),
    (
        Place("a", replace(SLOW, up=1e9, down=1e9), ranks_in_host([0, 3])),
        Place("b", SLOW, ranks_in_host([1, 2])),
    ),
)
TOPOLOGIES = {hosts: Topology.of_hosts(list(hosts)) for hosts in ("aaaa", "aabb", "abab", "abbb", "baca", "abcd")}
TOPOLOGIES["unequal"] = UNEQUAL
TOPOLOGIES["slow card"] = Topology(
    ("rank", "host"),
    tuple(
        Place(f"h{r}", SLOW if r == 2 else replace(SLOW, up=1e9, down=1e9), ranks_in_host([r])) for r in (3, 2, 0, 1)
    ),
)


def ordered_plans(topology: Topology, collective: str, root: int = 0) -> list[Plan]:
    """All that are considered, small and large."""
    choices = [planner.choose(topology, collective, size, root, ordered=True) for size in (1 << 12, 1 << 26)]
    plans = [candidate.plan for choice in choices for candidate in (choice.chosen, *choice.rejected)]
    return list({plan.id: plan for plan in plans}.values())


@pytest.mark.parametrize("collective", REDUCING)
@pytest.mark.parametrize("name", TOPOLOGIES)
def test_every_sum_is_made_at_once_in_the_order_of_the_ranks(name: str, collective: str) -> None:
    topology = TOPOLOGIES[name]
    root = 2 if collective == "reduce" else 0
    order = (root, *(rank for rank in range(4) if rank != root))
    for plan in ordered_plans(topology, collective, root):
        prove(plan)
        sums = [i.peers for rank in range(4) for i in schedule(plan, rank).instructions if i.kind == "reduce"]
        assert sums
        assert set(sums) == {order}


def test_a_host_behind_a_slow_card_still_owns_less() -> None:
    plans = ordered_plans(TOPOLOGIES["slow card"], "all_reduce")
    shares = [ring.shares for plan in plans for ring in plan.phases[0].rings if ring.shares]
    assert shares
    assert all(own[2] == 0 < min(own[0], own[1], own[3]) for own in shares)


def test_what_sums_nothing_is_planned_as_usual() -> None:
    topology = TOPOLOGIES["aabb"]
    for collective in ("all_gather", "broadcast", "all_to_all", "barrier"):
        usual = planner.choose(topology, collective, 1 << 20)
        assert planner.choose(topology, collective, 1 << 20, ordered=True).plan.id == usual.plan.id


def test_ordered_sums_and_narrow_wires_exclude_each_other() -> None:
    with pytest.raises(ValueError, match=r"wire \{'host': 'bfloat16'\}: what is rounded depends on the plan"):
        planner.choose(TOPOLOGIES["aabb"], "all_reduce", 1 << 20, wire={"host": "bfloat16"}, ordered=True)
    with pytest.raises(ValueError, match=r"wire \{'host': 'int8'\}: what is rounded depends on the plan"):
        planner.choose(TOPOLOGIES["aabb"], "all_reduce", 1 << 20, wire={"host": "int8"}, ordered=True)


def contributions(dtype: str, count: int) -> list[np.ndarray]:
    """Numbers of very different size and both signs: other orders of summation give other bits."""
    random = np.random.default_rng(5)
    values = [random.standard_normal(count) * 10.0 ** random.integers(-3, 4, count) for _ in range(4)]
    if dtype != "float16":
        values[0] *= 1e7
    values[2] = -values[0]  # what the large numbers have swallowed by then is gone
    if dtype == "bfloat16":
        import ml_dtypes

        return [value.astype(ml_dtypes.bfloat16) for value in values]
    return [value.astype(dtype) for value in values]


def summed_in_order(parts: list[np.ndarray]) -> np.ndarray:
    total = parts[0].astype(np.float32)
    for part in parts[1:]:
        total = total + part.astype(np.float32)
    return total.astype(parts[0].dtype)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_same_bits_everywhere(dtype: str) -> None:
    count = 3001
    parts = contributions(dtype, count)
    expected = summed_in_order(parts)
    backwards = summed_in_order(parts[::-1])
    assert expected.tobytes() != backwards.tobytes()
    plans = {plan.id: plan for topology in TOPOLOGIES.values() for plan in ordered_plans(topology, "all_reduce")}
    assert len(plans) >= 5

    def program(rank: Rank) -> list[bytes]:
        results = []
        for plan in plans.values():
            for segment_bytes in (plan.segment_bytes, 1 << 10):
                for buckets in ((0, count), (0, 1, 777, 778, 2500, count)):
                    mine = parts[rank.rank].copy()
                    for lo, hi in pairwise(buckets):
                        rank.run(replace(plan, segment_bytes=segment_bytes), mine[lo:hi])
                    results.append(mine.tobytes())
        return results

    with world(4, hosts=[0, 1, 0, 1]) as ranks:
        for results in in_threads(ranks, program):
            assert isinstance(results, list)
            assert set(results) == {expected.tobytes()}
