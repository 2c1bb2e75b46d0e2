"""Collectives of JAX in real processes: their values, derivatives and order; what is trained; who is missed."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from framework_jobs import Worlds, compiled_by_jax, job, needs

IMPORTS = ("jax", "optax", "multiring.jax", "sklearn.datasets", "sklearn.model_selection", "pytest")

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
APART = (
    "trains_apart",
    "trains_apart_late_and_unequally",
    "ends_before_others",
    "averages_apart_in_bfloat16",
    "wrong_ways_to_train_apart",
)
OTHER_TREES = ("retraced_alone", "other_trees")
LATE = ("late_between_compiled_steps",)


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worlds]:
    chosen = {1: TRAINING, 2: ("overtaken", "mistakes"), 3: TRAINING + OTHER_TREES + COLLECTIVES + APART + LATE}
    compiling = compiled_by_jax(tmp_path_factory.mktemp("compiled"))
    with Worlds("jax_ranks.py", chosen, losing={3}, imports=IMPORTS, **compiling) as worlds:
        yield worlds


@pytest.mark.parametrize("check", COLLECTIVES)
def test_collectives_derivatives_loops_and_order(check: str, worlds: Worlds) -> None:
    worlds.succeed(check, ranks=3)


@pytest.mark.parametrize("ranks", [1, 3])
def test_uneven_ranks_train_what_one_process_trains(ranks: int, worlds: Worlds) -> None:
    worlds.succeed(*TRAINING, ranks=ranks)


def test_groups_that_train_apart_exchange_what_one_process_computes(worlds: Worlds) -> None:
    worlds.succeed(*APART, ranks=3)


def test_a_rank_that_computes_between_compiled_steps_is_named_with_the_line(worlds: Worlds) -> None:
    worlds.succeed(*LATE, ranks=3)


def test_mistakes_are_told_and_differing_shapes_are_a_mismatch(worlds: Worlds) -> None:
    worlds.succeed("mistakes", ranks=2)


def test_a_call_of_numpy_in_the_place_of_one_of_jax_is_a_mismatch(worlds: Worlds) -> None:
    worlds.succeed("overtaken", ranks=2)


def test_trees_of_other_structure_are_a_mismatch_that_shows_both(worlds: Worlds) -> None:
    worlds.succeed(*OTHER_TREES, ranks=3)


def test_numbers_that_jax_would_cut_are_refused(worlds: Worlds) -> None:
    worlds.prints("jax_narrow_ranks.py", ranks=2)


def test_the_others_are_told_of_a_killed_rank(worlds: Worlds) -> None:
    worlds.told_of_the_killed_rank("multiring.PeerLost: rank 2.*and rank 2", ranks=3)


def test_nobody_is_started_again_where_ranks_end_by_themselves_as_jax_raises_a_mismatch() -> None:
    options = ("--min-ranks", "1", "--max-replacements", "3")
    done = job("jax_ranks.py", "ends_by_itself", ranks=3, options=options, imports=IMPORTS)
    assert done.returncode == 3, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("multiring: ")]
    assert not [line for line in lines if "again" in line or "go on" in line], lines
    # A rank on a core that is busy for 0.5 s ends before it has said anything.
    said = r"; rank 1 called .* where ranks 0 and 2 called |rank [02] \(host \S+\) called .*count=10.*, rank 1 \("
    assert [line for line in lines if re.search(said, line)], lines


def test_the_example_learns_digits(worlds: Worlds) -> None:
    printed = worlds.prints("../../examples/jax_digits.py", ranks=2)
    accuracy = float(re.search(r"test accuracy ([\d.]+)%, 2 ranks", printed)[1])
    assert accuracy > 95
