"""Chainer in real processes: what is trained, resumed and evaluated, and who is missed."""

from __future__ import annotations

import pytest
from framework_jobs import Worlds, needs, succeeds

CHECKS = ("training", "without_a_loss_function", "resuming", "evaluating", "mistakes")

pytestmark = needs("chainer", seconds=600)


@pytest.fixture(scope="module")
def worlds() -> Worlds:
    return Worlds("chainer_ranks.py", {2: CHECKS, 3: CHECKS}, losing={3})


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("check", CHECKS)
def test_uneven_ranks_train_what_one_process_trains(check: str, ranks: int, worlds: Worlds) -> None:
    worlds.succeed(check, ranks=ranks)


def test_the_others_are_told_of_a_killed_rank(worlds: Worlds) -> None:
    worlds.told_of_the_killed_rank("lost rank 2$", ranks=3)


def test_the_example_learns_digits() -> None:
    printed = succeeds("../../examples/chainer_digits.py", ranks=2)
    accuracy = float(printed.partition("test accuracy ")[2].partition("%")[0])
    assert accuracy > 90
