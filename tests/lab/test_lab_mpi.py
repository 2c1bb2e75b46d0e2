"""Open MPI over the hosts of a lab: it starts the ranks, which meet by it, and either engine moves the data."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from multiring import lab
from multiring.bench import peers
from multiring.lab.peers import start
from multiring.planning import topology_file

reasons = [lab.obstacle(), peers.remedy("openmpi")]
pytestmark = [
    pytest.mark.lab,
    *(pytest.mark.skipif(reason is not None, reason=str(reason)) for reason in reasons),
]

RACKS = Path(__file__).parents[2] / "lab/topologies" / "racks.toml"

PROGRAM = """
import sys

import numpy as np

import multiring as mr

communicator = mr.init(engine=sys.argv[1], probe="off", init_timeout=60)
rank, size = mr.rank(), mr.world_size()
index = np.arange(50_000.0)
x = index * (rank + 1)
mr.all_reduce(x)
assert (x == index * (size * (size + 1) // 2)).all()
gathered = mr.all_gather(np.array([rank, 7 * rank]))
assert gathered.tolist() == [[each, 7 * each] for each in range(size)]
sent = sum(counted["bytes_sent"] for counted in mr.stats()["peers"].values())
print(f"rank {rank} on {communicator.hosts[rank]}, {type(communicator.world.engine).__module__} sent {sent > 0}")
mr.shutdown()
"""


@pytest.mark.parametrize(
    ("engine", "module"), [("native", "multiring._native"), ("mpi", "multiring.runtime.mpi.engine")]
)
def test_open_mpi_starts_the_ranks_of_all_hosts(engine: str, module: str) -> None:
    topology = topology_file.load(RACKS)
    with lab.up(topology) as cluster:
        command = start(cluster, "openmpi", ["-c", PROGRAM, engine])
        words, environment = command.words, command.environment
        done = subprocess.run(words, env={**os.environ, **environment}, capture_output=True, text=True, timeout=100)
        carried = cluster.carried()
    assert done.returncode == 0, done.stdout + done.stderr
    for rank, host in enumerate(topology.hosts):
        assert f"rank {rank} on {host}, {module} sent True" in done.stdout
    for rack in ("left", "right"):
        for way in carried[rack]:
            assert way >= 400_000  # a rack sends its sum of 50,000 float64, and receives the other's
