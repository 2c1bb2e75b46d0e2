"""Where ranks run, what they share there, and what plans must assume of their speeds for it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .cost import INTERNAL_WIRE_OVERHEAD, NATIVE, Speeds


@dataclass(frozen=True)
class Seat:
    """Where a rank runs: its host; the kernel, whose containers may be several hosts; the CPUs that it may use there;
    and the CPU time that a cgroup grants the host, in CPUs."""

    host: str
    kernel: str
    cpus: frozenset[int]
    quota: float | None = None


def ranks_per_core(seats: Sequence[Seat]) -> float:
    """The most ranks that share a CPU of any machine, or the CPU time of any host; at least 1.0."""
    sharing: dict[tuple[str, int], float] = {}
    granted: dict[str, float] = {}
    for seat in seats:
        for cpu in seat.cpus:
            sharing[seat.kernel, cpu] = sharing.get((seat.kernel, cpu), 0.0) + 1 / len(seat.cpus)
        granted[seat.host] = min(granted.get(seat.host, math.inf), math.inf if seat.quota is None else seat.quota)
    ranks = Counter(seat.host for seat in seats)
    return max(1.0, *sharing.values(), *(count / granted[host] for host, count in ranks.items()))


def speeds(seats: Sequence[Seat]) -> Speeds:
    """What the ranks of a job need that have these seats."""
    is_internal = len({(seat.kernel, seat.host) for seat in seats}) > len({seat.kernel for seat in seats})
    wire = INTERNAL_WIRE_OVERHEAD if is_internal else NATIVE.wire_overhead
    return replace(NATIVE, ranks_per_core=ranks_per_core(seats), wire_overhead=wire)
