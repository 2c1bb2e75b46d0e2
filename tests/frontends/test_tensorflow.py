"""TensorFlow in real processes: averages, what is never written to, what is trained, who is missed."""

from __future__ import annotations

import pytest
from framework_jobs import Worlds, job, needs, succeeds

pytestmark = needs("tensorflow", seconds=600)

TOGETHER = ("averages", "nothing_is_written_to", "variables", "optimizer_of_plain_variables", "training", "mistakes")
APART = ("retraced_alone", "other_gradients")


@pytest.fixture(scope="module")
def worlds() -> Worlds:
    return Worlds("tensorflow_ranks.py", {2: TOGETHER, 3: TOGETHER + APART})


@pytest.mark.parametrize("ranks", [2, 3])
def test_averages_and_training(ranks: int, worlds: Worlds) -> None:
    worlds.succeed(*TOGETHER, ranks=ranks)


def test_gradients_of_other_variables_are_a_mismatch_that_shows_both(worlds: Worlds) -> None:
    worlds.succeed(*APART, ranks=3)


def test_the_others_are_told_of_a_killed_rank() -> None:
    done = job("tensorflow_ranks.py", "loss_of_a_rank", ranks=3)
    assert done.returncode != 0
    told = [line for line in done.stdout.splitlines() if "and rank 2" in line]
    assert len(told) == 2, done.stderr
    assert all("PeerLost: rank 2" in line for line in told)


def test_the_example_learns_digits() -> None:
    printed = succeeds("../../examples/tensorflow_digits.py", ranks=2)
    accuracy = float(printed.partition("test accuracy ")[2].partition("%")[0])
    assert accuracy > 95
