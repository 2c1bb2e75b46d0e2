"""Steps of a program, counted by the gaps between its calls (``csrc/rhythm.hpp``)."""

from __future__ import annotations

from pathlib import Path

import pytest
from compiling import compiled, said

SOURCES = ("wait", "errors", "system_files")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled("rhythm", SOURCES, tmp_path_factory.mktemp("rhythm"))


def steps(count: int, *gaps: float) -> list[str]:
    """Lines for so many steps, each of calls that come after these seconds."""
    return [f"call {gap}" for gap in gaps] * count


@pytest.mark.parametrize("length", [1e-6, 1e-3, 0.03, 0.7, 90.0, 1e5])
def test_each_call_is_a_step_where_all_come_alike(program: Path, length: float) -> None:
    assert said(program, [f"call {length} 37", "look", "look"]) == ["37", "0"]


@pytest.mark.parametrize("buckets", [1, 2, 5, 40])
def test_the_buckets_of_a_step_count_once(program: Path, buckets: int) -> None:
    assert said(program, [*steps(23, 0.2, *[0.07] * (buckets - 1)), "look"]) == ["23"]


def test_steps_that_differ_by_less_than_half_count_each(program: Path) -> None:
    gaps = [0.1 + 0.009 * number for number in range(11)]
    assert said(program, [*steps(3, *gaps), "look"]) == ["33"]


def test_a_long_pause_counts_as_one_step_of_its_look(program: Path) -> None:
    lines = [*steps(10, 0.2, 0.01), "call 30", *steps(5, 0.2, 0.01), "look", *steps(6, 0.2, 0.01), "look"]
    assert said(program, lines) == ["1", "6"]
