"""Ways to copy for a peer (``csrc/streaming_store_tuner.hpp``); results do not depend on the choice."""

from __future__ import annotations

import subprocess

import numpy as np
import pytest
from compiling import compiled
from engines import Rank, all_reduce_plan, in_threads, world

NEAR, FAR = (17.0, 40.0), (2.2, 20.0)
"""Bytes a nanosecond in the caches and past them, as seen between cores that share a cache, and that do not."""


@pytest.fixture(scope="module")
def streamed(tmp_path_factory: pytest.TempPathFactory):
    program = compiled("streaming_store_tuner", [], tmp_path_factory.mktemp("streamed"))

    def run(*stretches: tuple[int, tuple[float, float]], rule: str = "copies") -> list[int]:
        """Number of streamed copies in each stretch."""
        words = [rule, *(str(word) for copies, rates in stretches for word in (copies, *rates))]
        return [int(line) for line in subprocess.run([program, *words], capture_output=True, check=True).stdout.split()]

    return run


def test_copies_stay_in_caches_that_are_shared(streamed) -> None:
    assert streamed((10_000, NEAR)) == [20 * 9]  # trials of 9: after 36 copies, then after 57 * 9 each


def test_copies_go_past_caches_that_are_not(streamed) -> None:
    # Trials in the caches are 20 / 2.2 times as slow, and as many times as rare.
    assert streamed((36, FAR), (9, FAR), (30_000, FAR)) == [0, 9, 30_000 - 6 * 9]


def test_a_rank_that_moves_is_followed(streamed) -> None:
    begin, far, stays, near = streamed((570, NEAR), (200, FAR), (10_000, FAR), (10_000, NEAR))
    assert begin == 2 * 9
    assert far >= 200 - 10 * 9  # with the last trial just made, copies that are 17 / 2.2 times as slow hasten the next
    assert stays >= 10_000 - 3 * 9
    assert near <= 520 * 9 + 12 * 9


def test_of_small_copies_some_are_timed_and_those_of_a_trial(streamed) -> None:
    few = streamed((20_000, (30.0, 50.0)), rule="small_copies")
    assert few == [3 * 9]  # trials of 9: after 36 * 16, then after 57 * 9 * 16 each


def test_small_copies_to_lines_in_no_cache_do_not_count_as_slow(streamed) -> None:
    """After copies past the caches those of a trial are a fourth as fast, also between near cores."""
    far, near = streamed((40_000, (2.6, 50.0)), (300_000, (13.0, 50.0)), rule="small_copies")
    assert far == 40_000 - 35 * 16 - 1
    assert near < (57 * 16 + 1) * 9 * 16  # until the next trial, which is 16 times as rare


@pytest.mark.parametrize(("segment", "calls"), [(1 << 17, 3), (1 << 13, 6)])
def test_copies_of_a_trial_are_right(segment: int, calls: int) -> None:
    """Each call copies 64 segments; the first trial is after 36 copies, and after 576 small ones."""
    count = 64 * segment // 4
    index = np.arange(count, dtype=np.float32)
    with world(3) as ranks:
        plan = all_reduce_plan(3, "ring", segment)
        for call in range(calls):
            results = in_threads(ranks, lambda rank, c=call: rank.run(plan, index % 1009 * (rank.rank + 1 + c)))
            for result in results:
                np.testing.assert_array_equal(result, index % 1009 * (6 + 3 * call))


@pytest.mark.parametrize(
    ("dtype", "op"), [("float32", "sum"), ("float64", "avg"), ("float16", "max"), ("complex128", "sum")]
)
def test_what_is_written_in_place_during_a_trial_is_right(dtype: str, op: str) -> None:
    """1 MB in the arena, which peers read where it lies: 12 sums and 24 copies of some 29 KB a rank in each call, which
    begin and end in the middle of a line."""
    count = (1 << 20) // np.dtype(dtype).itemsize - 7
    index = np.arange(count) % 17
    with world(3) as ranks:
        plan = all_reduce_plan(3, "direct", 87_600)

        def program(rank: Rank) -> list[np.ndarray]:
            array = rank.engine.empty(1 << 20).view(dtype)[3 : 3 + count]
            found = []
            for call in range(6):
                array[:] = index * (rank.rank + 1 + call)
                found.append(rank.run(plan, array, op).copy())
            return found

        for results in in_threads(ranks, program):
            for call, result in enumerate(results):
                each = [index * (rank + 1 + call) for rank in range(3)]
                expected = {"sum": sum(each), "avg": sum(each) / 3, "max": each[-1]}[op]
                np.testing.assert_array_equal(result, expected.astype(dtype))
