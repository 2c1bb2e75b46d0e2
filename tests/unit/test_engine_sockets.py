"""Threads that read and write connections beyond the first between two ranks: values, order, losses, ends."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from engines import Rank, all_reduce_plan, contribution, in_threads, world

from multiring.errors import Mismatch, PeerLost
from multiring.planning.plan import Phase, Plan, Ring, Span

LARGE = 1_000_003
"""Elements; messages of 64 KB and more go to the threads."""


def total(size: int, count: int, shift: int = 0) -> np.ndarray:
    return sum(contribution(rank + shift, count).astype(np.float64) for rank in range(size))


@contextmanager
def asleep(numbers: set[str]) -> Iterator[None]:
    """These threads of this process do nothing for a second: a signal, whose number is 1, has them call ``sleep``."""
    libc = ctypes.CDLL(None)
    libc.signal.restype, libc.signal.argtypes = ctypes.c_void_p, [ctypes.c_int, ctypes.c_void_p]
    before = libc.signal(signal.SIGHUP, ctypes.cast(libc.sleep, ctypes.c_void_p))
    try:
        for number in numbers:
            libc.tgkill(os.getpid(), int(number), signal.SIGHUP)
        time.sleep(0.05)
        yield
    finally:
        libc.signal(signal.SIGHUP, before)


def has_threads(count: int) -> bool:
    """True if this process has ``count`` threads within 5 s: joined threads may take a moment to go."""
    until = time.monotonic() + 5
    while threads() != count and time.monotonic() < until:
        time.sleep(0.01)
    return threads() == count


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def threads_at_rest() -> int:
    """The number of threads once those that a test before has joined are gone: it stays the same for 0.1 s."""
    found, since = threads(), time.monotonic()
    while time.monotonic() < since + 0.1:
        time.sleep(0.01)
        if threads() != found:
            found, since = threads(), time.monotonic()
    return found


def test_they_are_made_for_the_first_large_message() -> None:
    alone = threads_at_rest()
    with world(2, [0, 1], streams=4, socket_threads=3) as ranks:
        assert has_threads(alone + 2)  # the progress threads
        plan = all_reduce_plan(2, "direct")
        in_threads(ranks, lambda rank: rank.run(plan, contribution(rank.rank, 1000)))
        assert has_threads(alone + 2)
        results = in_threads(ranks, lambda rank: rank.run(plan, contribution(rank.rank, LARGE)))
        assert has_threads(alone + 2 + 6)
        for result in results:
            np.testing.assert_array_equal(result, total(2, LARGE))
    assert has_threads(alone)


@pytest.mark.parametrize(("streams", "count"), [(1, 2), (3, 0)])
def test_there_are_none_where_nothing_is_left_for_them(streams: int, count: int) -> None:
    alone = threads_at_rest()
    with world(2, [0, 1], streams=streams, socket_threads=count) as ranks:
        plan = all_reduce_plan(2, "direct")
        results = in_threads(ranks, lambda rank: rank.run(plan, contribution(rank.rank, LARGE)))
        assert has_threads(alone + 2)
        for result in results:
            np.testing.assert_array_equal(result, total(2, LARGE))


@pytest.mark.parametrize(("streams", "count"), [(2, 1), (3, 2), (5, 2)])
@pytest.mark.parametrize("method", ["direct", "ring", "at once"])
def test_large_and_small_calls_take_turns(method: str, streams: int, count: int) -> None:
    plans = [all_reduce_plan(3, method, segment) for segment in (1 << 16, 1 << 18)]
    with world(3, [0, 1, 2], streams=streams, socket_threads=count) as ranks:

        def program(rank: Rank) -> None:
            for number in range(40):
                size = LARGE if number % 4 == 0 else 1 + 97 * number
                result = rank.run(plans[number % 2], contribution(rank.rank + number, size))
                np.testing.assert_array_equal(result, total(3, size, number))

        in_threads(ranks, program)


def in_vain(program: Callable[[], object]) -> str:
    with pytest.raises(PeerLost) as caught:
        program()
    return str(caught.value)


@pytest.mark.parametrize("round", range(5))
def test_a_rank_that_leaves_with_much_on_its_way_is_lost(round: int) -> None:
    plan = all_reduce_plan(3, "ring")
    with world(3, [0, 1, 2], streams=4, socket_threads=2) as ranks:
        in_threads(ranks, lambda rank: rank.run(plan, contribution(rank.rank, LARGE)))
        caught: list[str] = []
        callers = [
            threading.Thread(
                target=lambda r=rank: caught.append(in_vain(lambda: r.run(plan, contribution(r.rank, 8 * LARGE))))
            )
            for rank in ranks[:2]
        ]
        for caller in callers:
            caller.start()
        ranks[2].engine.shutdown()
        for caller in callers:
            caller.join(60)
        assert len(caught) == 2
        assert all("rank 2" in text for text in caught), caught


def test_a_last_call_that_was_not_the_same_is_found_by_whoever_leaves() -> None:
    """The news of it waits in a socket whose thread is asleep."""
    halves = [Span(Fraction(half, 2), Fraction(half + 1, 2)) for half in range(2)]
    sides: list[str] = []
    with world(2, [0, 1], streams=2, socket_threads=1) as ranks:
        alone = set(os.listdir("/proc/self/task"))
        in_threads(ranks, lambda rank: rank.run(all_reduce_plan(2, "direct"), contribution(rank.rank, LARGE)))

        def program(rank: Rank) -> None:
            rings = tuple(Ring((rank.rank, 1 - rank.rank), (half,)) for half in halves)
            plan = Plan("broadcast", 2, (Phase("broadcast", "rank", "direct", rings),), 1 << 16, rank.rank)
            # Ten elements are cut at multiples of 16: the first half is empty, the other goes by the second stream.
            rank.run(plan, contribution(rank.rank, 10))
            try:
                rank.engine.shutdown()
            except Mismatch as error:
                sides.append(str(error))

        with asleep(set(os.listdir("/proc/self/task")) - alone):
            in_threads(ranks, program)
    assert len(sides) == 2
    for side in sides:
        for rank in range(2):
            assert f"rank {rank} (host h{rank}) called broadcast(root={rank})" in side


SUMS = """
import sys
import numpy as np
from engines import all_reduce_plan, contribution, in_threads, world

