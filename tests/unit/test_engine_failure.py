"""What every rank sees when something goes wrong: the engine's errors, ranks as threads."""

from __future__ import annotations

import re
import threading
import time

import numpy as np
import pytest
from engines import Rank, all_reduce_plan, blocked_plan, in_threads, rooted_plan, world

from multiring import _native as native
from multiring.errors import CollectiveTimeout, Mismatch, MultiringError, PeerLost, ResourceError


def errors_of(ranks: list[Rank], program) -> list[BaseException | None]:
    def caught(rank: Rank) -> BaseException | None:
        try:
            program(rank)
        except MultiringError as error:
            return error
        return None

    return in_threads(ranks, caught)


@pytest.mark.parametrize(
    "disagree",
    [
        lambda rank: rank.run(all_reduce_plan(2, "direct"), np.zeros(100 + rank.rank, np.float32)),
        lambda rank: rank.run(all_reduce_plan(2, "direct"), np.zeros(100, ("int32", "float32")[rank.rank])),
        lambda rank: rank.run(all_reduce_plan(2, "direct"), np.zeros(100), ("sum", "max")[rank.rank]),
        lambda rank: rank.run(all_reduce_plan(2, ("direct", "ring")[rank.rank]), np.zeros(100)),
        lambda rank: rank.run(blocked_plan(("all_gather", "all_to_all")[rank.rank], 2), np.zeros(100)),
        lambda rank: (
            rank.run(rooted_plan("broadcast", 2, 0, "direct"), np.zeros(100))
            if rank.rank == 0
            else rank.run(all_reduce_plan(2, "direct"), np.zeros(100))
        ),
    ],
    ids=["count", "dtype", "op", "plan", "collective", "one-sided"],
)
def test_ranks_that_disagree_see_both_sides(disagree):
    with world(2) as ranks:

        def program(rank: Rank) -> None:
            disagree(rank)
            rank.run(all_reduce_plan(2, "direct"), np.zeros(10))

        errors = errors_of(ranks, program)
    for error in errors:
        assert isinstance(error, Mismatch)
        assert error.rank in (0, 1)
        assert re.search(r"rank \d \(host h\d\) called .*, rank \d \(host h\d\) called ", str(error))


def test_a_collective_that_somebody_does_not_enter_times_out_and_names_him():
    with world(3) as ranks:
        plan = all_reduce_plan(3, "direct")
        begin = time.monotonic()
        errors = errors_of(ranks[:2], lambda rank: rank.run(plan, np.zeros(10), timeout=0.3))
        assert time.monotonic() - begin < 10
        for error in errors:
            assert isinstance(error, CollectiveTimeout)
            assert error.rank == 2
            assert error.host == "h2"
            assert str(error).startswith(
                "all_reduce number 0 of communicator 0 waits for rank 2 (host h2), and its timeout of 0.3 s is up"
            )
        # What the others sent before they gave up is here: this call may complete, the next one cannot.
        assert isinstance(
            errors_of(ranks[2:], lambda rank: [rank.run(plan, np.zeros(10)) for _ in range(2)])[0], CollectiveTimeout
        )


def test_waiting_for_a_work_can_time_out_and_go_on():
    with world(2) as ranks:
        plan = all_reduce_plan(2, "direct")
        array = np.ones(1000, np.float32)
        work = ranks[0].start(plan, array)
        with pytest.raises(CollectiveTimeout, match=r"rank 1 \(host h1\)"):
            work.wait(0.05)
        assert not work.done()
        ranks[1].run(plan, np.ones(1000, np.float32))
        work.wait(10)
        assert (array == 2).all()


def test_pending_work_fails_with_the_first_failure():
    with world(3) as ranks:
        plan = all_reduce_plan(3, "direct")
        works = [rank.start(plan, np.zeros(100000, np.float32)) for rank in ranks[:2]]
        ranks[2].engine.fail("PeerLost", 1, "rank 1 was seen to vanish")
        for work in works:
            with pytest.raises(PeerLost, match=r"rank 1 was seen to vanish; in flight here: all_reduce number 0"):
                work.wait(10)
            error = work.error()
            assert isinstance(error, PeerLost)
            assert (error.rank, error.host, error.collective, error.number) == (1, "h1", "all_reduce", 0)
        for rank in ranks:
            assert isinstance(rank.engine.failure(), PeerLost)
            with pytest.raises(PeerLost):
                rank.run(plan, np.zeros(3))


def test_a_rank_that_shuts_down_is_lost_to_those_that_wait_for_it():
    with world(2) as ranks:
        plan = all_reduce_plan(2, "direct")
        in_threads(ranks, lambda rank: rank.run(plan, np.zeros(10)))
        leaver = threading.Timer(0.2, ranks[1].engine.shutdown)
        leaver.start()
        with pytest.raises(PeerLost, match=r"rank 1 \(host h1\) has shut down, and all_reduce number 1") as caught:
            ranks[0].run(plan, np.zeros(10))
        leaver.join()
        assert caught.value.rank == 1


def test_shutdown_fails_what_is_pending_and_may_be_repeated():
    with world(2) as ranks:
        plan = all_reduce_plan(2, "direct")
        work = ranks[0].start(plan, np.zeros(10))
        begin = time.monotonic()
        ranks[0].engine.shutdown()
        ranks[0].engine.shutdown()
        assert time.monotonic() - begin < 3
        with pytest.raises(MultiringError, match="the engine was shut down"):
            work.wait(5)
        with pytest.raises(RuntimeError, match="the engine is shut down"):
            ranks[0].run(plan, np.zeros(10))


def test_a_full_arena_is_an_error():
    engine = native.Engine(0, 1, inproc=True, arena_bytes=1 << 20)
    kept = engine.empty(1 << 19)
    with pytest.raises(ResourceError, match="out of shared memory: 1048576 bytes wanted"):
        engine.empty(1 << 20)
    del kept
    assert engine.empty(900_000).size == 900_000
    engine.shutdown()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([3, 0, 0, 1, 0, 0, 1, 1, 1, 0], "unknown kind 3"),
        ([0, 0, 0, 2, 0, 0, 1, 1, 1, 0], "its 2 peers from 0 are not in the table of 1"),
        ([0, 0, 0, 1, 1, 0, 1, 1, 1, 0], "block 1 of 1"),
        ([0, 0, 0, 1, 0, 2, 1, 1, 1, 0], "2/1 does not lie between 0 and 1"),
        ([0, 0, 0, 1, 0, 1, 2, 1, 3, 0], "ends before it starts"),
    ],
)
def test_malformed_schedules_are_refused(row, message):
    with world(2) as ranks, pytest.raises(ValueError, match=re.escape(message)):
        ranks[0].engine.install(0, np.array([row], np.int64), np.array([1], np.int32), 1, 64, 1)
