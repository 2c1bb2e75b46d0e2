"""Keras on its three backends, in real processes: what is trained, saved, shown and missed."""

from __future__ import annotations

import pytest
from framework_jobs import Worlds, needs, succeeds

BACKENDS = ["tensorflow", "jax", "torch"]
CHECKS = (
    "saving",
    "trained_before",
    "warm_up",
    "recipe_as_schedule",
    "mistakes",
    "scaled_losses",
    "saving_what_is_registered",
    "copies",
    "plain_optimizer",
    "compiled_by_torch",
    "uneven_batches",
    "corrected_momentum",
    "other_variables",
)

pytestmark = needs("keras", "tensorflow", "jax", seconds=600)


@pytest.fixture(scope="module", params=BACKENDS)
def worlds(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Worlds:
    backend: str = request.param
    folder = str(tmp_path_factory.mktemp(backend))
    environment = {"KERAS_BACKEND": backend, "JAX_ENABLE_X64": "1", "FOLDER": folder}
    return Worlds("keras_ranks.py", {2: CHECKS, 3: ("training",)}, losing={3}, **environment)


@pytest.mark.parametrize("check", CHECKS)
def test_two_ranks(check: str, worlds: Worlds) -> None:
    worlds.succeed(check, ranks=2)


def test_three_uneven_ranks_train_what_one_process_trains(worlds: Worlds) -> None:
    worlds.succeed("training", ranks=3)


def test_the_others_are_told_of_a_killed_rank(worlds: Worlds) -> None:
    worlds.told_of_the_killed_rank("(Error|PeerLost) and rank 2$", ranks=3)


def test_the_example_learns_digits() -> None:
    printed = succeeds("../../examples/keras_digits.py", ranks=2, KERAS_BACKEND="jax")
    accuracy = float(printed.partition("test accuracy ")[2].partition("%")[0])
    assert accuracy > 90
