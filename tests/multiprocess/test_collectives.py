"""Every collective in real processes: shared memory, TCP forced on one host, and hosts of unequal size."""

from __future__ import annotations

import os
from typing import Any

import collectives
import jobs
import pytest

from multiring.job.cores import cgroup_quota
from multiring.planning import planner
from multiring.planning.speeds import RankPlacement, Speeds, speeds
from multiring.planning.strategies import STRATEGIES, strategy
from multiring.planning.topology import Topology

WORLDS = [
    pytest.param(1, None, id="1"),
    pytest.param(2, None, id="2 shared"),
    pytest.param(3, None, id="3 shared"),
    pytest.param(4, None, id="4 shared"),
    pytest.param(5, None, id="5 shared"),
    pytest.param(8, None, id="8 shared"),
    pytest.param(2, "ab", id="2 tcp"),
    pytest.param(3, "abc", id="3 tcp"),
    pytest.param(5, "abbac", id="5 on uneven hosts"),
    pytest.param(8, "aaabbbbc", id="8 on uneven hosts"),
]


def run(program: Any, size: int, hosts: str | None, *arguments: Any, **options: Any) -> list[Any]:
    return jobs.run(program, size, *arguments, hosts=hosts and list(hosts), **options)


def speeds_of(hosts: str) -> Speeds:
    """Return the speeds of ranks whose hosts are all this machine."""
    cpus, quota = frozenset(os.sched_getaffinity(0)), cgroup_quota()
    return speeds([RankPlacement(host, "here", cpus, quota) for host in hosts])


@pytest.mark.parametrize(("size", "hosts"), WORLDS)
def test_every_collective(size: int, hosts: str | None) -> None:
    bits = run(collectives.grid, size, hosts, 100_003 if size < 5 else 20_011)
    assert len(set(bits)) == 1


@pytest.mark.parametrize(("size", "hosts"), [(3, None), (3, "abc"), (5, "abbac")])
def test_what_is_not_one_plan(size: int, hosts: str | None) -> None:
    run(collectives.others, size, hosts)


def test_groups() -> None:
    evens, odds = 0b10101, 0b01010
    assert run(collectives.groups, 5, "aabbb") == [
        [[evens, 0b00011, 0b00101, 0b01001, 0b10001, 4], [0, 3]],
        [[odds, 0b00011, 3], [0, 2]],
        [[evens, 0b00101], [1, 3]],
        [[odds, 0b01001, 3], [1, 2]],
        [[evens, 0b10001, 4], [2, 3]],
    ]


@pytest.mark.parametrize("hosts", [None, "ab"])
def test_groups_that_are_dropped_are_closed(hosts: str | None) -> None:
    """One that stayed took 7 KB, and after 4,095 of them there was none any more."""
    for kilobytes, left in run(collectives.dropped_groups, 2, hosts, 700, timeout=110, fresh=True):
        assert kilobytes < 2048
        assert left == 3  # all ranks, the one that was published, and the last


@pytest.mark.parametrize("hosts", [None, "ab"])
def test_groups_that_have_one_number_are_told_apart(hosts: str | None) -> None:
    run(collectives.groups_of_one_number, 2, hosts)


def test_first_calls_write_and_read_pages_that_are_there() -> None:
    """A lane stages a megabyte, 256 pages and as many faults; its peer maps them in 16. Seven calls, seven lanes."""
    assert all(faults < 48 for faults in run(collectives.faults_of_first_calls, 2, None, fresh=True))


def test_small_calls_find_their_plan_ready_and_only_those_asked_for_are_told_of() -> None:
    for asked, used, plans, last in run(collectives.planned_ahead, 2, None, [8, 4096, 48 << 10, 64 << 10, 1 << 20]):
        assert asked == [["all_reduce", 1 << 20]]
        assert used == [[1 << 20, 5]]
        assert plans == [5]
        assert last == "all_gather"  # which is planned when it is called


def test_calls_find_no_plan_ready_between_hosts_or_where_one_is_wanted() -> None:
    sizes = [4096, 1 << 20]
    for hosts, environment in (("ab", {}), (None, {"MULTIRING_PLAN": "ring"})):
        for asked, used, *_ in run(collectives.planned_ahead, 2, hosts, sizes, environment=environment):
            assert [nbytes for _, nbytes in asked] == ([] if environment else sizes)
            assert sum(calls for _, calls in used) == len(sizes)


