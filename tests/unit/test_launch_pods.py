"""Options that ``multiring run`` takes from a pod's environment."""

from __future__ import annotations

import pytest

from multiring.job import pet
from multiring.launch import LaunchError, pods
from multiring.launch.pods import PodOptions, completed

POD = {
    "PET_NNODES": "3",
    "PET_NPROC_PER_NODE": "2",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29500",
}
ADDRESS = "job-node-0-0.job:29500"


@pytest.mark.parametrize(
    ("environ", "typed", "expected"),
    [
        ({}, PodOptions(4), PodOptions(4)),
        ({}, PodOptions(), PodOptions()),
        (POD, PodOptions(), PodOptions(6, 3, 1, ADDRESS)),
        (POD, PodOptions(9), PodOptions(9, 3, 1, ADDRESS)),
        (POD, PodOptions(None, 2, 0, "a:1"), PodOptions(4, 2, 0, "a:1")),
        ({}, PodOptions(None, 2, 0, "a:1", 3), PodOptions(6, 2, 0, "a:1", 3)),
        ({}, PodOptions(ranks_per_host=3), PodOptions(3, ranks_per_host=3)),
        (POD, PodOptions(ranks_per_host=4), PodOptions(12, 3, 1, ADDRESS, 4)),
        (POD | {"PET_MASTER_ADDR": "fd00::1"}, PodOptions(), PodOptions(6, 3, 1, "[fd00::1]:29500")),
        (POD | {"PET_NNODES": "1", "PET_NODE_RANK": "0"}, PodOptions(), PodOptions(2)),
        (POD | {"PET_NNODES": "1:1", "PET_NODE_RANK": ""}, PodOptions(), PodOptions(2)),
        ({"PET_NPROC_PER_NODE": "3"}, PodOptions(), PodOptions(3)),
        ({"PET_NPROC_PER_NODE": "3"}, PodOptions(2), PodOptions(2)),
        (POD | {"PET_NPROC_PER_NODE": "auto"}, PodOptions(), PodOptions(15, 3, 1, ADDRESS)),
        (POD | {"PET_NPROC_PER_NODE": "cpu"}, PodOptions(), PodOptions(15, 3, 1, ADDRESS)),
        (POD | {"PET_NPROC_PER_NODE": "gpu"}, PodOptions(6), PodOptions(6, 3, 1, ADDRESS)),
        ({}, PodOptions(4, 2), PodOptions(4, 2)),  # the command says what is missing
    ],
)
def test_options(
    environ: dict[str, str], typed: PodOptions, expected: PodOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pods, "_processors", lambda: 5)
    assert completed(typed, pet.read(environ)) == expected


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"PET_NODE_RANK": "1"}, "PET_NODE_RANK=1 says that other hosts .* PET_NNODES is not set: set it .*, or -H"),
        (POD | {"PET_NNODES": "1"}, "PET_NODE_RANK=1 says that other hosts .* PET_NNODES is 1: set it to"),
        (POD | {"PET_NPROC_PER_NODE": "gpu"}, "PET_NPROC_PER_NODE=gpu: ranks of multiring run on CPUs; give .* -n"),
        (POD | {"PET_NPROC_PER_NODE": "many"}, "PET_NPROC_PER_NODE='many': expected a whole number"),
        (POD | {"PET_NNODES": "1:4"}, "PET_NNODES='1:4': a job has a fixed number of hosts"),
        (POD | {"PET_NODE_RANK": ""}, "PET_NNODES=3 .*: set --host-index or PET_NODE_RANK, or give -H localhost:N"),
        (POD | {"PET_MASTER_PORT": ""}, "set --rendezvous or PET_MASTER_ADDR and PET_MASTER_PORT"),
    ],
)
def test_what_cannot_be_taken_is_named(environ: dict[str, str], message: str) -> None:
    with pytest.raises((LaunchError, ValueError), match=message):
        completed(PodOptions(), pet.read(environ))


def test_a_pod_that_is_not_the_first_is_not_alone_with_typed_ranks() -> None:
    with pytest.raises(LaunchError, match="PET_NODE_RANK=1 says that other hosts"):
        completed(PodOptions(2), pet.read({"PET_NODE_RANK": "1"}))
