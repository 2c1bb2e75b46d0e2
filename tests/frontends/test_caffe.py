"""Caffe in real processes: the real one where it is installed, else a stand-in for pycaffe."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
from framework_jobs import HERE, Worlds

IMPORTS = ("sklearn.datasets", "sklearn.model_selection", "pytest")
FOUND = os.environ.get("PYTHONPATH", "")
CAFFE = {} if find_spec("caffe") else {"PYTHONPATH": f"{HERE / 'pycaffe'}:{FOUND}".rstrip(":")}


TRAINING = ("training", "reshaping", "mistakes")
OTHERWISE = ("outputs_with_axes", "layers_of_one_name", "freed", "steps_before", "running_means", "by_hand")

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def worlds() -> Worlds:
    return Worlds("caffe_ranks.py", {2: TRAINING + OTHERWISE, 3: TRAINING}, losing={3}, imports=IMPORTS, **CAFFE)


@pytest.mark.parametrize("ranks", [2, 3])
def test_uneven_ranks_train_what_one_process_trains(ranks: int, worlds: Worlds) -> None:
    worlds.succeed(*TRAINING, ranks=ranks)


@pytest.mark.parametrize("what", OTHERWISE)
def test_what_caffe_does_otherwise(what: str, worlds: Worlds) -> None:
    worlds.succeed(what, ranks=2)


def test_losses_do_not_travel_in_the_blocks_of_gradients() -> None:
    environment = {"MULTIRING_WIRE": "host=int8", "APART": "1", **CAFFE}
    narrow = Worlds("caffe_ranks.py", {2: ("gradients_in_int8",)}, imports=IMPORTS, **environment)
    narrow.succeed("gradients_in_int8", ranks=2)


def test_the_others_are_told_of_a_killed_rank(worlds: Worlds) -> None:
    worlds.told_of_the_killed_rank("lost rank 2$", ranks=3)


def test_the_example_learns_digits(worlds: Worlds) -> None:
    printed = worlds.prints("../../examples/caffe_digits.py", ranks=2)
    accuracy = float(printed.partition("test accuracy ")[2].partition("%")[0])
    assert accuracy > 90
