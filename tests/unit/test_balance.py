"""Shares for unequal links."""

from __future__ import annotations

from dataclasses import replace

import pytest
from topologies import CORE, card, nested, unequal

from multiring.planning.balance import fastest_shares, shortest_time
from multiring.planning.layout import canonical
from multiring.planning.topology import LEVELS, Topology


def shares(topology: Topology, depth: int = 2) -> tuple[int, ...] | None:
    whole = canonical(topology)
    return fastest_shares(whole.by_depth[depth - 1][0], whole)


@pytest.mark.parametrize("members", [2, 3, 4, 64])
def test_equal_links_take_twice_all_but_a_share(members):
    assert shortest_time([5.0] * members) == pytest.approx(2 * (members - 1) / members / 5.0)


def test_one_member_needs_no_time():
    assert shortest_time([5.0]) == 0


def test_the_slowest_link_bounds_the_time():
    assert shortest_time([400.0, 400.0, 400.0, 100.0]) == pytest.approx(1 / 100)


def test_equal_links_have_equal_shares():
    assert shares(unequal([400] * 4)) is None


def test_two_members_exchange_the_same_whatever_their_shares():
    assert shares(unequal([400, 100])) is None


def test_the_slowest_of_two_gets_nothing_if_what_it_owned_went_further():
    left, right = nested([[2, 2], [2, 2]], [card(400), card(400), CORE]).places
    slow = replace(left, places=(left.places[0], replace(left.places[1], link=card(100))))
    assert shares(Topology(LEVELS[:3], (slow, right))) == (64, 0)


@pytest.mark.parametrize(
    "cards", [[400, 400, 400, 100], [400, 300, 200], [400, 400, 200, 200], [1000, 10, 10, 10, 10], [40, 39, 41]]
)
def test_shares_reach_the_shortest_time(cards):
    found = shares(unequal(cards))
    assert found is not None
    assert sum(found) == 64
    busy = [(1 + (len(cards) - 2) * share / 64) / c for share, c in zip(found, cards, strict=True)]
    assert shortest_time(cards) <= max(busy) * (1 + 1e-12)
    assert max(busy) < shortest_time(cards) * (1 + len(cards) / 64)