@pytest.mark.parametrize("hosts", [None, "ab"])
def test_ten_thousand_collectives_keep_memory_and_descriptors_flat(hosts: str | None) -> None:
    for kilobytes, descriptors in run(collectives.flat, 2, hosts, 10_000, timeout=110, fresh=True):
        assert kilobytes < 4096
        assert descriptors == 0


def test_streams_and_a_range_of_ports() -> None:
    environment = {"MULTIRING_STREAMS": "3", "MULTIRING_SOCKET_THREADS": "2", "MULTIRING_PORTS": "28700-28799"}
    run(collectives.grid, 2, "ab", 300_000, environment=environment)


def test_float32_travels_narrow_between_hosts_if_asked_for() -> None:
    exact = 3 * (1 + 1 / 512)
    assert run(collectives.narrow, 3, "aab") == [[exact, exact]] * 3
    # bfloat16 keeps 8 bits: 2 + 1/256 of host a becomes 2, 1 + 1/512 of host b 1. float16 keeps 11, which is enough.
    for wire, sum_ in (("bfloat16", 3.0), ("float16", exact)):
        assert run(collectives.narrow, 3, "aab", environment={"MULTIRING_WIRE": f"host={wire}"}) == [[exact, sum_]] * 3


@pytest.mark.parametrize(
    ("hosts", "wire", "block", "error"),
    [("ab", "float8", 256, 0.073), ("aab", "int4", 64, 0.15), ("abcc", "int8", 256, 0.0080)],
)
def test_sums_that_travel_in_blocks_have_the_same_bits_on_all_ranks(
    hosts: str, wire: str, block: int, error: float
) -> None:
    bits = run(
        collectives.narrow_blocks, len(hosts), hosts, block, error, environment={"MULTIRING_WIRE": f"host={wire}"}
    )
    assert len(set(bits)) == 1


@pytest.mark.parametrize(
    ("hosts", "size_of_values", "wire", "error"),
    [
        ("ab", 1e6, "int8", 0.0080),
        ("aabc", 1e-3, "int8", 0.0080),
        ("aabc", 1e6, "int4", 0.15),
        ("aabc", 1e6, "int2", 3.0),
        ("ab", 1e-3, "int2", 3.0),
        ("ab", 1e-3, "float8", 0.073),
    ],
)
def test_gradients_and_marks_in_blocks_leave_each_other_alone(
    hosts: str, size_of_values: float, wire: str, error: float
) -> None:
    """Each mark has a block in int2, where what is owed from before may come as well."""
    arguments = size_of_values, error, wire == "int2"
    run(collectives.narrow_buckets, len(hosts), hosts, *arguments, environment={"MULTIRING_WIRE": f"host={wire}"})


def test_sums_in_two_bits_need_a_residual() -> None:
    found = run(collectives.two_bits, 3, "aab", environment={"MULTIRING_WIRE": "host=int2"})
    assert all(each == found[0] for each in found)
    for said, op in zip(found[0][0], ("sum", "avg"), strict=True):
        assert said == (
            f"all_reduce of float32 by {op} without a residual, over a wire that rounds most elements to 0: give "
            "residual= (torch: wire_feedback=True), sum in float64, or name another format than int2 in MULTIRING_WIRE"
        )


@pytest.mark.parametrize(
    ("hosts", "wire"), [("aabb", "bfloat16"), ("abb", "float16"), ("aabb", "int8"), ("abb", "int4"), ("abb", "float8")]
)
def test_what_rounding_loses_arrives_later_where_it_is_kept(hosts: str, wire: str) -> None:
    found = run(collectives.keeping, len(hosts), hosts, 20, environment={"MULTIRING_WIRE": f"host={wire}"})
    assert all(each == found[0] for each in found)
    said = found[0][2]
    assert said[:2] == [
        "residual is 20010 x float32, and x 20011 x float32: give as many float32, zeros at first",
        "residual is 20011 x float64, and x 20011 x float32: give as many float32, zeros at first",
    ]
    for words, what in zip(said[2:5], ("float32, op 'max'", "float64, op 'sum'", "int32, op 'sum'"), strict=True):
        assert words == (
            f"residual: only float32 is rounded, where it is summed or averaged, and x is {what}: leave residual out"
        )
    assert said[5] == "residual shares memory with x: give an array of its own, which keeps what x has lost"
    assert "is read-only" in said[6] or "is not contiguous" in said[6]
    assert len(said) == 7


