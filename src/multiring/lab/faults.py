"""Faults of a lab's link while a job runs on it.

Packets are lost where a real network loses them, in the switch, so that a sender learns nothing of it: a host's own
interface stays up. `restore` undoes everything.
"""

from __future__ import annotations

import shutil
import subprocess

from multiring.lab.cluster import Cluster, LabError
from multiring.lab.network import Cable, Port, design, shaping

_LOST = "inet lost"
"""A table of nft, on a host, of what it does not receive."""


def cut(cluster: Cluster, place: str) -> None:
    """Lose all that goes to or comes from a host, rack or site: LabError if there is no link of that name."""
    for cable in _cables(cluster, place):
        _fabric(cluster, "bridge", "link", "set", "dev", cable.outer.interface, "state", "0")


def deafen(cluster: Cluster, place: str) -> None:
    """Lose all that goes to a host, rack or site; what it sends still arrives."""
    for cable in _cables(cluster, place):
        _fabric(cluster, "tc", "qdisc", "replace", "dev", cable.outer.interface, "root", "blackhole")


def part(cluster: Cluster, one: str, other: str, *, both: bool = True, larger_than: int = 0) -> None:
    """Lose all that two hosts send to each other, or only what ``one`` sends to ``other``; all else arrives.

    With ``larger_than`` only packets of more bytes are lost. LabError without the command ``nft``.
    """
    if shutil.which("nft") is None:
        raise LabError("to part two hosts takes the command nft: apt-get install nftables")
    for source, target in ((one, other), (other, one))[: 2 if both else 1]:
        for address in cluster.host(source).addresses:
            which = f"ip saddr {address} " + (f"ip length > {larger_than} " if larger_than else "")
            chain = f"{_LOST} in {{ type filter hook input priority 0; }}"
            rules = f"add table {_LOST}; add chain {chain}; add rule {_LOST} in {which}drop"
            cluster.run(target, "nft", rules)


def throttle(cluster: Cluster, place: str, fraction: float, *, up: bool = True, down: bool = True) -> None:
    """Let the link of a host, rack or site carry a fraction of its rate, both ways or one: ValueError if it is none."""
    if not 0 < fraction <= 1:
        raise ValueError(f"{fraction:g} of the rate of {place}: it must be more than 0, and 1 at most")
    for cable in _cables(cluster, place):
        for port, is_meant in ((cable.inner, up), (cable.outer, down)):
            if is_meant:
                _shape(cluster, port, fraction)


def restore(cluster: Cluster, place: str) -> None:
    """Make the link of a host, rack or site what the topology says, and let a host receive from all others again."""
    for cable in _cables(cluster, place):
        _fabric(cluster, "bridge", "link", "set", "dev", cable.outer.interface, "state", "3")
        for port in (cable.inner, cable.outer):
            _shape(cluster, port, 1.0)
        if cable.inner.host and shutil.which("nft") is not None:
            cluster.run(cable.inner.host, "nft", f"add table {_LOST}; delete table {_LOST}")


def _cables(cluster: Cluster, place: str) -> list[Cable]:
    cables = design(cluster.topology).cables
    found = [cable for cable in cables if cable.place == place]
    if not found:
        known = ", ".join(dict.fromkeys(cable.place for cable in cables))
        raise LabError(f"lab {cluster.name} has no link of {place!r}; it has those of {known}")
    return found


def _shape(cluster: Cluster, port: Port, fraction: float) -> None:
    words = shaping(port, fraction).split()
    words[1] = "replace"
    if port.host:
        cluster.run(port.host, "tc", *words)
    else:
        _fabric(cluster, "tc", *words)


def _fabric(cluster: Cluster, *words: str) -> None:
    entered = ["nsenter", f"--net=/proc/{cluster.keeper}/ns/net", "--"]
    done = subprocess.run([*entered, *words], capture_output=True, text=True)
    if done.returncode:
        raise LabError(f"{' '.join(words)}: {done.stderr.strip()}")