plan = all_reduce_plan(2, "direct")
with world(2, [0, 1], streams=3, socket_threads=int(sys.argv[1])) as ranks:
    for count in (1, 1000, 300_007) * 3:
        expected = contribution(0, count) + contribution(1, count)
        for result in in_threads(ranks, lambda rank: rank.run(plan, contribution(rank.rank, count))):
            np.testing.assert_array_equal(result, expected)
"""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("count", [0, 2])
def test_nobody_is_lost_where_the_system_has_no_memory_for_a_moment(count: int, tmp_path: Path) -> None:
    here, library = Path(__file__).parent, tmp_path / "scarce_memory.so"
    subprocess.run(["cc", "-shared", "-fPIC", here / "scarce_memory.c", "-o", library, "-ldl"], check=True)
    preloaded = ":".join(filter(None, [os.environ.get("LD_PRELOAD"), str(library)]))
    environment = {**os.environ, "LD_PRELOAD": preloaded, "PYTHONPATH": os.pathsep.join([str(here), *sys.path])}
    words = [sys.executable, "-c", SUMS, str(count)]
    ended = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=100)
    assert (ended.returncode, ended.stderr) == (0, "")


def slept_on() -> int:
    """Number of this process's descriptors that threads can sleep on."""
    links = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the folder itself
            links.append(os.readlink(f"/proc/self/fd/{number}"))
    return sum(link in {"anon_inode:[eventfd]", "anon_inode:[eventpoll]"} for link in links)


def test_a_forked_child_leaves_them_alone() -> None:
    """It keeps no descriptor that they sleep on."""
    plan = all_reduce_plan(2, "direct")
    before = slept_on()
    with world(2, [0, 1], streams=3, socket_threads=2) as ranks:
        for _ in range(5):
            in_threads(ranks, lambda rank: rank.run(plan, contribution(rank.rank, LARGE)))
            child = os.fork()
            if child == 0:
                os._exit(0 if slept_on() == before else 1)
            assert os.waitpid(child, 0)[1] == 0
        results = in_threads(ranks, lambda rank: rank.run(plan, contribution(rank.rank, LARGE)))
        for result in results:
            np.testing.assert_array_equal(result, total(2, LARGE))
