"""From what a survey found to a topology: pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from multiring.planning.topology import HOST_LINK, LEVELS, RANK_LINK, Link, Place, Topology, ranks_in_host
from multiring.probe import classes
from multiring.probe.rounds import Findings
from multiring.probe.tree import Branch, Capacity, HostSet, needed, tree


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


def _rounded_groups(findings: Findings) -> dict[HostSet, Capacity]:
    return dict(zip(findings.groups, _rounded(list(findings.groups.values())), strict=True))


class _Builder:
    def __init__(self, findings: Findings, hosts: Sequence[ProbedHost], root: Branch):
        self._findings = findings
        self._hosts = hosts
        self._root = root
        self._names = {level: iter(range(1, len(hosts) + 1)) for level in LEVELS}
        branches = list(_below(root))
        trips = [
            min(findings.seconds[a, b] for a in branch.hosts for b in around.hosts - branch.hosts)
            for around, branch in branches
        ]
        latencies = classes.latencies([max(trip / 2, HOST_LINK.latency) for trip in trips])
        self._latency = {branch.hosts: latency for (_, branch), latency in zip(branches, latencies, strict=True)}

    def topology(self) -> Topology:
        height = self._root.height
        return Topology(LEVELS[: height + 1], tuple(self._place(branch, height) for branch in self._root.branches))

    def _place(self, branch: Branch, height: int) -> Place:
        """Return the place of a branch at a height; a lower branch gets a place of its own with the same link."""
        link = Link(branch.capacity.out, branch.capacity.into, self._latency[branch.hosts], self._burst(branch))
        if height == 1:
            host = self._hosts[min(branch.hosts)]
            return Place(host.name, link, ranks_in_host(host.ranks, RANK_LINK), cards=host.cards)
        level = LEVELS[height]
        name = f"{level}{next(self._names[level])}"
        inside = branch.branches if branch.height == height - 1 else (branch,)
        return Place(name, link, tuple(self._place(each, height - 1) for each in inside))

    def _burst(self, branch: Branch) -> float:
        """Return the bytes that its link passes at once; a host has the value of all other hosts."""
        bursts = self._findings.bursts
        return bursts.get(branch.hosts, bursts.get(self._root.hosts - branch.hosts, 0.0))


def _below(branch: Branch) -> Iterator[tuple[Branch, Branch]]:
    """Every branch with the one around it."""
    for inner in branch.branches:
        yield branch, inner
        yield from _below(inner)
