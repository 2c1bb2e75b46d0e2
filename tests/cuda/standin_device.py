"""The device of the stand-in driver, as programs of the tests use it: its streams, and arrays that lie "there"."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np

from multiring.runtime.buffers import DeviceBlocks, DeviceBuffer
from multiring.runtime.comm import group_of
from multiring.runtime.engine import DevicePart

Array = np.ndarray[Any, Any]
BLOCKED = ("all_gather", "reduce_scatter", "all_to_all")
COLLECTIVES = ("all_reduce", "broadcast", "reduce", *BLOCKED)


def _driver() -> Any:
    lib = ctypes.CDLL("libcuda.so.1")
    lib.standin_stream.restype = ctypes.c_void_p
    lib.standin_calls.restype = ctypes.c_long
    for name in ("is_done", "synchronize", "free"):
        getattr(lib, f"standin_{name}").argtypes = [ctypes.c_void_p]
    lib.standin_sleep.argtypes = [ctypes.c_void_p, ctypes.c_double]
    lib.standin_hold.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    lib.standin_copy.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_size_t]
    lib.standin_set_copy_seconds.argtypes = [ctypes.c_double]
    return lib


class Gate:
    """A gate that a stream can wait for; closed at first."""

    def __init__(self) -> None:
        self.value = ctypes.c_int(0)

    def open(self) -> None:
        self.value.value = 1


class Stream:
    """A stream of the caller's; number 0 is the device's usual one."""

    def __init__(self, number: int | None = None) -> None:
        self.driver = _driver()
        self.number: int = self.driver.standin_stream() if number is None else number

    def sleep(self, seconds: float) -> None:
        self.driver.standin_sleep(self.number, seconds)

    def hold(self, gate: Gate) -> None:
        self.driver.standin_hold(self.number, ctypes.byref(gate.value))

    def copy(self, target: Array, source: Array) -> None:
        assert target.nbytes == source.nbytes
        self.driver.standin_copy(self.number, target.ctypes.data, source.ctypes.data, source.nbytes)

    def is_done(self) -> bool:
        return bool(self.driver.standin_is_done(self.number))

    def synchronize(self) -> None:
        self.driver.standin_synchronize(self.number)

    def free(self) -> None:
        """Wait for the stream as cudaFree does, with the driver's lock held."""
        self.driver.standin_free(self.number)


def calls() -> int:
    """Calls of the driver so far, by all threads of the process."""
    return int(_driver().standin_calls())


def held() -> dict[str, int]:
    """Driver resources that the process holds, by kind."""
    numbers = (ctypes.c_long * 4)()
    _driver().standin_held(numbers)
    return dict(zip(("registered", "streams", "events", "contexts"), numbers, strict=True))


def set_copy_seconds(seconds: float) -> None:
    _driver().standin_set_copy_seconds(seconds)


def values(rank: int, count: int, dtype: str = "float32") -> Array:
    """Small whole numbers that depend on rank and index, so that sums are exact."""
    return ((7 * np.arange(count) + 13 * rank) % 11).astype(dtype)


@dataclass
class Case:
    """A collective as one rank calls it: what it gives, what it gets written, and what that has to be."""

    collective: str
    rank: int
    size: int
    root: int
    given: Array
    target: Array
    expected: Array

    def buffer(self, stream: Stream, owner: Any = None) -> DeviceBuffer:
        """The arrays as blocks on the device."""
        count = self.given.size // (self.size if self.collective in ("reduce_scatter", "all_to_all") else 1)
        pitch = count * self.given.itemsize
        into: DeviceBlocks | None = DeviceBlocks(self.target.ctypes.data, pitch, 0, 1)
        out: DeviceBlocks | None = DeviceBlocks(self.given.ctypes.data, pitch, 0, 1)
        if self.collective == "all_gather":
            out = DeviceBlocks(self.given.ctypes.data, pitch, self.rank, 1)
        if self.collective in ("reduce_scatter", "all_to_all"):
            out = DeviceBlocks(self.given.ctypes.data, pitch, 0, self.size)
        if self.collective in ("all_gather", "all_to_all"):
            into = DeviceBlocks(self.target.ctypes.data, pitch, 0, self.size)
        if self.collective == "reduce_scatter":
            into = DeviceBlocks(self.target.ctypes.data, pitch, self.rank, 1)
        if self.collective == "broadcast":
            out, into = (out, None) if self.rank == self.root else (None, into)
        if self.collective == "reduce" and self.rank != self.root:
            into = None
        keeps = (self.given, self.target) if owner is None else owner
        return DeviceBuffer(keeps, count, self.given.dtype.name, 0, stream.number, out, into)

    def check_given(self) -> None:
        """Nothing has been written yet."""
        np.testing.assert_array_equal(self.given, values(self.rank, self.given.size, self.given.dtype.name))

    def check(self, *what: Any) -> None:
        np.testing.assert_array_equal(
            self.target, self.expected, err_msg=f"{self.collective} rank {self.rank} of {self.size} {what}"
        )


def case(collective: str, rank: int, size: int, count: int, dtype: str = "float32", root: int = 0) -> Case:
    """``count`` elements in a block."""
    mine = values(rank, count, dtype)
    every = [values(other, count, dtype) for other in range(size)]
    total = sum(every[1:], every[0])
    filler = np.full(count, 77, dtype)
    if collective == "all_reduce":
        return Case(collective, rank, size, root, mine, mine, total)
    if collective == "broadcast":
        return Case(collective, rank, size, root, mine, mine, every[root])
    if collective == "reduce":
        return Case(collective, rank, size, root, mine, mine, total if rank == root else mine.copy())
    if collective == "all_gather":
        return Case(collective, rank, size, root, mine, np.tile(filler, size), np.concatenate(every))
    blocks = [
        np.concatenate([values(other + 3 * block, count, dtype) for block in range(size)]) for other in range(size)
    ]
    own = slice(rank * count, (rank + 1) * count)
    if collective == "reduce_scatter":
        whole = sum(blocks[1:], blocks[0])
        return Case(collective, rank, size, root, blocks[rank], filler, whole[own])
    exchanged = np.concatenate([block[own] for block in blocks])
    return Case(collective, rank, size, root, blocks[rank], np.tile(filler, size), exchanged)


def start(communicator: Any, one: Case, stream: Stream, owner: Any = None, timeout: float | None = None) -> DevicePart:
    """Start it as front ends do."""
    root = one.root if one.collective in ("broadcast", "reduce") else 0
    buffer = one.buffer(stream, owner)
    return group_of(communicator).start_on_device(one.collective, buffer, "sum", root, timeout=timeout)


def on_host(communicator: Any, one: Case) -> Any:
    """The same on buffers of the host, asynchronously."""
    if one.collective == "all_reduce":
        return communicator.all_reduce(one.given, async_op=True)
    if one.collective == "broadcast":
        return communicator.broadcast(one.given, one.root, async_op=True)
    if one.collective == "reduce":
        return communicator.reduce(one.given, "sum", one.root, async_op=True)
    return getattr(communicator, one.collective)(one.given, out=one.target, async_op=True)
