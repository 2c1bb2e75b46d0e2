"""Errors of the engine, as every rank sees them when something goes wrong; ranks are threads."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from engines import Rank, all_reduce_plan, blocked_plan, connected_sockets, errors_of, in_threads, rooted_plan, world

from multiring import _native as native
from multiring.errors import CollectiveTimeout, Mismatch, MultiringError, PeerLost, ResourceError

transports = pytest.mark.parametrize("apart", [False, True], ids=["inproc", "tcp"])


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


def test_a_callback_comes_before_each_error_that_the_program_hears_of():
    heard: list[int] = []
    plan, x = all_reduce_plan(2, "direct"), np.zeros(10)
    with world(2) as (rank, _):
        native.call_before_errors(lambda: heard.append(threading.get_ident()))
        try:
            work = rank.start(plan, x)
            assert work.error() is None
            assert heard == []
            rank.engine.fail("Mismatch", 1, "rank 1 makes another group")  # the caller raises it
            assert heard == [threading.get_ident()]
            with pytest.raises(Mismatch, match="rank 1 makes another group"):
                work.wait()
            assert isinstance(work.error(), Mismatch)
            with pytest.raises(Mismatch):
                rank.run(plan, x)
            assert heard == [threading.get_ident()] * 4
            native.call_before_errors(None)
            with pytest.raises(Mismatch):
                rank.run(plan, x)
            assert len(heard) == 4
        finally:
            native.call_before_errors(None)


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


def relay(source: int, destination: int, seconds: float) -> None:
    """Pass on what comes, that much later."""
    with socket.socket(fileno=source) as reading, socket.socket(fileno=destination) as writing:
        while data := reading.recv(1 << 16):
            time.sleep(seconds)
            writing.sendall(data)


def test_a_farewell_does_not_overtake_what_was_sent_before_it():
    """The control connection is quick, the data are slow: who has sent everything and left is not lost."""
    engines = [native.Engine(rank, 2, hosts=["h0", "h1"], inproc=True) for rank in range(2)]
    for engine in engines:
        engine.communicator(0, [0, 1])
    (out,), (entrance,) = connected_sockets(1)
    (exit_,), (in_,) = connected_sockets(1)
    engines[0].attach_tcp(1, [out])
    engines[1].attach_tcp(0, [in_])
    threading.Thread(target=relay, args=(entrance, exit_, 0.5), daemon=True).start()
    for rank, sockets in enumerate(connected_sockets(1)):
        engines[rank].attach_control(1 - rank, sockets[0])

    def program(rank: Rank) -> np.ndarray:
        result = rank.run(rooted_plan("broadcast", 2, 0, "direct"), np.full(1000, rank.rank + 5.0), timeout=10)
        rank.engine.shutdown()
        return result

    for result in in_threads([Rank(engine, rank) for rank, engine in enumerate(engines)], program):
        assert (result == 5).all()


def test_a_farewell_is_passed_on_between_hosts():
    """Control connections 1 - 0 - 2, and no data connections: rank 1 hears from rank 0 that rank 2 has left."""
    engines = [native.Engine(rank, 3, hosts=["h0", "h1", "h2"], inproc=True) for rank in range(3)]
    for other in (1, 2):
        for end, peer, sockets in zip((0, other), (other, 0), connected_sockets(1), strict=True):
            engines[end].attach_control(peer, sockets[0])
    assert not any(engine.departed(2) for engine in engines[:2])
    engines[2].shutdown()
    deadline = time.monotonic() + 20
    while not all(engine.departed(2) for engine in engines[:2]) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [engine.departed(2) for engine in engines[:2]] == [True, True]
    assert [engine.failure() for engine in engines[:2]] == [None, None]
    assert not engines[0].departed(1)
    (here,), (there,) = connected_sockets(1)
    engines[1].attach_tcp(2, [here])  # what it sent before may be on its way
    assert not engines[1].departed(2)
    os.close(there)
    for engine in engines[:2]:
        engine.shutdown()


def test_a_connection_that_is_closed_while_it_is_attached():
    for _ in range(20):
        engine = native.Engine(0, 2, hosts=["h0", "h1"], inproc=True)
        (here,), (there,) = connected_sockets(1)
        os.close(there)
        engine.attach_tcp(1, [here])
        deadline = time.monotonic() + 20
        while engine.failure() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        failure = engine.failure()
        assert isinstance(failure, PeerLost)
        assert failure.rank == 1
        engine.shutdown()


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
        with pytest.raises(MultiringError, match=r"was shut down: call multiring\.init\(\) again"):
            ranks[0].run(plan, np.zeros(10))
        with pytest.raises(MultiringError, match="was shut down"):
            ranks[0].start(plan, np.zeros(10))
        with pytest.raises(MultiringError, match="was shut down"):
            ranks[0].engine.attached(1)


@transports
def test_a_call_that_another_thread_shuts_down_ends_wherever_it_is(apart):
    dice, plan, count = random.Random(5), all_reduce_plan(2, "ring", 4096), 20_000
    for _ in range(30):
        with world(2, [0, 1] if apart else None) as ranks:
            done = [0, 0]

            def program(rank: Rank, done: list[int] = done) -> BaseException | None:
                try:
                    while True:
                        mine = np.arange(count, dtype=np.float64) * (rank.rank + 1) + done[rank.rank]
                        rank.run(plan, mine)
                        assert (mine == np.arange(count) * 3 + 2 * done[rank.rank]).all()
                        done[rank.rank] += 1
                except MultiringError as error:
                    return error

            leaving = threading.Timer(dice.uniform(0, 0.01), ranks[0].engine.shutdown)
            leaving.start()
            gone, left_alone = in_threads(ranks, program)
            leaving.join()
            assert "shut down" in str(gone), gone
            assert (type(left_alone), left_alone.rank) == (PeerLost, 0), left_alone
            assert abs(done[0] - done[1]) <= 1, done


def test_shutdown_leaves_no_descriptor_behind():
    def engine() -> native.Engine:
        made = native.Engine(0, 1, arena_bytes=1 << 20)
        made.communicator(0, [0])
        return made

    engine().shutdown()
    before = os.listdir("/proc/self/fd")
    kept = engine()
    array = kept.empty(4096)
    array[:] = 7
    kept.shutdown()
    assert os.listdir("/proc/self/fd") == before
    assert (array == 7).all()
    child = os.fork()
    if child == 0:
        array[:] = 8  # in the child's memory only
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert (array == 7).all()


def test_what_cannot_be_attached_is_closed():
    engine = native.Engine(0, 2, arena_bytes=1 << 20)
    before = sorted(os.listdir("/proc/self/fd"))
    for attach, message in [
        (lambda a, b, c: engine.attach_tcp(7, [a, b, c]), "peer 7 of rank 0"),
        (lambda a, b, c: [os.close(b), os.close(c), engine.attach_control(0, a)], "peer 0 of rank 0"),
        (lambda a, b, c: engine.attach_local(7, a, b, c), "peer 7 of rank 0"),
        (lambda a, b, c: engine.attach_local(1, a, b, c), "rank 1 is not a sealed arena"),
    ]:
        with pytest.raises(ValueError, match=message):
            attach(*(os.memfd_create("no arena") for _ in range(3)))
    assert sorted(os.listdir("/proc/self/fd")) == before
    engine.shutdown()


@transports
@pytest.mark.parametrize("together", [True, False], ids=["together", "one after the other"])
@pytest.mark.parametrize("sent", ["broadcast", "reduce"])
def test_a_last_call_that_was_not_the_same_is_found_when_leaving(sent, together, apart):
    """Everybody only sends in it, so nobody has to wait and each call completes."""
    sides = []
    with world(2, [0, 1] if apart else None) as ranks:

        def program(rank: Rank) -> None:
            root = rank.rank if sent == "broadcast" else 1 - rank.rank
            try:
                rank.run(rooted_plan(sent, 2, root, "direct"), np.zeros(10))
                rank.engine.shutdown()
            except Mismatch as error:
                sides.append(str(error))

        if together:
            in_threads(ranks, program)
        else:
            for rank in ranks:
                program(rank)
    assert len(sides) == (2 if together else 1)
    for side in sides:
        for rank in range(2):
            root = rank if sent == "broadcast" else 1 - rank
            assert f"rank {rank} (host h{rank}) called {sent}(root={root})" in side


@transports
@pytest.mark.parametrize("count", [10, 100_000])
def test_ranks_that_wait_for_each_other_in_different_calls_see_why(count, apart):
    """Nobody sends anything: it is not a time-out but a mismatch."""
    with world(3, [0, 1, 2] if apart else None) as ranks:
        errors = errors_of(ranks, lambda rank: rank.run(rooted_plan("reduce", 3, rank.rank, "direct"), np.zeros(count)))
    for error in errors:
        assert isinstance(error, Mismatch), error
        assert len(set(re.findall(r"root=(\d)", str(error)))) == 2


@transports
def test_leaving_after_the_same_calls_is_no_mismatch(apart):
    """The last one sends only, and its readers are late."""
    with world(3, [0, 0, 1] if apart else None) as ranks:

        def program(rank: Rank) -> np.ndarray:
            if rank.rank:
                time.sleep(0.1 * rank.rank)
            result = rank.run(rooted_plan("broadcast", 3, 0, "tree"), np.full(1000, rank.rank + 5.0))
            rank.engine.shutdown()
            return result

        for result in in_threads(ranks, program):
            assert (result == 5).all()


def test_a_full_arena_is_an_error():
    engine = native.Engine(0, 1, inproc=True, arena_bytes=1 << 20)
    kept = engine.empty(1 << 19)
    with pytest.raises(ResourceError, match="out of shared memory: 1048576 bytes wanted"):
        engine.empty(1 << 20)
    del kept
    assert engine.empty(900_000).size == 900_000
    engine.shutdown()


def test_copies_for_calls_leave_half_of_the_arena():
    engine = native.Engine(0, 1, hosts=["h0"], inproc=True, arena_bytes=32 << 20)
    array = engine.empty(20 << 20)
    with pytest.raises(ResourceError):
        engine.empty(1 << 20, copy=True)
    del array
    copy = engine.empty(10 << 20, copy=True)
    with pytest.raises(ResourceError):
        engine.empty(10 << 20, copy=True)
    array = engine.empty(12 << 20)
    del array, copy
    engine.shutdown()


def test_an_arena_that_a_limit_cuts_names_the_limit():
    program = """