def test_weights_whose_sum_is_beyond_a_float_are_refused_on_all_ranks() -> None:
    for told, mean in run(collectives.weights_beyond_a_float, 2, None):
        assert told == (
            "weight=1e+308: the sum of the weights of all 2 ranks is more than a float64 holds, 1.8e+308: give smaller "
            "ones"
        )
        assert mean == pytest.approx(2 / 3)


def test_a_plan_is_forced_by_its_id() -> None:
    topology = Topology.of_hosts(list("aab"))
    usual = planner.choose(topology, "all_reduce", 1 << 20, speeds=speeds_of("aab"))
    small = planner.choose(topology, "all_reduce", 64, speeds=speeds_of("aab"))
    of_small = {each.plan.id for each in (small.chosen, *small.rejected)}
    rejected = [each.plan.id for each in usual.rejected]
    others = [plan for plan in rejected if plan not in of_small][:2]  # which leave small buffers as they are
    of_both = [plan for plan in rejected if plan in of_small][:1]
    assert others
    for wanted in (*others, *of_both):
        used = run(collectives.forced, 3, "aab", wanted, environment={"MULTIRING_PROBE": "off"})
        assert used == [[wanted, wanted if wanted in of_both else small.plan.id, [wanted]]] * 3


@pytest.mark.parametrize(
    ("hosts", "names"),
    [
        ("aabbccdd", [*STRATEGIES, "multiring:2x4", "multiring:2x2x2", "multiring:8"]),
        ("aaa", [*STRATEGIES, "multiring:3"]),
        ("abbac", ["ring", "masters", "server"]),  # uneven hosts, whose ranks are not numbered in order
    ],
)
def test_every_strategy_is_forced_by_its_name(hosts: str, names: list[str]) -> None:
    topology = Topology.of_hosts(list(hosts))
    counts = [1, 7, 1009, 300_007]
    sizes = [planner.size_class(4 * count) for count in counts]
    wanted = [[strategy(name).plan(topology, size).id for size in sizes] for name in names]
    if "multiring" in names:  # the planner's own, which knows who shares a core
        own = [planner.plan(topology, "all_reduce", size, speeds=speeds_of(hosts)).id for size in sizes]
        wanted[names.index("multiring")] = own
    every = run(collectives.forced_strategies, len(hosts), hosts, names, counts, environment={"MULTIRING_PROBE": "off"})
    for number, name in enumerate(names):
        assert len({ranks[number][0] for ranks in every}) == 1, name
        assert all(ranks[number][1:] == [wanted[number], []] for ranks in every), name


def test_a_group_that_cannot_have_the_strategy_of_the_job_says_so() -> None:
    job = jobs.start(
        collectives.pair_under, 4, "multiring:2x2", hosts=list("aabb"), environment={"MULTIRING_PROBE": "off"}
    )
    outcomes = job.wait()
    topology = Topology.of_hosts(list("aabb"))
    whole, pair = strategy("multiring:2x2").plan(topology, 512).id, topology.restrict([0, 1])
    usual = planner.plan(pair, "all_reduce", 512, speeds=speeds_of("aabb")).id
    assert [outcome.value for outcome in outcomes] == [[whole, usual, 3.0], [whole, usual, 3.0], [whole], [whole]]
    said = [line for outcome in outcomes for line in outcome.error.splitlines() if "MULTIRING_PLAN" in line]
    assert len(said) == 1
    assert "multiring:2x2 is not for the group of ranks (0, 1): 2x2 is 4 ranks; the topology has 2" in said[0]


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        ("groups", "ValueError: MULTIRING_PLAN: strategy 'groups' is no collective (8 synchronous groups"),
        ("halving", "RendezvousError: MULTIRING_PLAN=halving: halving and doubling needs a power of two hosts, not 3"),
    ],
)
def test_a_strategy_that_cannot_be_forced_is_refused_on_every_rank(plan: str, reason: str) -> None:
    told = {"MULTIRING_PROBE": "off"}
    for outcome in jobs.start(collectives.forced, 3, plan, hosts=list("abc"), environment=told).wait():
        assert outcome.code == 1
        assert reason in outcome.error.splitlines()[-1]
