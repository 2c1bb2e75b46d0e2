"""Jobs on the lab: right sums over real TCP, and no more bytes on a link than the topology asks for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from multiring import lab
from multiring.lab import Cluster
from multiring.planning import topology_file

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
