"""From a topology to the commands that make its network: pure, no root needed."""

from __future__ import annotations

import pytest

from multiring.lab.network import FABRIC, Cable, EmulatedHost, design, shaping, wiring
from multiring.planning.topology import LEVELS, Link, Place, Topology, ranks_in_host

MEGABIT = 1e6 / 8


def link(up: float, down: float | None = None, latency: float = 50e-6) -> Link:
    return Link(up * MEGABIT, (up if down is None else down) * MEGABIT, latency)


def host(name: str, first: int, ranks: int, link: Link) -> Place:
    return Place(name, link, ranks_in_host(range(first, first + ranks)))


def two_racks() -> Topology:
    left = Place("left", link(200, 150), (host("a", 0, 3, link(400)), host("b", 3, 1, link(100, 50))))
    right = Place("right", link(300), (host("c", 4, 2, link(400)),))
    return Topology(LEVELS[:3], (left, right))


def joined(cable: Cable) -> tuple[str, str]:
    return cable.inner.host or cable.inner.switch, cable.outer.switch


def test_hosts_keep_their_order_names_and_ranks() -> None:
    assert design(two_racks()).hosts == (
        EmulatedHost("a", ("10.77.0.1",), 3),
        EmulatedHost("b", ("10.77.0.2",), 1),
        EmulatedHost("c", ("10.77.0.3",), 2),
    )


def test_a_switch_a_rack_and_one_that_joins_them() -> None:
    network = design(two_racks())
    assert network.switches == ("switch0", "switch1", "switch2")
    assert sorted(map(joined, network.cables)) == [
        ("a", "switch1"),
        ("b", "switch1"),
        ("c", "switch2"),
        ("switch1", "switch0"),
        ("switch2", "switch0"),
    ]


def test_the_inner_end_sends_up_and_the_outer_end_down() -> None:
    rates = {joined(cable): (cable.inner.rate, cable.outer.rate) for cable in design(two_racks()).cables}
    assert rates["b", "switch1"] == (100 * MEGABIT, 50 * MEGABIT)
    assert rates["switch1", "switch0"] == (200 * MEGABIT, 150 * MEGABIT)


def test_a_path_is_delayed_by_the_latency_of_its_slowest_link() -> None:
    def rack(name: str, first: int) -> Place:
        hosts = (host(f"{name}{i}", first + i, 1, link(400, latency=1e-3)) for i in range(2))
        return Place(name, link(200, latency=2e-3), tuple(hosts))

    sites = tuple(Place(f"site{i}", link(100, latency=10e-3), (rack(f"r{i}", 2 * i),)) for i in range(2))
    delays = {joined(cable): cable.delay for cable in design(Topology(LEVELS, sites)).cables}
    card, uplink, wide = delays["r00", "switch2"], delays["switch2", "switch1"], delays["switch1", "switch0"]
    assert 2 * card == pytest.approx(1e-3)
    assert 2 * (card + uplink) == pytest.approx(2e-3)
    assert 2 * (card + uplink + wide) == pytest.approx(10e-3)


def test_a_latency_that_the_machine_has_anyway_is_not_added() -> None:
    assert {cable.delay for cable in design(two_racks()).cables} == {0.0}


def test_commands_of_one_host() -> None:
    topology = Topology(LEVELS[:2], (host("a", 0, 1, link(400, 8)),))
    assert list(wiring(design(topology), {"a": "/net/a"}, "reno")) == [
        (
            FABRIC,
            "ip",
            [
                "link add name switch0 type bridge mcast_snooping 0",
                "link set switch0 up",
                "link add name port0 type veth peer name port0in",
                "link set port0in netns /net/a name eth0",
                "link set port0 master switch0 up",
            ],
        ),
        (FABRIC, "tc", ["qdisc add dev port0 root tbf rate 1000000bps burst 70000 limit 400000"]),
        (
            "a",
            "ip",
            [
                "link set lo up",
                "link set eth0 up",
                "address add 10.77.0.1/24 dev eth0 noprefixroute",
                "route add 10.77.0.0/24 dev eth0 src 10.77.0.1 congctl reno",
            ],
        ),
        ("a", "tc", ["qdisc add dev eth0 root tbf rate 50000000bps burst 100000 limit 2500000"]),
    ]


