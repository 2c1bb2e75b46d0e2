"""Training steps, parameter servers, and strategies side by side."""

from __future__ import annotations

from dataclasses import replace

import pytest

from multiring.planning.compose import compose
from multiring.planning.layout import Dimension
from multiring.planning.stages import Stage
from multiring.planning.strategies import ASYNCHRONOUS, strategy
from multiring.planning.topology import LEVELS, Link, Topology
from multiring.simulate import SimulatedCall, Speeds, simulate_exactly
from multiring.simulate.apart import SharedLinks, mean_step, parse_exchanges
from multiring.simulate.asynchronous import simulate_servers
from multiring.simulate.compare import NAMES, Training, _every_group, simulate_strategy
from multiring.simulate.machines import machine
from multiring.simulate.models import model
from multiring.simulate.recording import Gradient, Recording
from multiring.simulate.spread import slowest, slowness
from multiring.simulate.training import simulate_step

FREE = Link(1e15, 1e15, 0.0)
CARD = Link(1e9, 1e9, 10e-6)
SIMPLE = Speeds(gamma=0.0, local_overhead=0.0, wire_overhead=0.0)
MB = 1 << 20
HOSTS = Topology.flat([1] * 4, FREE, CARD)
"""An all-reduce of 8 MB takes 12.6 ms."""
SUM = 2 * 3 / 4 * 8 * MB / 1e9


def ring(nbytes: int):
    return strategy("multiring:4").plan(HOSTS, nbytes)


def step_of(gradients: int, seconds: float, **options):
    recording = Recording("r", 0.1, tuple(Gradient(8 * MB, seconds) for _ in range(gradients)))
    return simulate_step(HOSTS, recording, ring, SIMPLE, bucket_bytes=(8 * MB,), **options)


def test_only_the_last_bucket_is_exposed_if_sums_are_faster_than_backward():
    step = step_of(5, 2 * SUM)
    assert step.compute == pytest.approx(0.1 + 10 * SUM)
    assert step.exposed == pytest.approx(SUM, rel=0.02)
    assert step.efficiency == pytest.approx(step.compute / (step.compute + SUM), rel=0.001)


def test_sums_queue_if_backward_is_faster():
    step = step_of(5, SUM / 2)
    assert step.seconds == pytest.approx(0.1 + SUM / 2 + 5 * SUM, rel=0.02)
    assert step.busiest.seconds == pytest.approx(5 * SUM, rel=0.02)


def test_without_overlap_all_sums_are_exposed():
    step = step_of(5, 2 * SUM, overlap=False)
    assert step.exposed == pytest.approx(5 * SUM, rel=0.02)


def test_the_slowest_rank_stretches_the_step():
    plain, stretched = step_of(5, 2 * SUM), step_of(5, 2 * SUM, stretch=1.1)
    assert stretched.slowest == pytest.approx(1.1 * plain.slowest)
    assert stretched.seconds == pytest.approx(1.1 * plain.slowest + SUM, rel=0.01)
    assert stretched.compute == plain.compute


def test_one_rank_does_not_communicate():
    recording = model("resnet50").recording(32, 200)
    step = simulate_step(Topology.flat([1]), recording, lambda n: strategy("ring").plan(Topology.flat([1]), n))
    assert step.seconds == pytest.approx(0.16)
    assert step.efficiency == pytest.approx(1.0)
    assert step.busiest is None


def test_the_slowest_of_many_is_as_far_out_as_statistics_say():
    assert slowest(1, 0.02) == 1.0
    for ranks, deviations in ((10, 1.54), (100, 2.51), (1000, 3.24)):  # expected largest of so many normal values
        assert slowest(ranks, 0.02) == pytest.approx(1 + 0.02 * deviations, abs=5e-4)
    assert sum(slowness(place, 100, 0.02) for place in range(100)) == pytest.approx(100)


def test_a_lone_worker_pushes_and_fetches():
    pace = simulate_servers(Topology.flat([1] * 4, FREE, CARD), [0.1], 8 * MB, SIMPLE)
    remote = 3 / 4 * 8 * MB / 1e9
    assert pace.seconds == pytest.approx(0.1 + 2 * (remote + 10e-6))
    assert pace.staleness == 0


