"""Hosts with several cards: which messages go over which, on connections and in the simulator alike."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import pytest

from multiring.net import auth
from multiring.net.acceptor import Acceptor
from multiring.net.cards import Route, routes_between
from multiring.net.channel import ProvenChannel
from multiring.net.links import Links
from multiring.net.listen import bind
from multiring.net.membership import Membership
from multiring.planning.compose import compose
from multiring.planning.layout import Dimension
from multiring.planning.stages import SPLIT, Stage
from multiring.planning.topology import RANK_LINK, Link, Place, Topology, card_pairs, ranks_in_host
from multiring.simulate import SimulatedCall, simulate, simulate_exactly

MB = 1 << 20


def test_messages_take_turns_over_all_cards_alike() -> None:
    assert card_pairs(1, 1) == [(0, 0)]
    assert card_pairs(2, 2) == [(0, 0), (1, 1)]
    assert card_pairs(2, 1) == [(0, 0), (1, 0)]
    pairs = card_pairs(2, 3)
    assert len(pairs) == 6
    assert {card: sum(a == card for a, _ in pairs) for card in range(2)} == {0: 3, 1: 3}
    assert {card: sum(b == card for _, b in pairs) for card in range(3)} == {0: 2, 1: 2, 2: 2}


def test_both_hosts_number_their_routes_alike() -> None:
    here = [[("10.0.0.1", 5)], [("10.0.1.1", 5)]]
    there = [[("fd00::2", 7), ("10.0.0.2", 7)], [("10.0.1.2", 7)]]
    assert routes_between(here, there) == [Route("10.0.0.1", ("10.0.0.2", 7)), Route("10.0.1.1", ("10.0.1.2", 7))]
    assert routes_between(there, here) == [Route("10.0.0.2", ("10.0.0.1", 5)), Route("10.0.1.2", ("10.0.1.1", 5))]


def test_no_routes_where_one_card_is_all_or_two_cannot_talk() -> None:
    card, other = [("10.0.0.1", 5)], [("fd00::2", 7)]
    assert routes_between([card], [card]) == []
    assert routes_between([card, card], [card, other]) == []
    assert routes_between([], [card, card]) == []


SECRET = b"0123456789abcdef"


class Pair:
    """Two ranks, each listening on two addresses of the loopback network, as if these were cards."""

    def __init__(self, stack: ExitStack) -> None:
        self.attached: dict[int, list[socket.socket]] = {}
        self.sockets = [[bind(f"127.0.{card}.{rank + 1}", None) for card in range(2)] for rank in range(2)]
        self.cards = [[[sock.getsockname()] for sock in mine] for mine in self.sockets]
        for rank in range(2):
            stack.callback(self._close, rank)
        self.links = [self._start(rank, stack) for rank in range(2)]

    def _start(self, rank: int, stack: ExitStack) -> Links:
        def attach(role: int, peer: int, channels: Sequence[ProvenChannel]) -> None:
            self.attached[rank] = [channel.sock for channel in channels]

        addresses = {1 - rank: [card[0] for card in self.cards[1 - rank]]}
        hello = auth.Hello(auth.DATA, rank, job="cards")
        acceptor = Acceptor(self.sockets[rank], SECRET, hello, Membership.at_start(2), addresses, [], 30.0)
        stack.callback(acceptor.close)
        links = Links(acceptor, hello, addresses, 1, attach, lambda rank: f"rank {rank}")
        stack.callback(links.close)
        return links

    def _close(self, rank: int) -> None:
        for sock in self.attached.get(rank, []):
            sock.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    with ExitStack() as stack:
        yield Pair(stack)


@pytest.mark.parametrize("dialling", [0, 1])
def test_a_link_has_a_stream_for_each_pair_of_cards(pair: Pair, dialling: int) -> None:
    for rank, links in enumerate(pair.links):
        links.spread({1 - rank: routes_between(pair.cards[rank], pair.cards[1 - rank])})
    pair.links[dialling].ensure(auth.DATA, [1 - dialling], 10, lambda: None)
    pair.links[1 - dialling].ensure(auth.DATA, [dialling], 10, lambda: None)
    for rank in range(2):
        found = [(sock.getsockname()[0], sock.getpeername()[0]) for sock in pair.attached[rank]]
        assert found == [(f"127.0.{card}.{rank + 1}", f"127.0.{card}.{2 - rank}") for card in range(2)]


def test_where_a_card_leads_nowhere_the_others_are_used(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.1.2", 0))
        routes = [Route("127.0.0.1", pair.cards[1][0][0]), Route("127.0.1.1", closed.getsockname())]
        pair.links[0].spread({1: routes})
        with caplog.at_level(logging.WARNING, logger="multiring"):
            pair.links[0].ensure(auth.DATA, [1], 20, lambda: None)
    assert len(pair.attached[0]) == 1
    assert (
        "rank 0 cannot be linked to rank 1 over the cards 127.0.0.1 - 127.0.0.2, 127.0.1.1 - 127.0.1.2" in caplog.text
    )
    assert "they use one" in caplog.text


def two_cards(*cards: int) -> Topology:
    """Hosts of one rank whose links of 100 MB/s are so many cards each."""
    link = Link(100e6, 100e6, 50e-6)
    hosts = [
        Place(f"h{number}", link, ranks_in_host([number], RANK_LINK), cards=count) for number, count in enumerate(cards)
    ]
    return Topology(("rank", "host"), tuple(hosts))


def seconds(topology: Topology, segment_bytes: int) -> float:
    stages = [Stage(Dimension((level,)), SPLIT, "direct") for level in topology.levels]
    return simulate(
        topology, [SimulatedCall(compose(topology, "all_reduce", stages, segment_bytes, window=8), 8 * MB)]
    ).seconds


def test_many_segments_fill_both_cards_and_one_fills_one() -> None:
    bound = 8 * MB / 100e6
    assert seconds(two_cards(1, 1), 64 << 10) == pytest.approx(bound, rel=0.05)
    assert seconds(two_cards(2, 2), 64 << 10) == pytest.approx(bound, rel=0.1)
    assert seconds(two_cards(2, 1), 64 << 10) == pytest.approx(bound, rel=0.1)
    assert seconds(two_cards(1, 1), 8 * MB) == pytest.approx(bound, rel=0.1)
    assert seconds(two_cards(2, 2), 8 * MB) == pytest.approx(2 * bound, rel=0.1)


def test_loads_are_those_of_the_hosts() -> None:
    topology = two_cards(2, 1)
    stages = [Stage(Dimension((level,)), SPLIT, "direct") for level in topology.levels]
    plan = compose(topology, "all_reduce", stages, 64 << 10, window=8)
    loads = {load.link: load.nbytes for load in simulate_exactly(topology, [SimulatedCall(plan, 8 * MB)]).loads}
    assert loads["host h0 up"] == loads["host h1 down"] == pytest.approx(8 * MB)
    assert set(loads) == {
        f"{level} {way}" for level in ("host h0", "host h1", "rank 0", "rank 1") for way in ("up", "down")
    }
