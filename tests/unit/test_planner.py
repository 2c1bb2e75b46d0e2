"""The planner: every plan that it can return is right, and it returns those that experience calls for."""

from __future__ import annotations

import pytest

from multiring.compose import compose
from multiring.interpret import prove_by_classes, prove_in_full
from multiring.plan import COLLECTIVES
from multiring.planner import candidates, choose
from multiring.topology import Topology

HOSTS = [[1], [2], [1, 1], [3], [2, 2], [3, 2], [3, 1, 2], [2] * 5, [5, 1, 4, 2], [4] * 4, [7]]


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("hosts", HOSTS, ids=str)
@pytest.mark.parametrize("nbytes", [64, 1 << 26])
def test_every_candidate_is_proved(hosts, collective, nbytes):
    topology = Topology.flat(hosts)
    root = topology.world_size // 2 if collective in ("broadcast", "reduce") else 0
    for candidate in candidates(topology, collective, nbytes, root):
        plan = compose(topology, collective, candidate.stages, candidate.prediction.segment_bytes, root)
        prove_in_full(plan)
        prove_by_classes(plan)


def test_a_choice_is_the_first_of_the_candidates():
    choice = choose(Topology.flat([2, 2]), "all_reduce", 1 << 20)
    assert [choice.chosen, *choice.rejected] == candidates(Topology.flat([2, 2]), "all_reduce", 1 << 20)
    assert [phase.kind for phase in choice.plan.phases] == [time.kind for time in choice.chosen.prediction.phases]


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (("gossip", 1), "unknown collective 'gossip'"),
        (("all_reduce", -1), "nbytes is -1"),
        (("broadcast", 1, 4), "root is 4; the world has ranks 0 to 3"),
    ],
)
def test_wrong_arguments(arguments, fault):
    with pytest.raises(ValueError, match=fault):
        choose(Topology.flat([2, 2]), *arguments)
