"""The double binary tree across hosts.

Two trees carry half of the bytes each. A host that has children in one has none in the other, so that its card, busy
with half of the bytes each way in both, is filled; the steps grow with the logarithm of the number of hosts.

::

    8 hosts, first tree          4               second tree: host i stands where 7 - i stands in the first;
    (0 above all)          2           6         of 7 hosts, where i + 1 does, modulo 7
                        1     3     5     7

A tree is a phase of small reductions for each of its heights, and the same of broadcasts on the way back: 2 log2(n)
alpha + 2 S beta once the segments fill it. Sanders, Speck, Traff 2009; NCCL 2.4 2019.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from .plan import WHOLE, Phase, Plan, Ring, Span
from .topology import Topology

_Edge = tuple[int, int]
"""A parent and a child."""


def double_tree(topology: Topology, segment_bytes: int, window: int) -> Plan:
    """Rings reduce in the hosts; ranks with the same local index form two trees over their share of the bytes."""
    hosts = equal_hosts(topology)
    width = len(hosts[0])
    inside = [Ring(host, (WHOLE,)) for host in hosts]
    out, back = [], []
    if width > 1:
        out.append(Phase("reduce_scatter", "rank", "ring", inside))
        back.append(Phase("all_gather", "rank", "ring", inside))
    pieces = inside[0].pieces() if width > 1 else ((WHOLE,),)
    for height in range((len(hosts) - 1).bit_length()):
        rings = list(_rings(hosts, pieces, _edges(len(hosts), height)))
        out.append(Phase("reduce", "host", "direct", rings))
        back.append(Phase("broadcast", "host", "direct", rings))
    return Plan("all_reduce", topology.world_size, (*out, *back[::-1]), segment_bytes, window=window)


def equal_hosts(topology: Topology) -> list[tuple[int, ...]]:
    """The ranks of each host; ValueError if they are not equally many."""
    hosts: dict[str, list[int]] = {}
    for rank, host in enumerate(topology.hosts):
        hosts.setdefault(host, []).append(rank)
    sizes = {len(ranks) for ranks in hosts.values()}
    if len(sizes) > 1:
        raise ValueError(f"hosts have {min(sizes)} to {max(sizes)} ranks; this strategy needs equally many on each")
    return [tuple(ranks) for ranks in hosts.values()]


def _edges(count: int, height: int) -> list[_Edge]:
    """The edges up from the positions that have ``height`` trailing zero bits."""
    bit = 1 << height
    edges = []
    for child in range(bit, count, 2 * bit):
        above = (child ^ bit) | (bit << 1)
        edges.append((above if above < count else child ^ bit, child))
    return edges


def _rings(
    hosts: Sequence[tuple[int, ...]], pieces: Sequence[tuple[Span, ...]], edges: Sequence[_Edge]
) -> Iterator[Ring]:
    last = len(hosts) - 1
    second = (lambda position: last - position) if last % 2 else (lambda position: (position - 1) % len(hosts))
    trees: tuple[Callable[[int], int], ...] = (lambda position: position, second)
    for local, spans in enumerate(pieces):
        for half, host_of in zip(_halves(spans), trees, strict=True):
            children: dict[int, list[int]] = {}
            for parent, child in edges:
                children.setdefault(host_of(parent), []).append(host_of(child))
            for parent, below in children.items():
                yield Ring(tuple([hosts[host][local] for host in (parent, *below)]), half)


def _halves(spans: tuple[Span, ...]) -> Sequence[tuple[Span, ...]]:
    return Ring((0, 1), spans).pieces()
