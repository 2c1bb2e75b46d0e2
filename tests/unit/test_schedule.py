"""Schedules: the rule from span to elements, and what a plan looks like to one rank."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from multiring.planning.plan import WHOLE, Phase, Plan, Ring, Span
from multiring.planning.schedule import Instruction, cut, schedule


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 1000, 1 << 33])
def test_cuts_cover_the_slice_in_order_and_lie_on_cache_lines(count, itemsize):
    cuts = [cut(Fraction(i, 7), count, itemsize) for i in range(8)]
    assert cuts[0] == 0
    assert cuts[-1] == count
    assert cuts == sorted(cuts)
    assert all(c * itemsize % 64 == 0 for c in cuts[:-1])


@pytest.mark.parametrize("count", [0, 1, 255, 256, 257, 5_000])
def test_a_coarser_grain_keeps_blocks_whole(count):
    cuts = [cut(Fraction(i, 7), count, 4, 1024) for i in range(8)]
    assert (cuts[0], cuts[-1]) == (0, count)
    assert cuts == sorted(cuts)
    assert all(c % 256 == 0 and i * count / 7 - 256 < c <= i * count / 7 for i, c in enumerate(cuts[:-1]))


def test_every_rank_of_a_plan_cuts_by_one_grain():
    plan = two_hosts_of_two()
    assert [schedule(plan, rank).grain for rank in range(4)] == [64] * 4
    for wire, grain in (("bfloat16", 64), ("int8", 1024)):
        narrow = replace(plan, phases=(plan.phases[0], replace(plan.phases[1], wire=wire), plan.phases[2]))
        assert [schedule(narrow, rank).grain for rank in range(4)] == [grain] * 4


def test_a_small_slice_has_fewer_owners():
    assert [cut(Fraction(i, 4), 40, 4) for i in range(5)] == [0, 0, 16, 16, 40]


def two_hosts_of_two() -> Plan:
    half = (Span(Fraction(0), Fraction(1, 2)), Span(Fraction(1, 2), Fraction(1)))
    local = (Ring((0, 1), (WHOLE,)), Ring((2, 3), (WHOLE,)))
    across = (Ring((0, 2), half[:1]), Ring((1, 3), half[1:]))
    return Plan(
        "all_reduce",
        4,
        (
            Phase("reduce_scatter", "rank", "direct", local),
            Phase("all_reduce", "host", "direct", across),
            Phase("all_gather", "rank", "direct", local),
        ),
        1 << 18,
    )


def test_schedule_of_one_rank():
    zero, half, one = Fraction(0), Fraction(1, 2), Fraction(1)
    assert schedule(two_hosts_of_two(), 3).instructions == (
        Instruction("send", 0, (2,), 0, zero, half),
        Instruction("reduce", 0, (2, 3), 0, half, one),
        Instruction("send", 1, (1,), 0, half, one),
        Instruction("reduce", 1, (1, 3), 0, half, one, final=True),
        Instruction("send", 2, (2,), 0, half, one),
        Instruction("store", 2, (2,), 0, zero, half),
    )


def test_table_is_what_the_engine_takes():
    table, peers = schedule(two_hosts_of_two(), 3).table()
    assert table.dtype == np.int64
    assert peers.dtype == np.int32
    assert table[3].tolist() == [1, 1, 4, 2, 0, 1, 2, 1, 1, 1, 0, 0, 0]
    assert peers[4:6].tolist() == [1, 3]
    plan = two_hosts_of_two()
    for wire, code in (("float16", 2), ("int8", 3)):
        narrow = replace(plan, phases=(plan.phases[0], replace(plan.phases[1], wire=wire), plan.phases[2]))
        for rank, keeps in ((1, 1), (3, 0)):  # both have the sum of their ring, and its first keeps what is lost
            table, _ = schedule(narrow, rank).table()
            assert table[:, [0, 3, 10, 11, 12]].tolist() == [
                [0, 1, 0, 0, 0],
                [1, 2, 0, 0, 0],
                [3, 0, 0, 0, 0],
                [4, 0, code, 0, 0],
                [0, 1, code, 0, 0],
                [1, 2, code, code, keeps],
                [0, 1, 0, 0, 0],
                [2, 1, 0, 0, 0],
            ]


def test_blocks_have_their_own_fractions():
    whole = Plan("all_to_all", 3, (Phase("all_to_all", "rank", "direct", (Ring((0, 1, 2), (WHOLE,)),)),), 4096)
    instructions = schedule(whole, 1).instructions
    assert [(i.kind, i.peers, i.block, i.lo, i.hi) for i in instructions] == [
        ("send", (2,), 2, 0, 1),
        ("send", (0,), 0, 0, 1),
        ("store", (0,), 0, 0, 1),
        ("store", (2,), 2, 0, 1),
    ]


def test_a_cut_finer_than_64_bits_is_refused():
    fine = Span(Fraction(0), Fraction(1, 1 << 70))
    rest = Span(fine.hi, Fraction(1))
    rings = (Ring((0, 1), (fine,)), Ring((1, 0), (rest,)))
    plan = Plan("all_reduce", 2, (Phase("all_reduce", "rank", "direct", rings),), 4096)
    with pytest.raises(ValueError, match="finer than 64 bits"):
        schedule(plan, 0).table()


def test_rank_outside_the_world():
    with pytest.raises(ValueError, match="rank 4 is outside the world of 4"):
        schedule(two_hosts_of_two(), 4)
