"""Choice of cards for connections between two hosts of which one has several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from itertools import product

from multiring.net.dial import Address
from multiring.planning.topology import card_pairs


@dataclass(frozen=True)
class Route:
    """A connection's ends: the address of the card that it leaves by, and the one that it goes to."""

    source: str
    address: Address


def routes_between(mine: Sequence[Sequence[Address]], theirs: Sequence[Sequence[Address]]) -> list[Route]:
    """The routes that messages between two hosts take in turn, by the addresses of each card.

    None where neither host has several cards, or two of them have no family of addresses in common.
    """
    if not mine or not theirs:
        return []
    found = [_between(mine[here], theirs[there]) for here, there in card_pairs(len(mine), len(theirs))]
    return [route for route in found if route] if len(found) > 1 and all(found) else []


def _between(mine: Sequence[Address], theirs: Sequence[Address]) -> Route | None:
    for (source, _), address in product(mine, theirs):
        if ip_address(source).version == ip_address(address[0]).version:
            return Route(source, address)
    return None
