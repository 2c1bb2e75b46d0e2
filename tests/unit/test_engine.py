"""Collectives of the native engine, ranks as threads over inproc: what every rank ends with."""

from __future__ import annotations

import gc
import threading
import weakref
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from engines import (
    Rank,
    all_reduce_plan,
    blocked_plan,
    contribution,
    in_threads,
    rooted_plan,
    two_level_plan,
    world,
)

from multiring import _native as native
from multiring.errors import ResourceError
from multiring.planning.plan import COLLECTIVES, FINEST_GRAIN, IN_BLOCKS, REDUCING, ROOTED
from multiring.planning.schedule import REDUCE, REPAY, ROUND, SEND, STORE, Instruction, Schedule, cut

WORLDS = (1, 2, 3, 4, 5, 7, 8)


def sizes(n: int) -> list[int]:
    return sorted({0, 1, n - 1, n, n + 1, 1000, 20011})


def methods(n: int) -> list[str]:
    return ["at once", "direct", "ring"] + (["halving"] if n & (n - 1) == 0 else [])


@pytest.mark.parametrize("n", WORLDS)
def test_all_reduce_by_every_method_and_size(n):
    with world(n) as ranks:
        for method in methods(n):
            for segment_bytes in (64, 1 << 18):
                plan = all_reduce_plan(n, method, segment_bytes)
                for count in sizes(n):
                    expected = sum(contribution(rank, count).astype(np.float64) for rank in range(n))
                    results = in_threads(ranks, lambda rank, p=plan, c=count: rank.run(p, contribution(rank.rank, c)))
                    for result in results:
                        np.testing.assert_array_equal(result, expected, err_msg=f"{method} {segment_bytes} {count}")


@pytest.mark.parametrize("n", WORLDS)
def test_reduce_scatter_and_all_gather(n):
    with world(n) as ranks:
        for segment_bytes in (64, 4096):
            for count in (0, 1, 17, 3000):
                scatter = blocked_plan("reduce_scatter", n, segment_bytes)
                gather = blocked_plan("all_gather", n, segment_bytes)
                expected = sum(contribution(rank, n * count).astype(np.float64) for rank in range(n))

                def scattered(rank: Rank, plan=scatter, c=count) -> np.ndarray:
                    return rank.run(plan, contribution(rank.rank, n * c))

                def gathered(rank: Rank, plan=gather, c=count) -> np.ndarray:
                    mine = np.full(n * c, -1, np.float32)
                    mine[rank.rank * c : (rank.rank + 1) * c] = contribution(rank.rank, c)
                    return rank.run(plan, mine)

                for rank, result in enumerate(in_threads(ranks, scattered)):
                    block = slice(rank * count, (rank + 1) * count)
                    np.testing.assert_array_equal(result[block], expected[block])
                everything = np.concatenate([contribution(rank, count) for rank in range(n)])
                for result in in_threads(ranks, gathered):
                    np.testing.assert_array_equal(result, everything)


@pytest.mark.parametrize("n", WORLDS)
def test_all_to_all(n):
    with world(n) as ranks:
        for segment_bytes, count in ((64, 1), (64, 100), (4096, 3000)):
            plan = blocked_plan("all_to_all", n, segment_bytes)
            results = in_threads(ranks, lambda rank, p=plan, c=count: rank.run(p, contribution(rank.rank, n * c)))
            for rank, result in enumerate(results):
                block = slice(rank * count, (rank + 1) * count)
                sent = [contribution(other, n * count)[block] for other in range(n)]
                np.testing.assert_array_equal(result, np.concatenate(sent))


@pytest.mark.parametrize("method", ["direct", "tree", "ring"])
@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_broadcast_and_reduce(n, method):
    with world(n) as ranks:
        for root in (0, n - 1):
            for segment_bytes, count in ((64, 1), (64, 500), (4096, 5000)):
                spread = rooted_plan("broadcast", n, root, method, segment_bytes)
                for result in in_threads(
                    ranks, lambda rank, p=spread, c=count: rank.run(p, contribution(rank.rank, c))
                ):
                    np.testing.assert_array_equal(result, contribution(root, count))
                gather = rooted_plan("reduce", n, root, method, segment_bytes)
                results = in_threads(ranks, lambda rank, p=gather, c=count: rank.run(p, contribution(rank.rank, c)))
                expected = sum(contribution(rank, count).astype(np.float64) for rank in range(n))
                np.testing.assert_array_equal(results[root], expected)


