"""Theano, Aesara and PyTensor in real processes: averages, what is trained, who is missed."""

from __future__ import annotations

import pytest
from framework_jobs import Worlds, needs, succeeds

PROGRAM, EXAMPLE = "theano_ranks.py", "../../examples/theano_digits.py"
LIBRARIES = [pytest.param(name, marks=needs(name, seconds=600)) for name in ("theano", "aesara", "pytensor")]
CHECKS = ("averages", "mistakes", "variables", "training")


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables that keep compiled code out of the home directory, and make Numba optimise less."""
    names = ("THEANO_FLAGS", "AESARA_FLAGS", "PYTENSOR_FLAGS")
    return {"NUMBA_OPT": "1", **{name: f"base_compiledir={tmp_path_factory.mktemp(name.lower())}" for name in names}}


@pytest.fixture(scope="module", params=LIBRARIES)
def worlds(request: pytest.FixtureRequest, flags: dict[str, str]) -> Worlds:
    return Worlds(PROGRAM, {1: CHECKS, 3: CHECKS}, request.param, losing={3}, **flags)


@pytest.mark.parametrize("ranks", [1, 3])  # alone first: it compiles, the others find what it has compiled
@pytest.mark.parametrize("check", CHECKS)
def test_uneven_ranks_train_what_one_process_trains(check: str, ranks: int, worlds: Worlds) -> None:
    worlds.succeed(check, ranks=ranks)


def test_the_others_are_told_of_a_killed_rank(worlds: Worlds) -> None:
    worlds.told_of_the_killed_rank("lost rank 2$", ranks=3)


@pytest.mark.parametrize("library", LIBRARIES[:1])  # it takes a minute to compile
def test_the_example_learns_digits(library: str, flags: dict[str, str]) -> None:
    printed = succeeds(EXAMPLE, library, ranks=2, **flags)
    accuracy = float(printed.partition("test accuracy ")[2].partition("%")[0])
    assert accuracy > 90
