"""Measuring the links between hosts, to find the topology that no file gives (docs/topology.md).

::

    rounds.py    what is measured, round by round: pure
    classes.py   measured numbers rounded, so that tomorrow's are the same: pure
    tree.py      which hosts share a link: pure
    found.py     from all that to a topology: pure
    measure.py   performs the rounds over connections
    meeting.py   makes the connections, in a job that is coming together
"""

from __future__ import annotations

from multiring.probe.found import ProbedHost
from multiring.probe.meeting import MOST_HOSTS, ProbeGroup, kept_topology, measured

__all__ = ["MOST_HOSTS", "ProbeGroup", "ProbedHost", "kept_topology", "measured"]
