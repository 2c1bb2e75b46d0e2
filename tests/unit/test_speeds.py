"""Cores and machines that ranks share, and the speeds that plans assume."""

from __future__ import annotations

import pytest

from multiring.planning.speeds import INTERNAL_WIRE_OVERHEAD, NATIVE, RankPlacement, ranks_per_core, speeds


def placements(where: str, cpus: list[set[int]], quotas: list[float | None]) -> list[RankPlacement]:
    """Rank r is on the host named by the r-th word: the machine's letter, and a letter of its container's, if any."""
    return [
        RankPlacement(host, host[0], frozenset(allowed), quota)
        for host, allowed, quota in zip(where.split(), cpus, quotas, strict=True)
    ]


@pytest.mark.parametrize(
    ("where", "cpus", "quotas", "expected"),
    [
        ("a a", [{0, 1}, {0, 1}], [None, None], 1.0),
        ("a", [{0, 1, 2, 3}], [None], 1.0),
        ("a a a a", [{0, 1}] * 4, [None] * 4, 2.0),
        ("a a a a", [{0}, {1}, {0}, {1}], [None] * 4, 2.0),  # each is bound to one
        ("a a b a a b", [{0, 1}, {0, 1}, {0}, {0, 1}, {0, 1}, {0}], [None] * 6, 2.0),
        ("a a a b", [{0, 1}] * 3 + [{0}], [None] * 4, 1.5),
        ("a a a a", [{*range(8)}] * 4, [2.5] * 4, 1.6),
        ("a a a a b b", [{*range(8)}] * 6, [None] * 4 + [None, 0.5], 4.0),
        ("av aw ax ay", [{0, 1}] * 4, [None] * 4, 2.0),  # containers of one machine
        ("av av aw aw b b", [{0}, {0}, {0}, {0}, {0, 1}, {0, 1}], [None] * 6, 4.0),
        ("av aw", [{*range(8)}] * 2, [0.5, 4.0], 2.0),
    ],
)
def test_ranks_that_share_a_core(where: str, cpus: list[set[int]], quotas: list[float | None], expected: float) -> None:
    assert ranks_per_core(placements(where, cpus, quotas)) == expected
    assert speeds(placements(where, cpus, quotas)).ranks_per_core == expected


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("a a", NATIVE.wire_overhead),
        ("a b", NATIVE.wire_overhead),
        ("av b", NATIVE.wire_overhead),
        ("av aw", INTERNAL_WIRE_OVERHEAD),
        ("b av aw", INTERNAL_WIRE_OVERHEAD),
    ],
)
def test_messages_between_containers_of_one_machine(where: str, expected: float) -> None:
    ranks = len(where.split())
    assert speeds(placements(where, [{0, 1}] * ranks, [None] * ranks)).wire_overhead == expected
