"""Ranks that lose others, go on without them, and admit those that are started in their place."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from shrink_ranks import LOST_AT, STEPS, die, say, steps_until
from sums import reduced

import multiring as mr
from multiring import version
from multiring.job import growth, rendezvous
from multiring.job.admission import Admission
from multiring.runtime import clocks

NUMBER = int(os.environ.get("MULTIRING_REPLACEMENT", "0"))


def members(agreement: Any = None) -> dict[str, Any]:
    """A few more steps in the world as it is, and what it is."""
    steps_until(STEPS)
    handed = np.full(3, mr.rank(), float)
    mr.broadcast(handed, mr.oldest())
    assert (handed == mr.oldest()).all()
    acceptor = mr.init().world.acceptor
    assert acceptor is not None
    return {
        "rank": mr.rank(),
        "size": mr.world_size(),
        "local": mr.local_world_size(),
        "at_start": acceptor.membership.members,
        "generation": acceptor.membership.generation,
        "oldest": mr.oldest(),
        "plan": mr.plan(1 << 20).plan.id,
        "members": agreement and agreement.members,
        "told": agreement and agreement.generation,
    }


def lose(victims: Sequence[int]) -> None:
    """The ``victims`` are killed; the others go on without them."""
    try:
        for step in range(STEPS):
            if step == LOST_AT and mr.rank() in victims:
                die()
            reduced(20_000, step)
    except mr.PeerLost:
        if mr.rank() in victims:  # another one was gone before this one's turn
            die()
        mr.shrink()
    steps_until(STEPS)


def grow_until(size: int) -> Any:
    agreement = None
    while mr.world_size() < size:
        agreement = mr.grow() or agreement
        time.sleep(0.02)
    return agreement


def wait_for(path: str) -> None:
    while not Path(path).exists():
        time.sleep(0.02)


def come_back(victims: Sequence[int], go: str) -> dict[str, Any]:
    """Lose ``victims``, grow once the file ``go`` is there until all are back, and lose one more."""
    size = int(os.environ["MULTIRING_WORLD_SIZE"])
    mr.init()
    agreement = None
    if not NUMBER:
        lose(victims)
        wait_for(go)
        agreement = grow_until(size)
    outcome = members(agreement)
    try:
        for step in range(2):  # the others may be in the first still when rank 1 is gone
            reduced(20_000, step)
            if mr.rank() == 1:
                die()
    except mr.PeerLost:
        outcome["after"] = mr.shrink().members
    steps_until(STEPS)
    mr.shutdown()
    return outcome


def grow_alone() -> dict[str, Any]:
    """Nobody waits."""
    mr.init()
    before = mr.init()
    x = mr.empty(1000)
    told = [mr.grow() for _ in range(5)]
    x[:] = mr.rank()
    mr.all_reduce(x)
    assert mr.init() is before
    size = mr.world_size()
    assert (x == size * (size - 1) / 2).all()
    mr.shutdown()
    return {"told": told}


def cannot_reach_the_store(rank: int, go: str) -> dict[str, Any]:
    """Rank 2 is replaced; the first time that ``rank`` is to look into the launcher's store, it cannot be reached."""
    mr.init()
    told: list[Any] = []
    if not NUMBER:
        lose([2])
        wait_for(go)
        look = growth._join_queue
        if mr.rank() == rank:
            growth._join_queue = unreachable
        before = mr.init()
        try:
            told.append(mr.grow(4))
        except mr.RendezvousError as error:
            told.append(str(error))
        assert mr.init() is before
        steps_until(STEPS)
        growth._join_queue = look
        grow_until(3)
    outcome = {**members(), "first": told}
    mr.shutdown()
    return outcome


def unreachable(*_: Any) -> Any:
    raise mr.RendezvousError("no way to the store")


