"""The simulator against closed forms, the cut bound, and itself: lockstep against exact."""

from __future__ import annotations

from dataclasses import replace

import pytest

from multiring.planning.bound import cut_bound
from multiring.planning.compose import compose
from multiring.planning.layout import Dimension, Edge, layout
from multiring.planning.plan import Plan
from multiring.planning.stages import ALL, LEAD, SPLIT, Stage
from multiring.planning.topology import LEVELS, Link, Place, Topology, ranks_in_host
from multiring.simulate import SimulatedCall, Speeds, simulate, simulate_exactly, simulate_in_lockstep
from multiring.simulate.flows import Flow, Simulation, Use, fair_rates
from multiring.simulate.links import SimulatedLinks

S = 8 << 20
ALPHA, BETA, GAMMA = 20e-6, 1e-9, 1 / 4e9
FREE = Link(1e15, 1e15, 0.0)
WIRE = Link(1 / BETA, 1 / BETA, ALPHA)
SIMPLE = Speeds(gamma=GAMMA, local_overhead=0.0, wire_overhead=0.0)
SIMULATORS = [simulate_exactly, simulate_in_lockstep]

RANK = Link(5e9, 5e9, 1e-6)
CARD = Link(1.25e9, 1.25e9, 50e-6)
UPLINK = Link(1e9, 1e9, 60e-6)


def racks(*hosts_of_racks: tuple[int, ...]) -> Topology:
    """Racks of hosts of so many ranks."""
    rank = 0
    places = []
    for number, hosts in enumerate(hosts_of_racks):
        inside = []
        for host, ranks in enumerate(hosts):
            inside.append(Place(f"{number}.{host}", CARD, ranks_in_host(range(rank, rank + ranks), RANK)))
            rank += ranks
        places.append(Place(f"rack{number}", UPLINK, tuple(inside)))
    return Topology(LEVELS[:3], tuple(places))


def flat(topology: Topology, mode: str, method: str, segment_bytes: int, collective: str = "all_reduce") -> Plan:
    """One dimension over all ranks."""
    return compose(topology, collective, [Stage(Dimension(topology.levels), mode, method)], segment_bytes)


def by_level(topology: Topology, mode: str, method: str, segment_bytes: int) -> Plan:
    """One dimension a level."""
    stages = [Stage(Dimension((level,)), mode, method) for level in topology.levels]
    return compose(topology, "all_reduce", stages, segment_bytes)


def test_places_are_numbered_outwards_whatever_the_order_of_the_ranks() -> None:
    left = (Place("h", CARD, ranks_in_host([3, 0], RANK)), Place("g", CARD, ranks_in_host([2], RANK)))
    right = (Place("k", WIRE, ranks_in_host([1], RANK)),)
    links = SimulatedLinks(Topology(LEVELS[:3], (Place("x", UPLINK, left), Place("y", UPLINK, right))))
    assert [numbers.tolist() for numbers in links.place_of] == [[0, 1, 2, 3], [4, 6, 5, 4], [7, 8, 7, 7]]
    assert [links.name(link) for link in links.path(0, 1)] == [
        *("rank 0 up", "rank 1 down", "host h up", "host k down", "rack x up", "rack y down")
    ]
    assert links.latency.tolist() == [RANK.latency] * 4 + [CARD.latency] * 2 + [ALPHA] + [UPLINK.latency] * 2


@pytest.mark.parametrize(("size", "runs"), [(4, [4, 4]), (3, [2, 3, 3])])
def test_a_run_of_hosts_keeps_the_links_around_hosts_of_its_own(size: int, runs: list[int]) -> None:
    """Two racks of four hosts: that of a rack only where the run is the rack."""
    together = ("host", "rack")
    grid = [Dimension(("rank",)), Dimension(together, size), Dimension(together)]
    units = layout(racks((2, 2, 2, 2), (2, 2, 2, 2)), grid).shape.children
    assert [len(unit.children) for unit in units] == runs
    for unit, hosts in zip(units, runs, strict=True):
        cards = [Edge(host, host + 1, "host", CARD) for host in range(hosts)]
        assert list(unit.edges) == cards + [Edge(0, 4, "rack", UPLINK)] * (hosts == 4)