def test_a_token_bucket_holds_the_burst_of_its_link_and_no_less_than_a_packet() -> None:
    def burst(held: float, cards: int = 1) -> tuple[Place, ...]:
        link = Link(cards * 400 * MEGABIT, cards * 100 * MEGABIT, 50e-6, held)
        return (Place("a", link, ranks_in_host([0]), cards=cards),)

    (cable,) = design(Topology(LEVELS[:2], burst(250e3))).cables
    assert (cable.inner.burst, cable.outer.burst) == (250e3, 250e3)
    one, other = design(Topology(LEVELS[:2], burst(160e3, cards=2))).cables
    assert {port.burst for cable in (one, other) for port in (cable.inner, cable.outer)} == {80e3}
    assert "burst 80000 limit" in shaping(one.inner)
    assert "burst 70000 limit" in shaping(one.inner, 0.1)
    measured, _ = design(Topology(LEVELS[:2], burst(80e3, cards=2))).cables  # as it is found of a bucket of 70 kB
    assert (measured.inner.burst, measured.outer.burst) == (70e3, 70e3)
    with pytest.raises(ValueError, match=r"a link of a has a burst of 1.1e\+06 kB; a lab's have 1000000 at most"):
        design(Topology(LEVELS[:2], burst(1.1e9)))


def test_a_delayed_cable_is_not_made_by_ip() -> None:
    topology = Topology(LEVELS[:2], (host("a", 0, 1, link(400, latency=1e-3)),))
    _, _, lines = next(wiring(design(topology), {"a": "/net/a"}, "cubic"))
    assert not any("veth" in line for line in lines)
    assert "link set port0in netns /net/a name eth0" in lines


def test_every_card_has_a_network_and_its_part_of_the_link() -> None:
    two = Place("a", link(800, 400), ranks_in_host([0]), cards=2)
    network = design(Topology(LEVELS[:2], (two, host("b", 1, 1, link(400)))))
    assert [host.addresses for host in network.hosts] == [("10.77.0.1", "10.77.1.1"), ("10.77.0.2",)]
    ports = [(cable.inner.interface, cable.inner.rate, cable.outer.rate) for cable in network.cables[:2]]
    assert ports == [("eth0", 400 * MEGABIT, 200 * MEGABIT), ("eth1", 400 * MEGABIT, 200 * MEGABIT)]


def test_what_a_card_sends_leaves_by_it_and_other_networks_are_reached_by_the_first() -> None:
    two = Place("a", link(800), ranks_in_host([0]), cards=2)
    network = design(Topology(LEVELS[:2], (two, host("b", 1, 1, link(400)))))
    lines = {where: lines for where, tool, lines in wiring(network, {"a": "/a", "b": "/b"}, "reno") if tool == "ip"}
    assert [line for line in lines["a"] if line.startswith(("route", "rule"))] == [
        "route add 10.77.0.0/24 dev eth0 src 10.77.0.1 congctl reno",
        "route add 10.77.1.0/24 dev eth1 src 10.77.1.1 congctl reno",
        "rule add from 10.77.1.1 table 1",
        "route add 10.77.0.0/24 dev eth1 src 10.77.1.1 table 1 congctl reno",
        "route add 10.77.1.0/24 dev eth1 src 10.77.1.1 table 1 congctl reno",
    ]
    assert "route add 10.77.1.0/24 dev eth0 src 10.77.0.2 congctl reno" in lines["b"]


def test_two_places_of_one_name_are_refused() -> None:
    hosts = (host("twin", 0, 1, link(400)), host("twin", 1, 1, link(400)))
    with pytest.raises(ValueError, match="two places of the topology are called 'twin'"):
        design(Topology(LEVELS[:2], hosts))


def test_too_many_hosts_are_refused() -> None:
    with pytest.raises(ValueError, match="has 255 hosts; a lab has at most 254"):
        design(Topology.flat([1] * 255))


@pytest.mark.parametrize(("rate", "shown"), [(4e-6, "4e-06 Mbit/s"), (401e3, "401 Gbit/s")])
def test_links_are_as_fast_as_token_buckets_can_be(rate: float, shown: str) -> None:
    with pytest.raises(ValueError, match=f"a link of b has {shown}; a lab's have 8e-06 Mbit/s to 400 Gbit/s"):
        design(Topology(LEVELS[:2], (host("a", 0, 1, link(400)), host("b", 1, 1, link(rate)))))


@pytest.mark.parametrize("name", ["-a", "Localhost", "10.77.0.2", "a b", "a:2", "a,b", ".", "", "a" * 64])
def test_hosts_have_names_that_stand_on_a_command_line(name: str) -> None:
    with pytest.raises(ValueError, match=f"a host of a lab cannot be called '{name}'"):
        design(Topology(LEVELS[:2], (host(name, 0, 1, link(400)),)))


def test_a_host_has_no_more_cards_than_routing_tables() -> None:
    many = Place("a", link(400), ranks_in_host([0]), cards=251)
    with pytest.raises(ValueError, match="a has 251 cards; a lab's hosts have at most 250"):
        design(Topology(LEVELS[:2], (many,)))
