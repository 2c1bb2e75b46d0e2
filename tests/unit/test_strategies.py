"""Every strategy is a plan that sums, with the steps and the bytes that it is known for."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from topologies import CORE, card, nested, unequal

from multiring.planning import planner
from multiring.planning.interpret import prove
from multiring.planning.interpret.full import prove_in_full
from multiring.planning.methods import steps
from multiring.planning.speeds import NATIVE
from multiring.planning.strategies import ASYNCHRONOUS, STRATEGIES, strategy
from multiring.planning.topology import LEVELS, Link, Place, Topology, ranks_in_host
from multiring.simulate import SimulatedCall, Speeds, forced, simulate, simulate_exactly, simulate_in_lockstep
from multiring.simulate.links import SimulatedLinks
from multiring.simulate.lockstep import with_fastest_segments
from multiring.simulate.machines import machine
from multiring.simulate.prediction import predict
from multiring.simulate.rounds import how_many, rounds

FREE = Link(1e15, 1e15, 0.0)
CARD = Link(1e9, 1e9, 20e-6)
S = 8 << 20


def cluster(hosts: int, ranks: int) -> Topology:
    return Topology.flat([ranks] * hosts, FREE, CARD)


RACKS = Topology(
    LEVELS[:3],
    tuple(
        Place(
            f"rack{r}",
            CARD,
            tuple(Place(f"{r}.{h}", CARD, ranks_in_host((4 * r + 2 * h, 4 * r + 2 * h + 1))) for h in (0, 1)),
        )
        for r in range(2)
    ),
)


@pytest.mark.parametrize("name", [*STRATEGIES, "multiring:4", "multiring:2x2"])
def test_a_world_of_four_sums(name):
    prove_in_full(strategy(name).plan(cluster(2, 2), S))


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize(
    "topology", [cluster(1, 1), cluster(1, 4), cluster(4, 1), cluster(8, 3), cluster(16, 2), RACKS]
)
def test_every_strategy_sums(name, topology):
    prove_in_full(strategy(name).plan(topology, S))


REFUSALS = "needs a power of two hosts|needs equally many on each"


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    """Up to 24 ranks, numbered in any order, on hosts of any sizes under one switch or in racks."""
    hosts = draw(st.lists(st.integers(1, 4), min_size=1, max_size=6))
    order = iter(draw(st.permutations(range(sum(hosts)))))
    places = [
        Place(f"h{number}", card(400), ranks_in_host([next(order) for _ in range(ranks)], CORE))
        for number, ranks in enumerate(hosts)
    ]
    if draw(st.booleans()):
        cut = draw(st.integers(0, len(hosts) - 1))
        racks = [tuple(part) for part in (places[:cut], places[cut:]) if part]
        return Topology(LEVELS[:3], tuple(Place(f"r{number}", card(200), rack) for number, rack in enumerate(racks)))
    return Topology(LEVELS[:2], tuple(places))


def dimensions(size: int) -> list[str]:
    """All ways to give rings for so many ranks."""
    return [str(size)] + [
        f"{first}x{rest}" for first in range(2, size) if size % first == 0 for rest in dimensions(size // first)
    ]


@given(topologies())
@settings(max_examples=12, deadline=None)
def test_every_strategy_sums_on_any_topology_or_says_why_not(topology):
    refused = {}
    given_rings = [f"multiring:{sizes}" for sizes in dimensions(topology.world_size)]
    for name in (*STRATEGIES, *given_rings):
        try:
            plan = strategy(name).plan(topology, S)
        except ValueError as error:
            refused[name] = str(error)
            continue
        prove_in_full(plan)
    assert not {"ring", "masters", "server", "multiring"} & refused.keys()
    assert all(re.search(REFUSALS, reason) for reason in refused.values()), refused


@pytest.mark.parametrize("name", ["torus", "double-tree", "multiring:4x8x16"])
def test_every_strategy_sums_on_512_ranks(name):
    prove(strategy(name).plan(cluster(128, 4), S))


@pytest.mark.parametrize("hosts", range(2, 18))
def test_trees_of_any_number_of_hosts_sum(hosts):
    plan = strategy("double-tree").plan(cluster(hosts, 2), S)
    prove_in_full(plan)
    reductions = [phase for phase in plan.phases if phase.kind == "reduce"]
    assert len(reductions) == (hosts - 1).bit_length()


@pytest.mark.parametrize("hosts", [8, 13, 32])
def test_no_host_but_one_has_children_in_both_trees(hosts):
    plan = strategy("double-tree").plan(cluster(hosts, 1), S)
    parents = [set(), set()]
    for phase in plan.phases:
        if phase.kind == "reduce":
            for ring in phase.rings:
                parents[ring.spans[0].lo > 0].add(ring.members[0])
                assert len(ring.members) <= 3
    assert len(parents[0] & parents[1]) <= hosts % 2


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("multiring:4x8x8", [4, 8, 8]),
        ("multiring:4x16x4", [4, 16, 4]),
        ("multiring:2x2x64", [2, 2, 64]),
        ("multiring:4x4x4x4", [4, 4, 4, 4]),
        ("multiring:16x16", [16, 16]),
        ("torus", [16, 16]),
        ("ring", [256]),
    ],
)
def test_rings_have_the_sizes_that_are_asked_for(name, sizes):
    plan = strategy(name).plan(cluster(64, 4), S)
    found = [(phase.kind, len(phase.rings[0].members)) for phase in plan.phases]
    assert found == [("reduce_scatter", n) for n in sizes] + [("all_gather", n) for n in reversed(sizes)]
    assert {phase.method for phase in plan.phases} == {"ring"}


@pytest.mark.parametrize(
    ("name", "count"), [("ring", 510), ("multiring:4x64", 132), ("multiring:4x8x8", 34), ("multiring:4x16x4", 42)]
)
def test_steps_of_256_ranks(name, count):
    """The numbers that make many rings worth while: 510 steps of one ring become 34."""
    plan = strategy(name).plan(cluster(64, 4), S)
    assert sum(len(steps(p.kind, p.method, len(p.rings[0].members), 0)) for p in plan.phases) == count


def card_bytes(name: str, topology: Topology) -> float:
    outcome = simulate(topology, [SimulatedCall(strategy(name).plan(topology, S), S)], Speeds(gamma=0))
    return max(load.nbytes for load in outcome.loads if load.link.startswith("host"))


@pytest.mark.parametrize(
    ("name", "bytes_a_card"),
    [
        ("ring", 2 * 31 / 32 * S),
        ("halving", 2 * 7 / 8 * S),
        ("masters", 2 * 7 / 8 * S),
        ("masters:8", (1 + 2 * 3 / 4) * S),
        ("multiring:4x8", 2 * 7 / 8 * S),
        ("multiring:4x2x4", 2 * 7 / 8 * S),
        ("double-tree", 2 * S),
        ("server", (4 * 7 / 8 + 28 / 8) * S),
    ],
)
def test_bytes_through_the_card_of_a_host(name, bytes_a_card):
    """8 hosts of 4 ranks."""
    assert card_bytes(name, cluster(8, 4)) == pytest.approx(bytes_a_card, rel=0.01)


def test_a_host_serves_by_its_first_rank():
    """The ranks of a host need not follow one another."""
    plan = strategy("server").plan(Topology.of_hosts(["b", "a", "a", "b", "c"]), S)
    assert [ring.shares for phase in plan.phases for ring in phase.rings] == [(1, 1, 0, 0, 1)] * 2
    prove_in_full(plan)


def test_a_master_for_two_hosts():
    """16 of 4 ranks: a chain in the host, one between two hosts, a ring of 8."""
    plan = strategy("masters:8").plan(cluster(16, 4), S)
    prove_in_full(plan)
    found = [(phase.kind, len(phase.rings), len(phase.rings[0].members)) for phase in plan.phases]
    out = [("reduce", 16, 4), ("reduce", 8, 2), ("reduce_scatter", 1, 8)]
    assert found == [*out, ("all_gather", 1, 8), ("broadcast", 8, 2), ("broadcast", 16, 4)]
    assert strategy("masters:4").plan(cluster(16, 4), S).id == strategy("masters").plan(cluster(16, 4), S).id


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="groups of 6 are no whole hosts of 4 ranks"):
        strategy("masters:6").plan(cluster(6, 4), S)
    with pytest.raises(ValueError, match="masters:4x4: give the ranks of a group, as in masters:16"):
        strategy("masters:4x4")
    with pytest.raises(ValueError, match="4x8 is 32 ranks; the topology has 256"):
        strategy("multiring:4x8").plan(cluster(64, 4), S)
    with pytest.raises(ValueError, match="power of two hosts, not 6"):
        strategy("halving").plan(cluster(6, 4), S)
    with pytest.raises(ValueError, match="2 to 3 ranks"):
        strategy("double-tree").plan(Topology.flat([3, 2]), S)
    with pytest.raises(ValueError, match="unknown strategy 'rings'; known are ring, halving"):
        strategy("rings")
    with pytest.raises(ValueError, match="4x8x8, innermost first, not '4xx8'"):
        strategy("multiring:4xx8")
    for name, about in ASYNCHRONOUS.items():
        with pytest.raises(ValueError, match=f"{name}' is no collective") as refused:
            strategy(name)
        assert about in str(refused.value)


def test_what_multiring_plan_may_name():
    assert [forced.wanted(name, "") for name in ("", "0123456789ab", "multiring")] == [None] * 3
    found = forced.wanted("ring", "")
    assert found is STRATEGIES["ring"]
    with pytest.raises(ValueError, match="MULTIRING_PLAN: unknown strategy 'rings'; known are ring, halving"):
        forced.wanted("rings", "")
    with pytest.raises(
        ValueError, match="MULTIRING_PLAN=ring sends float32 as it is, which MULTIRING_WIRE=rack=bfloat"
    ):
        forced.wanted("ring", "rack=bfloat16")
    assert forced.wanted("multiring", "rack=bfloat16") is None


@pytest.mark.parametrize(
    "topology",
    [nested([[2, 2], [2, 2]], [card(200), card(400), CORE]), unequal([400, 400, 100]), Topology.flat([3, 2])],
)
def test_the_simulator_and_the_cost_model_say_the_same_of_a_plan(topology):
    """One goes through the rings of a plan, the other through the stages that it was composed of."""
    choice = planner.choose(topology, "all_reduce", S)
    for candidate in (choice.chosen, *choice.rejected):
        found = predict(topology, candidate.plan, S)
        known = candidate.prediction
        assert (found.segments, found.window) == (known.segments, known.window)
        assert [(p.kind, p.level, p.method, p.members, p.steps) for p in found.phases] == [
            (p.kind, p.level, p.method, p.members, p.steps) for p in known.phases
        ]
        assert busiest(found) == pytest.approx(busiest(known), rel=0.01)


def busiest(prediction):
    """Seconds of the busiest link of each level."""
    return {
        level: max(load.seconds for load in prediction.links if load.level == level)
        for level in {load.level for load in prediction.links}
    }


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("topology", [cluster(1, 4), cluster(8, 3), RACKS])
def test_rounds_are_counted_as_they_are_made(name, topology):
    plan = strategy(name).plan(topology, S)
    assert how_many(plan) == len(list(rounds(plan, SimulatedLinks(topology), NATIVE)))


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("calls", [1, 2])
def test_all_ranks_together_take_as_long_as_one_by_one(name, calls):
    """Within 2 %; the double tree, in which equal ranks do different things, within 12 %."""
    topology = cluster(4, 2)
    called = [SimulatedCall(strategy(name).plan(topology, S), S)] * calls
    together, apart = simulate_in_lockstep(topology, called), simulate_exactly(topology, called)
    assert together.seconds == pytest.approx(apart.seconds, rel=0.12 if name == "double-tree" else 0.02)


@pytest.mark.parametrize("name", ["ring", "halving", "masters", "server", "multiring"])
def test_rounds_of_uneven_rings_are_counted(name):
    topology = Topology.flat([3, 1, 2, 2], FREE, CARD)
    plan = strategy(name).plan(topology, S)
    assert how_many(plan) == len(list(rounds(plan, SimulatedLinks(topology), NATIVE)))


def test_a_forced_strategy_stands_beside_what_it_displaces():
    topology = replace(RACKS, places=tuple(replace(rack, link=card(200)) for rack in RACKS.places))
    usual = planner.choose(topology, "all_reduce", S)
    choice = forced.choose(topology, strategy("masters"), S)
    assert choice.plan.id == strategy("masters").plan(topology, S).id
    assert choice.bound == usual.bound
    assert choice.rejected == (usual.chosen, *usual.rejected)
    racks = [load for load in choice.chosen.prediction.links if load.level == "rack"]
    # A ring of four masters sends 3/4 of the bytes over each hop, there and back; a rack has one hop each way.
    assert [(load.count, load.up, load.down) for load in racks] == [(2, 1.5 * S, 1.5 * S)]
    assert choice.chosen.prediction.seconds == pytest.approx(1.5 * S / racks[0].link.up, rel=0.05)
    shown = str(choice)
    assert f"plan {choice.plan.id}: all_reduce of 8 MB over 8 ranks" in shown
    assert re.search(rf"{usual.plan.id} .* -3\d\.\d%\n", shown)  # part of the time that the forced plan takes


def test_a_forced_strategy_and_what_it_displaces_are_predicted_for_the_same_ranks():
    topology = cluster(4, 2)
    slow = replace(NATIVE, wire_overhead=1e-3)
    choice = forced.choose(topology, strategy("masters"), S, replace(slow, ranks_per_core=4.0))
    assert choice.chosen.prediction == predict(topology, choice.plan, S, slow)
    assert choice.rejected == tuple(planner.candidates(topology, "all_reduce", S, speeds=slow))
    assert choice.chosen.prediction.seconds > forced.choose(topology, strategy("masters"), S).chosen.prediction.seconds


def test_the_tree_says_which_link_it_fills():
    """A strategy without stages is predicted too: 4 hosts of 2, two of them parents in the tree of each half."""
    choice = forced.choose(cluster(4, 2), strategy("double-tree"), S)
    cards = {
        load.rank: (load.count, load.up, load.down) for load in choice.chosen.prediction.links if load.level == "host"
    }
    assert sum(count for count, *_ in cards.values()) == 4
    assert sum(count * up for count, up, _ in cards.values()) == pytest.approx(2 * 3 * S)  # 3 edges, there and back
    assert [phase.steps for phase in choice.chosen.prediction.phases] == [1] * 6


def test_a_world_of_one_has_nothing_to_sum():
    choice = forced.choose(Topology.flat([1]), strategy("double-tree"), S)
    assert (choice.plan.phases, choice.chosen.prediction.seconds) == ((), 0.0)
    assert "plan " in str(choice)


@pytest.mark.parametrize(("name", "hosts"), [("dgx1", 1), ("dgx1", 256), ("minsky", 16), ("commodity", 8)])
def test_a_plan_is_chosen_with_the_numbers_that_it_is_simulated_with(name, hosts):
    """The planner predicts what the simulator finds, and of its candidates none is simulated to be much faster."""
    nbytes = 25 << 20
    topology, speeds = machine(name).topology(hosts), machine(name).speeds()
    choice = planner.choose(topology, "all_reduce", nbytes, speeds=speeds)
    found = simulated(topology, choice.plan, nbytes, speeds)
    assert found == pytest.approx(choice.chosen.prediction.seconds, rel=0.1)
    others = [
        simulated(topology, with_fastest_segments(topology, other.plan, nbytes, speeds), nbytes, speeds)
        for other in choice.rejected[:8]
    ]
    assert found <= 1.05 * min(others)
    made = strategy("multiring").plan(topology, nbytes, speeds)
    assert made.id == choice.plan.id


def simulated(topology, plan, nbytes, speeds):
    return simulate(topology, [SimulatedCall(plan, nbytes)], speeds).seconds


def test_who_adds_slowly_is_given_a_plan_that_adds_less():
    """Direct all_reduces of everything have every rank add all that the others have."""
    topology = Topology.flat([8], Link(1e15, 1e15, 10e-6))
    assert [phase.kind for phase in planner.plan(topology, "all_reduce", 4 << 10).phases] == ["all_reduce"]
    slow = replace(NATIVE, gamma=1e-6, copy_seconds_per_byte=0.0)
    choice = planner.choose(topology, "all_reduce", 4 << 10, speeds=slow)
    assert [phase.kind for phase in choice.plan.phases] == ["reduce_scatter", "all_gather"]
    assert choice.chosen.prediction.seconds == pytest.approx(7 / 8 * (4 << 10) * 1e-6, rel=0.01, abs=30e-6)


def test_ranks_get_segments_of_the_sizes_that_they_can_have():
    speeds = replace(NATIVE, segments=(1 << 20, 1 << 30))
    choice = planner.choose(cluster(8, 1), "all_reduce", 64 << 20, speeds=speeds)
    assert choice.plan.segment_bytes in speeds.segments
    ring = strategy("ring").plan(cluster(8, 1), 64 << 20)
    fastest = with_fastest_segments(cluster(8, 1), ring, 64 << 20, speeds).segment_bytes
    assert fastest in (ring.segment_bytes, 1 << 20, 64 << 20)
