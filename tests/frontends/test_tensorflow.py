"""TensorFlow in real processes: averages, what is never written to, what is trained, who is missed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from framework_jobs import Worlds, needs

IMPORTS = ("tensorflow", "keras", "multiring.tensorflow", "sklearn.datasets", "sklearn.model_selection", "pytest")

pytestmark = needs("tensorflow", seconds=600)

TOGETHER = ("averages", "nothing_is_written_to", "variables", "optimizer_of_plain_variables", "training", "mistakes")
APART = ("retraced_alone", "other_gradients")


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    with Worlds("tensorflow_ranks.py", {3: TOGETHER + APART}, losing={3}, imports=IMPORTS) as worlds:
        yield worlds


@pytest.mark.parametrize("check", TOGETHER)
def test_averages_and_training(check: str, worlds: Worlds) -> None:
    worlds.succeed(check, ranks=3)


def test_gradients_of_other_variables_are_a_mismatch_that_shows_both(worlds: Worlds) -> None:
    worlds.succeed(*APART, ranks=3)


def test_the_others_are_told_of_a_killed_rank(worlds: Worlds) -> None:
    worlds.told_of_the_killed_rank("PeerLost: rank 2.* and rank 2$", ranks=3)


def test_the_example_learns_digits(worlds: Worlds) -> None:
    printed = worlds.prints("../../examples/tensorflow_digits.py", ranks=2)
    accuracy = float(printed.partition("test accuracy ")[2].partition("%")[0])
    assert accuracy > 95