def lose_another(dying: int, number: int, when: str, go: str) -> dict[str, Any]:
    """Rank 2 is replaced; in the first admission the one that was rank ``dying`` at the start is killed ``when``.

    ``number`` is that of the replacement that is killed, 0 for one that was there from the start.
    """
    if (int(os.environ["MULTIRING_RANK"]), NUMBER) == (dying, number):
        _die_at(when)
    mr.init()
    outcome: dict[str, Any] = {"lost": []}
    if not NUMBER:
        lose([2])
        wait_for(go)
    while "size" not in outcome:
        try:
            while 2 not in mr.init().world.membership.members:
                mr.grow(20)
                time.sleep(0.02)
            outcome.update(members())
        except mr.PeerLost as error:
            outcome["lost"].append(mr.init().world.membership.members[error.rank])
            mr.shrink()
    mr.shutdown()
    return outcome


def lose_as_clocks_are_compared(dying: int, number: int, go: str) -> dict[str, Any]:
    """Rank 2 is replaced; ``dying``, of replacement ``number``, is killed as all have met and compare clocks."""
    offset, calls = clocks.job_offset, 0 if NUMBER else -2  # those of the start and of the shrunk world

    def offset_or_die(*arguments: Any) -> int:
        nonlocal calls
        calls += 1
        if calls == 1 and (int(os.environ["MULTIRING_RANK"]), NUMBER) == (dying, number):
            die()
        return offset(*arguments)

    clocks.job_offset = offset_or_die
    mr.init()
    told = []
    if not NUMBER:
        lose([2])
        wait_for(go)
        while 2 not in mr.init().world.membership.members:
            agreement = mr.grow(20)
            if agreement is not None:
                told.append(list(agreement.members))
            time.sleep(0.02)
    outcome = {**members(), "agreed": told}
    mr.shutdown()
    return outcome


def _die_at(when: str) -> None:
    """Be killed before, or after, a step of an admission."""
    steps: dict[str, tuple[Any, str, int]] = {
        "members": (growth, "_told", 0),
        "answer": (Admission, "answer", 0),
        "engine": (rendezvous, "_engine", 0 if NUMBER else 2),  # after those of the start and of the shrunk world
        "verdict": (growth, "_concluded", 0),
    }
    side, step = when.split()
    home, name, calls = steps[step]
    original: Callable[..., Any] = getattr(home, name)

    def dying(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls -= 1
        if calls < 0 and side == "before":
            die()
        result = original(*arguments, **options)
        if calls < 0:
            die()
        return result

    setattr(home, name, dying)


def stop_and_wake(end: str) -> dict[str, Any]:
    """Rank 1 is stopped from outside, and another takes its place before it goes on."""
    mr.init()
    outcome: dict[str, Any] = {}
    if not NUMBER:
        stopped = mr.rank() == 1
        say("running")
        try:
            step = 0
            while True:
                reduced(20_000, step)
                step += 1
        except mr.PeerLost:
            try:
                mr.shrink()
            except mr.RendezvousError as error:
                assert stopped
                say("refused")
                wait_for(end)
                return {"refused": str(error)}
        say("went on")
        grow_until(3)
    say("grown")
    done = np.zeros(1, np.uint8)
    while not done[0]:
        reduced(20_000, 1)
        done[0] = Path(end).exists()
        mr.broadcast(done)
        time.sleep(0.01)
    outcome = members()
    mr.shutdown()
    return outcome


def refuse_the_first(go: str) -> dict[str, Any]:
    """The first newcomer does not fit; whoever comes next is admitted."""
    if "OTHER_VERSION" in os.environ:
        version.__version__ = os.environ["OTHER_VERSION"]
    try:
        mr.init()
    except mr.RendezvousError as error:
        return {"refused": str(error)}
    told: list[Any] = []
    if not NUMBER:
        lose([2])
        wait_for(go)
        told.append(mr.grow())
        say("grew")
        grow_until(3)
    outcome = {**members(), "first": told}
    mr.shutdown()
    return outcome
