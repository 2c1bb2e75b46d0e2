"""A kind of host, the network around it, and how fast it trains: every number with where it is from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import log

from multiring.planning.speeds import Speeds
from multiring.planning.topology import LEVELS, Link, Place, Topology, ranks_in_host

from ..models import MODELS, Model

SEGMENTS = (64 << 10, 256 << 10, 1 << 20, 4 << 20, 1 << 30)
"""Bytes of segments that are considered on all machines, as caches are not simulated. The last is a whole buffer."""


@dataclass(frozen=True, slots=True)
class SourcedFigure:
    """A number, its source and year; what nobody published says "assumed", and why."""

    value: float
    source: str
    year: int


@dataclass(frozen=True)
class Machine:
    """A cluster of equal hosts under a network that does not bind, at one or several sites.

    Rates in bytes a second each way, latencies in seconds. ``samples_a_second`` of a rank by model; what is missing
    follows from the nearest model by floating-point operations. ``spread`` is the standard deviation of the speeds of
    equal devices, relative to their mean.
    """

    name: str
    about: str
    ranks: int
    rank_rate: SourcedFigure
    rank_latency: SourcedFigure
    host_rate: SourcedFigure
    host_latency: SourcedFigure
    reduce_rate: SourcedFigure
    message_seconds: SourcedFigure
    samples_a_second: Mapping[str, SourcedFigure]
    spread: SourcedFigure
    sites: int = 1
    site_rate: SourcedFigure | None = None
    site_latency: SourcedFigure | None = None

    def topology(self, hosts: int) -> Topology:
        """The topology of ``hosts`` hosts, in equal parts at the sites."""
        if hosts < 1:
            raise ValueError(f"hosts is {hosts}; a cluster has at least one")
        rank_link = Link(self.rank_rate.value, self.rank_rate.value, self.rank_latency.value)
        host_link = Link(self.host_rate.value, self.host_rate.value, self.host_latency.value)
        places = tuple(
            Place(
                f"{self.name}{host}",
                host_link,
                ranks_in_host(range(host * self.ranks, (host + 1) * self.ranks), rank_link),
            )
            for host in range(hosts)
        )
        if self.site_rate is None or self.site_latency is None:
            return Topology(LEVELS[:2], places)
        if hosts % self.sites:
            raise ValueError(f"{hosts} hosts are not equally many at {self.sites} sites")
        site_link = Link(self.site_rate.value, self.site_rate.value, self.site_latency.value)
        each = hosts // self.sites
        sites = tuple(
            Place(
                f"site{site}",
                site_link,
                (Place(f"site{site}.all", site_link, places[site * each : (site + 1) * each]),),
            )
            for site in range(self.sites)
        )
        return Topology(LEVELS, sites)

    def speeds(self) -> Speeds:
        """Return the speeds of a rank in the simulation."""
        overhead = self.message_seconds.value
        return Speeds(1 / self.reduce_rate.value, overhead, overhead, SEGMENTS, copy_seconds_per_byte=0.0)

    def speed(self, model: Model) -> float:
        """Samples a second that one rank trains on."""
        if model.name in self.samples_a_second:
            return self.samples_a_second[model.name].value
        nearest = min(self.samples_a_second, key=lambda name: abs(log(MODELS[name].flops / model.flops)))
        return self.samples_a_second[nearest].value * MODELS[nearest].flops / model.flops

    def figures(self) -> dict[str, SourcedFigure]:
        """All numbers, by name."""
        found = {name: value for name, value in vars(self).items() if isinstance(value, SourcedFigure)}
        return found | {f"{name} samples a second": figure for name, figure in self.samples_a_second.items()}
