"""Strategies of others, as plans: each published one composed of the same words as our own.

A strategy is a name and a function from a topology, a number of bytes and the speeds of ranks to a plan, which runs on
the engine and in the simulator alike. ``double_tree.py`` has the one that is more than a line; ``simulate/forced.py``
puts one in the place of the planner's choice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import isqrt, prod

from . import planner
from .compose import compose
from .cost import LOCAL_WINDOW_BYTES, WIRE_WINDOW_BYTES
from .double_tree import double_tree, equal_hosts
from .layout import Dimension
from .plan import WHOLE, Phase, Plan, Ring
from .speeds import NATIVE, Speeds
from .stages import LEAD, SPLIT, Stage
from .topology import Topology

SEGMENT_BYTES = 256 << 10
"""Bytes of a segment, unless the planner says otherwise."""


@dataclass(frozen=True, slots=True)
class Strategy:
    """A way to sum gradients: who published it, and the plan that it makes for a topology, a number of bytes and the
    speeds of the ranks."""

    name: str
    about: str
    source: str
    make: Callable[[Topology, int, Speeds], Plan]
    by_size: bool = False
    """True if plans for different numbers of bytes differ."""

    def plan(self, topology: Topology, nbytes: int, speeds: Speeds = NATIVE) -> Plan:
        """Its plan; ValueError where the topology cannot have it."""
        return self.make(topology, nbytes, speeds)


def strategy(name: str) -> Strategy:
    """One of ``STRATEGIES``; or ``multiring:4x8x8`` for rings of given sizes, innermost first, or ``masters:16`` for a
    master for so many ranks.

    ValueError for a name that is not known, or that is no collective.
    """
    base, _, sizes = name.partition(":")
    if base == "multiring" and sizes:
        dimensions = parse_dimensions(sizes)
        about = f"rings of {', '.join(map(str, dimensions))} members"
        return Strategy(name, about, STRATEGIES[base].source, partial(_given_rings, dimensions))
    if base == "masters" and sizes:
        (size, *more) = parse_dimensions(sizes)
        if more:
            raise ValueError(f"masters:{sizes}: give the ranks of a group, as in masters:16")
        about = f"reduce in groups of {size}, a ring of masters, broadcast"
        return Strategy(name, about, STRATEGIES[base].source, partial(_grouped_masters, size))
    if name in ASYNCHRONOUS:
        raise ValueError(f"strategy {name!r} is no collective ({ASYNCHRONOUS[name]}): it can be simulated only")
    if base == OUTER:
        raise ValueError(f"strategy {name!r} is no collective (groups that train apart): it can be simulated only")
    if name not in STRATEGIES:
        known = (
            f"{', '.join(STRATEGIES)}, multiring:4x8x8, masters:16; in the simulator also {', '.join(ASYNCHRONOUS)}, "
            f"{OUTER}:rack:50"
        )
        raise ValueError(f"unknown strategy {name!r}; known are {known}")
    return STRATEGIES[name]


def parse_dimensions(text: str) -> tuple[int, ...]:
    """The sizes of ``4x8x8``."""
    parts = text.split("x")
    if not all(re.fullmatch("0*[1-9][0-9]{0,8}", part) for part in parts):
        raise ValueError(f"dimensions are given as 4x8x8, innermost first, not {text!r}")
    return tuple(map(int, parts))


def _flat_ring(topology: Topology, nbytes: int, speeds: Speeds) -> Plan:
    return _composed(topology, [Stage(Dimension(topology.levels), SPLIT, "ring")])


def _leaders_halving(topology: Topology, nbytes: int, speeds: Speeds) -> Plan:
    hosts = len(set(topology.hosts))
    if hosts & (hosts - 1):
        raise ValueError(f"halving and doubling needs a power of two hosts, not {hosts}")
    return _leaders(topology, "halving")


def _leaders_ring(topology: Topology, nbytes: int, speeds: Speeds) -> Plan:
    return _leaders(topology, "ring")


def _leaders(topology: Topology, across: str) -> Plan:
    inside, outside = topology.levels[:1], topology.levels[1:]
    return _composed(topology, [Stage(Dimension(inside), LEAD, "ring"), Stage(Dimension(outside), SPLIT, across)])


def _grouped_masters(size: int, topology: Topology, nbytes: int, speeds: Speeds) -> Plan:
    """A master for several hosts: their leaders reduce to one of them."""
    hosts = equal_hosts(topology)
    width = len(hosts[0])
    if size % width or len(hosts) % (size // width):
        raise ValueError(
            f"groups of {size} are no whole hosts of {width} ranks, or do not divide {len(hosts)} of them equally"
        )
    inside, outside = topology.levels[:1], topology.levels[1:]
    groups = [Stage(Dimension(inside), LEAD, "ring"), Stage(Dimension(outside, size // width), LEAD, "ring")]
    return _composed(topology, [*groups, Stage(Dimension(outside), SPLIT, "ring")])


def _torus(topology: Topology, nbytes: int, speeds: Speeds) -> Plan:
    """Rows of whole hosts, as near to a square as the numbers allow."""
    hosts = equal_hosts(topology)
    ranks = len(hosts[0])
    rows = [ranks * k for k in range(1, len(hosts) + 1) if len(hosts) % k == 0]
    row = min(rows, key=lambda size: (abs(size - isqrt(topology.world_size)), size))
    return _given_rings((row, topology.world_size // row), topology, nbytes, speeds)


def _given_rings(sizes: Sequence[int], topology: Topology, nbytes: int, speeds: Speeds) -> Plan:
    """Rings of these sizes, innermost first; a dimension that does not end with a host runs over hosts and ranks."""
    equal_hosts(topology)
    if prod(sizes) != topology.world_size:
        shown = "x".join(map(str, sizes))
        raise ValueError(f"{shown} is {prod(sizes)} ranks; the topology has {topology.world_size}")
    width = topology.world_size // len(set(topology.hosts))
    done = 1
    cut = next((i for i, size in enumerate(sizes) if (done := done * size) >= width), len(sizes) - 1) + 1
    inner, outer = topology.levels[:1], topology.levels[1:]
    groups = [(inner, sizes[:cut]), (outer, sizes[cut:])] if done == width else [(topology.levels, tuple(sizes))]
    stages = []
    for levels, here in groups:
        here = here or (1,)
        stages += [Stage(Dimension(levels, size), SPLIT, "ring") for size in here[:-1]]
        stages.append(Stage(Dimension(levels), SPLIT, "ring"))
    return _composed(topology, stages)


def _double_tree(topology: Topology, nbytes: int, speeds: Speeds) -> Plan:
    return double_tree(topology, SEGMENT_BYTES, _window(topology))


def _planned(topology: Topology, nbytes: int, speeds: Speeds) -> Plan:
    return planner.plan(topology, "all_reduce", nbytes, speeds=speeds)


def _server(topology: Topology, nbytes: int, speeds: Speeds) -> Plan:
    """A shard of the parameters on every host; all ranks send it their gradients and fetch the sums."""
    size = topology.world_size
    if size == 1:
        return Plan("all_reduce", 1, (), SEGMENT_BYTES)
    first: dict[str, int] = {}
    for rank, host in enumerate(topology.hosts):
        first.setdefault(host, rank)
    ring = Ring(tuple(range(size)), (WHOLE,), tuple(int(first[host] == r) for r, host in enumerate(topology.hosts)))
    level = "+".join(topology.levels)
    phases = (Phase("reduce_scatter", level, "direct", (ring,)), Phase("all_gather", level, "direct", (ring,)))
    return Plan("all_reduce", size, phases, SEGMENT_BYTES, window=_window(topology))


def _composed(topology: Topology, stages: Sequence[Stage]) -> Plan:
    return compose(topology, "all_reduce", stages, SEGMENT_BYTES, window=_window(topology))


def _window(topology: Topology) -> int:
    """Segments in flight: as many bytes as the planner's plans may have."""
    return (LOCAL_WINDOW_BYTES if len(set(topology.hosts)) == 1 else WIRE_WINDOW_BYTES) // SEGMENT_BYTES