import resource
from multiring import _native as native
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 21, 1 << 21))
try:
    native.Engine(0, 1, arena_bytes=1 << 28).empty(1 << 22)
except Exception as error:
    print(error)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True)
    assert "the arena has 2097152 bytes" in result.stdout
    assert "a limit of file sizes (ulimit -f) cuts it: raise that" in result.stdout
    assert "MULTIRING_ARENA_BYTES" not in result.stdout


def test_an_arena_that_a_limit_forbids_names_the_limit():
    program = """
import resource
from multiring import _native as native
resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))
try:
    native.Engine(0, 1, arena_bytes=1 << 28)
except Exception as error:
    print(error)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True)
    assert result.stdout.startswith("cannot reserve 4096 bytes of shared memory: File too large")
    assert result.stdout.strip().endswith(": a limit of file sizes (ulimit -f) cuts it: raise that")


def test_memory_that_is_there_for_staging_goes_to_an_array_where_the_machine_has_no_more(tmp_path):
    """Two engines have 8 MB each, of the 24 MB that there are."""
    program = """
import numpy as np
from engines import all_reduce_plan, contribution, in_threads
from multiring.errors import ResourceError
from test_engine_given_up import unheard

with unheard(2) as (ranks, _):
    array = ranks[0].engine.empty(12 << 20)
    array[:] = 7
    try:
        ranks[0].engine.empty(12 << 20)
    except ResourceError as error:
        print(error)
    plan = all_reduce_plan(2, "direct")
    for result in in_threads(ranks, lambda rank: rank.run(plan, contribution(rank.rank, 1000))):
        np.testing.assert_array_equal(result, contribution(0, 1000) + contribution(1, 1000))
    assert (array == 7).all()