def test_many_workers_fill_the_cards():
    busy = simulate_servers(Topology.flat([8] * 4, FREE, CARD), [0.01] * 32, 8 * MB, SIMPLE)
    assert busy.seconds == pytest.approx(2 * 8 * 3 / 4 * 8 * MB / 1e9, rel=0.15)  # pushes and fetches of 8 a card
    idle = simulate_servers(Topology.flat([8] * 4, FREE, CARD), [10.0] * 32, 8 * MB, SIMPLE)
    assert idle.efficiency > 0.99
    assert idle.staleness == pytest.approx(31, rel=0.1)  # all others update once while one computes


def test_nobody_waits_for_a_slow_worker():
    compute = [0.1] * 7 + [1.0]
    pace = simulate_servers(Topology.flat([1] * 8, FREE, CARD), compute, MB, SIMPLE)
    assert pace.seconds == pytest.approx(sum(compute) / 8, rel=0.05)


@pytest.mark.parametrize("name", ["async-server", "groups"])
def test_asynchronous_strategies_need_equal_hosts_under_one_network(name):
    far = training("two-sites", 4)
    assert simulate_strategy(far, name).seconds is None
    assert simulate_strategy(far, name).note.endswith("without links above the hosts, and here are sites")
    first, *others = training("commodity", 4).topology.places
    slow = replace(first, link=Link(1e6, 1e6, 50e-6))
    uneven = replace(far, topology=Topology(LEVELS[:2], (slow, *others)))
    assert simulate_strategy(uneven, name).note.endswith("alike, and commodity1 is not as commodity0")


def test_every_host_is_in_a_group():
    steps = {hosts: simulate_strategy(training("commodity", hosts), "multiring").seconds for hosts in (1, 2)}
    paces = _every_group(training("commodity", 11))
    assert paces == [steps[2]] * 3 + [steps[1]] * 5


def training(name: str, hosts: int, **options) -> Training:
    host = machine(name)
    recording = model("resnet50").recording(32, host.speed(model("resnet50")))
    return Training(host.topology(hosts), recording, host.speeds(), **options)


@pytest.mark.parametrize("name", NAMES)
def test_every_strategy_has_a_result(name):
    result = simulate_strategy(training("big-basin", 4), name)
    assert 0.3 < result.efficiency < 1
    waits = name not in ASYNCHRONOUS
    assert result.exposed == (pytest.approx(result.seconds - 32 / 195) if waits else None)


def test_a_strategy_that_does_not_fit_says_why():
    result = simulate_strategy(training("minsky", 6), "halving")
    assert result.seconds is None
    assert result.note == "halving and doubling needs a power of two hosts, not 6"


GROUPS_OF_TWO = Topology.of_hosts(list("aabbcc"), CARD, Link(1e8, 1e8, 10e-6))
PARAMETERS = Recording("r", 0.1, (Gradient(48 * MB, 0.2),))
WITHIN = 48 * MB / 1e9
"""Seconds in which the two ranks of a host sum: each sends half and gets half, twice."""
BETWEEN = 2 * 2 / 3 * 48 * MB / 1e8
"""Seconds of an exchange over the hosts' links, of all parameters."""


@pytest.mark.parametrize(
    ("name", "seconds"),
    [
        ("outer:host:50", 0.3 + WITHIN + BETWEEN / 50),
        ("outer:host:10", 0.3 + WITHIN + BETWEEN / 10),
        ("outer:host:10:4", 0.3 + WITHIN + BETWEEN / 10),
        ("outer:host:10:1:1", 0.3 + WITHIN + (BETWEEN - 0.3 - WITHIN) / 10),
        ("outer:host:10:1:2", 0.3 + WITHIN + max(0, BETWEEN - 2 * (0.3 + WITHIN)) / 10),
        ("outer:host:10:4:1", 0.3 + WITHIN),  # a fragment of 12 MB is there before a step is over
        ("outer:rank:10:4:1", 0.3),
        ("outer:host:1:1:1", BETWEEN),  # each waits for the one before it
        ("outer:host:1:1:3", BETWEEN),  # the links are never idle
        ("outer:host:2:1:7", 0.3 + WITHIN),  # they carry an exchange in two steps
        ("outer:host:4:4:15", 0.3 + WITHIN),
    ],
)
def test_groups_wait_for_their_own_sums_and_for_what_is_left_of_exchanges(name, seconds):
    result = simulate_strategy(Training(GROUPS_OF_TWO, PARAMETERS, SIMPLE), name)
    assert result.seconds == pytest.approx(seconds, rel=0.01)
    assert result.exposed == pytest.approx(result.seconds - 0.3)
    assert result.efficiency == pytest.approx(0.3 / result.seconds)


