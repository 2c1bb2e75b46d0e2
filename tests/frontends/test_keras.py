"""Keras on its three backends, in real processes: what is trained, saved, shown and missed."""

from __future__ import annotations

from pathlib import Path

import pytest
from framework_jobs import job, needs, succeeds

BACKENDS = ["tensorflow", "jax", "torch"]

pytestmark = needs("keras", "tensorflow", "jax")


@pytest.mark.parametrize("backend", BACKENDS)
def test_training_saving_and_callbacks(backend: str, tmp_path: Path) -> None:
    functions = ("training", "saving", "trained_before", "warm_up", "recipe_as_schedule", "mistakes", "scaled_losses")
    functions += (
        "saving_what_is_registered",
        "copies",
        "plain_optimizer",
        "compiled_by_torch",
        "uneven_batches",
        "corrected_momentum",
        "other_variables",
    )
    succeeds("keras_ranks.py", *functions, ranks=2, KERAS_BACKEND=backend, JAX_ENABLE_X64="1", FOLDER=str(tmp_path))


@pytest.mark.parametrize("backend", BACKENDS)
def test_three_uneven_ranks_train_what_one_process_trains(backend: str) -> None:
    succeeds("keras_ranks.py", "training", ranks=3, KERAS_BACKEND=backend, JAX_ENABLE_X64="1")


@pytest.mark.parametrize(("backend", "ranks"), [("tensorflow", 2), ("jax", 3), ("torch", 2)])
def test_the_others_are_told_of_a_killed_rank(backend: str, ranks: int) -> None:
    done = job("keras_ranks.py", "loss_of_a_rank", ranks=ranks, KERAS_BACKEND=backend, JAX_ENABLE_X64="1")
    assert done.returncode != 0
    told = [line for line in done.stdout.splitlines() if line.endswith(f" and rank {ranks - 1}")]
    assert len(told) == ranks - 1, done.stderr
    assert all("Error and" in line or "PeerLost and" in line for line in told)


def test_the_example_learns_digits() -> None:
    printed = succeeds("../../examples/keras_digits.py", ranks=2, KERAS_BACKEND="jax")
    accuracy = float(printed.partition("test accuracy ")[2].partition("%")[0])
    assert accuracy > 90