"""
    here, library = Path(__file__).parent, tmp_path / "scarce_pages.so"
    subprocess.run(["cc", "-shared", "-fPIC", here / "scarce_pages.c", "-o", library, "-ldl"], check=True)
    preloaded = ":".join(filter(None, [os.environ.get("LD_PRELOAD"), str(library)]))
    path = os.pathsep.join([str(here), *sys.path])
    environment = {**os.environ, "LD_PRELOAD": preloaded, "PYTHONPATH": path, "PAGES_BYTES": str(24 << 20)}
    words = [sys.executable, "-c", program]
    result = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=100)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("out of shared memory: 12582912 bytes wanted, ")


def test_too_few_descriptors_name_the_limit():
    program = """
import os, resource
from multiring import _native as native
from multiring.errors import ResourceError
from multiring.net.loop import LoopThread
free = os.dup(0)
os.close(free)
resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, free + 1))
for start in (lambda: native.Engine(0, 1, inproc=True), lambda: LoopThread("test")):
    try:
        start()
    except ResourceError as error:
        print(error)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True)
    engine, loop = result.stdout.splitlines()
    assert engine == "cannot create a descriptor to sleep on: Too many open files (raise ulimit -n)"
    assert loop == "cannot create an event loop: [Errno 24] Too many open files (raise ulimit -n)"
    assert result.stderr == ""


