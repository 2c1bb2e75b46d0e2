"""Programs of ranks that meet trouble while their buffers lie on the device of the stand-in driver."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import standin_device
from standin_device import Array, Gate, Stream, case, held, start

import multiring as mr


def caught(kind: type[BaseException], program: Callable[[], object]) -> str:
    try:
        program()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


def soon(condition: Callable[[], bool], what: str, seconds: float = 15) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, what
        time.sleep(0.005)


class Owner:
    """Says when the engine let go of it, and whether the device was done by then."""

    def __init__(self, released: list[bool]) -> None:
        self.released, self.stream = released, 0

    def __del__(self) -> None:
        self.released.append(Stream(self.stream).is_done())


def is_filled_or_done(x: Array, expected: Array) -> bool:
    """True if each element is the result or has all bits set."""
    return bool(((x == expected) | (x.view(np.uint32) == 0xFFFFFFFF)).all())


def warm(comm: Any, stream: Stream) -> None:
    one = case("all_reduce", comm.rank, comm.size, 1000)
    start(comm, one, stream).wait(20)
    comm.barrier()


def a_rank_dies() -> str:
    """The last is killed while copies go on; the others hear of it, and no stream of theirs waits for ever."""
    comm, stream = mr.init(), Stream()
    warm(comm, stream)
    standin_device.set_copy_seconds(0.03)
    released: list[bool] = []
    owner = Owner(released)
    one = case("all_reduce", comm.rank, comm.size, 1_500_007)
    if comm.rank == comm.size - 1:
        stream.sleep(60)
    part = start(comm, one, stream, owner)
    owner.stream = part.last_stream
    del owner
    if comm.rank == comm.size - 1:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    part.join(stream.number)
    error = caught(mr.PeerLost, lambda: part.wait(20))
    assert part.done()
    assert isinstance(part.error(), mr.PeerLost)
    soon(stream.is_done, "the caller's stream still waits")
    np.testing.assert_array_equal(one.target.view(np.uint32), 0xFFFFFFFF)
    soon(lambda: bool(released) or not caught(mr.PeerLost, lambda: start(comm, one, stream)), "the owner is kept")
    assert released == [True]
    mr.shutdown()
    return error


def a_rank_dies_with_many_calls() -> None:
    comm, stream = mr.init(), Stream()
    warm(comm, stream)
    standin_device.set_copy_seconds(0.005)
    calls = [case("all_reduce", comm.rank, comm.size, 300_007) for _ in range(12)]
    if comm.rank == comm.size - 1:
        parts = [start(comm, one, stream) for one in calls[:6]]
        parts[1].wait(20)
        os.kill(os.getpid(), signal.SIGKILL)
    parts = []
    try:
        for one in calls:
            parts.append(start(comm, one, stream))
    except mr.PeerLost:
        pass
    soon(lambda: all(part.done() for part in parts), "a call is not done")
    for part in parts:
        part.join(stream.number)
    soon(stream.is_done, "the caller's stream still waits")
    for part, one in zip(parts, calls, strict=False):
        if part.error() is None:
            one.check()
        assert is_filled_or_done(one.target, one.expected)
    mr.shutdown()
    assert held()["registered"] == 0


def a_rank_is_late() -> str:
    """The last does not come: the time limit of the others is up."""
    comm, stream = mr.init(), Stream()
    warm(comm, stream)
    if comm.rank == comm.size - 1:
        time.sleep(8)
        return caught(mr.MultiringError, comm.barrier)
    one = case("all_reduce", comm.rank, comm.size, 300_007)
    part = start(comm, one, stream, timeout=3)
    part.join(stream.number)
    error = caught(mr.CollectiveTimeout, lambda: part.wait(20))
    soon(stream.is_done, "the caller's stream still waits")
    np.testing.assert_array_equal(one.target.view(np.uint32), 0xFFFFFFFF)
    mr.shutdown()
    return error


def its_own_stream_is_late() -> str:
    """The caller's stream does not come to the call: its time is up, and the device keeps what it may still use."""
    comm, stream, gate = mr.init(), Stream(), Gate()
    warm(comm, stream)
    released: list[bool] = []
    one = case("all_reduce", comm.rank, comm.size, 300_007)
    stream.hold(gate)
    part = start(comm, one, stream, owner := Owner(released), timeout=0.5)
    owner.stream = part.last_stream
    del owner
    error = caught(mr.CollectiveTimeout, lambda: part.wait(20))
    mr.shutdown()
    one.check_given()
    assert released == []
    assert held()["registered"] == 1
    gate.open()
    soon(stream.is_done, "the caller's stream still waits")
    return error