@pytest.mark.parametrize(
    ("words", "alone", "work", "seconds"),
    [
        ("10:1:9", 14, 14, 1.5),  # 9 steps and 5 seconds more, then the tenth step
        ("10:1:15", 14, 6, 1.0),  # the second exchange begins when the first needs no link
        ("10:1:15", 12, 12, 1.2),  # as fast as the links are
        ("10:1:39", 12, 12, 1.2),
        ("10:1:20", 40, 1, 2.0),  # two are on their way, the third waits for the first
        ("10:1:15", 40, 1, 2.25),  # two times 5 steps lie between 40 seconds, in which two exchanges end, less 5 steps
        ("4:2:3", 2.5, 2.5, 1.25),
        ("4:2:0", 2.5, 1, 2.25),
        ("3:2:11", 1.5, 1.5, 1.0),  # after 1 step and after 2, in turns
    ],
)
def test_exchanges_that_overlap_share_the_links(words, alone, work, seconds):
    assert mean_step(parse_exchanges(f"outer:host:{words}"), 1.0, alone, work) == pytest.approx(seconds)


def test_exchanges_share_links_as_simulated_calls_do():
    topology = Topology.flat([1] * 4, Link(1e15, 1e15, 0.0), Link(1e9, 1e9, 20e-6))
    plan = compose(topology, "all_reduce", [Stage(Dimension(topology.levels), "split", "direct")], 256 << 10)

    def ends(begins: list[float]) -> tuple[float, ...]:
        return simulate_exactly(topology, [SimulatedCall(plan, 8 * MB, begin) for begin in begins], SIMPLE).ended

    alone, (_, both) = ends([0.0])[0], ends([0.0, 0.0])
    begins = [0.0, alone / 2, alone * 0.9, alone * 4, alone * 4.1]
    links = SharedLinks(both - alone, alone - (both - alone))
    for number, begin in enumerate(begins):
        links.begin(number, begin)
    assert [links.end(number) for number in range(5)] == pytest.approx(ends(begins), rel=0.05)


def test_the_slowest_group_is_waited_for():
    slow = GROUPS_OF_TWO.places[1]
    slow = replace(slow, places=tuple(replace(rank, link=Link(1e8, 1e8, 10e-6)) for rank in slow.places))
    first, _, last = GROUPS_OF_TWO.places
    result = simulate_strategy(
        Training(Topology(LEVELS[:2], (first, slow, last)), PARAMETERS, SIMPLE, spread=0.02), "outer:host:10:4:1"
    )
    assert result.seconds == pytest.approx(0.3 * slowest(6, 0.02) + 10 * WITHIN, rel=0.01)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("outer:rack:50", "the topology has the levels rank, host, and no rack"),
        ("outer:host:50", "all ranks are on one host, so there is nobody to exchange parameters with"),
    ],
)
def test_groups_that_are_none_have_no_result(name, why):
    result = simulate_strategy(Training(Topology.flat([4]), PARAMETERS, SIMPLE), name)
    assert (result.seconds, result.note) == (None, why)


def test_spread_costs_what_the_slowest_rank_does():
    plain, spread = (simulate_strategy(training("minsky", 8, spread=s), "multiring") for s in (0.0, 0.02))
    assert spread.seconds / plain.seconds == pytest.approx(slowest(32, 0.02), rel=0.01)


def test_more_bandwidth_shortens_the_step():
    here = training("commodity", 8)
    faster = Topology.flat([2] * 8, here.topology.places[0].places[0].link, Link(1e10, 1e10, 50e-6))
    before, after = (simulate_strategy(t, "multiring") for t in (here, replace(here, topology=faster)))
    assert after.exposed < 0.5 * before.exposed


def test_ten_thousand_ranks():
    result = simulate_strategy(training("dgx1", 1280), "multiring")
    assert 0.9 < result.efficiency < 1
    assert result.busiest.link.startswith("host")
