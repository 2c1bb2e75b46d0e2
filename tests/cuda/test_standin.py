"""Buffers on a device, in real processes, with a stand-in for the CUDA driver: what every rank ends with."""

from __future__ import annotations

import pytest
import standin_ranks
import standin_threads
from standins import Standin, run

WORLDS = [
    pytest.param(1, None, id="1"),
    pytest.param(2, None, id="2 shared"),
    pytest.param(3, None, id="3 shared"),
    pytest.param(4, None, id="4 shared"),
    pytest.param(2, "ab", id="2 tcp"),
    pytest.param(4, "aabb", id="4 on two hosts"),
]
FEW = [pytest.param(2, None, id="2 shared"), pytest.param(3, "abb", id="3 on two hosts")]


@pytest.mark.parametrize(("size", "hosts"), WORLDS)
def test_every_collective(standin: Standin, size: int, hosts: str | None) -> None:
    run(standin_ranks.every_collective, size, hosts, standin())


def test_a_call_of_more_chunks_than_slots(standin: Standin) -> None:
    run(standin_ranks.longer_than_the_slots, 2, None, standin(copy_seconds=0.001))


@pytest.mark.parametrize(("size", "hosts"), FEW)
def test_some_ranks_on_devices_and_others_on_the_host(standin: Standin, size: int, hosts: str | None) -> None:
    run(standin_ranks.mixed, size, hosts, standin(copy_seconds=0.001))


@pytest.mark.parametrize(("size", "hosts"), FEW)
def test_many_calls_in_flight_on_two_communicators(standin: Standin, size: int, hosts: str | None) -> None:
    run(standin_ranks.in_flight, size, hosts, standin())


@pytest.mark.parametrize(("size", "hosts"), FEW)
def test_calls_come_in_the_order_of_streams(standin: Standin, size: int, hosts: str | None) -> None:
    run(standin_ranks.order, size, hosts, standin(copy_seconds=0.002))


@pytest.mark.parametrize(("size", "hosts"), FEW)
def test_collectives_complete_while_the_driver_is_locked(standin: Standin, size: int, hosts: str | None) -> None:
    run(standin_ranks.locked, size, hosts, standin(copy_seconds=0.002))


def test_nothing_of_the_driver_is_held_after_shutdown_but_streams(standin: Standin) -> None:
    """One is the caller's. Two are of the communicator and two of its groups, each of which takes the last one's."""
    for held in run(standin_ranks.tidy, 2, None, standin(copy_seconds=0.001)):
        assert held == {"registered": 0, "streams": 5, "events": 0, "contexts": 0}


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_ranks_of_one_process(standin: Standin, size: int) -> None:
    run(standin_threads.every_collective, 1, None, standin(), size)
