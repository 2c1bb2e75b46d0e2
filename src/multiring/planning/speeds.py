"""Assumptions of plans about ranks: seconds for each step of their work, and the machines and cores they share."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

SWITCH_SECONDS = 5e-6
"""Seconds from one rank to the next on a core that they share: a call, a switch, and caches that another has filled."""

INTERNAL_WIRE_OVERHEAD = 28e-6
"""Seconds a message between hosts that are one machine: its cores work for both ends, and for what emulates the
network. Measured: benchmarks/results/2026-11-28-constants.md, Planning."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """Seconds that a rank needs to reduce a byte and to handle a further message, and the limits of its engine.

    ``segments`` are the sizes of a segment from which the planner chooses, ``lanes`` the most calls in flight. Planner
    and simulator take the same values, but the simulator ignores ``ranks_per_core`` and ``copy_seconds_per_byte``. The
    defaults are those of the native engine.

    A rank's thread does one thing at a time. Half of a message's overhead is the sender's, half the receiver's; the
    latency of a link holds the overhead of one message.
    """

    gamma: float = 1 / 8e9
    """Seconds in which one core adds a byte of float32 that is in its cache."""

    local_overhead: float = 0.2e-6
    """Seconds a message within a host: a descriptor written and read."""

    wire_overhead: float = 5e-6
    """Seconds a message between hosts: a send and a receive through the kernel."""

    segments: tuple[int, ...] = (64 << 10, 128 << 10, 256 << 10, 512 << 10)
    """Bytes, ascending: smaller ones are mostly overhead, larger ones leave the cache and do not overlap.
    Measured: benchmarks/results/2026-11-28-constants.md, Planning."""

    lanes: int = 8

    ranks_per_core: float = 1.0
    """The most ranks that share a core of any machine; at least 1. They take turns: a rank that waits for another waits
    for a turn of each rank that takes part, and one core does the work of all of them."""

    copy_seconds_per_byte: float = 1 / 16e9
    """Seconds in which a core reads a byte of another rank of the host, to add or to keep it, beyond the time that the
    byte takes to come. 0 where something else than cores moves bytes within a host."""

    def overhead(self, is_local: bool) -> float:
        """Seconds for a further message in a step, between ranks of one host or of several."""
        return self.local_overhead if is_local else self.wire_overhead

    def message_seconds(self, between: float, within: float) -> float:
        """Seconds in which a rank sends or receives ``between`` messages between hosts and ``within`` its own host."""
        return self.ranks_per_core * (between * self.wire_overhead + within * self.local_overhead) / 2

    def scheduling_delay(self, fraction: float) -> float:
        """Seconds until a rank has its core back, beyond the latency of what it waits for.

        ``fraction`` is that of all ranks that are in the rings of the phase.
        """
        return SWITCH_SECONDS * max(1.0, fraction * self.ranks_per_core) if self.ranks_per_core > 1 else 0.0


NATIVE = Speeds()


@dataclass(frozen=True)
class RankPlacement:
    """Host, kernel and CPUs of a rank.

    ``kernel`` names the machine, whose containers may be several hosts; ``cpus`` are those that the rank may use;
    ``quota`` is the CPU time that a cgroup grants the host, in CPUs.
    """

    host: str
    kernel: str
    cpus: frozenset[int]
    quota: float | None = None


def ranks_per_core(placements: Sequence[RankPlacement]) -> float:
    """The most ranks that share a CPU of any machine, or a CPU's time of any host; at least 1.0."""
    sharing: dict[tuple[str, int], float] = {}
    granted: dict[str, float] = {}
    for placement in placements:
        for cpu in placement.cpus:
            sharing[placement.kernel, cpu] = sharing.get((placement.kernel, cpu), 0.0) + 1 / len(placement.cpus)
        granted[placement.host] = min(
            granted.get(placement.host, math.inf), math.inf if placement.quota is None else placement.quota
        )
    ranks = Counter(placement.host for placement in placements)
    return max(1.0, *sharing.values(), *(count / granted[host] for host, count in ranks.items()))


def speeds(placements: Sequence[RankPlacement]) -> Speeds:
    """The speeds of ranks that run in these places."""
    is_internal = len({(placement.kernel, placement.host) for placement in placements}) > len(
        {placement.kernel for placement in placements}
    )
    wire = INTERNAL_WIRE_OVERHEAD if is_internal else NATIVE.wire_overhead
    return replace(NATIVE, ranks_per_core=ranks_per_core(placements), wire_overhead=wire)
