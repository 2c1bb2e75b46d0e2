"""Probes of labs: the links that were built are found, kept, and used."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import pytest

from multiring import lab
from multiring.lab import Cluster
from multiring.planning import topology_file
from multiring.planning.bound import cut_bound
from multiring.planning.topology import Topology

reason = lab.obstacle()
pytestmark = [pytest.mark.lab, pytest.mark.skipif(reason is not None, reason=str(reason))]

TOPOLOGIES = sorted((Path(__file__).parents[2] / "lab/topologies").glob("*.toml"))

ATTEMPTS = 4
"""Probes of which one must be right: busy cores hold up hosts and make links seem slower than they are."""

TELL = """
import multiring as mr

world = mr.init().world
print(world.topology)
mr.shutdown()
"""


def run(cluster: Cluster, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        cluster.launch_command(*words), env={**os.environ, **environment}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done


def difference(built: Topology, found: Topology) -> float:
    """The largest difference of the cut bounds of any set of hosts."""
    hosts = list(dict.fromkeys(built.hosts))
    worst = 0.0
    for count in range(2, len(hosts) + 1):
        for chosen in combinations(hosts, count):
            bounds = [
                cut_bound(each.restrict([r for r, host in enumerate(each.hosts) if host in chosen]), "all_reduce", 1)
                for each in (built, found)
            ]
            worst = max(worst, abs(bounds[1] / bounds[0] - 1))
    return worst


@pytest.mark.timed
@pytest.mark.parametrize("path", TOPOLOGIES, ids=lambda path: path.stem)
def test_every_set_of_hosts_is_bounded_as_it_was_built(path: Path, tmp_path: Path) -> None:
    built = topology_file.load(path)
    file = tmp_path / "found.toml"
    with lab.up(built) as cluster:
        for _ in range(ATTEMPTS):
            run(cluster, "-m", "multiring.cli.probe_rank", "--output", str(file))
            found = topology_file.load(file)
            assert found.hosts == built.hosts
            if difference(built, found) < 0.1:
                return
    pytest.fail(file.read_text())


def test_a_job_measures_once_and_all_its_ranks_agree(cache: Path) -> None:
    with lab.up(topology_file.load(TOPOLOGIES[0].parent / "uneven.toml")) as cluster:
        first = run(cluster, "-n", "6", sys.executable, "-c", TELL)
        (file,) = cache.rglob("*.toml")
        assert f"kept in {file}" in first.stderr
        file.write_text(file.read_text().replace("400 Mbit/s", "800 Mbit/s"))
        again = run(cluster, sys.executable, "-c", TELL)
        unmeasured = run(cluster, sys.executable, "-c", TELL, MULTIRING_PROBE="off")
        anew = run(cluster, sys.executable, "-c", TELL, MULTIRING_PROBE="refresh")
    for done in (first, again, unmeasured, anew):
        told = {line.partition("] ")[2] or line for line in done.stdout.splitlines()}
        assert len(told) == 1
        assert len(done.stdout.splitlines()) == 6
    assert "measured" not in again.stderr + unmeasured.stderr
    assert "up=100000000.0" in again.stdout
    assert "up=1250000000.0" in unmeasured.stdout
    assert "measured the links of 3 hosts" in anew.stderr
    assert "800 Mbit/s" not in file.read_text()


FROZEN = """
import os, signal, socket, threading, time
import multiring as mr
from multiring.probe import measure

measure.PATIENCE_SECONDS = measure.DRAIN_SECONDS = 0.5
if socket.gethostname() == "c":
    answer = measure.Member.report
    measure.Member.report = lambda member, order: time.sleep(3) if order["do"] == "carry" else answer(member, order)
world = mr.init().world
assert not world.known
print("joined", len(world.topology.levels))
mr.shutdown()
"""


def test_a_job_goes_on_without_measures_and_names_the_host_that_did_not_answer(cache: Path) -> None:
    with lab.up(topology_file.load(TOPOLOGIES[0].parent / "uneven.toml")) as cluster:
        done = run(cluster, sys.executable, "-c", FROZEN)
    assert done.stdout.count("joined 2") == 6
    assert "could not be measured (sending at full speed: host c did not answer)" in done.stderr
    assert not list(cache.rglob("*.toml"))


def test_a_file_that_cannot_be_written_is_one_line(cache: Path, tmp_path: Path) -> None:
    with lab.up(topology_file.load(TOPOLOGIES[0].parent / "uneven.toml")) as cluster:
        words = ["probe", "-H", "a:3,b:1,c:2", "--ssh", str(cluster.ssh), "--output", str(tmp_path)]
        command = cluster.command("a", sys.executable, "-m", "multiring", *words)
        typed = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert typed.returncode == 2
    assert f"multiring probe: --output {tmp_path}: it is a directory" in typed.stderr
    assert not list(cache.rglob("*.toml"))  # nothing was measured
    assert "Traceback" not in typed.stderr


def test_what_the_command_finds_is_what_a_job_can_be_given(cache: Path, tmp_path: Path) -> None:
    file = tmp_path / "found.toml"
    with lab.up(topology_file.load(TOPOLOGIES[0].parent / "uneven.toml")) as cluster:
        words = ["probe", "-H", "a:3,b:1,c:2", "--ssh", str(cluster.ssh), "--output", str(file)]
        command = cluster.command("a", sys.executable, "-m", "multiring", *words)
        typed = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert typed.returncode == 0, typed.stderr
        file.write_text(file.read_text().replace("400 Mbit/s", "800 Mbit/s"))
        for kept in cache.rglob("*.toml"):
            kept.unlink()
        told = run(cluster, "--topology", str(file), sys.executable, "-c", TELL)
    assert [line.split(",")[0] for line in typed.stdout.splitlines()] == ["host a", "host b", "host c"]
    assert "measured" not in told.stderr
    assert "up=100000000.0" in told.stdout
