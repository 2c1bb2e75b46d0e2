"""Programs for ranks that do what people do: fork, interrupt, fail, leave without a word."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
from functools import partial
from typing import Any

import numpy as np

import multiring as mr
from multiring import env
from multiring.net import local, unix
from multiring.runtime.buffers import writable
from multiring.runtime.comm import group_of
from multiring.training.labels import label


def tell(text: str) -> None:
    """A sign to the test that this rank got here."""
    print(text, flush=True)


def error_of(call: Any, *arguments: Any, **options: Any) -> list[Any]:
    """Return the class, rank and message of the error that a call raised, and the seconds until then."""
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
    kind, _, message, _ = error_of(mr.init)
    assert (kind, "its environment is still that rank's" in message) == ("MultiringError", True)
    for name in (*env.RANKS, "MULTIRING_WORLD_SIZE"):
        os.environ.pop(name, None)
    assert mr.init().size == 1  # not the parent's job any more
    mr.shutdown()
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
    seen = error_of(mr.barrier)  # the others may be in it still when rank 1 is gone
    if mr.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if seen[0] == "nothing":
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


def fail_between_collectives(text: str) -> Any:
    """Rank 1 raises an exception that nobody catches; what the others see."""
    mr.init()
    if mr.rank() == 1:
        mr.barrier()
        raise ValueError(text)
    seen = error_of(mr.barrier)  # rank 1 may be through and gone before the others are
    if seen[0] == "nothing":
        seen = error_of(mr.all_reduce, np.ones(10))
    mr.shutdown()
    return seen


def killed_while_attaching(victim: int, when: str) -> list[Any]:
    """Rank ``victim`` is killed in init, before the others look for it, or after that; what the others see of it."""
    attach = local.attach

    def strike(*arguments: Any) -> list[int]:
        if when == "attached":
            attach(*arguments)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("not reached")

    def look_late(*arguments: Any) -> list[int]:
        names = arguments[2]
        while victim in names and unix.exists(names[victim]):
            time.sleep(0.01)
        return attach(*arguments)

    if int(os.environ["MULTIRING_RANK"]) == victim:
        local.attach = strike  # type: ignore[assignment]
    elif when == "unseen":
        local.attach = look_late  # type: ignore[assignment]
    return error_of(mr.init)


def lost_while_attaching(victim: int, before: float) -> list[Any]:
    """Rank ``victim`` is lost in init, so many seconds before the time limit; if that is below 0, it stops for ever.

    What the others see of it.
    """

    def be_lost(*arguments: Any) -> list[int]:
        deadline = arguments[5]
        if before < 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(max(deadline - before - time.monotonic(), 0))
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("not reached")

    if int(os.environ["MULTIRING_RANK"]) == victim:
        local.attach = be_lost
    found = error_of(mr.init)
    tell("ended")
    return found


def leave_an_interactive_session() -> Any:
    """Rank 1 has seen an exception at its prompt, and leaves well later; what the others see."""
    mr.init()
    if mr.rank() == 1:
        sys.ps1, sys.last_value = ">>> ", ValueError("a slip of the pen")
        return []
    return error_of(mr.barrier)


def leave_early() -> Any:
    """Rank 1 ends well but too early, without shutdown; what the others see."""
    mr.init()
    mr.barrier()
    if mr.rank() == 1:
        sys.exit(0)
    return error_of(mr.all_reduce, np.ones(10))


def leave_before_any_contact() -> Any:
    """Rank 1 ends well, but before it has a link to anybody; what the others see."""
    mr.init()
    if mr.rank() == 1:
        sys.exit(0)
    return error_of(mr.all_reduce, np.ones(10))


def leave_before_a_message() -> Any:
    """Rank 2 ends well; what rank 1 sees, which waits for a message of it, and rank 0, which waits for rank 1."""
    mr.init()
    if mr.rank() == 2:
        sys.exit(0)
    return error_of(mr.recv, np.ones(10), mr.rank() + 1)


def leave_after_the_lowest() -> Any:
    """Rank 0, over which the hosts hear of each other, leaves, then rank 3, which has a link to rank 2 alone; what
    rank 1 sees, which waits for a message of it, and what rank 2 hears, which waits for nothing."""
    mr.init()
    x = np.full(5, 10 + mr.rank())
    if mr.rank() == 0:
        sys.exit(0)
    if mr.rank() == 3:
        mr.recv(x, 2)
        assert (x == 12).all()
        sys.exit(0)
    if mr.rank() == 2:
        engine = mr.init().world.engine
        while not engine.departed(0):
            time.sleep(0.01)
        mr.send(x, 3)
        while not engine.departed(3):
            time.sleep(0.01)
        mr.send(x, 1)
        while (failure := engine.failure()) is None:
            time.sleep(0.01)
        return [type(failure).__name__, failure.rank, str(failure), 0]
    mr.recv(x, 2)
    return error_of(mr.recv, x, 3)


def receive_from_who_is_left() -> Any:
    """Rank 2 ends, then rank 1, which sends to rank 0 before; what rank 0 receives from anybody."""
    mr.init()
    if mr.rank() == 2:
        sys.exit(0)
    x = np.full(5, 10 + mr.rank())
    if mr.rank() == 1:
        mr.send(x, 0)
        sys.exit(0)
    source = mr.recv(x)
    return [source, x.tolist(), error_of(mr.recv, x)]


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


def until_told(file: str) -> list[Any]:
    """Collectives of a short time limit until a file is there; what was seen."""
    mr.init()
    mr.barrier()
    tell("running")
    seen, go_on = ["nothing"], np.ones(1)
    while seen[0] == "nothing" and go_on[0]:
        go_on[0] = not os.path.exists(file)
        seen = error_of(mr.all_reduce, go_on, "min", timeout=4)
        if seen[0] == "nothing":
            seen = error_of(mr.all_reduce, np.ones(300_000), timeout=4)
    return seen


def wait_without_end() -> list[float]:
    """Sums of calls that may take for ever, in several words for it."""
    mr.init()
    found = []
    for timeout in (float("inf"), 1e10):
        if mr.rank():
            time.sleep(0.3)
        x = np.full(4, 1.0 + mr.rank())
        mr.all_reduce(x, timeout=timeout)
        if mr.rank():
            time.sleep(0.3)
        mr.all_reduce(x, async_op=True).wait(timeout)
        found.append(float(x[-1]))
    mr.shutdown()
    return found


def late(seconds: float) -> Any:
    """Rank 2 comes too late."""
    mr.init()
    mr.barrier()
    if mr.rank() == 2:
        time.sleep(seconds)
        return None
    return error_of(mr.all_reduce, np.ones(10), timeout=0.5)


def late_behind_a_root(collective: str) -> Any:
    """Rank 2 never comes to calls whose root does not wait for it until no more can be under way."""
    mr.init()
    mr.barrier()
    if mr.rank() == 2:
        time.sleep(60)
    x, blocks = np.ones(3000), np.ones((3, 3000)) if mr.rank() == 0 else None

    def calls() -> None:
        for _ in range(1000):
            if collective == "broadcast":
                mr.broadcast(x, timeout=5)
            elif collective == "scatter":
                mr.scatter(x, blocks, timeout=5)
            elif mr.rank() == 0:
                mr.send(x, 2, timeout=5)

    found = error_of(calls)
    tell("raised")
    time.sleep(0.5)  # or what comes next would be read with the line, and lost
    return found


def without_memory() -> Any:
    """Rank 1 has no memory left for what it would send in so many calls."""
    mr.init()
    kept = mr.empty((12 << 20) // 8 * 7 - (200 << 10), np.uint8) if mr.rank() == 1 else None

    def call() -> None:
        for work in [mr.all_reduce(np.ones(1 << 20), async_op=True) for _ in range(4)]:
            work.wait()

    found = error_of(call)
    del kept
    return found


def without_descriptors() -> Any:
    """Rank 1 has no descriptor left for the links of its first call."""
    mr.init()
    if mr.rank() == 1:
        lowest = os.dup(0)
        os.close(lowest)
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, most))
    began = time.monotonic()
    return [*error_of(lambda: mr.all_reduce(np.ones(1000))), time.monotonic() - began]


def _disagreeing(what: str) -> Any:
    """A call that on rank 1 is another than on the other ranks."""
    mr.init()
    odd = mr.rank() == 1
    count = 7 if odd and what in ("count", "both", "inputs") else 6
    x = np.ones(count, "int32" if odd and what in ("dtype", "both") else "float32")
    if odd and what == "collective":
        return partial(mr.broadcast, x)
    if odd and what == "barrier":
        return mr.barrier
    if what == "inputs":
        return partial(mr.all_gather, x)
    if what == "root":
        return partial(_last_broadcast, x, int(odd))
    if what in ("ahead", "behind"):
        return partial(_one_more_call, odd == (what == "behind"), x, np.ones(8 if what == "ahead" else 6, "float32"))
    if what == "unlabelled":
        named = 0 if odd else label("gradients", ["kernel", "bias"])
        return partial(group_of(mr.init()).run, "all_reduce", writable(x), label=named)
    if what == "label":
        named = label("gradients", ["kernel", "bias"][:: -1 if odd else 1])
        return partial(group_of(mr.init()).run, "all_reduce", writable(x), label=named)
    return partial(mr.all_reduce, x, "max" if odd and what == "op" else "sum")


def _last_broadcast(x: Any, root: int) -> None:
    """Each rank is its own root, which waits for nobody: the call after it does."""
    mr.broadcast(x, root)
    mr.barrier()


def _one_more_call(one_more: bool, x: Any, then: Any) -> None:
    """Make the calls of both ranks; the one with ``one_more`` makes another before them."""
    if one_more:
        mr.all_reduce(x)
    mr.all_reduce(then)
    mr.barrier()


def disagree(what: str) -> Any:
    """Rank 1 calls something else than rank 0."""
    return error_of(_disagreeing(what))


def disagree_with_most(what: str) -> Any:
    """The same of more ranks, with the attributes of what is raised."""
    try:
        _disagreeing(what)()
    except mr.Mismatch as error:
        return [str(error), error.rank, error.host, error.collective, error.number]
    return "nothing was raised"


def disagree_last(what: str) -> Any:
    """The last call of all is one in which nobody has to wait; what it, or else leaving, says of it."""
    mr.init()
    x = np.ones(5, "float32")
    mr.all_reduce(x)
    call, root = (mr.broadcast, mr.rank()) if what == "broadcast" else (mr.reduce, 1 - mr.rank())
    seen = error_of(call, x, root=root)  # the other's message may be here already
    left = error_of(mr.shutdown)
    if seen[0] == "nothing":
        seen = left
    assert not mr.is_initialized()
    mr.shutdown()
    return seen


def end_in_disagreement(code: int) -> None:
    """The same without shutdown, by ``sys.exit(code)``; an exit hook that was there before runs."""
    atexit.register(tell, "hook")
    mr.init()
    x = np.ones(5, "float32")
    mr.all_reduce(x)
    tell(f"broadcast: {error_of(mr.broadcast, x, root=mr.rank())[0]}")  # as above
    sys.exit(code)


def wrong_tags() -> list[str]:
    """Return the errors that wrong tags raise."""
    mr.init()
    x = np.zeros(3)
    seen = []
    for call in (mr.send, mr.recv):
        for tag in (-3, 1 << 63, "a"):
            try:
                call(x, 1 - mr.rank(), tag)
            except (ValueError, TypeError) as error:
                seen.append(f"{type(error).__name__}: {error}")
    mr.barrier()
    return seen


def crossed_reduce() -> Any:
    """Each is its own root, and waits for the other."""
    mr.init()
    return error_of(mr.reduce, np.ones(5, "float32"), root=mr.rank())


def disagree_in(what: str) -> Any:
    """Ranks give a collective that is made of messages different counts."""
    mr.init()
    rank = mr.rank()
    x = np.zeros(3 + rank, "int16")
    if what == "gather":
        call = error_of(mr.gather, x)
    elif what == "scatter":
        call = error_of(mr.scatter, x, np.zeros(6, "int16") if rank == 0 else None)
    else:
        call = error_of(mr.all_to_all, np.zeros((2, 1 + rank)), [1, 1])
    return call if call[0] != "nothing" else error_of(mr.barrier)


def use_what_was_left() -> Any:
    """Calls on what belonged to a job that was left."""
    world = mr.init()
    group = mr.new_group([1, 0])
    x = np.ones(3)
    work = mr.recv(x, 1 - mr.rank(), async_op=True)
    mr.shutdown()
    calls = (world.all_reduce, group.all_reduce, lambda x: group.send(x, 1 - group.rank), world.all_gather)
    return [error_of(call, x)[::2] for call in (*calls, lambda _: work.wait(), lambda _: group.new_group([0, 1]))]


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


def measure_plans() -> list[Any]:
    mr.init(timeout=30)
    before = mr.plan(4096).measured
    for _ in range(3):
        mr.all_reduce(np.ones(1024, np.float32))
    mr.all_reduce(np.ones(1500, np.float32), async_op=True).wait()
    choice = mr.plan(4096)
    measured = choice.measured
    assert before is None
    assert measured is not None
    assert mr.stats()["plans"][choice.plan.id]["calls"] == measured.calls
    assert "mean of 4 calls here" in str(choice)
    mr.shutdown()
    return [measured.calls, measured.nbytes, 0 < measured.seconds < 30]


def arrive(late_rank: int, seconds: float) -> None:
    """One rank comes later than the others' patience."""
    if int(os.environ["MULTIRING_RANK"]) == late_rank:
        time.sleep(seconds)
    mr.init()
