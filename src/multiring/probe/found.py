"""From what a survey found to a topology: pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from multiring.planning.topology import HOST_LINK, LEVELS, RANK_LINK, Link, Place, Topology, ranks_in_host
from multiring.probe import classes
from multiring.probe.rounds import Findings
from multiring.probe.tree import Capacity, Group, Node, needed, tree


@dataclass(frozen=True)
class ProbedHost:
    """A host of the job: its name, its ranks, and how many cards it was reached by."""

    name: str
    ranks: tuple[int, ...]
    cards: int = 1


def topology(findings: Findings, hosts: Sequence[ProbedHost]) -> Topology:
    """The topology of some hosts, its numbers rounded to classes. Racks and sites are numbered, since nobody says what
    they are called."""
    bursts = dict(zip(findings.bursts, classes.rates(list(findings.bursts.values())), strict=True))
    findings = replace(findings, hosts=_rounded(findings.hosts), groups=_rounded_groups(findings), bursts=bursts)
    root = tree(
        findings.hosts, findings.groups, needed(findings.hosts, findings.groups, findings.seconds), len(LEVELS) - 1
    )
    return _Builder(findings, hosts, root).topology()


def _rounded(capacities: Sequence[Capacity]) -> tuple[Capacity, ...]:
    rates = classes.rates([rate for each in capacities for rate in (each.out, each.into)])
    return tuple(Capacity(out, into) for out, into in zip(rates[::2], rates[1::2], strict=True))


def _rounded_groups(findings: Findings) -> dict[Group, Capacity]:
    return dict(zip(findings.groups, _rounded(list(findings.groups.values())), strict=True))


class _Builder:
    def __init__(self, findings: Findings, hosts: Sequence[ProbedHost], root: Node):
        self._findings = findings
        self._hosts = hosts
        self._root = root
        self._names = {level: iter(range(1, len(hosts) + 1)) for level in LEVELS}
        nodes = list(_below(root))
        trips = [
            min(findings.seconds[a, b] for a in node.hosts for b in around.hosts - node.hosts) for around, node in nodes
        ]
        latencies = classes.latencies([max(trip / 2, HOST_LINK.latency) for trip in trips])
        self._latency = {node.hosts: latency for (_, node), latency in zip(nodes, latencies, strict=True)}

    def topology(self) -> Topology:
        height = self._root.height
        return Topology(LEVELS[: height + 1], tuple(self._place(node, height) for node in self._root.nodes))

    def _place(self, node: Node, height: int) -> Place:
        """Return the place of a node at a height; a node of less height gets a place of its own with the same link."""
        link = Link(node.capacity.out, node.capacity.into, self._latency[node.hosts], self._burst(node))
        if height == 1:
            host = self._hosts[min(node.hosts)]
            return Place(host.name, link, ranks_in_host(host.ranks, RANK_LINK), cards=host.cards)
        level = LEVELS[height]
        name = f"{level}{next(self._names[level])}"
        inside = node.nodes if node.height == height - 1 else (node,)
        return Place(name, link, tuple(self._place(each, height - 1) for each in inside))

    def _burst(self, node: Node) -> float:
        """Return the bytes that its link passes at once; a host has the value of all other hosts."""
        bursts = self._findings.bursts
        return bursts.get(node.hosts, bursts.get(self._root.hosts - node.hosts, 0.0))


def _below(node: Node) -> Iterator[tuple[Node, Node]]:
    """Every node with the one around it."""
    for inner in node.nodes:
        yield node, inner
        yield from _below(inner)