def test_an_arena_is_not_larger_than_the_machine():
    engine = native.Engine(0, 1, arena_bytes=99999 << 30)
    with pytest.raises(ResourceError, match=r"the arena has .* kept for staging: the machine has no more"):
        engine.empty(99999 << 30)
    engine.shutdown()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([5, 0, 0, 1, 0, 0, 1, 1, 1, 0, 0, 0, 0], "unknown kind 5"),
        ([0, 0, 0, 2, 0, 0, 1, 1, 1, 0, 0, 0, 0], "its 2 peers from 0 are not in the table of 1"),
        ([0, 0, 0, 1, 1, 0, 1, 1, 1, 0, 0, 0, 0], "block 1 of 1"),
        ([0, 0, 0, 1, 0, 2, 1, 1, 1, 0, 0, 0, 0], "2/1 does not lie between 0 and 1"),
        ([0, 0, 0, 1, 0, 1, 2, 1, 3, 0, 0, 0, 0], "ends before it starts"),
        ([0, 0, 0, 1, 0, 0, 1, 1, 1, 0, 9, 0, 0], "unknown wire 9"),
        ([0, 0, 0, 1, 0, 0, 1, 1, 1, 0, 3, 0, 0], "int8 needs a grain that is a multiple of 1024, not 64"),
        ([3, 0, 0, 1, 0, 0, 1, 1, 1, 0, 0, 0, 0], "it has no peers, and 1 are given"),
        ([4, 0, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0], "it rounds to no narrow format"),
    ],
)
def test_malformed_schedules_are_refused(row, message):
    with world(2) as ranks, pytest.raises(ValueError, match=re.escape(message)):
        ranks[0].engine.install(
            0, np.array([row], np.int64), np.array([1], np.int32), native.PlanFacts(1, 64, 1 << 20, 1)
        )


@pytest.mark.parametrize("grain", [0, 100])
def test_a_grain_that_is_no_whole_cache_lines_is_refused(grain):
    row = [0, 0, 0, 1, 0, 0, 1, 1, 1, 0, 0, 0, 0]
    with world(2) as ranks, pytest.raises(ValueError, match=f"grain is {grain}, must be a multiple of 64"):
        ranks[0].engine.install(
            0, np.array([row], np.int64), np.array([1], np.int32), native.PlanFacts(1, 64, 1 << 20, 1, grain)
        )


def test_the_culprit_is_named_and_not_its_neighbour():
    """Each rank waits for the one before it in a ring, the first of them for one that calls nothing."""
    with world(5) as ranks:
        plan = all_reduce_plan(5, "ring")
        in_threads(ranks, lambda rank: rank.run(plan, np.zeros(1000)))
        errors = errors_of(
            [ranks[i] for i in (0, 1, 3, 4)], lambda rank: rank.run(plan, np.zeros(1000), timeout=1 + 0.1 * rank.rank)
        )
    for error in errors:
        assert isinstance(error, CollectiveTimeout)
        assert (error.rank, error.host, error.collective, error.number) == (2, "h2", "all_reduce", 1)
        assert error.seconds >= 0.9
        assert "rank 2 (host h2) has not called it; its last call, all_reduce number 0 of communicator 0, was" in str(
            error
        )


@pytest.mark.parametrize("hosts", [None, [0, 0, 1, 1, 2]], ids=["one host", "three hosts"])
def test_the_culprit_is_named_across_hosts(hosts):
    with world(5, hosts, heartbeat_timeout=10, late_seconds=1) as ranks:
        plan = all_reduce_plan(5, "ring")
        in_threads(ranks, lambda rank: rank.run(plan, np.zeros(1000)))
        others = [ranks[i] for i in (0, 1, 2, 4)]
        errors = errors_of(others, lambda rank: rank.run(plan, np.zeros(1000), timeout=2.5))
    for error in errors:
        assert isinstance(error, CollectiveTimeout)
        assert error.rank == 3
        assert "rank 3 (host h3) has not called it" in str(error)


