"""Caffe in real processes: the real one where it is installed, else a stand-in for pycaffe."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
from framework_jobs import HERE, job, succeeds

FOUND = os.environ.get("PYTHONPATH", "")
CAFFE = {} if find_spec("caffe") else {"PYTHONPATH": f"{HERE / 'pycaffe'}:{FOUND}".rstrip(":")}


@pytest.mark.parametrize("ranks", [2, 3])
def test_uneven_ranks_train_what_one_process_trains(ranks: int) -> None:
    succeeds("caffe_ranks.py", "training", "reshaping", "mistakes", ranks=ranks, **CAFFE)


@pytest.mark.parametrize(
    "what", ["outputs_with_axes", "layers_of_one_name", "freed", "steps_before", "running_means", "by_hand"]
)
def test_what_caffe_does_otherwise(what: str) -> None:
    succeeds("caffe_ranks.py", what, ranks=2, **CAFFE)


def test_the_others_are_told_of_a_killed_rank() -> None:
    done = job("caffe_ranks.py", "loss_of_a_rank", ranks=3, **CAFFE)
    assert done.returncode != 0
    assert done.stdout.count("lost rank 2") == 2, done.stderr


def test_the_example_learns_digits() -> None:
    printed = succeeds("../../examples/caffe_digits.py", ranks=2, **CAFFE)
    accuracy = float(printed.partition("test accuracy ")[2].partition("%")[0])
    assert accuracy > 90
