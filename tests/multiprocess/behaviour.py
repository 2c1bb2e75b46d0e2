"""Programs for ranks that do what people do: fork, interrupt, fail, leave without a word."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from typing import Any

import numpy as np

import multiring as mr


def tell(text: str) -> None:
    """A sign to the test that this rank got here."""
    print(text, flush=True)


def error_of(call: Any, *arguments: Any, **options: Any) -> list[Any]:
    """What a call raised: class, rank, message, seconds until then."""
    started = time.monotonic()
    try:
        call(*arguments, **options)
    except mr.MultiringError as error:
        return [type(error).__name__, error.rank, str(error), time.monotonic() - started]
    return ["nothing", -1, "", time.monotonic() - started]


def _child(shared: Any, number: int) -> None:
    """A data loader's worker: it uses memory that it inherited, and cannot call collectives."""
    shared += number
    assert (shared == number).all()
    kind, _, message, _ = error_of(mr.rank)
    assert (kind, "forked" in message) == ("MultiringError", True)
    sys.exit(7)


def fork_while_collectives_run() -> list[int]:
    """Exit codes of workers that were forked between and during collectives."""
    mr.init()
    fork = multiprocessing.get_context("fork")
    zeros = mr.empty(100_000, "float64")
    zeros[:] = 0
    codes = []
    for round in range(6):
        x = np.full(300_000, mr.rank(), np.float32)
        work = mr.all_reduce(x, async_op=True)
        worker = fork.Process(target=_child, args=(zeros, round))
        worker.start()
        y = np.full(10, 1 + mr.rank())
        mr.all_reduce(y)
        assert y[0] == sum(range(1, mr.world_size() + 1))
        work.wait(20)
        assert (x == sum(range(mr.world_size()))).all()
        worker.join()
        codes.append(worker.exitcode or 0)
        assert not zeros.any()
    plain = os.fork()
    if plain == 0:
        sys.exit(0)  # runs what is registered for the exit of the parent
    os.waitpid(plain, 0)
    mr.barrier()
    mr.shutdown()
    return codes


def die_with_a_living_child() -> list[Any]:
    """Rank 1 is killed while a process that it forked lives on; what the others see."""
    mr.init()
    if mr.rank() == 1:
        child = os.fork()
        if child == 0:
            os.closerange(0, 3)  # the test waits for the end of what is written there
            time.sleep(20)
            os._exit(0)
        tell(f"child {child}")
    mr.barrier()
    if mr.rank() == 1:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    seen = error_of(mr.barrier)
    mr.shutdown()
    return seen


def interrupted() -> list[Any]:
    """Rank 0 waits for a rank that does not come, and is interrupted."""
    mr.init()
    if mr.rank() != 0:
        seen = error_of(mr.recv, np.zeros(1), 0)
        mr.shutdown()
        return seen
    tell("blocked")
    started = time.monotonic()
    try:
        mr.all_reduce(np.ones(1000))
    except KeyboardInterrupt:
        mr.shutdown()
        return ["KeyboardInterrupt", time.monotonic() - started]
    return ["not interrupted"]


def again() -> int:
    """init after shutdown, several times; how many descriptors more than after the first."""
    used = []
    for round in range(4):
        mr.init()
        x = np.array([mr.rank() + round])
        mr.all_reduce(x)
        assert x[0] == sum(range(mr.world_size())) + round * mr.world_size()
        mr.shutdown()
        assert not mr.is_initialized()
        used.append(len(os.listdir("/proc/self/fd")))
    return used[-1] - used[0]


def fail_between_collectives() -> Any:
    """Rank 1 raises an exception that nobody catches; what the others see."""
    mr.init()
    if mr.rank() == 1:
        mr.barrier()
        raise ValueError("no such sample: 42")
    seen = error_of(mr.barrier)  # rank 1 may be through and gone before the others are
    if seen[0] == "nothing":
        seen = error_of(mr.all_reduce, np.ones(10))
    mr.shutdown()
    return seen


def leave_early() -> Any:
    """Rank 1 ends well but too early, without shutdown; what the others see."""
    mr.init()
    mr.barrier()
    if mr.rank() == 1:
        sys.exit(0)
    return error_of(mr.all_reduce, np.ones(10))


def leave_without_shutdown() -> str:
    """All end after their last collective."""
    mr.init()
    mr.all_reduce(np.ones(100_000), async_op=True).wait()
    return "ended"


def until_lost(nbytes: int) -> list[Any]:
    """Collectives without end; what this rank sees when another is killed, and whether it can leave."""
    mr.init()
    x = np.zeros(nbytes, np.uint8)
    mr.barrier()
    tell("running")
    seen = ["nothing"]
    while seen[0] == "nothing":
        seen = error_of(mr.all_reduce, x, "max")
    again = error_of(mr.all_reduce, x, "max")
    started = time.monotonic()
    mr.shutdown()
    return [*seen[:3], again[0], time.monotonic() - started, time.time()]


def late(seconds: float) -> Any:
    """Rank 2 comes too late."""
    mr.init()
    mr.barrier()
    if mr.rank() == 2:
        time.sleep(seconds)
        return None
    return error_of(mr.all_reduce, np.ones(10), timeout=0.5)


def disagree(what: str) -> Any:
    """Rank 1 calls something else than rank 0."""
    mr.init()
    odd = mr.rank() == 1
    x = np.ones(7 if odd and what == "count" else 6, "int32" if odd and what == "dtype" else "float32")
    if odd and what == "collective":
        return error_of(mr.broadcast, x)
    return error_of(mr.all_reduce, x, "max" if odd and what == "op" else "sum")


def disagree_on_a_group() -> Any:
    """Rank 1 makes a group of other ranks than rank 0."""
    mr.init()
    return error_of(mr.new_group, [1, 0] if mr.rank() == 1 else [0, 1])


def interleaved() -> None:
    """Two communicators, each used by a thread of its own."""
    world = mr.init()
    group = mr.new_group(range(mr.world_size()))
    failures: list[BaseException] = []

    def use(members: Any, weight: int) -> None:
        try:
            for number in range(200):
                x = np.full(1 + 37 * number, weight * (mr.rank() + number))
                members.all_reduce(x)
                assert (x == weight * sum(rank + number for rank in range(members.size))).all()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=use, args=pair) for pair in ((world, 1), (group, 3))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    mr.shutdown()


def arrive(late_rank: int, seconds: float) -> None:
    """One rank comes later than the others' patience."""
    if int(os.environ["MULTIRING_RANK"]) == late_rank:
        time.sleep(seconds)
    mr.init()
