"""The planner: every plan that it can return is right, and it returns those that the links call for."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from topologies import CORE, card, nested, tree, unequal

from multiring.planning import bound, planner
from multiring.planning.bound import cut_bound
from multiring.planning.choice import Candidate
from multiring.planning.compose import compose
from multiring.planning.interpret import prove, prove_by_classes, prove_in_full
from multiring.planning.layout import Dimension, canonical, rooted, shape_in
from multiring.planning.plan import COLLECTIVES, Plan, Tiling
from multiring.planning.planner import candidates, choose
from multiring.planning.schedule import schedule
from multiring.planning.space import grids, options
from multiring.planning.speeds import Speeds
from multiring.planning.stages import ALL, LEAD, SPLIT, Stage
from multiring.planning.topology import LEVELS, Topology

ROOTED = ("broadcast", "reduce")


def composed(topology: Topology, collective: str, candidate: Candidate, root: int = 0) -> Plan:
    prediction = candidate.prediction
    return compose(topology, collective, candidate.stages, prediction.segment_bytes, root, prediction.window)


def all_that_is_chosen(topology: Topology) -> dict[tuple[str, int, int], tuple[str, object, float, list[object]]]:
    """Plan, prediction and bound of some calls, and all candidates'."""
    found = {}
    for collective in COLLECTIVES:
        for nbytes in (0, 4 << 10, 3 << 20):
            for root in {0, topology.world_size - 1} if collective in ROOTED else {0}:
                choice = choose(topology, collective, nbytes, root)
                others = [(each.stages, each.prediction, each.plan.id) for each in choice.rejected[:5]]
                found[collective, nbytes, root] = choice.plan.id, choice.chosen.prediction, choice.bound, others
    return found


def forget() -> None:
    """Empty what the planner keeps from call to call."""
    for kept in (planner._ranked, planner._stages_to_choose_from, planner._plan_of, bound._seconds_per_byte):
        kept.cache_clear()


@pytest.mark.parametrize(
    "before",
    [
        Topology.flat([2, 2, 2, 2]),
        Topology.flat([3, 1]),
        Topology.flat([1, 1, 1]),
        nested([[2, 1], [2, 2]], [card(200), card(400), CORE]),
        unequal([400, 100, 1000]),
    ],
)
def test_trees_that_look_alike_share_what_is_kept_and_have_ranks_of_their_own(before: Topology) -> None:
    after = before.restrict([*range(1, before.world_size), 0])  # as when rank 0 is lost and replaced by the last rank
    forget()
    expected = all_that_is_chosen(after)
    forget()
    assert all_that_is_chosen(before) != expected
    misses = planner._stages_to_choose_from.cache_info().misses
    assert all_that_is_chosen(after) == expected
    assert planner._stages_to_choose_from.cache_info().misses == misses


@pytest.mark.parametrize("members", [[1, 2, 3, 4, 5, 0], [5, 4, 3, 2, 1, 0], [0, 3, 1, 4, 2, 5]])
def test_the_busiest_links_are_those_of_the_ranks_that_are_named(members: list[int]) -> None:
    fast, slow = unequal([400, 100, 1000]), unequal([1000, 100, 400])
    for topology in (fast.restrict(members), slow.restrict(members)):
        for collective in COLLECTIVES:
            loads = choose(topology, collective, 3 << 20).chosen.prediction.links
            assert loads
            for load in loads:
                expected = CORE if load.level == "rank" else topology.host_link(load.rank)
                assert load.link == expected, (collective, load)


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    """Two to four levels, uneven, prime counts, single ranks and hosts, slow cards, ranks in any order."""
    depth = draw(st.integers(2, 4))
    links = [draw(st.sampled_from([card(100), card(400), card(10_000, 1e-3)])) for _ in range(depth - 1)]

    def inside(level: int):
        if level == 1:
            return draw(st.integers(1, 5))
        return [
            inside(level - 1) for _ in range(draw(st.sampled_from([1, 2, 2, 3, 5, 7] if level == depth else [1, 2, 3])))
        ]

    places = list(tree(inside(depth), [*links, CORE], count()))
    if draw(st.booleans()):
        places[0] = replace(places[0], link=card(100))
    topology = Topology(LEVELS[:depth], tuple(places))
    assume(topology.world_size <= 40)
    return topology.restrict(draw(st.permutations(range(topology.world_size))))


