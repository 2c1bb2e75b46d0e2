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


def steps_until(
    named: bool, late: list[int], how: str, works: int, *, where: bool = True
) -> tuple[dict[str, Any] | None, float]:
    """Steps until all ranks know of a slow one, and one that sleeps ``where``, or of none.

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
        has_to_know = where and named and mr.rank() in late and how == "sleeps"
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


def without_a_core() -> dict[str, Any]:
    """Rank 1 has a core of its own, which others want too; the other ranks share another one."""
    first, second = sorted(os.sched_getaffinity(0))[:2]
    mr.init()
    hogs = []
    if mr.rank() == 1:
        command = [sys.executable, "-c", HOG.format(core={second})]
        hogs = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(6)]
        for hog in hogs:
            assert hog.stdout is not None
            hog.stdout.readline()
    os.sched_setaffinity(0, {second if mr.rank() == 1 else first})
    try:
        number, began, slowest = 0, time.monotonic(), None
        while True:
            compute(0.02)
            slowest = mr.stats()["slowest"] or slowest
            over = time.monotonic() - began > PATIENCE_SECONDS
            if step(number, over or slowest is not None, 1):
                break
            number += 1
    finally:
        for hog in hogs:
            hog.kill()
            hog.communicate()
    assert not over, "not in time"
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


def beside_a_listener(steps: int) -> dict[str, Any]:
    """Steps of equal work beside a thread that waits for words of rank 0, then some in which rank 1 is late."""
    mr.init()
    words = mr.new_group(list(range(mr.world_size())))
    heard: list[float] = []

    def listen() -> None:
        word = np.zeros(1)
        while not heard or heard[-1] >= 0:
            words.recv(word, 0)
            heard.append(float(word[0]))

    def tell(word: float) -> None:
        for peer in range(1, mr.world_size()):
            words.send(np.array([float(word)]), peer)

    listener = threading.Thread(target=listen)
    if mr.rank() != 0:
        listener.start()
    known = []
    for number in range(steps):
        time.sleep(STEP_SECONDS)
        if mr.rank() == 0 and number % 50 == 49:
            tell(number)
        step(number, False, 1)
        if (slowest := mr.stats()["slowest"]) is not None:
            known.append(slowest)
    slowest, _ = steps_until(True, [1], "sleeps", 1, where=False)  # it may be the listener that is looked at
    if mr.rank() == 0:
        tell(-1)
    else:
        listener.join()
        assert heard == [*range(49, steps, 50), -1]
    mr.shutdown()
    return {"known": known, "slowest": slowest}