CLOSED = {
    (SPLIT, "ring"): lambda n: 2 * (n - 1) * (ALPHA + S / n * BETA) + (n - 1) / n * S * GAMMA,
    (SPLIT, "halving"): lambda n: 2 * (n.bit_length() - 1) * ALPHA + (n - 1) / n * S * (2 * BETA + GAMMA),
    (SPLIT, "direct"): lambda n: 2 * ALPHA + (n - 1) / n * S * (2 * BETA + GAMMA),
    (ALL, "direct"): lambda n: ALPHA + (n - 1) * S * (BETA + GAMMA),
    (ALL, "halving"): lambda n: (n.bit_length() - 1) * (ALPHA + S * (BETA + GAMMA)),
    (LEAD, "ring"): lambda n: 2 * (n - 1) * (ALPHA + S * BETA) + (n - 1) * S * GAMMA,
}
"""Seconds of an all-reduce of n ranks with a link each, in one segment: the costs in methods.py."""


@pytest.mark.parametrize("run", SIMULATORS)
@pytest.mark.parametrize("size", [2, 4, 8, 16])
@pytest.mark.parametrize(("mode", "method"), CLOSED)
def test_one_segment_takes_what_the_formula_says(run, size, mode, method):
    topology = Topology.flat([1] * size, FREE, WIRE)
    outcome = run(topology, [SimulatedCall(flat(topology, mode, method, S), S)], SIMPLE)
    assert outcome.seconds == pytest.approx(CLOSED[mode, method](size), rel=1e-5)


@pytest.mark.parametrize("run", SIMULATORS)
def test_a_tree_takes_the_latency_of_its_steps(run):
    topology = Topology.flat([1] * 16, FREE, WIRE)
    outcome = run(topology, [SimulatedCall(flat(topology, ALL, "tree", S), 64)], SIMPLE)
    assert outcome.seconds == pytest.approx(8 * ALPHA, rel=0.02)


@pytest.mark.parametrize("run", SIMULATORS)
def test_further_messages_of_a_step_cost_the_thread_of_a_rank(run):
    topology = Topology.flat([1] * 8, FREE, WIRE)
    speeds = Speeds(gamma=0.0, local_overhead=0.0, wire_overhead=3e-6)
    (ended,) = run(topology, [SimulatedCall(flat(topology, ALL, "direct", S), 64)], speeds).ended
    assert ended == pytest.approx(ALPHA + 6 * 3e-6 + 7 * 64 * BETA)


@pytest.mark.parametrize("run", SIMULATORS)
def test_segments_fill_the_link(run):
    topology = Topology.flat([1] * 8, FREE, WIRE)
    outcome = run(topology, [SimulatedCall(flat(topology, SPLIT, "ring", 256 << 10), S)], SIMPLE)
    bound = 2 * 7 / 8 * S * BETA
    assert bound < outcome.seconds < 1.01 * bound
    busiest = outcome.loads[0]
    assert busiest.nbytes == pytest.approx(2 * 7 / 8 * S)
    assert busiest.seconds == pytest.approx(bound)
    assert busiest.link.startswith("host")


