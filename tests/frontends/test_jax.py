"""Collectives of JAX in real processes: their values, derivatives and order; what is trained; who is missed."""

from __future__ import annotations

import re

import pytest
from framework_jobs import Worlds, job, needs, succeeds

pytestmark = needs("jax", "optax", seconds=600)

TRAINING = ("training", "recipe_as_schedule")
COLLECTIVES = (
    "collectives",
    "derivatives",
    "loops",
    "without_jit",
    "trees",
    "order",
    "groups",
    "joined_again",
    "failed_before",
    "left_with_steps_on_their_way",
)
OTHER_TREES = ("retraced_alone", "other_trees")


@pytest.fixture(scope="module")
def worlds() -> Worlds:
    return Worlds(
        "jax_ranks.py",
        {1: TRAINING, 2: (*TRAINING, *COLLECTIVES, "mistakes"), 3: TRAINING + OTHER_TREES + COLLECTIVES},
    )


@pytest.mark.parametrize("ranks", [2, 3])
def test_collectives_derivatives_loops_and_order(ranks: int, worlds: Worlds) -> None:
    worlds.succeed(*COLLECTIVES, ranks=ranks)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_uneven_ranks_train_what_one_process_trains(ranks: int, worlds: Worlds) -> None:
    worlds.succeed(*TRAINING, ranks=ranks)


def test_mistakes_are_told_and_differing_shapes_are_a_mismatch(worlds: Worlds) -> None:
    worlds.succeed("mistakes", ranks=2)


def test_a_call_of_numpy_in_the_place_of_one_of_jax_is_a_mismatch() -> None:
    succeeds("jax_ranks.py", "overtaken", ranks=2)


def test_trees_of_other_structure_are_a_mismatch_that_shows_both(worlds: Worlds) -> None:
    worlds.succeed(*OTHER_TREES, ranks=3)


def test_the_others_are_told_of_a_killed_rank() -> None:
    done = job("jax_ranks.py", "loss_of_a_rank", ranks=3)
    assert done.returncode != 0
    told = [line for line in done.stdout.splitlines() if "and rank 2" in line]
    assert len(told) == 2
    assert all("multiring.PeerLost: rank 2" in line for line in told)


def test_the_example_learns_digits() -> None:
    printed = succeeds("../../examples/jax_digits.py", ranks=2)
    accuracy = float(re.search(r"test accuracy ([\d.]+)%, 2 ranks", printed)[1])
    assert accuracy > 95
