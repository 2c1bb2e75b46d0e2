"""A card that falls to a tenth of its rate in the middle of a job is named while that lasts, and nothing else is."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fair_time import FAIR
from jobs_under_fault import Job, World, started

from multiring import lab
from multiring.planning.topology import LEVELS, Link, Place, Topology, ranks_in_host

obstacle = lab.obstacle()
pytestmark = [pytest.mark.lab, pytest.mark.skipif(obstacle is not None, reason=str(obstacle))]

CARD = Link(up=5e7, down=5e7, latency=0.0)
CLEAN_SECONDS = 8.0
WITHIN = 40.0
"""Fair seconds until a line is there: with a machine to themselves they take 6."""

NAMED = re.compile(r"^(the links? .*) carr(?:y|ies) .* % of the 50 MB/s that the plan counts on, for \d+ s now$", re.M)
OVER = re.compile(r"^(the links? .*) no longer keeps? the ranks waiting$", re.M)


@pytest.fixture(scope="module")
def cards() -> Iterator[lab.Cluster]:
    """Four hosts with a card of 50 MB/s each."""
    places = tuple(Place(name, CARD, ranks_in_host([rank])) for rank, name in enumerate("abcd"))
    with lab.up(Topology(LEVELS[:2], places), "slow-links") as cluster:
        yield cluster


def await_line(job: Job, line: re.Pattern[str]) -> str:
    """Wait for a line of rank 0, and return the links that it names."""
    began = time.time()
    while not (found := line.search(job.log(0))):
        assert FAIR.between(began, time.time()) < WITHIN, job.log(0)
        assert job.ranks[0].poll() is None, job.log(0)
        time.sleep(0.1)
    return found[1]


@pytest.mark.parametrize(
    ("hosts", "count", "ways", "names"),
    [
        ("abcd", 500_000, {}, r"the links? .*host c.*"),
        ("abcd", 500_000, {"down": False}, r"the links from host c|the link from host c to host [abd]"),
        ("abcd", 500_000, {"up": False}, r"the links to host c|the link from host [abd] to host c"),
        ("abcd", 125_000, {"up": False}, r"the links to host c|the link from host [abd] to host c"),
        ("bc", 500_000, {"down": False}, r"the link from host c to host b"),
        ("bc", 500_000, {"up": False}, r"the link from host b to host c"),
        ("ccdd", 500_000, {}, r"the links between host c and host d|the link from host [cd] to host [cd]"),
    ],
)
def test_a_card_at_a_tenth_of_its_rate_is_named_until_it_is_well(
    hosts: str, count: int, ways: dict[str, bool], names: str, cards: lab.Cluster, tmp_path: Path
) -> None:
    """The other way, whose acknowledgements are late where one alone is slow, is not named."""
    topology = {"MULTIRING_TOPOLOGY": str(cards.directory / "topology.toml")}
    world = World(tuple(hosts), cards)
    with started(world, tmp_path, str(count), environment=topology, program="link_looks.py") as job:
        time.sleep(CLEAN_SECONDS)
        clean = job.log(0)
        lab.throttle(cards, "c", 0.1, **ways)
        try:
            named = await_line(job, NAMED)
        finally:
            lab.restore(cards, "c")
        over = await_line(job, OVER)
        job.write("stop")
        job.end(range(world.size))
        outcomes = [job.outcome(rank) for rank in range(world.size)]
    assert "carr" not in clean
    assert over == named
    assert re.fullmatch(names, named)
    assert "carr" not in "".join(job.log(rank) for rank in range(1, world.size))
    for outcome in outcomes:
        assert outcome["ranks"] == []
        assert outcome["links"], outcome
        for link in [*outcome["links"], *outcome["so_far"]]:
            assert "c" in (link["from"], link["to"])
            assert ways.get("up", True) or link["to"] == "c" != link["from"]
            assert ways.get("down", True) or link["from"] == "c" != link["to"]
            assert link["expected"] == 5e7
            assert 0 < link["bytes_per_second"] < 2.5e7
            assert link["seconds"] > 4
            assert link["both_ways"] == ("between" in link["name"])
        assert named in [link["name"] for link in outcome["so_far"]]


def test_a_job_that_computes_beside_a_slow_card_names_nobody(cards: lab.Cluster, tmp_path: Path) -> None:
    """A call of 64 KB needs 20 ms there, and there is one in 300 ms."""
    topology = {"MULTIRING_TOPOLOGY": str(cards.directory / "topology.toml")}
    world = World(tuple("abcd"), cards)
    with started(world, tmp_path, "8000", pause=0.3, environment=topology, program="link_looks.py") as job:
        lab.throttle(cards, "c", 0.1)
        try:
            time.sleep(2 * CLEAN_SECONDS)
        finally:
            lab.restore(cards, "c")
        job.write("stop")
        job.end(range(world.size))
        outcomes = [job.outcome(rank) for rank in range(world.size)]
    assert [(outcome["links"], outcome["so_far"]) for outcome in outcomes] == [([], [])] * world.size
