"""From a topology to the network that emulates it: a value, and the commands that make it.

Every host is a network namespace. One more, the fabric, holds the switches: a bridge for every rack and site, and one
that joins the outermost places. A cable carries the link that leads out of a place::

    host a            fabric
    +------+          +----------------------------------------+
    | eth0 =====up===>= port0                                  |
    |      <====down==|   `- switch1 (rack) - port4 ==up==>    |
    +------+          |                       <==down== port5 -  switch0
                      +----------------------------------------+

A cable is a pair of virtual Ethernet interfaces, each of which sends no faster than a token bucket fills. With a
delay, it is a pair of TAP devices with a forwarder between them (``forwarder.py``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from multiring import units
from multiring.planning.topology import Place, Topology

FABRIC = ""
"""Stands where a host's name would, for the namespace of the switches."""

MAX_HOSTS = 254
MAX_CARDS = 250
"""Most cards of a host: each has a network and a routing table of its own, of which 256 have numbers."""

HOST_NAME = re.compile(r"(?!localhost$)(?![0-9.]+$)[a-z0-9_][a-z0-9._-]{0,62}", re.IGNORECASE)
"""Names of hosts that command lines and lists of hosts accept, and that are no addresses."""

RATES = (1.0, 50e9)
"""Lowest and highest rate of a link, bytes a second: token buckets count whole bytes, and their queues hold 4 GB at
most."""
LARGEST_BURST = 1e9

FORWARDER_SECONDS = 50e-6
"""Seconds that a forwarder takes by itself. A delay that is not longer needs none: the way through the kernel takes as
long."""

BURST = (2e-3, 70e3)
QUEUE = (50e-3, 400e3)
"""Seconds of the rate, and fewest bytes, that a queue holds, and a token bucket unless the topology says.

With these a TCP stream gets 96 % of the rate, all that the headers leave. The smallest burst must hold the largest
packet that the kernel passes in one piece, 64 kB.
"""


@dataclass(frozen=True)
class Port:
    """One end of a cable: an interface of a host (with an address) or of the fabric (in a switch)."""

    host: str
    interface: str
    rate: float
    """Bytes a second that it may send."""
    burst: float
    """Bytes that it sends at once after a while without."""
    address: str = ""
    switch: str = ""


@dataclass(frozen=True)
class Cable:
    """The cable of a place's link or of one card of it: its ends, and the seconds it delays a packet, each way."""

    place: str
    inner: Port
    outer: Port
    delay: float


@dataclass(frozen=True)
class EmulatedHost:
    """A host, the addresses of its cards, and how many ranks the topology gives it."""

    name: str
    addresses: tuple[str, ...]
    ranks: int


@dataclass(frozen=True)
class Network:
    """Namespaces, bridges and cables that a lab is made from."""

    hosts: tuple[EmulatedHost, ...]
    switches: tuple[str, ...]
    cables: tuple[Cable, ...]


def design(topology: Topology) -> Network:
    """The network that emulates ``topology``; ValueError if it cannot be emulated."""
    return _Designer(topology).network()


class _Designer:
    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._hosts: list[EmulatedHost] = []
        self._switches: list[str] = []
        self._cables: list[Cable] = []
        self._ports = 0

    def network(self) -> Network:
        self._connect(self._topology.places, len(self._topology.levels) - 1)
        if len(self._hosts) > MAX_HOSTS:
            raise ValueError(f"the topology has {len(self._hosts)} hosts; a lab has at most {MAX_HOSTS}")
        for cable in self._cables:
            for rate in (cable.inner.rate, cable.outer.rate):
                if not RATES[0] <= rate <= RATES[1]:
                    wanted = " to ".join(map(units.rate, RATES))
                    raise ValueError(f"a link of {cable.place} has {units.rate(rate)}; a lab's have {wanted}")
        return Network(tuple(self._hosts), tuple(self._switches), tuple(self._cables))

    def _connect(self, places: tuple[Place, ...], height: int) -> str:
        """A new switch that joins ``places``, which are hosts at height 1."""
        switch = f"switch{len(self._switches)}"
        self._switches.append(switch)
        for place in places:
            if any(cable.place == place.name for cable in self._cables):
                raise ValueError(f"two places of the topology are called {place.name!r}; a lab needs different names")
            if height == 1:
                inner_ports = self._cards(place)
            else:
                inside = self._connect(place.places, height - 1)
                inner_ports = [Port(FABRIC, self._new_port(), *_bucket(place, place.link.up), switch=inside)]
            for inner in inner_ports:
                outer = Port(FABRIC, self._new_port(), *_bucket(place, place.link.down), switch=switch)
                self._cables.append(Cable(place.name, inner, outer, _delay(place, height)))
        return switch

    def _cards(self, host: Place) -> list[Port]:
        if not HOST_NAME.fullmatch(host.name):
            allowed = "at most 63 letters, digits, dots, dashes and underscores, no address and not localhost"
            raise ValueError(f"a host of a lab cannot be called {host.name!r}: use {allowed}")
        if host.cards > MAX_CARDS:
            raise ValueError(f"{host.name} has {host.cards} cards; a lab's hosts have at most {MAX_CARDS}")
        number = len(self._hosts) + 1
        addresses = tuple(f"10.77.{card}.{number}" for card in range(host.cards))
        self._hosts.append(EmulatedHost(host.name, addresses, len(host.places)))
        bucket = _bucket(host, host.link.up)
        return [Port(host.name, f"eth{card}", *bucket, address) for card, address in enumerate(addresses)]

    def _new_port(self) -> str:
        self._ports += 1
        return f"port{self._ports - 1}"


