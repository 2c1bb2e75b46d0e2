"""The lab: a cluster on one Linux machine, made from a topology (docs/lab.md).

::

    network.py    what is to be made: namespaces, switches, cables, and the commands for them; pure
    build.py      makes it
    keeper.py     the process that the namespaces live and die with
    forwarder.py  delays the packets of a link
    cluster.py    uses and removes it
    faults.py     cuts and slows its links
"""

from __future__ import annotations

from multiring.lab.build import obstacle, up
from multiring.lab.cluster import NONE_UP, Cluster, LabError, LabHost, clusters, find, remove
from multiring.lab.faults import cut, deafen, part, restore, throttle

__all__ = [
    "NONE_UP",
    "Cluster",
    "LabError",
    "LabHost",
    "clusters",
    "cut",
    "deafen",
    "find",
    "obstacle",
    "part",
    "remove",
    "restore",
    "throttle",
    "up",
]
