"""A probe in a job that is coming together: one rank of each host connects to those of all others, and they measure."""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from multiring import cache, units
from multiring.errors import RendezvousError
from multiring.files import read_text
from multiring.net.channel import ProvenChannel
from multiring.net.dial import Address
from multiring.net.links import Links
from multiring.planning import topology_file
from multiring.planning.topology import Topology
from multiring.probe.found import ProbedHost, topology
from multiring.probe.measure import Leader, Member, Unresponsive, follow
from multiring.probe.rounds import survey

CONNECT_SECONDS = 3.0
"""Seconds to wait for the connections to all other hosts."""

MORE_SECONDS = 0.5
"""Seconds to wait for the cards beyond the first: an address may lead nowhere."""

MOST_CARDS = 4

MOST_HOSTS = 64
"""Beyond that, connections and rounds take longer than a job should wait for."""

_log = logging.getLogger("multiring")


@dataclass(frozen=True)
class ProbeGroup:
    """The group that measures: the hosts in order, the rank of each that takes part, and the cards that reach it.

    ``cards[h]`` lists the addresses of each card of host h as this rank sees them; ``identity`` tells these hosts from
    others. The first host leads.
    """

    hosts: tuple[ProbedHost, ...]
    mine: int
    cards: tuple[Sequence[Sequence[Address]], ...]
    identity: Sequence[Sequence[str]]

    def rank(self, host: int) -> int:
        """The rank that takes part for a host."""
        return min(self.hosts[host].ranks)

    def reachable_cards(self, host: int, streams: Mapping[int, set[int]]) -> int:
        """Return the number of a host's cards that can be reached, by the streams to it."""
        return max(sum(number <= len(self.cards[host]) for number in numbers) for numbers in streams.values())


def measured(links: Links, group: ProbeGroup, deadline: float) -> str:
    """Measure, and keep and log what was found: as the text of a topology file on the host that leads, "" on others.

    Also "" if it fails, for a job can do without.
    """
    started = time.monotonic()
    try:
        found = probe(links, group, deadline)
        if found is None:
            return ""
        text = topology_file.text(found)
        topology_file.parse(text)  # a host may have a name that no file can hold
    except (Unresponsive, ValueError) as error:
        about: object = error
        if isinstance(error, Unresponsive):
            about = (
                f"{error.step}: {' and '.join(f'host {group.hosts[each].name}' for each in error.hosts)} did not answer"
            )
        _log.warning("the links between the hosts could not be measured (%s); the plan takes them for equal", about)
        return ""
    file = cache.path(group.identity)
    try:
        cache.keep(file, text)
        where = f"kept in {file}"
    except OSError as error:
        where = f"not kept, {error.filename}: {error.strerror}"
    seconds = time.monotonic() - started
    _log.warning("measured the links of %d hosts in %.1f s: %s; %s", len(group.hosts), seconds, summary(found), where)
    return text


def kept_topology(identity: Sequence[Sequence[str]]) -> str:
    """The text of the file that an earlier job kept for these hosts, "" if there is none.

    RendezvousError if what somebody made of it cannot be used.
    """
    file = cache.path(identity)
    try:
        topology_file.load(file).assign([name for name, *_ in identity])
        return read_text(file)
    except OSError:
        return ""
    except ValueError as error:
        raise RendezvousError(f"{error}: correct {file}, or remove it to have the links measured again") from error


def summary(topology: Topology) -> str:
    """A topology in a few words: how many hosts, racks and sites, and the rates of their links."""
    words = []
    places = topology.places
    for level in topology.levels[:0:-1]:
        rates = sorted({bandwidth for place in places for bandwidth in (place.link.up, place.link.down)})
        span = " to ".join(units.rate(each) for each in dict.fromkeys((rates[0], rates[-1])))
        words.append(f"{len(places)} {level}{'s' * (len(places) > 1)} at {span}")
        places = tuple(inner for place in places for inner in place.places)
    return ", ".join(words)


def probe(links: Links, group: ProbeGroup, deadline: float) -> Topology | None:
    """Take part in measuring; the topology on the host that leads, None on others.

    Unresponsive on the host that leads if a host does not do its part; the others learn nothing of it.
    """
    with contextlib.ExitStack() as stack:
        controls, streams = _connect(links, group)
        for control in controls.values():
            stack.enter_context(control)
        for numbered in streams.values():
            for sock in numbered.values():
                stack.enter_context(sock)
        member = Member(group.mine, len(group.hosts), streams)
        if group.mine != 0:
            if 0 in controls:
                follow(member, controls[0], deadline)
            return None
        missing = [host for host in range(1, len(group.hosts)) if host not in controls]
        if missing:
            raise Unresponsive(missing, "connecting to the first host")
        leader = Leader(member, controls)
        try:
            streams_of = leader.agree()
            findings = leader.measure(lambda seconds: survey(len(group.hosts), seconds))
        finally:
            leader.end()
        hosts = (replace(host, cards=group.reachable_cards(n, streams_of[n])) for n, host in enumerate(group.hosts))
        return topology(findings, tuple(hosts))


def _connect(links: Links, group: ProbeGroup) -> tuple[dict[int, ProvenChannel], dict[int, dict[int, socket.socket]]]:
    """The control connections, and the streams to each host, numbered from 1 as its cards or ours."""
    others = [host for host in range(len(group.hosts)) if host != group.mine]
    host_of = {group.rank(host): host for host in others}
    first: dict[tuple[int, int], Sequence[Address]] = {}
    more: dict[tuple[int, int], Sequence[Address]] = {}
    for host in others:
        if 0 in (host, group.mine):
            first[group.rank(host), 0] = [address for card in group.cards[host] for address in card]
        cards = group.cards[host][:MOST_CARDS]
        first[group.rank(host), 1] = cards[0] if cards else ()
        for number in range(2, max(len(cards), min(len(group.cards[group.mine]), MOST_CARDS)) + 1):
            more[group.rank(host), number] = cards[number - 1] if number <= len(cards) else ()
    reached = links.reach(first, CONNECT_SECONDS)
    if more:
        reached |= links.reach(more, MORE_SECONDS)
    controls = {host_of[rank]: channel for (rank, number), channel in reached.items() if number == 0}
    streams: dict[int, dict[int, socket.socket]] = {host: {} for host in others}
    for (rank, number), channel in reached.items():
        if number > 0:
            streams[host_of[rank]][number] = channel.sock
    return controls, streams
