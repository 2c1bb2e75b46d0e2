"""Jobs on the lab: right sums over real TCP, and no more bytes on a link than the topology asks for."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from multiring import lab
from multiring.lab import Cluster
from multiring.planning import topology_file
from multiring.planning.topology import LEVELS, Link, Place, Topology, ranks_in_host

reason = lab.obstacle()
pytestmark = [pytest.mark.lab, pytest.mark.skipif(reason is not None, reason=str(reason))]

TOPOLOGIES = Path(__file__).parents[2] / "lab/topologies"

PROGRAM = """
import os, sys
import numpy as np

import multiring as mr

for given in (False, True):  # by the same ranks: their start takes longer than the rest
    if given:
        os.environ["MULTIRING_TOPOLOGY"] = sys.argv[1]
    mr.init()
    rank, size = mr.rank(), mr.world_size()
    for count in (1, 12345):
        exact = (np.arange(count) % 1009 * (rank + 1)).astype(np.float32)
        mr.all_reduce(exact)
        assert (exact == np.arange(count) % 1009 * (size * (size + 1) // 2)).all()

        inexact = np.random.default_rng(rank).standard_normal(count, np.float32)
        contributions = mr.all_gather(inexact).reshape(size, count)
        mr.all_reduce(inexact)
        assert np.allclose(inexact, contributions.sum(axis=0, dtype=np.float64), atol=1e-5)
        everyones = mr.all_gather(inexact).reshape(size, count)
        assert (everyones == inexact).all(), "ranks differ"
    print("done", "as told" if given else "as found")
    mr.shutdown()
"""

LARGE = """
import numpy as np

import multiring as mr

mr.init()
x = np.full(1 << 20, mr.rank() + 1.0, np.float32)
mr.all_reduce(x)
assert (x == 36).all()
mr.shutdown()
"""


def launch(cluster: Cluster, program: str, *arguments: str, **variables: str) -> str:
    command = cluster.launch_command(sys.executable, "-c", program, *arguments)
    done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", ["racks", "uneven", "two-cards", "sites"])
def test_all_ranks_get_the_sum_with_the_topology_that_they_find_and_that_they_are_told(name: str) -> None:
    topology = topology_file.load(TOPOLOGIES / f"{name}.toml")
    with lab.up(topology) as cluster:
        output = launch(cluster, PROGRAM, str(cluster.directory / "topology.toml"))
    for way in ("as found", "as told"):
        assert output.count(f"done {way}") == topology.world_size, output


def test_uplinks_carry_no_more_than_they_must() -> None:
    with lab.up(topology_file.load(TOPOLOGIES / "racks.toml")) as cluster:
        launch(cluster, LARGE, MULTIRING_TOPOLOGY=str(cluster.directory / "topology.toml"))
        carried = cluster.carried()
    nbytes = 4 << 20
    for rack in ("left", "right"):
        for way in carried[rack]:
            assert nbytes <= way < 1.1 * nbytes


SPARE = """
import os, signal, sys, time
import numpy as np

import multiring as mr

rank, size, replacement = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MULTIRING_REPLACEMENT"))
mr.init()
if not replacement:
    agent = os.getppid()
    try:
        while True:
            x = np.full(1 << 16, rank + 1.0, np.float32)
            mr.all_reduce(x)
            assert (x == size * (size + 1) // 2).all()
            if rank == 2:  # the agent, and all that it started, as when the host is gone
                os.kill(agent, signal.SIGKILL)
    except mr.PeerLost:
        mr.shrink()
while mr.world_size() < size:
    mr.grow()
x = np.arange(5) * (rank + 1)
mr.all_reduce(x)
print("sum", *x, "of", rank, "on", os.uname().nodename, "beside", mr.local_world_size(), flush=True)
mr.shutdown()
"""


def test_a_spare_host_takes_the_place_of_a_lost_one_and_its_links_are_measured() -> None:
    card = Link(up=2.5e7, down=2.5e7, latency=0.0)
    slow = Link(up=5e6, down=5e6, latency=0.0)
    cards = {"a": card, "b": card, "c": slow}
    places = (Place(name, link, ranks_in_host([2 * i, 2 * i + 1])) for i, (name, link) in enumerate(cards.items()))
    with lab.up(Topology(LEVELS[:2], tuple(places))) as cluster:
        words = ["-H", "a:2,b:2", "--spares", "c:2", "--min-ranks", "2", "--max-replacements", "2"]
        run = [sys.executable, "-m", "multiring", "run", *words, "--ssh", str(cluster.ssh), "--python", sys.executable]
        command = cluster.command("a", *run, sys.executable, "-c", SPARE)
        done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank, host in enumerate("aacc"):
        assert f"sum 0 10 20 30 40 of {rank} on {host} beside 2\n" in done.stdout
    assert "ranks 2, 3 of host b start again on host c, replacements 1, 2 of 2\n" in done.stderr
    rates = [float(rate) for rate in re.findall(r"measured the links of 2 hosts .* ([\d.]+) Mbit/s;", done.stderr)]
    assert rates == [pytest.approx(200, rel=0.3), pytest.approx(40, rel=0.3)], done.stderr  # the lesser card tells