_ALL = (
    Strategy("ring", "one ring over all ranks", "Patarasuk and Yuan 2009; Baidu 2017", _flat_ring),
    Strategy(
        "halving",
        "reduce in the host, halving and doubling across, broadcast",
        "Goyal et al. 2017 (arXiv 1706.02677)",
        _leaders_halving,
    ),
    Strategy(
        "masters",
        "reduce in the host, a ring of masters, broadcast",
        "Jia et al. 2018 (arXiv 1807.11205)",
        _leaders_ring,
    ),
    Strategy("torus", "rings along rows and columns of a grid", "Mikami et al. 2018 (arXiv 1811.05233)", _torus),
    Strategy("double-tree", "rings in the host, two binary trees across", "NCCL 2.4 2019", _double_tree),
    Strategy("server", "parameter server, synchronous, a shard on every host", "Li et al. 2014", _server),
    Strategy(
        "multiring",
        "rings in dimensions that the planner chooses",
        "Cho et al. 2017 (arXiv 1708.02188), BlueConnect 2019",
        _planned,
        by_size=True,
    ),
)

STRATEGIES = {each.name: each for each in _ALL}
"""The strategies that are collectives, by name."""

GROUPS = 8
"""Groups of hosts that are synchronous within, as many as Kurth et al. 2017 had."""

ASYNCHRONOUS = {
    "async-server": "parameter server, asynchronous, a shard on every host: DistBelief 2012, Project Adam 2014",
    "groups": f"{GROUPS} synchronous groups, asynchronous between them: Kurth et al. 2017 (arXiv 1708.05256)",
}
"""Strategies that are no collectives: they live in the simulator only."""

OUTER = "outer"
"""Begins the names of strategies that average parameters once in some steps, which the simulator knows, too."""

EXCHANGES_ON_THE_WAY = 4
"""Exchanges of a fragment that such a strategy lets be under way at a time; each keeps a copy of the fragment."""