@contextmanager
def unconnected(hosts: list[int], heartbeat_timeout: float) -> Iterator[list[native.Engine]]:
    """Engines that hear of each other, and have no data connection to other hosts."""
    names = [f"h{host}" for host in hosts]
    timeout = {"heartbeat_timeout": heartbeat_timeout}
    engines = [native.Engine(rank, len(hosts), hosts=names, inproc=True, **timeout) for rank in range(len(hosts))]
    for a, b in combinations(range(len(hosts)), 2):
        if hosts[a] == hosts[b]:
            engines[a].attach_inproc(b, engines[b])
            engines[b].attach_inproc(a, engines[a])
        elif hosts.index(hosts[a]) == a and hosts.index(hosts[b]) == b:
            for end, other, sockets in zip((a, b), (b, a), connected_sockets(1), strict=True):
                engines[end].attach_control(other, sockets[0])
    try:
        yield engines
    finally:
        for engine in engines:
            engine.shutdown()


def test_a_missing_connection_is_a_failure_once_both_ends_of_it_miss_it():
    """The first of them may only be the one that cannot connect, and the second late; so may others of its host be."""
    with unconnected([0, 1, 2, 2], heartbeat_timeout=2.0) as engines:
        for _ in range(4):
            engines[0].miss_connection(3, 2.5)
            engines[2].miss_connection(0, 2.5)
            engines[1].miss_connection(2, 2.5)
            time.sleep(0.25)
        assert [engine.failure() for engine in engines] == [None] * 4
        engines[2].miss_connection(1, 3.5)
        deadline = time.monotonic() + 20
        while not all(engine.failure() for engine in engines[:3]) and time.monotonic() < deadline:
            time.sleep(0.02)
        failures = [
            engine.failure() for engine in engines[:3]
        ]  # in one process ranks of a host tell each other nothing
    assert [type(failure).__name__ for failure in failures] == ["PeerLost"] * 3, failures
    assert {(failure.rank, failure.apart) for failure in failures} == {(1, 2)}, failures
    assert all(
        "rank 1 (host h1) and rank 2 (host h2) both live and cannot reach each other" in str(f) for f in failures
    )


def test_a_missing_connection_of_long_ago_does_not_count():
    with unconnected([0, 1], heartbeat_timeout=1.0) as engines:
        engines[0].miss_connection(1, 1.5)
        time.sleep(1.5)
        engines[1].miss_connection(0, 1.5)
        time.sleep(1.5)
        assert [engine.failure() for engine in engines] == [None] * 2


def test_a_link_that_stands_is_not_missed():
    with world(2, [0, 1], heartbeat_timeout=1.0) as ranks:
        for rank in ranks:
            rank.engine.miss_connection(1 - rank.rank, 1.5)
        time.sleep(1.5)
        assert [rank.engine.failure() for rank in ranks] == [None] * 2


def test_who_is_late_is_logged_at_doubling_intervals(caplog):
    with world(2, late_seconds=0.2) as ranks:
        plan = all_reduce_plan(2, "direct")
        late = threading.Timer(1.5, lambda: ranks[1].run(plan, np.ones(10)))
        late.start()
        with caplog.at_level("WARNING", "multiring"):
            assert (ranks[0].run(plan, np.ones(10)) == 2).all()
        late.join()
    lines = [record.getMessage() for record in caplog.records]
    assert 2 <= len(lines) <= 3
    for line, least in zip(lines, (0.2, 0.4, 0.8), strict=False):
        found = re.fullmatch(
            r"all_reduce number 0 of communicator 0 has waited for ([\d.]+) s: rank 1 \(host h1\) has not called it; "
            r"it has called nothing yet",
            line,
        )
        assert found, line
        assert float(found[1]) >= least


def test_a_time_limit_ends_a_call_in_which_bytes_never_cease_to_arrive():
    """The call has so many segments that they would take many times as long as the limit."""
    with world(2) as ranks:
        plan = all_reduce_plan(2, "direct", segment_bytes=64)
        errors = errors_of(ranks, lambda rank: rank.run(plan, np.zeros(50_000_000, np.float32), timeout=0.5))
    for error in errors:
        assert isinstance(error, CollectiveTimeout)
        assert "its timeout of 0.5 s is up" in str(error)


