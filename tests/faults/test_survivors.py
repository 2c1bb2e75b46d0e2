"""An uplink of a lab is cut in the middle of collectives: one side goes on, the other raises."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs_under_fault import World, started

from multiring import lab
from multiring.planning.topology import LEVELS, Link, Place, Topology, ranks_in_host

obstacle = lab.obstacle()
pytestmark = [pytest.mark.lab, pytest.mark.skipif(obstacle is not None, reason=str(obstacle))]

CARD = Link(up=5e7, down=5e7, latency=0.0)
HEARTBEAT = 3.0


@pytest.mark.parametrize("both", [True, False])
def test_two_hosts_that_cannot_reach_each_other_are_not_both_members(both: bool, tmp_path: Path) -> None:
    """They live, and all others reach both: of ranks 1 and 2, whose hosts exchange bytes in a ring, one goes."""
    places = tuple(Place(name, CARD, ranks_in_host([rank])) for rank, name in enumerate("abcd"))
    with lab.up(Topology(LEVELS[:2], places), "apart") as cluster:
        environment = {
            "MULTIRING_HEARTBEAT_TIMEOUT": f"{HEARTBEAT:g}",
            "MULTIRING_PROBE": "off",
            "MULTIRING_PLAN": "ring",
        }
        world = World(tuple("abcd"), cluster)
        with started(world, tmp_path, "", environment=environment, program="survivors.py") as job:
            lab.part(cluster, "b", "c", both=both)
            job.end(range(4))
            outcomes = [job.outcome(rank) for rank in range(4)]
    assert {outcome["blamed"] for outcome in outcomes} == {"c"}
    for rank in (0, 1, 3):
        assert (outcomes[rank]["members"], outcomes[rank]["hosts"]) == ([0, 1, 3], ["a", "b", "d"])
    assert "this rank can have no part in the next generation" in outcomes[2]["refused"]
    assert max(outcome["seconds"] for outcome in outcomes) < 20


def test_the_larger_side_of_a_cut_goes_on(tmp_path: Path) -> None:
    left = Place("left", CARD, (Place("a", CARD, ranks_in_host([0, 1])), Place("b", CARD, ranks_in_host([4]))))
    right = Place("right", CARD, (Place("c", CARD, ranks_in_host([2, 3])),))
    with lab.up(Topology(LEVELS[:3], (left, right)), "survivors") as cluster:
        world = World(tuple("aaccb"), cluster)
        environment = {"MULTIRING_HEARTBEAT_TIMEOUT": f"{HEARTBEAT:g}", "MULTIRING_PROBE": "off"}
        with started(world, tmp_path, "", environment=environment, program="survivors.py") as job:
            lab.cut(cluster, "right")
            job.end(range(5))
            outcomes = [job.outcome(rank) for rank in range(5)]
    for rank in (0, 1, 4):
        assert outcomes[rank]["blamed"] == "c"
        assert (outcomes[rank]["members"], outcomes[rank]["hosts"]) == ([0, 1, 4], ["a", "a", "b"])
    for rank in (2, 3):
        assert outcomes[rank]["blamed"] in ("a", "b")
        assert "of the 5 ranks only ranks 2-3 were found, in" in outcomes[rank]["refused"]
    assert max(outcome["seconds"] for outcome in outcomes) < 20
