"""Keras on its three backends, in real processes: what is trained, saved, shown and missed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from framework_jobs import Worlds, alone, compiled_by_jax, needs

# Keras imports TensorFlow when it saves a model, on any backend. Nothing here may start it, JAX or their threads: that
# begins with the first tensor. multiring.keras is not among these, as a test looks at what plain Keras does.
IMPORTS = ("keras", "tensorflow", "sklearn.datasets", "sklearn.model_selection", "pytest")
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
APART = (
    "trains_apart",
    "trains_apart_late_and_unequally",
    "trains_apart_in_several_steps_at_once",
    "waits_for_steps_that_are_timed",
)

pytestmark = needs("keras", "tensorflow", "jax", seconds=600)


@pytest.fixture(scope="module", params=BACKENDS)
def environment(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    backend: str = request.param
    folder = tmp_path_factory.mktemp(backend)
    return {"KERAS_BACKEND": backend, "FOLDER": str(folder), **compiled_by_jax(folder / "compiled")}


@pytest.fixture(scope="module")
def worlds(environment: dict[str, str]) -> Iterator[Worlds]:
    chosen = {2: CHECKS, 3: ("training", *APART)}
    with Worlds("keras_ranks.py", chosen, losing={3}, imports=IMPORTS, **environment) as worlds:
        yield worlds


@pytest.mark.parametrize("check", CHECKS)
def test_two_ranks(check: str, worlds: Worlds) -> None:
    worlds.succeed(check, ranks=2)


def test_plain_keras_loads_what_was_saved(worlds: Worlds, environment: dict[str, str]) -> None:
    worlds.succeed("saving", ranks=2)
    load = f"import sys, keras; model = keras.models.load_model({environment['FOLDER']!r} + '/model1.keras')"
    show = "print(type(model.optimizer).__name__, int(model.optimizer.iterations))"
    program = f"{load}; {show}; assert 'multiring.keras' not in sys.modules"
    done = alone(program, imports=IMPORTS, **environment)
    assert (done.returncode, done.stdout) == (0, "Adam 5\n"), done.stderr


def test_three_uneven_ranks_train_what_one_process_trains(worlds: Worlds) -> None:
    worlds.succeed("training", ranks=3)


def test_groups_that_train_apart_exchange_what_one_process_computes(worlds: Worlds) -> None:
    worlds.succeed(*APART, ranks=3)


def test_the_others_are_told_of_a_killed_rank(worlds: Worlds) -> None:
    worlds.told_of_the_killed_rank("(Error|PeerLost) and rank 2$", ranks=3)


@pytest.mark.parametrize("environment", ["jax"], indirect=True)
def test_the_example_learns_digits(worlds: Worlds) -> None:
    printed = worlds.prints("../../examples/keras_digits.py", ranks=2)
    accuracy = float(printed.partition("test accuracy ")[2].partition("%")[0])
    assert accuracy > 90