def test_sizes_that_have_a_plan_in_common_have_it_composed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def counted(*arguments):
        made.append(arguments)
        return compose(*arguments)

    monkeypatch.setattr(planner, "compose", counted)
    topology = unequal([100, 300], ranks=3)  # that no other test has
    plans = [choose(topology, "all_reduce", 1 << bits).plan for bits in range(8, 24)]
    assert len(made) == len({plan.id for plan in plans}) < len(plans)
    assert {plan.id for plan in plans} == {compose(*arguments).id for arguments in made}


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(topologies(), st.sampled_from(COLLECTIVES), st.sampled_from([64, 1 << 24]), st.data())
def test_every_candidate_is_proved(topology, collective, nbytes, data):
    root = data.draw(st.integers(0, topology.world_size - 1)) if collective in ROOTED else 0
    for candidate in candidates(topology, collective, nbytes, root):
        plan = composed(topology, collective, candidate, root)
        prove_in_full(plan)
        prove_by_classes(plan)


def _mutations(plan: Plan, data: st.DataObject) -> Plan:
    """The plan with one thing wrong: a phase or ring gone or repeated, members or pieces in another order."""
    phases = list(plan.phases)
    at = data.draw(st.integers(0, len(phases) - 1))
    kind = data.draw(
        st.sampled_from(["drop phase", "repeat phase", "drop ring", "repeat ring", "rotate ring", "swap rings"])
    )
    tiles = [(list(pattern), units) for pattern, units in phases[at].rings.tiles]
    pattern, _ = data.draw(st.sampled_from(tiles))
    ring = data.draw(st.integers(0, len(pattern) - 1))
    if kind == "drop phase":
        del phases[at]
    elif kind == "repeat phase":
        phases.insert(at, phases[at])
    else:
        if kind == "drop ring":
            del pattern[ring]
        elif kind == "repeat ring":
            pattern.insert(ring, pattern[ring])
        elif kind == "rotate ring":
            pattern[ring] = replace(pattern[ring], members=pattern[ring].members[1:] + pattern[ring].members[:1])
        else:
            other = data.draw(st.integers(0, len(pattern) - 1))
            pattern[ring], pattern[other] = (
                replace(pattern[ring], spans=pattern[other].spans),
                replace(pattern[other], spans=pattern[ring].spans),
            )
        phases[at] = replace(phases[at], rings=Tiling(tiles))
    return replace(plan, phases=tuple(phases))


def _drawn(topology: Topology, collective: str, data: st.DataObject) -> Plan:
    """Any plan that the planner could find the cheapest; to find out which are takes most of the time of a test."""
    seen = rooted(topology, 0) if collective in ROOTED else topology
    shape = canonical(seen)
    choices = [
        choice
        for grid in grids(shape, seen.levels, collective)
        for choice in options(grid, shape_in(shape, seen.levels, grid), collective, {})
    ]
    choice = data.draw(st.sampled_from(choices))
    return compose(topology, collective, [data.draw(st.sampled_from(stages)) for stages in choice], 1 << 16)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(topologies(), st.sampled_from([c for c in COLLECTIVES if c != "all_to_all"]), st.data())
def test_the_proof_by_classes_accepts_nothing_that_the_full_proof_refuses(topology, collective, data):
    assume(topology.world_size > 1)
    wrong = _mutations(_drawn(topology, collective, data), data)
    try:
        prove_by_classes(wrong)
    except ValueError:
        return
    prove_in_full(wrong)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_plain_rings_are_proved_like_tiled_ones(collective):
    topology = nested([[3, 1], [2, 2]], [card(200), card(400), CORE])
    plan = choose(topology, collective, 1 << 20).plan
    plain = replace(plan, phases=tuple(replace(phase, rings=tuple(phase.rings)) for phase in plan.phases))
    prove_by_classes(plain)
    prove_in_full(plain)
    assert [schedule(plain, rank).instructions for rank in range(8)] == [
        schedule(plan, rank).instructions for rank in range(8)
    ]


def phases(topology: Topology, nbytes: int, collective: str = "all_reduce") -> list[str]:
    return [f"{p.kind} {p.level} {p.method}" for p in choose(topology, collective, nbytes).plan.phases]