@pytest.mark.parametrize(("hosts", "per_host"), [(2, 2), (2, 4), (3, 2)])
def test_two_levels(hosts, per_host):
    n = hosts * per_host
    with world(n) as ranks:
        for segment_bytes in (256, 1 << 16):
            plan = two_level_plan(hosts, per_host, segment_bytes)
            for count in (3, 1000, 50021):
                results = in_threads(ranks, lambda rank, p=plan, c=count: rank.run(p, contribution(rank.rank, c)))
                expected = sum(contribution(rank, count).astype(np.float64) for rank in range(n))
                for result in results:
                    np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("method", ["at once", "direct", "ring"])
def test_all_ranks_end_with_the_same_bits(method):
    n, count = 5, 30011
    generator = np.random.default_rng(11)
    inputs = generator.standard_normal((n, count)).astype(np.float32)
    with world(n) as ranks:
        plan = all_reduce_plan(n, method, 4096)
        results = [in_threads(ranks, lambda rank: rank.run(plan, inputs[rank.rank].copy())) for _ in range(3)]
    first = results[0][0]
    for result in (array for attempt in results for array in attempt):
        np.testing.assert_array_equal(result.view(np.uint32), first.view(np.uint32))
    np.testing.assert_allclose(first, inputs.astype(np.float64).sum(0), rtol=1e-5, atol=1e-5)


def test_sums_are_taken_in_the_order_of_the_ring():
    n, count = 4, 1000
    inputs = np.random.default_rng(5).standard_normal((n, count)).astype(np.float32)
    with world(n) as ranks:
        plan = all_reduce_plan(n, "at once")
        result = in_threads(ranks, lambda rank: rank.run(plan, inputs[rank.rank].copy()))[2]
    expected = ((inputs[0] + inputs[1]) + inputs[2]) + inputs[3]
    np.testing.assert_array_equal(result, expected)


def test_arena_buffers_are_reduced_where_they_lie():
    n, count = 4, 40000
    with world(n) as ranks:
        plans = [all_reduce_plan(n, method, 4096) for method in methods(n)] + [two_level_plan(2, 2, 4096)]

        def program(rank: Rank) -> np.ndarray:
            mine = rank.engine.empty(4 * count).view(np.float32)
            for round_, plan in enumerate(plans * 2):
                mine[:] = contribution(rank.rank + round_, count)
                rank.run(plan, mine)
                expected = sum(contribution(other + round_, count).astype(np.float64) for other in range(n))
                np.testing.assert_array_equal(mine, expected)
            return mine

        in_threads(ranks, program)
        exchange = blocked_plan("all_to_all", n, 4096)

        def swap(rank: Rank) -> np.ndarray:
            mine = rank.engine.empty(4 * n * count).view(np.float32)
            mine[:] = contribution(rank.rank, n * count)
            return rank.run(exchange, mine)

        for rank, result in enumerate(in_threads(ranks, swap)):
            block = slice(rank * count, (rank + 1) * count)
            expected = np.concatenate([contribution(other, n * count)[block] for other in range(n)])
            np.testing.assert_array_equal(result, expected)


def test_works_overlap_and_complete():
    n, count, works = 3, 5000, 40
    with world(n) as ranks:
        plan = all_reduce_plan(n, "direct", 4096)

        def program(rank: Rank) -> None:
            arrays = [contribution(rank.rank + i, count) for i in range(works)]
            handles = [rank.start(plan, array) for array in arrays]
            small = rank.run(plan, contribution(rank.rank, 3))  # does not wait for the handles
            for handle in handles:
                handle.wait(20)
                assert handle.done()
                assert handle.error() is None
            np.testing.assert_array_equal(small, sum(contribution(other, 3) for other in range(n)))
            for i, array in enumerate(arrays):
                np.testing.assert_array_equal(array, sum(contribution(other + i, count) for other in range(n)))

        in_threads(ranks, program)


