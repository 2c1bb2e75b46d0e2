"""What plans assume of the ranks: seconds for each step of their work, and what ranks share where they run."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

SWITCH_SECONDS = 5e-6
"""From one rank to the next on a core that they share: a call, a switch, and caches that the other has filled."""

INTERNAL_WIRE_OVERHEAD = 28e-6
"""A message between hosts that are one machine: its cores work for both ends, and for what emulates the network. Calls
of 4 KB, four or six ranks a core, two to ten such messages of the busiest rank: with it predictions were 7 % off in the
middle, with 20 us 17 %, with 40 16 %."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """Seconds that a rank needs to reduce a byte and to handle a further message, and the limits of its engine.

    ``segments`` are the sizes that it can be given, ``lanes`` the calls that it has in flight at most. Planner and
    simulator take the same values, but the simulator ignores ``ranks_per_core`` and ``copy_seconds_per_byte``. The
    defaults are those of the native engine.

    A rank's thread does one thing at a time. Half of a message's overhead is the sender's, half the receiver's; the
    latency of a link holds the overhead of one message.
    """

    gamma: float = 1 / 8e9
    """One core adding float32 streams that are in its cache."""

    local_overhead: float = 0.2e-6
    """A descriptor written and read."""

    wire_overhead: float = 5e-6
    """A send and a receive through the kernel."""

    segments: tuple[int, ...] = (64 << 10, 128 << 10, 256 << 10, 512 << 10)
    """Bytes, ascending: smaller ones are mostly overhead, larger ones leave the cache and do not overlap (1 MB took
    half as long again as these on two ranks of one host)."""

    lanes: int = 8

    ranks_per_core: float = 1.0
    """The most that share one, on any machine; at least 1. They take turns: whoever waits for another does so for a
    turn of each that takes part, and the messages of all, and what they copy and reduce, are one core's work."""

    copy_seconds_per_byte: float = 1 / 16e9
    """A byte of another rank of the host, added or kept alike, beyond the time that it takes to come: its core passes
    over it. 0 where something else moves the bytes within a host, while cores add."""

    def overhead(self, is_local: bool) -> float:
        """Seconds a further message in a step between ranks of one host, or of several."""
        return self.local_overhead if is_local else self.wire_overhead

    def message_seconds(self, between: float, within: float) -> float:
        """Seconds until a rank has sent or received so many messages between hosts, and within its own."""
        return self.ranks_per_core * (between * self.wire_overhead + within * self.local_overhead) / 2

    def scheduling_delay(self, part: float) -> float:
        """Seconds until a rank has its core back, beyond the latency of what it waits for, where a part of the ranks
        takes part."""
        return SWITCH_SECONDS * max(1.0, part * self.ranks_per_core) if self.ranks_per_core > 1 else 0.0


NATIVE = Speeds()


@dataclass(frozen=True)
class RankPlacement:
    """Where a rank runs: its host; the kernel, whose containers may be several hosts; the CPUs that it may use there;
    and the CPU time that a cgroup grants the host, in CPUs."""

    host: str
    kernel: str
    cpus: frozenset[int]
    quota: float | None = None


def ranks_per_core(placements: Sequence[RankPlacement]) -> float:
    """The most ranks that share a CPU of any machine, or the CPU time of any host; at least 1.0."""
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
    """What the ranks of a job need that have these placements."""
    is_internal = len({(placement.kernel, placement.host) for placement in placements}) > len(
        {placement.kernel for placement in placements}
    )
    wire = INTERNAL_WIRE_OVERHEAD if is_internal else NATIVE.wire_overhead
    return replace(NATIVE, ranks_per_core=ranks_per_core(placements), wire_overhead=wire)
