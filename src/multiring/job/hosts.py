"""Ranks that have proved to share a host, and what the lowest rank of each does for its host."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from multiring import env, probe
from multiring.errors import RendezvousError
from multiring.job.exchange import Record
from multiring.job.introduction import Introduction
from multiring.net.cards import Route, routes_between
from multiring.net.dial import Address
from multiring.planning import topology_file
from multiring.planning.topology import Topology
from multiring.units import ranges

CONTROL_FANOUT = 4
"""Children of a host in the control tree: depth 5 at 1,024 hosts."""

_log = logging.getLogger("multiring")


@dataclass(frozen=True)
class Proof:
    """Ranks that share a host, and what is known of the links between the hosts."""

    hosts: tuple[str, ...]
    """The host of each rank."""
    topology: str
    """Text of a topology file, from the user or from an earlier measurement; "" if there is none."""
    measure: bool
    """True if the links are to be measured now."""

    def encode(self) -> Record:
        """Return the fields as a record for JSON."""
        return {"hosts": self.hosts, "topology": self.topology, "measure": self.measure}

    @classmethod
    def decode(cls, record: Record) -> Proof:
        """The reverse of `encode`."""
        return cls(tuple(record["hosts"]), record["topology"], record["measure"])


def prove(
    attached: Sequence[Sequence[int]], introductions: Sequence[Introduction], text: str, settings: env.Settings
) -> Proof:
    """Judge by whom each rank has attached; ``text`` is that of the topology file, if there is one.

    RendezvousError if the ranks contradict one another, or what is kept of these hosts cannot be used.
    """
    hosts = _hosts(attached, [introduction.host for introduction in introductions])
    lowest = [introductions[rank] for rank in leaders(hosts)]
    if text and not settings.topology and not set(hosts) <= set(topology_file.parse(text).hosts):
        text = ""  # it was measured before all of these hosts had come
    if text or len(lowest) == 1 or settings.probe == "off" or settings.engine == "mpi":
        return Proof(hosts, text, measure=False)
    if len(lowest) > probe.MOST_HOSTS:
        _log.warning(
            "%d hosts are more than the %d between which links are measured: they are taken for equal; give a topology "
            "file by MULTIRING_TOPOLOGY",
            len(lowest),
            probe.MOST_HOSTS,
        )
        return Proof(hosts, "", measure=False)
    if settings.probe == "refresh":
        return Proof(hosts, "", measure=True)
    elsewhere = len({leader.machine for leader in lowest}) > 1  # else there is no network between them
    text = probe.kept_topology(_identity(introductions, hosts)) if elsewhere else ""
    return Proof(hosts, text, measure=elsewhere and not text)


def _hosts(attached: Sequence[Sequence[int]], names: Sequence[str]) -> tuple[str, ...]:
    """The host of each rank by who attached whom; the second of two hosts that have one name is told apart."""
    groups = [sorted({rank, *peers}) for rank, peers in enumerate(attached)]
    found: dict[int, str] = {}
    for rank, group in enumerate(groups):
        for peer in group:
            if groups[peer] != group:
                raise RendezvousError(
                    f"rank {rank} shares memory with {ranges(group)}, but rank {peer} with {ranges(groups[peer])}: "
                    "give the ranks of one host the same MULTIRING_HOST, and those of others another",
                    rank=rank,
                )
        if group[0] == rank:
            found[rank] = f"{names[rank]}#{rank}" if names[rank] in found.values() else names[rank]
    return tuple(found[group[0]] for group in groups)


def leaders(hosts: Sequence[str]) -> list[int]:
    """The lowest rank of each host."""
    return [hosts.index(host) for host in dict.fromkeys(hosts)]


def control_edges(hosts: Sequence[str], rank: int) -> list[int]:
    """The ranks to which ``rank`` keeps a control connection: the tree over the lowest ranks of the hosts."""
    lowest = leaders(hosts)
    if rank not in lowest:
        return []
    position = lowest.index(rank)
    children = range(CONTROL_FANOUT * position + 1, CONTROL_FANOUT * position + CONTROL_FANOUT + 1)
    edges = [lowest[child] for child in children if child < len(lowest)]
    return [lowest[(position - 1) // CONTROL_FANOUT], *edges] if position else edges


def _identity(introductions: Sequence[Introduction], hosts: Sequence[str]) -> list[list[str]]:
    """Return the texts that tell this set of hosts from others."""
    return [introductions[rank].identity(hosts[rank]) for rank in leaders(hosts)]


def probe_group(introductions: Sequence[Introduction], hosts: Sequence[str], rank: int) -> probe.ProbeGroup:
    """Return the group that measures, as this rank, the lowest of its host, sees it."""
    lowest = leaders(hosts)
    found = tuple(
        probe.ProbedHost(hosts[each], tuple(r for r, host in enumerate(hosts) if host == hosts[each]))
        for each in lowest
    )
    cards = tuple(_cards(introductions, each, rank) for each in lowest)
    return probe.ProbeGroup(found, lowest.index(rank), cards, _identity(introductions, hosts))


def routes_over_cards(introductions: Sequence[Introduction], topology: Topology, rank: int) -> dict[int, list[Route]]:
    """The routes to the ranks of other hosts, over the cards that the topology gives each host."""

    def cards(peer: int) -> list[list[Address]]:
        return _cards(introductions, peer, rank)[: topology.cards[peer]]

    mine = cards(rank)
    others = (peer for peer, host in enumerate(topology.hosts) if host != topology.hosts[rank])
    return {peer: routes_between(mine, cards(peer)) for peer in others}


def _cards(introductions: Sequence[Introduction], peer: int, rank: int) -> list[list[Address]]:
    """The addresses of ``peer`` by card, as ``rank`` sees them; its own as others see them."""
    if peer == rank:
        return introductions[rank].usable_cards()
    return introductions[peer].cards_for(introductions[rank])


def warn_of_missing_cards(introductions: Sequence[Introduction], topology: Topology) -> None:
    """Say which hosts have fewer usable cards than plans count on."""
    for rank in leaders(topology.hosts):
        usable = introductions[rank].usable_cards()
        if max(len(usable), 1) < topology.cards[rank]:
            _log.warning(
                "host %s has %d cards by the topology, but only %d of its interfaces (%s) can be used as equals: plans "
                "count on more than there is. Correct `cards` in the topology file, or see MULTIRING_INTERFACE",
                topology.hosts[rank],
                topology.cards[rank],
                len(usable),
                ", ".join(introductions[rank].fastest) or "none",
            )