def test_a_work_keeps_its_buffer_alive():
    n, count = 2, 100000
    with world(n) as ranks:
        plan = all_reduce_plan(n, "direct", 4096)

        begun = threading.Event()

        def program(rank: Rank) -> None:
            if rank.rank == 1:
                assert begun.wait(20)
            arrays = [contribution(rank.rank + i, count) for i in range(20)]
            buffers = [weakref.ref(array) for array in arrays]
            works = [rank.start(plan, array) for array in arrays]
            del arrays
            if rank.rank == 0:  # the other rank has called nothing, so no call has ended
                gc.collect()
                kept = [buffer() for buffer in buffers]
                assert all(array is not None for array in kept)
                begun.set()
            for work in works:
                work.wait(20)
            for i, array in enumerate(kept if rank.rank == 0 else []):
                np.testing.assert_array_equal(array, contribution(i, count) + contribution(1 + i, count))

        in_threads(ranks, program)


def test_two_communicators_in_different_orders():
    n, count = 4, 20000
    with world(n) as ranks:
        for rank in ranks:
            rank.engine.communicator(7, list(range(n)))
        plan = all_reduce_plan(n, "direct", 1024)

        def program(rank: Rank) -> None:
            order = (0, 7) if rank.rank % 2 else (7, 0)
            arrays = {(c, i): contribution(rank.rank + c + i, count) for c in order for i in range(3)}
            works = [rank.start(plan, array, communicator=c) for (c, _), array in arrays.items()]
            for work in works:
                work.wait(20)
            for (c, i), array in arrays.items():
                expected = sum(contribution(other + c + i, count).astype(np.float64) for other in range(n))
                np.testing.assert_array_equal(array, expected)

        in_threads(ranks, program)


def test_a_communicator_of_some_ranks_in_another_order():
    members = [3, 1, 2]
    with world(4) as ranks:
        chosen = [ranks[m] for m in members]
        for rank in chosen:
            rank.engine.communicator(5, members)
        plan = blocked_plan("all_gather", 3, 64)

        def program(rank: Rank) -> np.ndarray:
            member = members.index(rank.rank)
            rank.install(plan, 5, member)
            mine = np.zeros(30, np.int64)
            mine[10 * member : 10 * member + 10] = rank.rank * 100 + np.arange(10)
            return rank.run(plan, mine, communicator=5)

        for result in in_threads(chosen, program):
            np.testing.assert_array_equal(result, np.concatenate([m * 100 + np.arange(10) for m in members]))
        for rank in chosen:
            rank.engine.forget(5)
        with pytest.raises(ValueError, match="no communicator 5"):
            ranks[1].engine.forget(5)


def test_many_collectives_leave_nothing_behind():
    n = 2
    generator = np.random.default_rng(3)
    counts = generator.integers(0, 3000, 2500)
    with world(n) as ranks:
        plan = all_reduce_plan(n, "direct", 1024)

        def program(rank: Rank) -> list[int]:
            committed = []
            for i, count in enumerate(counts):
                result = rank.run(plan, np.full(count, rank.rank + 1 + i % 5, np.int32))
                assert (result == 3 + 2 * (i % 5)).all()
                if i % 500 == 499:
                    committed.append(rank.engine.statistics()["arena_committed"])
            return committed

        for committed in in_threads(ranks, program):
            assert committed[1] == committed[-1]


@pytest.mark.parametrize("communicator", [0, 1])
def test_first_calls_stage_in_memory_that_is_there(communicator):
    """The lanes of another group have it where those of the first do not use it."""
    n = 2
    with world(n, arena_bytes=128 << 20) as ranks:
        plan = replace(all_reduce_plan(n, "at once", 1 << 19), window=2)

        def program(rank: Rank) -> tuple[int, int]:
            if communicator:
                rank.engine.communicator(communicator, list(range(n)))
            before = rank.engine.statistics()
            for count in (3, 1 << 10, 1 << 14, 1 << 18):
                for call in range(8):
                    result = rank.run(plan, contribution(rank.rank + call, count), communicator=communicator)
                    np.testing.assert_array_equal(result, sum(contribution(r + call, count) for r in range(n)))
            after = rank.engine.statistics()
            return tuple(after[what] - before[what] for what in ("arena_allocated", "arena_committed"))

        assert in_threads(ranks, program) == [(8 << 20, 0)] * n


