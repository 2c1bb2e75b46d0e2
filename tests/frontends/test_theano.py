"""Theano, Aesara and PyTensor in real processes: averages, what is trained, who is missed."""

from __future__ import annotations

import pytest
from framework_jobs import job, needs, succeeds

PROGRAM, EXAMPLE = "theano_ranks.py", "../../examples/theano_digits.py"
LIBRARIES = [pytest.param(name, marks=needs(name)) for name in ("theano", "aesara", "pytensor")]


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What is compiled is kept for the tests of this run, and not in the home directory."""
    names = ("THEANO_FLAGS", "AESARA_FLAGS", "PYTENSOR_FLAGS")
    return {name: f"base_compiledir={tmp_path_factory.mktemp(name.lower())}" for name in names}


@pytest.mark.parametrize("library", LIBRARIES)
def test_uneven_ranks_train_what_one_process_trains(library: str, flags: dict[str, str]) -> None:
    functions = ("averages", "mistakes", "variables", "training")
    for ranks in (1, 2, 3):  # alone first: it compiles, the others find what it has compiled
        succeeds(PROGRAM, library, *functions, ranks=ranks, **flags)


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_others_are_told_of_a_killed_rank(library: str, flags: dict[str, str]) -> None:
    done = job(PROGRAM, library, "loss_of_a_rank", ranks=3, **flags)
    assert done.returncode != 0
    assert done.stdout.count("lost rank 2") == 2, done.stderr


@pytest.mark.parametrize("library", LIBRARIES[:1])  # it takes a minute to compile
def test_the_example_learns_digits(library: str, flags: dict[str, str]) -> None:
    printed = succeeds(EXAMPLE, library, ranks=2, **flags)
    accuracy = float(printed.partition("test accuracy ")[2].partition("%")[0])
    assert accuracy > 90
