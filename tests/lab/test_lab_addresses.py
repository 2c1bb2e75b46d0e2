"""Hosts find each other whatever addresses they have: one that all share, only IPv6, and one way only."""

from __future__ import annotations

import subprocess
import sys

import pytest

from multiring import lab
from multiring.lab import Cluster
from multiring.planning.topology import Topology

reason = lab.obstacle()
pytestmark = [pytest.mark.lab, pytest.mark.skipif(reason is not None, reason=str(reason))]

PROGRAM = """
import os, socket
import numpy as np
import multiring as mr

interface = {interfaces!r}.get(socket.gethostname())
if interface:
    os.environ["MULTIRING_INTERFACE"] = interface
mr.init(init_timeout=20)
x = np.arange(1000) + mr.rank()
mr.all_reduce(x)
size = mr.world_size()
assert (x == size * np.arange(1000) + size * (size - 1) // 2).all()
y = mr.all_to_all(np.arange(size) + 100 * mr.rank())
assert (y == 100 * np.arange(size) + mr.rank()).all()
print("done")
mr.shutdown()
"""


def run(cluster: Cluster, interfaces: dict[str, str]) -> None:
    """Run a job; ``interfaces`` says what MULTIRING_INTERFACE is on a host."""
    program = PROGRAM.format(interfaces=interfaces)
    command = cluster.launch_command(sys.executable, "-c", program)
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done") == 4
    assert "refused" not in done.stderr


def give_all_the_same(cluster: Cluster) -> None:
    """Every host has a bridge with the address that Docker uses everywhere."""
    for host in cluster.hosts:
        cluster.run(host.name, "ip", "link", "add", "name", "docker0", "type", "bridge")
        cluster.run(host.name, "ip", "address", "add", "172.17.0.1/16", "dev", "docker0")
        cluster.run(host.name, "ip", "link", "set", "docker0", "up")


def card(cluster: Cluster, host: str) -> str:
    """The interface that holds the host's address."""
    shown = cluster.run(host, "ip", "-brief", "address").stdout
    return next(
        line.split()[0].partition("@")[0] for line in shown.splitlines() if cluster.host(host).addresses[0] in line
    )


def test_an_address_that_every_host_has() -> None:
    with lab.up(Topology.flat([2, 1, 1])) as cluster:
        give_all_the_same(cluster)
        run(cluster, {})


def test_one_way_is_enough() -> None:
    """The first host is found at no address that leads there, so it must reach the others."""
    with lab.up(Topology.flat([1, 2, 1])) as cluster:
        give_all_the_same(cluster)
        run(cluster, {"host0": "docker0"})


def test_the_other_way_is_enough() -> None:
    with lab.up(Topology.flat([1, 2, 1])) as cluster:
        give_all_the_same(cluster)
        run(cluster, {"host2": "docker0"})


def test_ipv6() -> None:
    with lab.up(Topology.flat([2, 2])) as cluster:
        for number, host in enumerate(cluster.hosts):
            address = f"fd77::{number + 1}/64"
            cluster.run(host.name, "ip", "address", "add", address, "dev", card(cluster, host.name), "nodad")
        run(cluster, {host.name: "fd77::/64" for host in cluster.hosts})
