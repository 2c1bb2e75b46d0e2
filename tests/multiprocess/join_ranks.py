"""Processes that join jobs by the arguments of `init`, as the workers of a cluster engine do."""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import workers
from sums import reduced

import multiring as mr
from multiring.job import rendezvous

COUNT = 3000
MOST = {"init_timeout": 30, "timeout": 30, "heartbeat_timeout": 3}


def joins(place: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The arguments of `init` for a place, as JSON carries it."""
    secret = {"secret": bytes.fromhex(place["secret"])} if "secret" in place else {}
    return {**MOST, **place, **secret, **more}


def say(line: str) -> None:
    print(line, flush=True)


@workers.worker
def join(place: dict[str, Any]) -> dict[str, Any]:
    before = dict(os.environ)
    mr.init(**joins(place))
    for step in range(3):
        reduced(COUNT, step)
    found = {"rank": mr.rank(), "size": mr.world_size(), "local_size": mr.local_world_size()}
    assert mr.init(**joins(place)) is mr.init()
    for other in ({"rank": place["rank"] + 1, "world_size": place["world_size"] + 1}, {"job": "another"}):
        try:
            mr.init(**joins({**place, **other}))
        except ValueError as error:
            found["other"] = str(error)
    assert mr.grow() is None
    reduced(COUNT, 3)
    mr.shutdown()
    assert dict(os.environ) == before
    return found


@workers.worker
def join_by_variables() -> dict[str, Any]:
    mr.init()
    reduced(COUNT, 1)
    found = {"rank": mr.rank(), "size": mr.world_size()}
    mr.shutdown()
    return found


def held() -> tuple[int, int]:
    """Descriptors and threads, once those that looked up addresses have noticed that nobody needs them."""
    until = time.monotonic() + 10
    while threading.active_count() > 1 and time.monotonic() < until:
        time.sleep(0.02)
    return len(os.listdir("/proc/self/fd")), threading.active_count()


@workers.worker
def join_many(places: list[dict[str, Any] | None]) -> dict[str, Any]:
    """One job after another, as other ranks of other worlds; None where this process has no part."""
    seen, sums = [], 0
    mapped = []
    for number, place in enumerate(places):
        if place is not None:
            mr.init(**joins(place))
            assert (mr.rank(), mr.world_size()) == (place["rank"], place["world_size"])
            reduced(COUNT, number)
            sums += 1
            mr.shutdown()
        seen.append(held())
        with open("/proc/self/maps") as maps:
            mapped.append(sum("multiring" in line for line in maps))
    return {"held": seen, "mapped": mapped, "sums": sums}


@workers.worker
def hold_store() -> dict[str, Any]:
    """A store whose holder forks children that close it, collect it or leave its ``with``; it serves until a line
    comes."""
    codes = []
    with mr.StoreServer() as store:
        for way in ("close", "collect", "exit"):
            child = os.fork()
            if child == 0:
                signal.alarm(20)
                if way == "exit":
                    sys.exit(0)
                if way == "close":
                    store.close()
                    store.close()
                del store
                gc.collect()
                os._exit(0)
            codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        say(json.dumps({"store": list(store.addresses), "secret": store.secret.hex()}))
        sys.stdin.readline()
    return {"codes": codes}


@workers.worker
def refused(place: dict[str, Any]) -> dict[str, Any]:
    """Return the error of `init` and the seconds until then; nothing of the call is left."""
    before, began = held(), time.monotonic()
    try:
        mr.init(**joins(place))
    except (mr.MultiringError, ValueError) as error:
        assert not mr.is_initialized()
        seconds = time.monotonic() - began
        assert held() == before
        return {"error": type(error).__name__, "told": str(error), "seconds": seconds}
    reduced(COUNT, 1)
    mr.shutdown()
    return {"error": ""}


@workers.worker
def die_in_init(place: dict[str, Any], when: str) -> None:
    """Killed while it waits for others to arrive, from outside, or else when it is to prove whose host it is on."""
    if when == "arrived":
        mr.init(**joins(place, init_timeout=300))
    make: Callable[..., Any] = rendezvous._engine

    def make_or_die(*arguments: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)
        return make(*arguments)

    rendezvous._engine = make_or_die
    mr.init(**joins(place))


@workers.worker
def train(place: dict[str, Any]) -> dict[str, Any]:
    """Steps until a line comes on the standard input, from whoever has closed the store meanwhile."""
    mr.init(**joins(place))
    reduced(COUNT, 0)
    say("joined")
    sys.stdin.readline()
    for step in range(20):
        reduced(COUNT, step)
    group = mr.new_group([1, 0])
    if group is not None:
        mr.barrier(group=group)
    assert mr.grow() is None
    mr.shutdown()
    return {"done": True}


@workers.worker
def lose(place: dict[str, Any], victim: int) -> dict[str, Any]:
    """The survivors of a loss go on; then they join another job, as other ranks, under its own name."""
    mr.init(**joins(place))
    try:
        for step in range(20):
            if step == 5 and mr.rank() == victim:
                os.kill(os.getpid(), signal.SIGKILL)
            reduced(COUNT, step)
    except mr.PeerLost as error:
        blamed = error.rank
    agreement = mr.shrink()
    again = mr.init(**joins(place)).size
    for step in range(5):
        reduced(COUNT, step)
    assert mr.grow() is None
    size, rank = mr.world_size(), mr.rank()
    mr.shutdown()
    mr.init(**joins({**place, "rank": size - 1 - rank, "world_size": size, "job": "after"}))
    reduced(COUNT, 7)
    assert mr.rank() == size - 1 - rank
    mr.shutdown()
    return {"blamed": blamed, "members": agreement.members, "size": size, "again": again}


if __name__ == "__main__":
    function, arguments = sys.argv[1], json.loads(sys.argv[2])
    say("result " + json.dumps(workers.named(function)(*arguments)))