@pytest.mark.parametrize("run", SIMULATORS)
def test_a_window_of_one_segment_shows_its_latency(run):
    topology = Topology.flat([1] * 4, FREE, WIRE)
    speeds = Speeds(gamma=0.0, local_overhead=0.0, wire_overhead=0.0)
    plan = replace(flat(topology, SPLIT, "direct", S // 8), window=1)
    outcome = run(topology, [SimulatedCall(plan, S)], speeds)
    assert outcome.seconds == pytest.approx(8 * (2 * ALPHA + 2 * 3 / 4 * S / 8 * BETA))


@pytest.mark.parametrize("run", SIMULATORS)
def test_calls_overlap_and_share_the_links(run):
    topology = Topology.flat([1] * 4, FREE, WIRE)
    plan = flat(topology, SPLIT, "direct", 256 << 10)
    alone = run(topology, [SimulatedCall(plan, S)], SIMPLE).seconds
    together = run(topology, [SimulatedCall(plan, S), SimulatedCall(plan, S, ready=alone / 2)], SIMPLE)
    assert together.begun == (0.0, pytest.approx(alone / 2))
    assert together.ended[0] > 1.2 * alone
    assert together.seconds == pytest.approx(2 * alone, rel=0.02)
    apart = run(topology, [SimulatedCall(plan, S), SimulatedCall(plan, S, ready=2 * alone)], SIMPLE)
    assert apart.ended == pytest.approx((alone, 3 * alone))


@pytest.mark.parametrize("run", SIMULATORS)
def test_a_call_waits_for_its_lane(run):
    topology = Topology.flat([1] * 4, FREE, WIRE)
    plan = flat(topology, SPLIT, "direct", 256 << 10)
    speeds = Speeds(gamma=0.0, local_overhead=0.0, wire_overhead=0.0, lanes=2)
    outcome = run(topology, [SimulatedCall(plan, S)] * 5, speeds)
    assert outcome.begun[:2] == (0.0, 0.0)
    assert outcome.begun[2:] == outcome.ended[:3]


@pytest.mark.parametrize(("kind", "direction"), [("reduce", "down"), ("broadcast", "up")])
@pytest.mark.parametrize("run", SIMULATORS)
def test_the_root_is_the_bottleneck_of_a_direct_reduce_and_broadcast(run, kind, direction):
    topology = Topology.flat([1] * 8, FREE, WIRE)
    outcome = run(topology, [SimulatedCall(flat(topology, LEAD, "direct", 1 << 20, kind), S)], SIMPLE)
    busiest = outcome.loads[0]
    assert (busiest.link, busiest.count) == (f"host host0 {direction}", 1)
    assert busiest.nbytes == 7 * S
    assert outcome.seconds >= 7 * S * BETA


def all_plans(topology: Topology, segment_bytes: int) -> dict[str, Plan]:
    plans = {}
    for method in ("ring", "direct", "halving"):
        if method != "halving" or topology.world_size & (topology.world_size - 1) == 0:
            plans[f"flat {method}"] = flat(topology, SPLIT, method, segment_bytes)
            plans[f"by level {method}"] = by_level(topology, SPLIT, method, segment_bytes)
    plans["leads"] = by_level(topology, LEAD, "direct", segment_bytes)
    plans["doubling"] = flat(topology, ALL, "halving", segment_bytes)
    return plans


EVEN = {
    "flat": Topology.flat([4] * 4, RANK, CARD),
    "racks": racks((2, 2), (2, 2), (2, 2), (2, 2)),
    "hosts of one": Topology.flat([1] * 8, RANK, CARD),
}
UNEVEN = {
    "uneven hosts": racks((3, 1), (2,)),
    "slow card": Topology(
        LEVELS[:2],
        tuple(
            Place(f"h{i}", Link(1e9 / (1 + 3 * (i == 1)), 1e9, 5e-5), ranks_in_host((2 * i, 2 * i + 1), RANK))
            for i in range(4)
        ),
    ),
}


@pytest.mark.parametrize("name", EVEN)
@pytest.mark.parametrize("nbytes", [4 << 10, 1 << 20])
def test_lockstep_is_exact_where_all_ranks_are_alike(name, nbytes):
    topology = EVEN[name]
    for plan_name, plan in all_plans(topology, 256 << 10).items():
        exact = simulate_exactly(topology, [SimulatedCall(plan, nbytes), SimulatedCall(plan, nbytes, ready=1e-3)])
        lockstep = simulate_in_lockstep(
            topology, [SimulatedCall(plan, nbytes), SimulatedCall(plan, nbytes, ready=1e-3)]
        )
        tolerance = 0.08 if "direct" in plan_name else 0.03  # messages of a step leave one by one
        assert lockstep.seconds == pytest.approx(exact.seconds, rel=tolerance), plan_name
        links = {load.link: load for load in exact.loads}
        assert sum(load.count for load in lockstep.loads) == len(links)
        for load in lockstep.loads:
            assert load.nbytes == pytest.approx(links[load.link].nbytes, rel=0.02, abs=4096), plan_name


@pytest.mark.parametrize("name", [*EVEN, *UNEVEN])
@pytest.mark.parametrize("run", [*SIMULATORS, simulate])
def test_no_plan_beats_the_bound(run, name):
    topology = {**EVEN, **UNEVEN}[name]
    bound = cut_bound(topology, "all_reduce", S // 4)
    for plan_name, plan in all_plans(topology, 256 << 10).items():
        assert run(topology, [SimulatedCall(plan, S // 4)]).seconds > bound, plan_name


def test_uneven_clusters_are_close_in_lockstep():
    for topology in UNEVEN.values():
        for name, plan in all_plans(topology, 256 << 10).items():
            exact = simulate_exactly(topology, [SimulatedCall(plan, 2 << 20)]).seconds
            assert simulate_in_lockstep(topology, [SimulatedCall(plan, 2 << 20)]).seconds == pytest.approx(
                exact, rel=0.25
            ), name
            assert simulate(topology, [SimulatedCall(plan, 2 << 20)]).seconds == exact


def test_direct_shares_by_bandwidth_spare_a_slow_card():
    topology = UNEVEN["slow card"]
    hosts = Dimension(("host",))
    equal, weighted = (
        compose(topology, "all_reduce", [Stage(Dimension(("rank",)), SPLIT, "direct"), stage], 128 << 10)
        for stage in (Stage(hosts, SPLIT, "direct"), Stage(hosts, SPLIT, "direct", weighted=True))
    )
    slow, fast = (simulate(topology, [SimulatedCall(plan, S)]).seconds for plan in (equal, weighted))
    assert fast == pytest.approx(4 * S / 1e9, rel=0.1)
    assert slow == pytest.approx(6 * S / 1e9, rel=0.1)


@pytest.mark.parametrize("hosts", [2, 4])
def test_weighted_shares_pass_each_other_in_lockstep_as_they_do_exactly(hosts):
    cards = [Link(1e9 / (1 + 3 * (host == 1)), 1e9, 5e-5) for host in range(hosts)]
    topology = Topology(
        LEVELS[:2],
        tuple(Place(f"h{i}", card, ranks_in_host((2 * i, 2 * i + 1), RANK)) for i, card in enumerate(cards)),
    )
    stages = [Stage(Dimension(("rank",)), SPLIT, "direct"), Stage(Dimension(("host",)), SPLIT, "direct", weighted=True)]
    call = SimulatedCall(compose(topology, "all_reduce", stages, 128 << 10), S)
    exact = simulate_exactly(topology, [call]).seconds
    assert simulate_in_lockstep(topology, [call]).seconds == pytest.approx(exact, rel=0.03)


def test_ranks_that_differ_are_simulated_one_by_one_as_long_as_it_takes_seconds():
    topology = UNEVEN["slow card"]
    calls = [SimulatedCall(by_level(topology, SPLIT, "direct", 64 << 10), S)] * 5  # some 40,000 messages
    exact = simulate(topology, calls)
    assert exact == simulate_exactly(topology, calls)
    assert not exact.approximate
    hurried = simulate(topology, calls, patience=0.1)
    assert hurried.approximate
    assert hurried.seconds == simulate_in_lockstep(topology, calls).seconds != exact.seconds
    assert not simulate(
        EVEN["flat"], [SimulatedCall(flat(EVEN["flat"], SPLIT, "ring", S), S)], patience=0.0
    ).approximate


def test_one_rank_needs_no_time():
    topology = Topology.flat([1])
    assert simulate(topology, [SimulatedCall(by_level(topology, SPLIT, "ring", 4096), S)]).ended == (0.0,)
    assert simulate_exactly(topology, [SimulatedCall(by_level(topology, SPLIT, "ring", 4096), S)]).ended == (0.0,)


def test_a_plan_of_another_world_is_refused():
    plan = flat(Topology.flat([1] * 3), SPLIT, "ring", 4096)
    with pytest.raises(ValueError, match="for 3 ranks, the topology has 4"):
        simulate(Topology.flat([1] * 4), [SimulatedCall(plan, S)])
    with pytest.raises(ValueError, match="at least one byte"):
        SimulatedCall(plan, 0)


def test_rates_are_max_min_fair():
    def over(*links: int) -> Use:
        return Use(tuple((link, 1.0) for link in links))

    # links of 1, 2 and 10: one flow over all, one over the second, two over the third
    uses = [over(0, 1, 2), over(1), over(2), over(2)]
    assert fair_rates(uses, [1.0, 2.0, 10.0]) == pytest.approx([1.0, 1.0, 4.5, 4.5])
    # one that stands for three
    assert fair_rates([Use(((0, 3.0),)), over(0)], [8.0]) == pytest.approx([2.0, 2.0])


def test_a_connection_carries_one_message_after_the_other():
    simulation = Simulation([10.0])
    use = Use(((0, 1.0),))
    both, other = Flow(), Flow()
    arrivals = []
    for connection, name, nbytes in ((both, "first", 10.0), (both, "second", 20.0), (other, "third", 30.0)):
        simulation.send(connection, use, nbytes, 0.5, lambda name=name: arrivals.append((name, simulation.now)))
    simulation.run()
    # at 5 a second each until the first two are through after 6 s; the third ends with them
    assert arrivals == [("first", pytest.approx(2.5)), ("second", pytest.approx(6.5)), ("third", pytest.approx(6.5))]
    assert simulation.carried == [60.0]
