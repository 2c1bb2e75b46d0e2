"""Every collective in real processes: shared memory, TCP forced on one host, and hosts of unequal size."""

from __future__ import annotations

from typing import Any

import collectives
import jobs
import pytest

from multiring import planner
from multiring.topology import Topology

WORLDS = [
    pytest.param(1, None, id="1"),
    pytest.param(2, None, id="2 shared"),
    pytest.param(3, None, id="3 shared"),
    pytest.param(4, None, id="4 shared"),
    pytest.param(5, None, id="5 shared"),
    pytest.param(8, None, id="8 shared"),
    pytest.param(2, "ab", id="2 tcp"),
    pytest.param(3, "abc", id="3 tcp"),
    pytest.param(5, "abbac", id="5 on uneven hosts"),
    pytest.param(8, "aaabbbbc", id="8 on uneven hosts"),
]


def run(program: Any, size: int, hosts: str | None, *arguments: Any, **options: Any) -> list[Any]:
    return jobs.run(program, size, *arguments, hosts=hosts and list(hosts), **options)


@pytest.mark.parametrize(("size", "hosts"), WORLDS)
def test_every_collective(size: int, hosts: str | None) -> None:
    bits = run(collectives.grid, size, hosts, 100_003 if size < 5 else 20_011)
    assert len(set(bits)) == 1


@pytest.mark.parametrize(("size", "hosts"), [(3, None), (3, "abc"), (5, "abbac")])
def test_what_is_not_one_plan(size: int, hosts: str | None) -> None:
    run(collectives.others, size, hosts)


def test_groups() -> None:
    evens, odds = 0b10101, 0b01010
    assert run(collectives.groups, 5, "aabbb") == [
        [[evens, 0b00011, 0b00101, 0b01001, 0b10001, 4], [0, 3]],
        [[odds, 0b00011, 3], [0, 2]],
        [[evens, 0b00101], [1, 3]],
        [[odds, 0b01001, 3], [1, 2]],
        [[evens, 0b10001, 4], [2, 3]],
    ]


@pytest.mark.parametrize("hosts", [None, "ab"])
def test_ten_thousand_collectives_keep_memory_and_descriptors_flat(hosts: str | None) -> None:
    for kilobytes, descriptors in run(collectives.flat, 2, hosts, 10_000, timeout=110):
        assert kilobytes < 4096
        assert descriptors == 0


def test_streams_and_a_range_of_ports() -> None:
    environment = {"MULTIRING_STREAMS": "3", "MULTIRING_PORTS": "28700-28799"}
    run(collectives.grid, 2, "ab", 300_000, environment=environment)


def test_float32_travels_narrow_between_hosts_if_asked_for() -> None:
    exact = 3 * (1 + 1 / 512)
    assert run(collectives.narrow, 3, "aab") == [[exact, exact]] * 3
    # bfloat16 keeps 8 bits: 2 + 1/256 of host a becomes 2, 1 + 1/512 of host b 1. float16 keeps 11, which is enough.
    for wire, sum_ in (("bfloat16", 3.0), ("float16", exact)):
        assert run(collectives.narrow, 3, "aab", environment={"MULTIRING_WIRE": f"host={wire}"}) == [[exact, sum_]] * 3


def test_a_plan_is_forced_by_its_id() -> None:
    topology = Topology.of_hosts(list("aab"))
    usual = planner.choose(topology, "all_reduce", 1 << 20)
    small = planner.choose(topology, "all_reduce", 64)
    for candidate in usual.rejected[:3]:
        wanted = usual.plan_of(candidate).id
        used = run(collectives.forced, 3, "aab", wanted, environment={"MULTIRING_PROBE": "off"})
        assert used == [[wanted, small.plan.id, [wanted]]] * 3
