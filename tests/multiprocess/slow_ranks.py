"""Programs for the tests of slow ranks: steps in which some are late, until that is known or is over."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np

import multiring as mr

COUNT = 5000
LATE_SECONDS, STEP_SECONDS = 0.1, 0.03
PATIENCE_SECONDS = 100

HOG = "import os; os.sched_setaffinity(0, {core}); print(flush=True)\nwhile True: pass"


def step(number: int, wish: bool, works: int) -> bool:
    """One step's collectives, and whether all ranks wish to end."""
    parts = [np.arange(COUNT) * (mr.rank() + 1.0) + number for _ in range(works)]
    if works == 1:
        mr.all_reduce(parts[0])
    else:
        for work in [mr.all_reduce(part, async_op=True) for part in parts]:
            work.wait()
    size = mr.world_size()
    for part in parts:
        assert (part == np.arange(COUNT) * (size * (size + 1) / 2) + number * size).all()
    mr.all_reduce(wishes := np.array([int(wish)]), "min")
    return bool(wishes[0])


def compute(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        np.arange(1000.0).sum()


def steps_until(named: bool, late: list[int], how: str, works: int) -> tuple[dict[str, Any] | None, float]:
    """Steps until all ranks know of a slow one, and one that sleeps where, or of none.

    What is known then, and the part of time that it ran.
    """
    number, began, slowest = 0, time.monotonic(), None
    ran = wall = 0.0
    while True:
        time.sleep(STEP_SECONDS)
        if mr.rank() in late:
            before = time.monotonic(), time.thread_time()
            if how == "sleeps":
                time.sleep(LATE_SECONDS)
            else:
                compute(LATE_SECONDS)
            wall += time.monotonic() - before[0]
            ran += time.thread_time() - before[1]
        now = mr.stats()["slowest"]
        slowest = now or slowest if named else now
        over = time.monotonic() - began > PATIENCE_SECONDS
        has_to_know = named and mr.rank() in late and how == "sleeps"
        knows_where = not has_to_know or bool(slowest and slowest["where"])
        if step(number, over or ((slowest is not None) == named and knows_where), works):
            assert not over, "not in time"
            return slowest, ran / wall if wall else 0.0
        number += 1


def some_late(late: list[int], how: str, works: int, page: str) -> dict[str, Any]:
    """Ranks ``late`` are, until all know; then nobody is any more, until all know that too. A ``page`` tells of it."""
    mr.init()
    slowest, ran = steps_until(True, late, how, works)
    steps_until(False, [], how, works)
    so_far = mr.stats()["slow_so_far"]
    mr.report(page)
    mr.shutdown()
    return {"slowest": slowest, "ran": ran, "so_far": so_far}


def without_a_core(reason: str) -> dict[str, Any]:
    """Rank 1 has a core of its own, which others want too; the other ranks share another one.

    Steps until all say so for this reason: where other programs keep all of these from running for long, the system
    tells of a wait for a core when it is over, and some windows tell of a sleep before they tell of that.
    """
    first, second = sorted(os.sched_getaffinity(0))[:2]
    lacks_core = os.environ["MULTIRING_RANK"] == "1"
    command = [sys.executable, "-c", HOG.format(core={second})]
    hogs = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(4 * lacks_core)]
    for hog in hogs:  # before `init`: later this rank would sleep meanwhile, and the others wait
        assert hog.stdout is not None
        hog.stdout.readline()
    try:
        mr.init()
        os.sched_setaffinity(0, {second if lacks_core else first})  # this thread alone, as in the next line
        os.setpriority(os.PRIO_PROCESS, 0, 5 * lacks_core)  # it lacks a core more than others, whatever else runs
        number, began, slowest = 0, time.monotonic(), None
        while True:
            compute(0.02)
            slowest = mr.stats()["slowest"] or slowest
            over = time.monotonic() - began > PATIENCE_SECONDS
            if step(number, over or (slowest is not None and slowest["reason"] == reason), 1):
                break
            number += 1
    finally:
        for hog in hogs:
            hog.kill()
            hog.communicate()
    assert not over, f"not in time: {slowest}"
    mr.shutdown()
    return {"slowest": slowest}


def nobody_late(steps: int) -> list[Any]:
    """Take steps of equal work, and return the slow ranks known after them."""
    mr.init()
    known = []
    for number in range(steps):
        time.sleep(STEP_SECONDS)
        step(number, False, 1)
        if (slowest := mr.stats()["slowest"]) is not None:
            known.append(slowest)
    mr.shutdown()
    return known


def beside_listeners(steps: int) -> dict[str, Any]:
    """Steps of equal work beside threads that wait for words of rank 0, then some in which rank 1 is late."""
    mr.init()
    groups = [mr.new_group(list(range(mr.world_size()))) for _ in range(3)]
    heard: list[list[float]] = [[] for _ in groups]

    def listen(number: int) -> None:
        word = np.zeros(1)
        while not heard[number] or heard[number][-1] >= 0:
            groups[number].recv(word, 0)
            heard[number].append(float(word[0]))

    def tell(word: float) -> None:
        for number, words in enumerate(groups):
            for peer in range(1, mr.world_size()):
                words.send(np.array([float(word + number if word >= 0 else word)]), peer)

    listeners = [threading.Thread(target=listen, args=(number,)) for number in range(len(groups))]
    if mr.rank() != 0:
        for listener in listeners:
            listener.start()
    known = []
    for number in range(steps):
        time.sleep(STEP_SECONDS)
        if mr.rank() == 0 and number % 50 == 49:
            tell(number)
        step(number, False, 1)
        if (slowest := mr.stats()["slowest"]) is not None:
            known.append(slowest)
    slowest, _ = steps_until(True, [1], "sleeps", 1)
    if mr.rank() == 0:
        tell(-1)
    else:
        for number, listener in enumerate(listeners):
            listener.join()
            assert heard[number] == [*(step + number for step in range(49, steps, 50)), -1]
    mr.shutdown()
    return {"known": known, "slowest": slowest}


def beside_one_that_polls(pause: float | None) -> list[list[int]]:
    """Rank 1 asks again and again whether a call is done, for which the others wait; rank 2 is late. Who was named."""
    mr.init()
    rank, size = mr.rank(), mr.world_size()
    number, began, over, all_know = 0, time.monotonic(), False, False
    while not all_know and not over:
        time.sleep(STEP_SECONDS + LATE_SECONDS * (rank == 2))
        part = np.arange(COUNT) * (rank + 1.0) + number
        work = mr.all_reduce(part, async_op=True)
        while rank == 1 and not work.done():
            if pause is not None:
                time.sleep(pause)
        work.wait()
        assert (part == np.arange(COUNT) * (size * (size + 1) / 2) + number * size).all()
        over = time.monotonic() - began > PATIENCE_SECONDS
        mr.all_reduce(wishes := np.array([int(bool(mr.stats()["slow_so_far"])), int(not over)]), "min")
        all_know, over = bool(wishes[0]), not wishes[1]
        number += 1
    assert not over, "not in time"
    named: list[list[int]] = [each["ranks"] for each in mr.stats()["slow_so_far"]]
    mr.shutdown()
    return named