def test_where_bytes_of_a_call_are_lost_all_that_are_in_it_are_told():
    """Two ranks send into sockets that nobody empties; only their control connection leads from one to the other."""
    engines = [native.Engine(rank, 2, hosts=["h0", "h1"], inproc=True) for rank in range(2)]
    nowhere = [socket.socketpair() for _ in engines]
    for engine, control, (near, _) in zip(engines, connected_sockets(1), nowhere, strict=True):
        peer = 1 - engines.index(engine)
        engine.attach_tcp(peer, [near.detach()])
        engine.attach_control(peer, control[0])
        engine.communicator(0, [0, 1])
    plan = all_reduce_plan(2, "at once")
    ranks = [Rank(engine, rank) for rank, engine in enumerate(engines)]
    try:
        errors = errors_of(ranks, lambda rank: rank.run(plan, np.zeros(1000, np.float32), timeout=4.0))
    finally:
        for engine in engines:
            engine.shutdown()
        for _, far in nowhere:
            far.close()
    for error in errors:
        assert isinstance(error, CollectiveTimeout)
        assert re.search(
            r"waits for rank (\d) \(host h\1\), and its timeout of 4 s is up: "
            r"rank \1 \(host h\1\) waits for rank \d and has 4000 bytes to go; "
            r"the kernel here holds \d{4} bytes for rank \1 and 0 from it",
            str(error),
        ), str(error)


def test_ranks_that_wait_for_each_other_in_different_calls_are_a_mismatch():
    with world(2) as ranks:
        for rank in ranks:
            rank.engine.communicator(1, [0, 1])
        plan = all_reduce_plan(2, "direct")
        errors = errors_of(ranks, lambda rank: rank.run(plan, np.zeros(10), timeout=1.0, communicator=rank.rank))
    for error in errors:
        assert isinstance(error, Mismatch)
        assert "ranks wait for each other in a cycle: rank " in str(error)
        for number in (0, 1):
            assert f"all_reduce number 0 of communicator {number} for rank {1 - number}" in str(error)


def test_a_message_is_no_part_in_the_collective_of_its_number():
    with world(2) as ranks:
        plan = all_reduce_plan(2, "direct")
        calls = [
            lambda: ranks[0].run(plan, np.zeros(10), timeout=1.0),
            lambda: ranks[1].recv(0, np.zeros(10), timeout=1.0).wait(20),
        ]
        errors = errors_of(ranks, lambda rank: calls[rank.rank]())
    for error in errors:
        assert isinstance(error, Mismatch)
        assert "rank 0 (host h0) waits in all_reduce number 0 of communicator 0 for rank 1" in str(error)
        assert "rank 1 (host h1) waits in recv number 0 of communicator 0 for rank 0" in str(error)


def test_a_communicator_that_is_made_after_the_failure_raises_it_in_its_calls():
    plan = all_reduce_plan(2, "direct")
    with world(2) as ranks:
        engine = ranks[0].engine
        engine.fail("PeerLost", 1, "rank 1 is gone")
        engine.communicator(9, [0, 1])
        assert engine.completed(9) == 0
        with pytest.raises(PeerLost, match="rank 1 is gone"):
            ranks[0].run(plan, np.zeros(10), communicator=9)
        engine.shutdown()
        with pytest.raises(MultiringError, match="shut down"):
            engine.communicator(10, [0, 1])


def test_threads_that_hold_the_interpreter_are_not_silent(caplog):
    """A rank computes for long in one call, with the GIL: its progress thread beats all the same."""
    with world(2, heartbeat_timeout=1) as ranks:
        plan = all_reduce_plan(2, "direct")
        work = ranks[0].start(plan, np.ones(10))
        begin = time.monotonic()
        while time.monotonic() - begin < 1.5:
            sorted(range(200_000))
        ranks[1].run(plan, np.ones(10))
        work.wait(5)
    assert not caplog.records


def test_a_failure_names_the_call_that_meets_it_also_where_its_plan_is_new():
    with world(2) as ranks:
        ranks[0].engine.fail("PeerLost", 1, "rank 1 is gone")
        with pytest.raises(PeerLost, match=r"rank 1 is gone; this all_reduce was not started") as caught:
            ranks[0].run(all_reduce_plan(2, "ring"), np.zeros(10))
    assert (caught.value.rank, caught.value.collective) == (1, "all_reduce")


class ToldToEnd(BaseException):
    pass


def test_what_the_handler_of_a_signal_raises_while_an_error_is_made_is_raised(monkeypatch: pytest.MonkeyPatch):
    def end(*_: object) -> None:
        raise ToldToEnd

    before = signal.signal(signal.SIGUSR1, end)
    try:
        with world(2) as ranks:
            ranks[0].engine.fail("PeerLost", 1, "rank 1 has ended")
            monkeypatch.setattr(PeerLost, "__init__", lambda *_, **__: signal.raise_signal(signal.SIGUSR1))
            with pytest.raises(ToldToEnd):
                ranks[0].run(all_reduce_plan(2, "direct"), np.zeros(100))
    finally:
        signal.signal(signal.SIGUSR1, before)