def shutdown_in_flight() -> str:
    """Rank 0 leaves with calls in flight; the others, which wait for it, hear of it."""
    comm, stream = mr.init(), Stream()
    warm(comm, stream)
    one = case("all_reduce", comm.rank, comm.size, 300_007)
    if comm.rank == 0:
        standin_device.set_copy_seconds(0.05)
        part = start(comm, one, stream)
        part.join(stream.number)
        mr.shutdown()
        assert part.done()
        part.join(stream.number)
        soon(stream.is_done, "the caller's stream still waits")
        assert is_filled_or_done(one.target, one.expected)
        return ""
    part = start(comm, one, stream)
    part.join(stream.number)
    soon(part.done, "the call is not done")
    soon(stream.is_done, "the caller's stream still waits")
    assert is_filled_or_done(one.target, one.expected)
    if part.error() is None:
        one.check()
    message = str(part.error() or "")
    mr.shutdown()
    return message


def group_closed_in_flight() -> None:
    """A group whose calls go on is not closed; when they are done it is."""
    comm, stream = mr.init(), Stream()
    for round in range(3):
        group = comm.new_group(list(range(comm.size)))
        warm(group, stream)
        standin_device.set_copy_seconds(0.02)
        one = case("all_reduce", comm.rank, comm.size, 300_007 + round)
        part = start(group, one, stream)
        assert "has operations in flight" in caught(ValueError, group.close)
        part.wait(20)
        one.check()
        group.close()
        part.join(stream.number)
        soon(stream.is_done, "the caller's stream still waits")
    comm.barrier()
    assert held()["registered"] == 0
    mr.shutdown()


def a_copy_fails(number: int) -> str:
    """The driver refuses a copy of rank 0, of which a part is queued."""
    comm, stream, gate = mr.init(), Stream(), Gate()
    if comm.rank == 0:
        os.environ["STANDIN_FAILING_COPY"] = str(number)
    released: list[bool] = []
    one = case("all_reduce", comm.rank, comm.size, 1_500_007)
    stream.hold(gate)
    owner = Owner(released)
    owner.stream = stream.number
    if comm.rank == 0:
        error = caught(mr.ResourceError, lambda: start(comm, one, stream, owner))
        del owner
        time.sleep(0.4)
        caught(mr.ResourceError, comm.barrier)
        assert released == []  # the device may still read what was queued
        gate.open()
        soon(stream.is_done, "the caller's stream still waits")
        soon(lambda: bool(released) or not caught(mr.ResourceError, comm.barrier), "the owner is kept")
        mr.shutdown()
        assert held()["registered"] == 0
        return error
    gate.open()
    error = caught(mr.MultiringError, lambda: start(comm, one, stream).wait(20))
    soon(stream.is_done, "the caller's stream still waits")
    mr.shutdown()
    return error


def no_room() -> str:
    """The arena does not hold a device's slots: the call is refused, and others go on."""
    comm, stream = mr.init(), Stream()
    errors = set()
    for _ in range(2):
        one = case("all_reduce", comm.rank, comm.size, 300_007)
        errors.add(caught(mr.ResourceError, lambda one=one: start(comm, one, stream)))  # type: ignore[misc]
    one.check_given()
    standin_device.on_host(comm, one).wait()
    one.check()
    empty = case("all_reduce", comm.rank, comm.size, 0)
    start(comm, empty, stream).wait(20)
    group = comm.new_group(list(range(comm.size)))
    caught(mr.ResourceError, lambda: start(group, case("all_reduce", comm.rank, comm.size, 5), stream))
    group.close()
    mr.shutdown()
    (error,) = errors
    return error


def no_driver() -> str:
    """A driver that does not serve: the call is refused, and those on the host go on."""
    comm = mr.init()
    one = case("all_reduce", comm.rank, comm.size, 1000)
    stream = Stream.__new__(Stream)
    stream.number = 0
    error = caught(mr.ResourceError, lambda: start(comm, one, stream))
    again = caught(mr.ResourceError, lambda: start(comm, one, stream))
    assert error == again
    standin_device.on_host(comm, one).wait()
    one.check()
    mr.shutdown()
    return error


def forked() -> None:
    """A child comes and goes while calls are in flight: it may not use them, and the parent's end as they would."""
    comm, stream = mr.init(), Stream()
    warm(comm, stream)
    standin_device.set_copy_seconds(0.02)
    one = case("all_reduce", comm.rank, comm.size, 1_500_007)
    part = start(comm, one, stream)
    child = os.fork()
    if child == 0:
        caught(mr.MultiringError, lambda: part.join(stream.number))
        caught(mr.MultiringError, lambda: start(comm, one, stream))
        del part
        mr.shutdown()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    part.wait(20)
    one.check()
    comm.barrier()
    mr.shutdown()
