"""Chainer in real processes: what is trained, resumed and evaluated, and who is missed."""

from __future__ import annotations

import pytest
from framework_jobs import job, needs, succeeds

pytestmark = needs("chainer")


@pytest.mark.parametrize("ranks", [2, 3])
def test_uneven_ranks_train_what_one_process_trains(ranks: int) -> None:
    functions = ("training", "without_a_loss_function", "resuming", "evaluating", "mistakes")
    succeeds("chainer_ranks.py", *functions, ranks=ranks)


def test_the_others_are_told_of_a_killed_rank() -> None:
    done = job("chainer_ranks.py", "loss_of_a_rank", ranks=3)
    assert done.returncode != 0
    assert done.stdout.count("lost rank 2") == 2, done.stderr


def test_the_example_learns_digits() -> None:
    printed = succeeds("../../examples/chainer_digits.py", ranks=2)
    accuracy = float(printed.partition("test accuracy ")[2].partition("%")[0])
    assert accuracy > 90
