"""The interpreter: it finds every way in which a plan can be wrong, and both proofs agree."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest

from multiring.planning.interpret import prove_by_classes, prove_in_full
from multiring.planning.plan import WHOLE, Phase, Plan, Ring, Span
from multiring.planning.schedule import schedule

HALVES = (Span(Fraction(0), Fraction(1, 2)), Span(Fraction(1, 2), Fraction(1)))
LOCAL = (Ring((0, 1), (WHOLE,)), Ring((2, 3), (WHOLE,)))
ACROSS = (Ring((0, 2), HALVES[:1]), Ring((1, 3), HALVES[1:]))
OUT = Phase("reduce_scatter", "rank", "direct", LOCAL)
TOP = Phase("all_reduce", "host", "direct", ACROSS)
BACK = Phase("all_gather", "rank", "direct", LOCAL)


def plan(*phases: Phase, collective: str = "all_reduce", root: int = 0) -> Plan:
    return Plan(collective, 4, phases, 4096, root)


def mutated(rank: int, change) -> tuple[Plan, list]:
    right = plan(OUT, TOP, BACK)
    schedules = [schedule(right, r) for r in range(4)]
    instructions = list(schedules[rank].instructions)
    change(instructions)
    schedules[rank] = replace(schedules[rank], instructions=tuple(instructions))
    return right, schedules


def test_a_right_plan_is_proved():
    prove_in_full(plan(OUT, TOP, BACK))
    prove_by_classes(plan(OUT, TOP, BACK))


WRONG_PLANS = {
    "one ring forgotten": plan(OUT, replace(TOP, rings=ACROSS[:1]), BACK),
    "a span of which the member holds only its own": plan(
        OUT, replace(TOP, rings=(Ring((0, 3), HALVES[:1]), ACROSS[1])), BACK
    ),
    "nobody gathers": plan(OUT, TOP),
    "gathered on one host only": plan(OUT, TOP, replace(BACK, rings=LOCAL[:1])),
    "gathered before it is summed": plan(OUT, BACK),
    "summed twice": plan(OUT, TOP, TOP, BACK),
    "the host sums never meet": plan(replace(OUT, kind="all_reduce")),
    "the wrong root": plan(
        Phase("reduce", "rank", "direct", LOCAL),
        Phase("reduce", "host", "direct", (Ring((0, 2), (WHOLE,)),)),
        collective="reduce",
        root=1,
    ),
    "a broadcast from a rank that has nothing": plan(
        Phase("broadcast", "rank", "direct", (Ring((1, 0, 2, 3), (WHOLE,)),)), collective="broadcast"
    ),
    "blocks that end on the wrong ranks": plan(
        Phase("reduce_scatter", "rank", "direct", (Ring((0, 2, 1, 3), (WHOLE,)),)), collective="reduce_scatter"
    ),
    "an exchange out of order": plan(
        Phase("all_to_all", "rank", "direct", (Ring((0, 2, 1, 3), (WHOLE,)),)), collective="all_to_all"
    ),
}


@pytest.mark.parametrize("proof", [prove_in_full, prove_by_classes])
@pytest.mark.parametrize("wrong", WRONG_PLANS.values(), ids=WRONG_PLANS)
def test_a_wrong_plan_is_refused(wrong, proof):
    with pytest.raises(ValueError, match=f"plan {wrong.id}"):
        proof(wrong)


def test_errors_name_phase_ring_and_rank():
    wrong = plan(OUT, replace(TOP, rings=(Ring((0, 3), HALVES[:1]), ACROSS[1])), BACK)
    with pytest.raises(ValueError, match=r"phase 1 \(all_reduce, level host\), ring 0 \(0 3\), rank 3"):
        prove_by_classes(wrong)
    with pytest.raises(ValueError, match=r"phase 1 \(all_reduce, level host\), ring 0 \(0 3\), rank [03]"):
        prove_in_full(wrong)


def test_a_contribution_counted_twice():
    twice = plan(replace(OUT, kind="all_reduce"), replace(TOP, rings=(Ring((0, 1), (WHOLE,)), Ring((2, 3), (WHOLE,)))))
    with pytest.raises(ValueError, match=r"phase 1 .* counts ranks \(0 1\) twice"):
        prove_in_full(twice)


def test_a_send_left_out_is_a_deadlock():
    with pytest.raises(ValueError, match=r"phase 1 .*ring 1 \(1 3\), rank 3.*waits for rank 1 for ever"):
        prove_in_full(*mutated(1, lambda instructions: instructions.pop(2)))


def test_a_wait_left_out_is_a_message_nobody_takes():
    with pytest.raises(ValueError, match=r"phase 2 .*ring 1 \(2 3\), rank 3.*sends to rank 2 what that never takes"):
        prove_in_full(*mutated(2, lambda instructions: instructions.pop()))


def test_messages_in_the_wrong_order():
    def swap(instructions):
        instructions[0], instructions[4] = instructions[4], instructions[0]

    with pytest.raises(ValueError, match=r"rank 0 sends it .* in phase 2"):
        prove_in_full(*mutated(0, swap))


def test_a_span_of_another_length():
    def shorten(instructions):
        instructions[0] = replace(instructions[0], hi=instructions[0].hi - Fraction(1, 4))

    with pytest.raises(ValueError, match=r"rank 0 sends it \[1/2,3/4\)"):
        prove_in_full(*mutated(0, shorten))


@pytest.mark.parametrize("index", [1, 3])
def test_final_marks_the_completing_sum_and_no_other(index):
    def flip(instructions):
        instructions[index] = replace(instructions[index], final=not instructions[index].final)

    with pytest.raises(ValueError, match="final"):
        prove_in_full(*mutated(0, flip))


def test_a_rank_in_two_rings_with_one_span():
    wrong = plan(OUT, replace(TOP, rings=(*ACROSS, ACROSS[0])), BACK)
    with pytest.raises(ValueError, match="in two rings with the same span"):
        prove_by_classes(wrong)
    with pytest.raises(ValueError, match="twice"):
        prove_in_full(wrong)
