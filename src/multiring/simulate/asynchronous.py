"""Training without a common step: workers that exchange with parameter servers, each at its own pace.

A worker computes a gradient, pushes it to the shards of the parameters, one on every host, and fetches them anew;
nobody waits for anybody else. A worker is a rank (DistBelief, Dean et al. 2012; Project Adam, Chilimbi et al. 2014),
or a group of ranks that sum among themselves first (Kurth et al. 2017, arXiv 1708.05256). What it gains in time it
pays in staleness: the updates of others between fetching and pushing.

Hosts are alike, so a byte that a card sends to the shards loads all other cards equally: they stand as one link with
the capacity of all. Many workers are simulated by some of them with their part of that capacity.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import inf

from multiring.planning.speeds import NATIVE, Speeds
from multiring.planning.topology import Link, Place, Topology

from .flows import Flow, Simulation, Use

MOST_WORKERS = 128
"""Most workers that are simulated, if a host has no more; they stand for all."""

CYCLES = 6
"""Cycles of each worker that are simulated; the first half lets the queues fill."""


@dataclass(frozen=True, slots=True)
class WorkerCycle:
    """Mean seconds of a worker's cycle, those in which it computes, and the mean number of updates that it misses."""

    seconds: float
    compute: float
    staleness: float

    @property
    def efficiency(self) -> float:
        """Part of the cycle in which a worker computes."""
        return self.compute / self.seconds


def simulate_servers(topology: Topology, compute: Sequence[float], nbytes: int, speeds: Speeds = NATIVE) -> WorkerCycle:
    """Workers that compute for ``compute`` seconds each, from host to host.

    ValueError unless all hosts are alike and nothing but their own cards lies between them.
    """
    check_hosts(topology)
    return _Servers(topology, compute, nbytes, speeds).run()


class _Servers:
    def __init__(self, topology: Topology, compute: Sequence[float], nbytes: int, speeds: Speeds):
        hosts = len(set(topology.hosts))
        on_host = max(1, len(compute) // hosts)
        shown = min(len(compute), max(1, MOST_WORKERS // on_host) * on_host)
        self._compute = [compute[worker * len(compute) // shown] for worker in range(shown)]
        self._represents = len(compute) / shown
        self._nbytes = nbytes
        host = topology.places[0]
        self._latency = host.link.latency + hosts * speeds.wire_overhead / 2
        network = _Network(host, hosts, hosts / self._represents, speeds)
        self._pushes, self._fetches = zip(*(network.uses(worker // on_host) for worker in range(shown)), strict=True)
        self._simulation = Simulation(network.capacity)
        self._connections = [Flow() for _ in range(shown)]
        self._fetched: list[list[float]] = [[] for _ in range(shown)]
        self._pushed: list[list[float]] = [[] for _ in range(shown)]

    def run(self) -> WorkerCycle:
        for worker, seconds in enumerate(self._compute):
            begin = seconds * worker / len(self._compute)
            self._simulation.at(begin, partial(self._begin, worker))
        self._simulation.run()
        half = CYCLES // 2
        cycles = [(times[-1] - times[half]) / (len(times) - 1 - half) for times in self._fetched]
        mean = sum(cycles) / len(cycles)
        return WorkerCycle(mean, sum(self._compute) / len(self._compute), self._staleness(half))

    def _staleness(self, half: int) -> float:
        """Updates of others between a fetch and the next push, while all workers are at it."""
        pushes = sorted(time for times in self._pushed for time in times)
        end = min(times[-1] for times in self._pushed)
        missed = [
            bisect_left(pushes, pushed) - bisect_left(pushes, fetched)
            for worker in range(len(self._pushed))
            for fetched, pushed in zip(self._fetched[worker][half - 1 :], self._pushed[worker][half:], strict=False)
            if pushed <= end
        ]
        return self._represents * sum(missed) / max(1, len(missed))

    def _begin(self, worker: int) -> None:
        done = self._simulation.now + self._compute[worker]
        self._simulation.at(done, partial(self._push, worker))

    def _push(self, worker: int) -> None:
        arrived = partial(self._fetch, worker)
        self._simulation.send(self._connections[worker], self._pushes[worker], self._nbytes, self._latency, arrived)

    def _fetch(self, worker: int) -> None:
        self._pushed[worker].append(self._simulation.now)
        arrived = partial(self._go_on, worker)
        self._simulation.send(self._connections[worker], self._fetches[worker], self._nbytes, self._latency, arrived)

    def _go_on(self, worker: int) -> None:
        self._fetched[worker].append(self._simulation.now)
        if len(self._fetched[worker]) < CYCLES:
            self._begin(worker)


class _Network:
    """Links by number: all shards' adders and cards as three links, and those of workers and their hosts."""

    def __init__(self, host: Place, hosts: int, shown: float, speeds: Speeds):
        adders = shown / speeds.gamma if speeds.gamma else inf
        self.capacity = [adders, shown * host.link.up, shown * host.link.down]
        self._host = host
        self._remote = (hosts - 1) / hosts
        self._cards: dict[int, int] = {}

    def uses(self, host: int) -> tuple[Use, Use]:
        """A new worker on a host: what its pushes use, and what its fetches use."""
        if host not in self._cards:
            self._cards[host] = self._add(self._host.link)
        card, rank = self._cards[host], self._add(self._host.places[0].link)
        return self._use(0, card, rank), self._use(None, card + 1, rank + 1)

    def _add(self, link: Link) -> int:
        self.capacity += [link.up, link.down]
        return len(self.capacity) - 2

    def _use(self, adders: int | None, card: int, rank: int) -> Use:
        remote = [(link, self._remote) for link in (1, 2, card) if self._remote]
        return Use(((rank, 1.0), *([] if adders is None else [(adders, 1.0)]), *remote))


def check_hosts(topology: Topology) -> None:
    """ValueError for hosts that differ, or that are behind further links than their own."""
    if len(topology.levels) > 2:
        raise ValueError(
            f"asynchronous strategies are simulated without links above the hosts, and here are {topology.levels[-1]}s"
        )
    first, *others = topology.places
    for host in others:
        if (host.link, len(host.places)) != (first.link, len(first.places)):
            raise ValueError(
                f"asynchronous strategies are simulated on hosts that are alike, and {host.name} is not as {first.name}"
            )