def test_a_big_all_reduce_is_split_at_every_level():
    racks = nested([[2, 2], [2, 2]], [card(200), card(400), CORE])
    assert [phase.split()[:2] for phase in phases(racks, 8 << 20)] == [
        ["reduce_scatter", "rank"],
        ["reduce_scatter", "host"],
        ["reduce_scatter", "rack"],
        ["all_gather", "rack"],
        ["all_gather", "host"],
        ["all_gather", "rank"],
    ]


def test_a_small_all_reduce_on_one_host_is_one_step():
    assert phases(Topology.flat([4]), 64) == ["all_reduce rank direct"]


def test_a_barrier_of_hosts_is_two_steps():
    assert phases(Topology.flat([4] * 4), 1, "barrier") == ["all_reduce rank direct", "all_reduce host direct"]


def test_a_host_behind_a_slow_card_owns_nothing():
    choice = choose(unequal([400, 400, 400, 100]), "all_reduce", 8 << 20)
    (crossing,) = [phase for phase in choice.plan.phases if (phase.kind, phase.level) == ("reduce_scatter", "host")]
    assert [ring.shares for ring in crossing.rings] == [(22, 21, 21, 0)] * 2
    assert choice.bound == pytest.approx((8 << 20) / card(100).up)
    assert choice.chosen.prediction.seconds < 1.03 * choice.bound


def test_nor_does_it_among_two_of_a_rack():
    left, right = nested([[2, 2], [2, 2]], [card(400), card(400), CORE]).places
    slow = replace(left, places=(left.places[0], replace(left.places[1], link=card(100))))
    choice = choose(Topology(LEVELS[:3], (slow, right)), "all_reduce", 8 << 20)
    slow_host = [load for load in choice.chosen.prediction.links if (load.level, load.rank) == ("host", 2)]
    assert [(load.up, load.down) for load in slow_host] == [(8 << 20, 8 << 20)]


def test_a_large_level_is_factorised():
    assert [phase.split()[1] for phase in phases(Topology.flat([4] * 64), 102 << 20)].count("host") in (4, 6)


@pytest.mark.parametrize("nbytes", [1 << 20, 100 << 20])
@pytest.mark.parametrize("collective", [c for c in COLLECTIVES if c != "barrier"])
@pytest.mark.parametrize(
    "topology", [Topology.flat([4] * 4), nested([[3], [1, 2]], [card(200), card(400), CORE]), unequal([400, 100, 200])]
)
def test_no_prediction_beats_the_bound(topology, collective, nbytes):
    bound = cut_bound(topology, collective, nbytes)
    assert all(candidate.prediction.seconds > bound for candidate in candidates(topology, collective, nbytes))


def test_a_choice_is_the_first_of_the_candidates():
    topology = Topology.flat([2, 2])
    choice = choose(topology, "all_reduce", 1 << 20)
    assert [choice.chosen, *choice.rejected] == candidates(topology, "all_reduce", 1 << 20)
    assert choice.plan.id == composed(topology, "all_reduce", choice.chosen).id
    assert [phase.kind for phase in choice.plan.phases] == [time.kind for time in choice.chosen.prediction.phases]
    assert {stage.mode for c in choice.rejected for stage in c.stages} == {SPLIT, LEAD, ALL}


def test_a_rack_may_have_one_leader_among_leaders_that_exchange():
    """Few bytes: one rank of each rack talks to the other rack, and neither waits for an answer to its own."""
    racks = nested([[2, 2], [2, 2]], [card(200), card(400), CORE])
    shared = Speeds(wire_overhead=40e-6, ranks_per_core=4.0)
    choice = choose(racks, "all_reduce", 4 << 10, speeds=shared)
    assert [(phase.kind, phase.level) for phase in choice.plan.phases] == [
        ("reduce", "rank"),
        ("reduce", "host"),
        ("all_reduce", "rack"),
        ("broadcast", "host"),
        ("broadcast", "rank"),
    ]


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_a_world_of_one_has_nothing_to_do(collective):
    plan = choose(Topology.flat([1]), collective, 1 << 20).plan
    assert plan.phases == ()
    assert schedule(plan, 0).instructions == ()
    prove(plan)


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("hosts", [[1] * 67, [67]], ids=["67 hosts", "67 ranks"])
def test_a_prime_number_of_members_too_many_for_one_ring(hosts, collective):
    plan = choose(Topology.flat(hosts), collective, 1 << 24).plan
    prove_in_full(plan)
    if collective != "all_to_all":
        assert max(len(ring.members) for phase in plan.phases for ring in phase.rings if phase.method != "tree") <= 64


