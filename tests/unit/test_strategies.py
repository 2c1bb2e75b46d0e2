"""Every strategy is a plan that sums, with the steps and the bytes that it is known for."""

from __future__ import annotations

import pytest

from multiring.interpret.full import prove_in_full
from multiring.methods import steps
from multiring.simulate import Call, Speeds, simulate
from multiring.strategies import STRATEGIES, strategy
from multiring.topology import LEVELS, Link, Place, Topology, ranks_in_host

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
    outcome = simulate(topology, [Call(strategy(name).plan(topology, S), S)], Speeds(gamma=0))
    return max(load.nbytes for load in outcome.loads if load.link.startswith("host"))


@pytest.mark.parametrize(
    ("name", "bytes_a_card"),
    [
        ("ring", 2 * 31 / 32 * S),
        ("halving", 2 * 7 / 8 * S),
        ("masters", 2 * 7 / 8 * S),
        ("multiring:4x8", 2 * 7 / 8 * S),
        ("multiring:4x2x4", 2 * 7 / 8 * S),
        ("double-tree", 2 * S),
        ("server", (4 * 7 / 8 + 28 / 8) * S),
    ],
)
def test_bytes_through_the_card_of_a_host(name, bytes_a_card):
    """8 hosts of 4 ranks."""
    assert card_bytes(name, cluster(8, 4)) == pytest.approx(bytes_a_card, rel=0.01)


def test_what_does_not_fit_is_refused():
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
