"""Topologies: how they are made, restricted to a group, and fitted to a job."""

from __future__ import annotations

import pytest
from topologies import CORE, card, nested

from multiring.planning.topology import HOST_LINK, LEVELS, RANK_LINK, Link, Place, Topology, ranks_in_host


def ranks_by_host(topology: Topology) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for rank, host in enumerate(topology.hosts):
        found.setdefault(host, []).append(rank)
    return found


def test_flat_numbers_ranks_from_host_to_host():
    topology = Topology.flat([2, 3])
    assert topology.levels == ("rank", "host")
    assert topology.world_size == 5
    assert ranks_by_host(topology) == {"host0": [0, 1], "host1": [2, 3, 4]}
    assert topology.places[0].link == HOST_LINK
    assert topology.places[1].places[2] == Place("", RANK_LINK, rank=4)


def test_hosts_of_ranks_may_interleave():
    assert ranks_by_host(Topology.of_hosts(["a", "b", "a"])) == {"a": [0, 2], "b": [1]}


def test_a_group_keeps_the_tree_above_its_members():
    topology = nested([[2, 2], [2, 2]], [card(200), card(400), CORE])
    group = topology.restrict([5, 0, 7])
    assert group.levels == topology.levels
    assert group.hosts == ("2-0", "2-0", "2-1")
    assert [[rank for rank in rack.ranks()] for rack in group.places] == [[1], [0, 2]]
    assert [rack.link for rack in group.places] == [rack.link for rack in topology.places]


def test_ranks_by_level():
    topology = nested([[2, 1], [1]], [card(200), card(400), CORE])
    assert topology.ranks_by("rank") == [[0], [1], [2], [3]]
    assert topology.ranks_by("host") == [[0, 1], [2], [3]]
    assert topology.ranks_by("rack") == [[0, 1, 2], [3]]
    assert Topology.of_hosts(["a", "b", "a"]).ranks_by("host") == [[0, 2], [1]]
    with pytest.raises(ValueError, match="level='site': the topology has rank, host, rack"):
        topology.ranks_by("site")


@pytest.mark.parametrize("members", [[], [0, 0], [0, 4], [-1]])
def test_a_group_has_different_ranks_of_the_world(members):
    with pytest.raises(ValueError, match="must be different ranks from 0 to 3"):
        Topology.flat([2, 2]).restrict(members)


def test_a_job_takes_its_places_by_host_name():
    left = Place(
        "left",
        card(200),
        (Place("a", card(400), ranks_in_host([0], CORE)), Place("b", card(100), ranks_in_host([1], CORE))),
    )
    right = Place("right", card(200), (Place("c", card(400), ranks_in_host([2], CORE)),))
    job = Topology(LEVELS[:3], (left, right)).assign(["b", "c", "b"])
    assert ranks_by_host(job) == {"b": [0, 2], "c": [1]}
    assert [rack.name for rack in job.places] == ["left", "right"]
    assert job.places[0].places[0].link == card(100)


def test_a_job_on_an_unknown_host():
    with pytest.raises(ValueError, match="'x'; the topology has only host0, host1: add the host there, or set MULTIR"):
        Topology.flat([1, 1]).assign(["host0", "x"])
    with pytest.raises(ValueError, match=r"the topology has only host0, .*, host15 and 184 more: add the host there"):
        Topology.flat([1] * 200).assign(["x"])


@pytest.mark.parametrize(
    ("levels", "places", "fault"),
    [
        (("rank",), (Place("", CORE, rank=0),), "levels are"),
        (("rank", "rack"), (), "levels are"),
        (("rank", "host"), (), "at least one rank"),
        (("rank", "host"), (Place("a", HOST_LINK),), "host 'a' holds no rank"),
        (
            ("rank", "host"),
            (Place("a", HOST_LINK, (Place("b", HOST_LINK, ranks_in_host([0])),)),),
            "'b' stands where a rank",
        ),
        (("rank", "host"), (Place("a", HOST_LINK, ranks_in_host([0, 0])),), "ranks must be 0 to 1, each once; 0"),
        (("rank", "host"), (Place("a", HOST_LINK, ranks_in_host([0, 2])),), "ranks must be 0 to 1, each once; 2"),
    ],
)
def test_wrong_trees(levels, places, fault):
    with pytest.raises(ValueError, match=fault):
        Topology(levels, places)


@pytest.mark.parametrize("numbers", [(0, 1, 0), (1, -1, 0), (1, 1, -1), (float("nan"), 1, 0)])
def test_links_are_positive(numbers):
    with pytest.raises(ValueError, match="positive bandwidths"):
        Link(*numbers)


def test_the_link_of_each_place_with_the_ranks_that_share_it() -> None:
    cards = [Link(up=1e6 * (host + 1), down=2e6 * (host + 1), latency=0.0) for host in range(3)]
    uplinks = [Link(up=3e6, down=4e6, latency=0.0), Link(up=5e6, down=6e6, latency=0.0)]
    hosts = [Place("abc"[host], cards[host], ranks_in_host([host, 5 - host])) for host in range(3)]
    racks = (Place("r0", uplinks[0], tuple(hosts[:2])), Place("r1", uplinks[1], tuple(hosts[2:])))
    assert list(Topology(LEVELS[:3], racks).links()) == [
        ([0, 1, 4, 5], uplinks[0]),
        ([0, 5], cards[0]),
        ([1, 4], cards[1]),
        ([2, 3], uplinks[1]),
        ([2, 3], cards[2]),
    ]