def test_memory_that_is_there_for_staging_is_no_more_than_arrays_leave():
    arena_bytes = 16 << 20
    with world(2, arena_bytes=arena_bytes) as ranks:
        for rank in ranks:
            counted = rank.engine.statistics()
            assert 0 < counted["arena_committed"] - counted["arena_allocated"] <= arena_bytes // 8
            array = rank.engine.empty(arena_bytes - arena_bytes // 8 - (64 << 10))
            array[:] = rank.rank + 1
    with world(2, hosts=[0, 1]) as ranks:  # who shares memory with nobody has none
        for rank in ranks:
            counted = rank.engine.statistics()
            assert counted["arena_committed"] == counted["arena_allocated"]


def test_staging_takes_what_calls_need_where_the_arena_is_full():
    """Every lane stages twice in 16 calls; with the slots that it has otherwise, it would not fit."""
    n, count, arena_bytes = 2, 4 << 10, 32 << 20
    with world(n, arena_bytes=arena_bytes) as ranks:
        plan = all_reduce_plan(n, "at once", 1 << 18)

        def program(rank: Rank) -> int:
            taken = rank.engine.empty(arena_bytes - arena_bytes // 8 - (1 << 18))
            before = rank.engine.statistics()["arena_allocated"]
            for call in range(16):
                result = rank.run(plan, contribution(rank.rank + call, count))
                np.testing.assert_array_equal(result, sum(contribution(r + call, count) for r in range(n)))
            del taken
            return rank.engine.statistics()["arena_allocated"] - before

        for allocated in in_threads(ranks, program):
            assert allocated == 8 * 4 * count - (arena_bytes - arena_bytes // 8 - (1 << 18))


def test_arrays_leave_memory_for_staging():
    n, count = 2, 1 << 20
    with world(n, arena_bytes=64 << 20) as ranks:
        plan = all_reduce_plan(n, "direct", 1 << 15)

        def program(rank: Rank) -> None:
            kept = []
            for size in (1 << 20, 4096):
                with suppress(ResourceError):
                    while True:
                        kept.append(rank.engine.empty(size))
            with pytest.raises(ResourceError, match="8388608 kept for staging: raise MULTIRING_ARENA_BYTES"):
                rank.engine.empty(1)
            works = [rank.start(plan, contribution(rank.rank + call, count)) for call in range(16)]
            for work in works:
                work.wait(20)

        in_threads(ranks, program)


def test_staging_takes_what_calls_need_where_the_arena_is_in_pieces():
    """Holes of 400 KB, when a large call has what is kept for staging: lanes would rather have more for 64 KB."""
    n, count, arena_bytes = 2, 16 << 10, 32 << 20
    with world(n, arena_bytes=arena_bytes) as ranks:
        plan = all_reduce_plan(n, "at once", 1 << 18)

        def program(rank: Rank) -> int:
            holes, kept = [], []
            with suppress(ResourceError):
                while True:
                    holes.append(rank.engine.empty(400 << 10))
                    kept.append(rank.engine.empty(4 << 10))
            with suppress(ResourceError):
                while True:
                    kept.append(rank.engine.empty(4 << 10))
            rank.run(plan, contribution(rank.rank, 15 << 16))
            holes.clear()
            with pytest.raises(ResourceError, match=r"in use and \d+ kept for staging, and no hole larger than \d+: r"):
                rank.engine.empty(1 << 20)
            before = rank.engine.statistics()["arena_allocated"]
            for call in range(64):
                length = (call % 5 + 1) * count // 5
                result = rank.run(plan, contribution(rank.rank + call, length))
                np.testing.assert_array_equal(result, sum(contribution(r + call, length) for r in range(n)))
            return rank.engine.statistics()["arena_allocated"] - before

        for allocated in in_threads(ranks, program):
            assert allocated == 7 * 4 * count


def test_staging_that_goes_around_keeps_what_is_read():
    """Segments of several sizes share the slots of a lane, more of them than are in flight and no multiple of these."""
    n = 3
    counts = [5_000, 33_000, 700, 20_011, 1, 33_001, 9_999]
    with world(n) as ranks:
        plans = [replace(all_reduce_plan(n, "direct", 1 << 12), window=window) for window in (2, 3, 16)]

        def program(rank: Rank) -> None:
            for call in range(420):
                count = counts[call % len(counts)]
                result = rank.run(plans[call % len(plans)], contribution(rank.rank + call, count))
                expected = sum(contribution(r + call, count) for r in range(n))
                np.testing.assert_array_equal(result, expected, err_msg=f"call {call}")

        in_threads(ranks, program)


def test_communicators_share_what_staging_may_have_beyond_its_need():
    n, count = 2, 4 << 10
    with world(n) as ranks:
        plan = all_reduce_plan(n, "at once", 1 << 18)

        def program(rank: Rank) -> int:
            before = rank.engine.statistics()["arena_allocated"]
            for communicator in range(1, 25):
                rank.engine.communicator(communicator, list(range(n)))
                for call in range(8):
                    result = rank.run(plan, contribution(rank.rank + call, count), communicator=communicator)
                    np.testing.assert_array_equal(result, sum(contribution(r + call, count) for r in range(n)))
            return rank.engine.statistics()["arena_allocated"] - before

        needed = 24 * 8 * 4 * count
        assert all(needed < taken <= needed + (4 << 20) for taken in in_threads(ranks, program))


def test_lanes_of_small_calls_stay_small():
    n = 2
    with world(n) as ranks:
        plan = all_reduce_plan(n, "at once", 1 << 18)

        def program(rank: Rank) -> int:
            before = rank.engine.statistics()["arena_allocated"]
            for call in range(600):
                assert (
                    rank.run(plan, contribution(rank.rank, 3) + call).tolist()
                    == (sum(contribution(r, 3) for r in range(n)) + n * call).tolist()
                )
            return rank.engine.statistics()["arena_allocated"] - before

        assert all(0 < taken <= 8 * 4096 for taken in in_threads(ranks, program))


@pytest.mark.parametrize("count", [0, 3, 1000])
def test_cut_agrees_with_the_rule_of_schedules(count):
    for itemsize in (1, 2, 4, 8, 16):
        for numerator in range(8):
            for grain in (64, 1024):
                expected = cut(Fraction(numerator, 7), count, itemsize, grain)
                assert native.cut(numerator, 7, count, itemsize, grain) == expected
            assert native.cut(numerator, 7, count, itemsize) == cut(Fraction(numerator, 7), count, itemsize)


def test_the_engine_and_the_planner_sort_collectives_alike():
    assert native.COLLECTIVES[: len(COLLECTIVES)] == COLLECTIVES
    assert set(native.ROOTED) == set(ROOTED)
    int8, avg = native.DTYPES.index("int8"), native.OPS.index("avg")
    for code, collective in enumerate(native.COLLECTIVES):
        nbytes = native.Call(code, 0, 5, int8, 1.0).nbytes(3)
        assert nbytes == (15 if collective in IN_BLOCKS else 5), collective
        if collective in REDUCING:
            with pytest.raises(ValueError, match="avg is not defined for int8"):
                native.Call(code, 0, 5, int8, 1.0, op=avg)
        else:
            native.Call(code, 0, 5, int8, 1.0, op=avg)


def test_the_engine_and_the_planner_number_instructions_and_wires_alike():
    steps = [Instruction(kind, 0, (1,), 0, Fraction(0), Fraction(1)) for kind in (SEND, REDUCE, STORE, REPAY, ROUND)]
    wires = ("", *list(native.WIRES)[1:])
    steps += [Instruction(ROUND, 0, (), 0, Fraction(0), Fraction(1), wire=wire, rounded=wire) for wire in wires]
    table, _ = Schedule("", "all_reduce", 0, 2, 1, 64, FINEST_GRAIN, tuple(steps)).table()
    assert [native.INSTRUCTIONS[code] for code in table[:, 0]] == [step.kind for step in steps]
    assert table[5:, 10].tolist() == table[5:, 11].tolist() == list(range(len(native.WIRES)))
