"""Ranks that lose others and go on without them, every sum compared to the last bit."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from sums import reduced

import multiring as mr
from multiring.job import rendezvous
from multiring.net import local
from multiring.net.acceptor import Message, RankConnection
from multiring.runtime import clocks

STEPS, LOST_AT = 12, 5


def steps_until(stop: int, count: int = 20_000) -> None:
    for step in range(stop):
        reduced(count, step)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def go_on(outcome: dict[str, Any], timeout: float | None = None) -> dict[str, Any]:
    """Shrink, and as many steps more."""
    began = time.monotonic()
    try:
        agreement = mr.shrink(timeout)
    except mr.RendezvousError as error:
        assert not mr.is_initialized()
        return {**outcome, "refused": str(error), "seconds": time.monotonic() - began}
    outcome["seconds"] = time.monotonic() - began
    outcome["calls"] = mr.init().world.account()["calls"]
    steps_until(STEPS)
    group = mr.new_group([mr.world_size() - 1, 0]) if mr.world_size() > 1 else None
    if group is not None:
        x = np.full(3, float(mr.rank()))
        mr.broadcast(x, 0, group=group)
        assert (x == mr.world_size() - 1).all()
    return {
        **outcome,
        "members": agreement.members,
        "generation": agreement.generation,
        "completed": agreement.completed,
        "rank": mr.rank(),
        "size": mr.world_size(),
        "plan": mr.plan(1 << 20).plan.id,
    }


def lose(victims: Sequence[int]) -> dict[str, Any]:
    """The ``victims`` are killed in the middle of the steps, all at once."""
    mr.init()
    rank = mr.rank()
    try:
        for step in range(STEPS):
            if step == LOST_AT and rank in victims:
                die()
            reduced(20_000, step)
    except mr.PeerLost as error:
        if rank in victims:
            die()
        outcome = go_on({"blamed": error.rank, "done": step})
    mr.shutdown()
    return outcome


def lose_after(steps: int) -> dict[str, int]:
    """Rank 1 is killed when it has done so many steps, of a collective each; the second of them is to grow."""
    mr.init()
    done = 0
    try:
        while True:
            if done == steps and mr.rank() == 1:
                die()
            if done == 1:
                assert mr.grow() is None
            else:
                reduced(2000, done)
            done += 1
    except mr.PeerLost:
        completed = mr.shrink().completed
    mr.shutdown()
    return {"done": done, "completed": completed}


def lose_the_timeline_too(directory: str) -> dict[str, Any]:
    """The directory of the timeline is removed before rank 1 is lost."""
    mr.init()
    reduced(100, 0)
    if mr.rank() == 0:
        shutil.rmtree(directory)
    reduced(100, 1)
    return lose([1])


def lose_while_shrinking(first: int, second: int, when: str) -> dict[str, Any]:
    """Rank ``second`` is killed in the middle of the agreement about the loss of ``first``.

    ``when`` is the kind of message that it does not send (a leader: to all but one), or "meeting".
    """
    if int(os.environ["MULTIRING_RANK"]) == second:
        _die_at(when)
    return lose([first])


def lose_while_attaching() -> dict[str, Any]:
    """Rank 2 is killed when rank 1 has attached it, and not yet rank 3, in the meeting after the loss of rank 4.

    Rank 1 finds that out by itself, before the leader tells.
    """
    rank, attach, calls = int(os.environ["MULTIRING_RANK"]), local.attach, 0

    def attach_or_die(*arguments: Any) -> list[int]:
        nonlocal calls
        calls += 1
        if calls == 2 and rank == 1:
            arguments = *arguments[:-1], lambda: None
        elif calls == 2 and rank == 2:
            local._exchange = exchange_or_die
        elif calls == 2 and rank == 3:
            time.sleep(1.5)  # rank 1 knows by then
        return attach(*arguments)

    exchange = local._exchange

    def exchange_or_die(engine: Any, sock: Any, peer: int) -> None:
        exchange(engine, sock, peer)
        if peer == 1:
            time.sleep(0.5)
            die()

    local.attach = attach_or_die
    return lose([4])


def lose_the_leader_after_some_have_met() -> dict[str, Any]:
    """Rank 0 is killed when one other rank alone knows that the meeting after the loss of rank 4 has come about.

    Each step is a collective, and is repeated where not all have completed it, as the documentation has it.
    """
    if int(os.environ["MULTIRING_RANK"]) == 0:
        send, told = RankConnection.send, 0

        async def send_or_die(self: RankConnection, message: Message) -> None:
            nonlocal told
            if message.get("key", "").endswith("connect/all"):
                told += 1
                if told > 1:
                    await asyncio.sleep(0.5)  # a reset would overtake what was sent before
                    die()
            await send(self, message)

        RankConnection.send = send_or_die  # type: ignore[method-assign]
    mr.init()
    begin = step = 0
    begun, generations = [], []
    while step < STEPS:
        try:
            if step == LOST_AT and mr.rank() == 4:
                die()
            reduced(2000, step)
            step += 1
        except mr.PeerLost:
            agreement = mr.shrink()
            begin = step = begin + agreement.completed + 1
            begun.append(begin)
            generations.append(agreement.generation)
    mr.shutdown()
    return {"begun": begun, "generations": generations}


def lose_in_a_loop(first: int, second: int, seconds: float) -> dict[str, Any]:
    """Rank ``second`` is killed so many seconds after it begins to shrink without ``first``, or in the steps after."""
    mr.init()
    rank, size = mr.rank(), mr.world_size()
    members, generation, step = list(range(size)), 0, 0
    while step < STEPS:
        try:
            if step == LOST_AT and rank == first:
                die()
            reduced(20_000, step)
            step += len(members) == size or len(members) == size - 2
        except mr.PeerLost:
            if rank == second and len(members) == size:
                threading.Timer(seconds, die).start()
            agreement = mr.shrink()
            members, generation = [members[before] for before in agreement.members], agreement.generation
            step = 0  # some may have done one more than others
    assert members[mr.rank()] == rank
    mr.shutdown()
    return {"members": members, "generation": generation}


def lose_as_clocks_are_compared(second: int) -> dict[str, Any]:
    """Rank ``second`` is killed when the survivors of the loss of the last one have met, and compare their clocks."""
    offset, calls = clocks.job_offset, 0

    def offset_or_die(*arguments: Any) -> int:
        nonlocal calls
        calls += 1
        if calls == 2 and mr.rank() == second:
            die()
        return offset(*arguments)

    clocks.job_offset = offset_or_die
    return lose([int(os.environ["MULTIRING_WORLD_SIZE"]) - 1])


def _die_at(when: str) -> None:
    send, seen = RankConnection.send, 0
    make: Callable[..., Any] = rendezvous._engine

    def see(which: int) -> None:
        nonlocal seen
        seen += 1
        if seen == which:
            die()

    async def send_or_die(self: RankConnection, message: Message) -> None:
        if message.get("kind", "join") == when:
            see(2 if when in ("accept", "decided") else 1)
        await send(self, message)

    def make_or_die(*arguments: Any) -> Any:
        see(2)  # the first was that of generation 0
        return make(*arguments)

    if when == "meeting":
        rendezvous._engine = make_or_die
    else:
        RankConnection.send = send_or_die  # type: ignore[method-assign]


def stop_and_wake(end: str) -> dict[str, Any]:
    """Rank 1 is stopped from outside; the others go on, and end when the file ``end`` is there."""
    mr.init()
    rank = mr.rank()
    say("running")
    outcome: dict[str, Any] = {}
    try:
        step = 0
        while True:
            reduced(20_000, step)
            step += 1
    except mr.PeerLost as error:
        outcome = go_on({"blamed": error.rank})
    say("went on" if "members" in outcome else "refused")
    while not Path(end).exists():
        time.sleep(0.05)
    if rank != 1:
        steps_until(STEPS)  # what the excluded one sent has not reached us
    mr.shutdown()
    return outcome


def do_something_else(late: int, timeout: float, go: str, end: str) -> dict[str, Any]:
    """The last rank is killed, and rank ``late`` calls shrink when the file ``go`` is there; all end at ``end``."""
    mr.init()
    rank, last = mr.rank(), mr.world_size() - 1
    try:
        while True:
            reduced(2000, 0)
            if rank == last:
                die()
    except mr.PeerLost as error:
        while rank == late and not Path(go).exists():
            time.sleep(0.05)
        outcome = go_on({"blamed": error.rank}, timeout)
    say("went on" if "members" in outcome else "refused")
    while not Path(end).exists():
        time.sleep(0.05)
    mr.shutdown()
    return outcome


def shrink_without_a_loss() -> list[str]:
    mr.init()
    told = []
    try:
        mr.shrink()
    except mr.MultiringError as error:
        told.append(str(error))
    reduced(100, 1)  # nothing has changed
    with contextlib.suppress(mr.Mismatch):
        mr.all_reduce(np.zeros(3 + mr.rank()))
    for timeout in (None, -1.0):
        try:
            mr.shrink(timeout)
        except (mr.Mismatch, ValueError) as error:
            told.append(type(error).__name__)
    mr.shutdown()
    return told


def late() -> dict[str, Any]:
    """Rank 1 does not come to the collective in time, but to the agreement; `init` still knows its options."""
    mr.init(late_warning=29.0)
    try:
        reduced(1000, 0)
        if mr.rank() == 1:
            time.sleep(2.5)
        reduced(1000, 1, timeout=1.0)
    except mr.CollectiveTimeout as error:
        outcome = go_on({"blamed": error.rank})
        assert mr.init(late_warning=29.0).size == mr.world_size()
        try:
            mr.init(late_warning=28.0)
        except ValueError:
            return outcome
    raise AssertionError("nobody was late")


def late_for_a_wait() -> dict[str, Any]:
    """Rank 1 is late for a work: the others first give up a wait for it, then the call."""
    mr.init()
    reduced(1000, 0)
    if mr.rank() == 1:
        time.sleep(3.5)
        try:
            reduced(1000, 1, timeout=1.0)
        except mr.CollectiveTimeout as error:
            return go_on({"blamed": error.rank})
    work = mr.all_reduce(np.ones(1000), async_op=True, timeout=2.0)
    told = []
    try:
        work.wait(0.3)
    except mr.CollectiveTimeout as error:
        told.append(str(error))
    try:
        mr.shrink()
    except mr.MultiringError as error:
        told.append(str(error))
    try:
        work.wait()
    except mr.CollectiveTimeout as error:
        return go_on({"blamed": error.rank, "told": told})
    raise AssertionError("nobody was late")


def say(line: str) -> None:
    print(line, flush=True)
