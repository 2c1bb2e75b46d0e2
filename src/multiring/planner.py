"""Choosing a plan for a topology, a collective and a size."""

from __future__ import annotations

from dataclasses import dataclass

from .compose import ALL, LEAD, SPLIT, Stage, compose
from .layout import Dimension
from .plan import Plan
from .topology import Topology

SMALL_BYTES = 64 << 10
SEGMENT_BYTES = 256 << 10


@dataclass(frozen=True)
class Choice:
    """The plan chosen."""

    plan: Plan


def plan(topology: Topology, collective: str, nbytes: int, root: int = 0) -> Plan:
    """The plan for a buffer of ``nbytes`` (all blocks together)."""
    return choose(topology, collective, nbytes, root).plan


def choose(topology: Topology, collective: str, nbytes: int, root: int = 0) -> Choice:
    """Choose a plan for a buffer of ``nbytes`` (all blocks together)."""
    dimensions = [Dimension((level,)) for level in topology.levels]
    if collective == "all_to_all":
        stages = [Stage(Dimension(topology.levels), SPLIT, "direct")]
    elif collective in ("broadcast", "reduce"):
        stages = [Stage(dimension, LEAD, "direct") for dimension in dimensions]
    elif collective in ("all_reduce", "barrier") and nbytes <= SMALL_BYTES:
        stages = [Stage(Dimension(topology.levels), ALL, "direct")]
    else:
        stages = [Stage(dimension, SPLIT, "direct") for dimension in dimensions]
    return Choice(compose(topology, collective, stages, SEGMENT_BYTES, root))