@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter", "all_to_all"])
def test_ten_thousand_ranks_in_four_levels(collective):
    """Chosen and proved over classes; only the schedules asked for are expanded."""
    sizes = [[[8] * 8] * 16] * 10
    topology = nested(sizes, [card(80_000, 1e-3), card(40_000, 80e-6), card(10_000), CORE])
    assert topology.world_size == 10_240
    plan = choose(topology, collective, 100 << 20).plan
    prove(plan)
    steps = schedule(plan, 777).instructions
    assert all(peer == 777 or peer in range(10_240) for step in steps for peer in step.peers)
    if collective == "all_reduce":
        assert len(steps) < 100


def test_only_the_outermost_dimensions_can_be_all():
    stages = [Stage(Dimension(("rank",)), ALL, "direct"), Stage(Dimension(("host",)), SPLIT, "direct")]
    with pytest.raises(ValueError, match="mode split stands around mode all"):
        compose(Topology.flat([2, 2]), "all_reduce", stages, 4096)
    with pytest.raises(ValueError, match="needs units of one size"):
        compose(Topology.flat([2, 3]), "all_reduce", [replace(stage, mode=ALL) for stage in stages], 4096)


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (("gossip", 1), "unknown collective 'gossip'"),
        (("all_reduce", -1), "nbytes is -1"),
        (("broadcast", 1, 4), "root is 4; the world has ranks 0 to 3"),
    ],
)
def test_wrong_arguments(arguments, fault):
    with pytest.raises(ValueError, match=fault):
        choose(Topology.flat([2, 2]), *arguments)


def test_a_choice_is_short_in_a_notebook_and_a_table_in_print() -> None:
    choice = choose(Topology.of_hosts(["a"] * 2 + ["b"] * 2), "all_reduce", 1 << 20)
    assert (
        repr(choice)
        == f"<plan {choice.plan.id}: all_reduce of 1 MB over 4 ranks (for sizes up to twice that); print it to see why>"
    )
    assert "rejected" in str(choice)


def test_a_plan_over_links_with_bursts_says_what_they_save() -> None:
    link = replace(card(400), burst=100e3)
    small, large = (str(choose(Topology.flat([2, 2], CORE, link), "all_reduce", size)) for size in (4 << 10, 1 << 20))
    assert "passes at once, in every phase, what takes 1.92 ms at its rate" in small  # 100 kB less the 4 KB of a call
    assert ", in 1 segment, at most" in small
    assert "bursts" not in large


def test_nothing_that_was_rejected_is_shown_as_cheaper() -> None:
    for nbytes in (1 << 10, 1 << 20, 1 << 26):
        for hosts in (["a"] * 4, ["a"] * 3 + ["b"] * 2, list("abcd")):
            shown = str(choose(Topology.of_hosts(hosts), "all_reduce", nbytes))
            assert "-0." not in shown, shown


def test_two_ranks_are_offered_no_method_twice() -> None:
    found = candidates(Topology.of_hosts(["a", "a"]), "all_reduce", 1 << 20)
    methods = {tuple((stage.mode, stage.method) for stage in candidate.stages) for candidate in found}
    assert len(methods) == len(found)
    assert {method for stages in methods for _, method in stages} <= {"direct", "tree"}


def test_any_candidate_can_be_forced_by_its_id():
    topology = nested([[2, 2], [2, 2]], [card(200), card(400), CORE])
    usual = choose(topology, "all_reduce", 1 << 20)
    for candidate in usual.rejected:
        forced = candidate.plan.id
        choice = choose(topology, "all_reduce", 1 << 20, forced=forced)
        assert (choice.plan.id, choice.chosen) == (forced, candidate)
        assert len(choice.rejected) == len(usual.rejected)
        assert usual.chosen in choice.rejected
    assert len({usual.plan.id, *(candidate.plan.id for candidate in usual.rejected)}) > 10
    assert choose(topology, "all_reduce", 1 << 20, forced="0" * 12).plan.id == usual.plan.id