def _bucket(place: Place, rate: float) -> tuple[float, float]:
    """The rate and the burst of one of the cards of a place whose cards have a rate together."""
    rate, burst = rate / place.cards, place.link.burst / place.cards
    seconds, least = BURST
    if burst > LARGEST_BURST:
        most = f"{LARGEST_BURST / 1e3:.0f}"
        raise ValueError(f"a link of {place.name} has a burst of {burst / 1e3:g} kB; a lab's have {most} at most")
    return rate, max(burst or seconds * rate, least)


def _delay(place: Place, height: int) -> float:
    """Seconds that the cable of ``place`` adds to those of the cables inside it.

    A link's latency is that of a message which passes it and none slower: it passes the links of two such places, and
    those inside them, and each side has half of it.
    """
    inside = max((inner.link.latency for inner in place.places), default=0.0) if height > 1 else 0.0
    delay = (place.link.latency - inside) / 2
    return delay if delay > FORWARDER_SECONDS else 0.0


def wiring(network: Network, namespaces: dict[str, str], congestion: str) -> Iterator[tuple[str, str, list[str]]]:
    """The commands that make the network: (host or FABRIC, "ip" or "tc", lines for its ``-batch``), in order.

    ``namespaces`` has the path of every host's network namespace. The TAP devices of delayed cables exist already, in
    the fabric, under the names that `tap_names` gives them. ``congestion`` is the congestion control of TCP.
    """
    yield FABRIC, "ip", [*_switch_lines(network), *_cable_lines(network, namespaces)]
    yield (
        FABRIC,
        "tc",
        [shaping(port) for cable in network.cables for port in (cable.inner, cable.outer) if not port.host],
    )
    networks = [f"10.77.{card}.0/24" for card in range(max(len(host.addresses) for host in network.hosts))]
    for host in network.hosts:
        ports = [cable.inner for cable in network.cables if cable.inner.host == host.name]
        yield host.name, "ip", ["link set lo up", *_card_lines(ports), *_route_lines(ports, networks, congestion)]
        yield host.name, "tc", [shaping(port) for port in ports]


def tap_names(cable: Cable) -> tuple[str, str]:
    """The names of a delayed cable's inner and outer device while both are in the fabric."""
    inner = f"{cable.outer.interface}in" if cable.inner.host else cable.inner.interface
    return inner, cable.outer.interface


def _switch_lines(network: Network) -> Iterator[str]:
    for switch in network.switches:
        yield f"link add name {switch} type bridge mcast_snooping 0"
        yield f"link set {switch} up"


def _cable_lines(network: Network, namespaces: dict[str, str]) -> Iterator[str]:
    for cable in network.cables:
        inner, outer = tap_names(cable)
        if not cable.delay:
            yield f"link add name {outer} type veth peer name {inner}"
        if cable.inner.host:
            yield f"link set {inner} netns {namespaces[cable.inner.host]} name {cable.inner.interface}"
        else:
            yield f"link set {inner} master {cable.inner.switch} up"
        yield f"link set {outer} master {cable.outer.switch} up"


def _card_lines(ports: list[Port]) -> Iterator[str]:
    for port in ports:
        yield f"link set {port.interface} up"
        yield f"address add {port.address}/24 dev {port.interface} noprefixroute"


def _route_lines(ports: list[Port], networks: list[str], congestion: str) -> Iterator[str]:
    """Routes and rules: each network by its own card, else the first; replies leave by the card they came to.

    TCP's congestion control is set by route, since a namespace may only choose among what the machine allows its users.
    """
    for number, network in enumerate(networks):
        port = ports[number] if number < len(ports) else ports[0]
        yield f"route add {network} dev {port.interface} src {port.address} congctl {congestion}"
    for table, port in enumerate(ports[1:], 1):
        yield f"rule add from {port.address} table {table}"
        for network in networks:
            yield f"route add {network} dev {port.interface} src {port.address} table {table} congctl {congestion}"


def shaping(port: Port, fraction: float = 1.0) -> str:
    """Return the arguments of ``tc`` for a port that carries a fraction of its rate."""
    rate = fraction * port.rate
    burst = max(fraction * port.burst, BURST[1])
    queue = max(QUEUE[0] * rate, QUEUE[1])
    return f"qdisc add dev {port.interface} root tbf rate {round(rate)}bps burst {round(burst)} limit {round(queue)}"
