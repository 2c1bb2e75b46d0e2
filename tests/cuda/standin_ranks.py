"""Programs of ranks as processes whose buffers lie on the device of the stand-in driver."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import standin_device
from standin_device import COLLECTIVES, Case, Gate, Stream, case, start

import multiring as mr

SIZES = (0, 1, 3, 17, 20_011)


def communicator() -> Any:
    return mr.init()


def every_collective() -> None:
    """Each alone, in sizes from nothing to many segments, and several types."""
    comm, stream = communicator(), Stream()
    for collective in COLLECTIVES:
        for count in (*SIZES, 600_011):
            for dtype in ("float32", "int64", "uint8") if count == 17 else ("float32",):
                one = case(collective, comm.rank, comm.size, count, dtype, root=count % comm.size)
                part = start(comm, one, stream)
                part.join(stream.number)
                stream.synchronize()
                one.check(count, dtype)
                part.wait(20)


def longer_than_the_slots() -> None:
    """A call of nine chunks, which has eight slots, and one behind it."""
    comm, stream = communicator(), Stream()
    long, short = (case("all_reduce", comm.rank, comm.size, count) for count in (9_000_011, 1000))
    parts = [start(comm, one, stream) for one in (long, short)]
    for part, one in zip(parts, (long, short), strict=True):
        part.wait(30)
        one.check()


def mixed() -> None:
    """Ranks of odd numbers have theirs on the host."""
    comm, stream = communicator(), Stream()
    for collective in COLLECTIVES:
        for count in (0, 1, 17, 300_001):
            one = case(collective, comm.rank, comm.size, count, root=comm.size - 1)
            if comm.rank % 2:
                standin_device.on_host(comm, one).wait()
            else:
                start(comm, one, stream).wait(20)
            if collective != "reduce" or comm.rank == one.root or comm.rank % 2 == 0:  # a host's is used for sums
                one.check(count)


def in_flight() -> None:
    """Many calls at once, on two communicators and two streams, waited for in another order."""
    comm = communicator()
    other = comm.new_group(list(reversed(range(comm.size))))
    streams = Stream(), Stream(0)
    begun: list[tuple[Any, Case]] = []
    for number in range(24):
        for comm_, stream in ((comm, streams[0]), (other, streams[1])):
            collective = COLLECTIVES[number % len(COLLECTIVES)]
            one = case(collective, comm_.rank, comm_.size, (7, 40_001, 900_001)[number % 3], root=number % comm_.size)
            begun.append((start(comm_, one, stream), one))
    for part, one in reversed(begun):
        part.wait(30)
        one.check()
    assert all(part.done() and part.error() is None for part, _ in begun)
    for part, _ in begun:
        part.join(streams[0].number)
    streams[0].synchronize()


def order() -> None:
    """A call comes behind what the stream was given; what waits for it comes behind the call."""
    comm, stream, follower = communicator(), Stream(), Stream()
    for count in (1000, 400_003):
        one = case("all_reduce", comm.rank, comm.size, count)
        source, seen = one.given.copy(), np.zeros_like(one.given)
        one.given[:] = -5
        gate = Gate()
        stream.hold(gate)
        stream.sleep(0.05)
        stream.copy(one.given, source)
        part = start(comm, one, stream)
        part.join(follower.number)
        follower.copy(seen, one.target)
        time.sleep(0.2)
        assert not part.done()
        assert (one.target == -5).all()
        assert not follower.is_done()
        gate.open()
        follower.synchronize()
        one.check()
        np.testing.assert_array_equal(seen, one.expected)
        part.wait(10)


def locked() -> None:
    """A call of the driver that keeps all others out until the collective is done, in each process at once."""
    comm, stream = communicator(), Stream()
    one = case("all_reduce", comm.rank, comm.size, 2_000_003)
    start(comm, one, stream).wait(30)  # what is made once
    comm.barrier()
    one = case("all_reduce", comm.rank, comm.size, 2_000_003)
    stream.sleep(0.05)
    part = start(comm, one, stream)
    part.join(stream.number)
    before = standin_device.calls()
    stream.free()
    one.check()
    part.wait(10)
    assert standin_device.calls() == before


def tidy() -> dict[str, int]:
    """Return what the process still holds after calls over a communicator and three groups in turn."""
    comm, stream = communicator(), Stream()
    for _ in range(3):
        group = comm.new_group(list(range(comm.size)))
        for comm_ in (comm, group, comm, group):
            parts = [start(comm_, case("all_reduce", comm_.rank, comm_.size, 1000), stream) for _ in range(10)]
            for part in parts:
                part.wait(20)
        group.close()
    del part, parts
    mr.shutdown()
    return standin_device.held()
