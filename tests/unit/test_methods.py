"""The methods: what docs/algorithms.md says of them is what they do, whatever the number of members."""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path

import pytest

from multiring.planning.interpret import prove_in_full
from multiring.planning.methods import Reduce, Step, steps
from multiring.planning.plan import IN_BLOCKS, METHODS_OF, WHOLE, Phase, Plan, Ring
from multiring.planning.traffic import mean_messages

ALL = [(kind, method) for kind, methods in METHODS_OF.items() for method in methods]
PAGE = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()


def possible(kind: str, method: str, size: int) -> bool:
    return method != "halving" or kind == "all_reduce" or size & (size - 1) == 0


def transfers(kind: str, method: str, size: int) -> str:
    """Every message of a ring, as the page writes them."""
    programs = [steps(kind, method, size, position) for position in range(size)]
    lines = []
    for number in range(len(programs[0])):
        sent = []
        for source, program in enumerate(programs):
            for send in program[number].sends:
                first, last = send.shares.start, send.shares.stop - 1
                what = "" if len(send.shares) == size else f":{first}" if first == last else f":{first}-{last}"
                sent += [f"{source}>{peer}{what}" for peer in send.peers]
        lines.append(f"    step {number}   {'  '.join(sent)}\n")
    return "".join(lines)


@pytest.mark.parametrize(("kind", "method", "size"), [(*each, 4) for each in ALL] + [("all_reduce", "halving", 5)])
def test_the_page_shows_every_transfer(kind, method, size):
    assert f"{kind} {method}, {size} members\n\n{transfers(kind, method, size)}\n" in PAGE


def amounts(kind: str, method: str, size: int) -> list[Fraction]:
    """Steps, and what the busiest member sends, receives and reduces."""
    programs = [steps(kind, method, size, position) for position in range(size)]

    def busiest(part) -> Fraction:
        return max(sum((part(step, i) for step in program), Fraction(0)) for i, program in enumerate(programs))

    def sends(step: Step, i: int) -> Fraction:
        return sum((Fraction(len(send.shares) * len(send.peers), size) for send in step.sends), Fraction(0))

    def receives(step: Step, i: int) -> Fraction:
        return sum((Fraction(len(w.shares) * len(set(w.peers) - {i}), size) for w in step.waits), Fraction(0))

    def reduces(step: Step, i: int) -> Fraction:
        return receives(Step(waits=tuple(wait for wait in step.waits if isinstance(wait, Reduce))), i)

    assert len({len(program) for program in programs}) == 1
    return [Fraction(len(programs[0])), busiest(sends), busiest(receives), busiest(reduces)]


def evaluated(formula: str, n: int) -> Fraction:
    log = (n - 1).bit_length()
    whole, _, divisor = formula.replace("log n", str(log)).replace("n", str(n)).partition("/")
    assert re.fullmatch(r"[\d()*-]+", whole)
    return Fraction(eval(whole), int(divisor or 1))


@pytest.mark.parametrize(("kind", "method"), ALL)
def test_the_page_has_steps_and_bytes(kind, method):
    (row,) = [line for line in PAGE.splitlines() if line.startswith(f"| {kind} | {method} |")]
    formulas = [cell.strip() for cell in row.split("|")[3:-1]]
    for size in (2, 4, 8, 16) if method == "halving" else (2, 3, 4, 5, 7, 8, 16):
        if method == "tree" and kind == "all_reduce" and size & (size - 1):
            continue  # the root of a tree that is not full has less to do
        assert amounts(kind, method, size) == [evaluated(formula, size) for formula in formulas], size


@pytest.mark.parametrize(
    ("kind", "method", "size"),
    [(*both, size) for both in ALL for size in [*range(2, 18), 31, 32] if possible(*both, size)],
)
def test_every_method_does_what_its_kind_says(kind, method, size):
    ring = Ring(tuple(range(size)), (WHOLE,))
    prove_in_full(Plan(kind, size, (Phase(kind, "rank", method, (ring,)),), 4096))


@pytest.mark.parametrize("kind", ["reduce_scatter", "all_gather"])
def test_a_ring_is_a_ring(kind):
    for position in range(5):
        for step in steps(kind, "ring", 5, position):
            assert [send.peers for send in step.sends] == [((position + 1) % 5,)]
            assert [set(wait.peers) - {position} for wait in step.waits] == [{(position - 1) % 5}]


@pytest.mark.parametrize("kind", ["reduce_scatter", "all_reduce", "reduce"])
def test_direct_sums_in_the_order_of_the_members(kind):
    waits = [wait for position in range(5) for step in steps(kind, "direct", 5, position) for wait in step.waits]
    assert {wait.peers for wait in waits} == {(0, 1, 2, 3, 4)}


SENT = [(*each, size, False) for each in ALL for size in (2, 3, 4, 5, 8) if possible(*each, size)]
SENT += [(*each[:3], True) for each in SENT if each[0] in IN_BLOCKS]


@pytest.mark.parametrize(("kind", "method", "size", "shares_are_blocks"), SENT)
def test_the_messages_of_all_members_together(kind, method, size, shares_are_blocks):
    sends = [send for i in range(size) for step in steps(kind, method, size, i) for send in step.sends]
    sent = sum(len(send.peers) * (len(send.shares) if shares_are_blocks else 1) for send in sends)
    alike = method != "halving" or size & (size - 1) == 0
    assert sent <= size * mean_messages(kind, method, size, shares_are_blocks)
    assert not alike or sent == pytest.approx(size * mean_messages(kind, method, size, shares_are_blocks))
