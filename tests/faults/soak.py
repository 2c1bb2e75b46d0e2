"""Growth of two ranks' memory while they call everything, mixed or each kind of call by itself.

    python tests/faults/soak.py [--seconds 900] [--kind mixed|each|NAME] [--every 10] [--trace]

Rank 0 prints its private and resident memory, the memory that malloc has given out and the committed part of the
arena, in KB, and after each kind their growth in the second half of the time. ``--trace`` shows the lines of Python
that allocated the growth.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

import multiring as mr

SOURCE = Path(__file__).parents[2] / "src"
SECONDS_A_ROUND = 0.5  # between two looks at the clock, which rank 0 takes for both


class Program:
    """Calls of a rank, with the same draws on all ranks."""

    def __init__(self) -> None:
        self.rank, self.size = mr.rank(), mr.world_size()
        self._draws = np.random.default_rng(7)
        self._peer = (self.rank + 1) % self.size

    def _count(self, largest: int = 300_000) -> int:
        """One of 32 numbers: of each size NumPy keeps up to 7 freed arrays of 1 KB at most, which looks like growth."""
        return int(np.exp(self._draws.integers(32) / 31 * np.log(largest)))

    def _numbers(self, count: int) -> np.ndarray:
        return np.arange(count, dtype=np.float32) % 1000 + self.rank

    def _sum(self, count: int) -> np.ndarray:
        return self.size * (np.arange(count, dtype=np.float32) % 1000) + self.size * (self.size - 1) / 2

    def small(self) -> None:
        x = self._numbers(1000)
        mr.all_reduce(x)
        assert (x == self._sum(1000)).all()

    def sizes(self) -> None:
        count = self._count(1_000_000)
        x = self._numbers(count)
        mr.all_reduce(x)
        assert (x == self._sum(count)).all()

    def asynchronous(self) -> None:
        buffers = [self._numbers(self._count()) for _ in range(8)]
        for work in [mr.all_reduce(x, async_op=True) for x in buffers]:
            work.wait()
        for x in buffers:
            assert (x == self._sum(x.size)).all()

    def collectives(self) -> None:
        count = self._count(50_000)
        assert (mr.all_gather(self._numbers(count))[0] == np.arange(count, dtype=np.float32) % 1000).all()
        mr.reduce_scatter(self._numbers(self.size * count))
        mr.all_to_all(self._numbers(self.size * count))
        mr.broadcast(self._numbers(count))
        mr.reduce(self._numbers(count))
        mr.gather(self._numbers(count))
        mr.barrier()

    def messages(self) -> None:
        count = self._count()
        x, y = self._numbers(count), np.empty(count, np.float32)
        works = [mr.send(x, self._peer, tag=3, async_op=True), mr.recv(y, self._peer, tag=3, async_op=True)]
        for work in works:
            work.wait()
        assert (y == np.arange(count, dtype=np.float32) % 1000 + self._peer).all()

    def objects(self) -> None:
        found = mr.init().all_gather_object({"rank": self.rank, "text": "x" * self._count(20_000)})
        assert [each["rank"] for each in found] == list(range(self.size))

    def groups(self) -> None:
        group = mr.new_group(range(self.size))
        assert group is not None
        x = self._numbers(self._count())
        group.all_reduce(x)
        assert (x == self._sum(x.size)).all()
        group.close()

    def dropped(self) -> None:
        group = mr.new_group(range(self.size))
        assert group is not None
        x = self._numbers(self._count(5000))
        group.all_reduce(x)
        assert (x == self._sum(x.size)).all()

    def arena(self) -> None:
        arrays = [mr.empty(self._count()) for _ in range(4)]
        for x in arrays:
            x[:] = self._numbers(x.size)
            mr.all_reduce(x)
            assert (x == self._sum(x.size)).all()

    def mixed(self) -> None:
        getattr(self, KINDS[self._draws.integers(len(KINDS))])()


KINDS = ("small", "sizes", "asynchronous", "collectives", "messages", "objects", "groups", "dropped", "arena")


class _Mallinfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


def sampled() -> dict[str, int]:
    """KB, after what is free went back to the system."""
    libc = ctypes.CDLL(None)
    gc.collect()
    libc.malloc_trim(0)
    libc.mallinfo2.restype = _Mallinfo
    malloc = libc.mallinfo2()
    lines = [line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]]
    return {
        "private": sum(int(words[1]) for words in lines if words[0].startswith("Private_")),
        "resident": next(int(words[1]) for words in lines if words[0] == "Rss:"),
        "malloc": (malloc.uordblks + malloc.hblkhd) // 1024,
        "arena": mr.stats()["arena_committed"] // 1024,
    }


@contextmanager
def traced(wanted: bool) -> Iterator[Callable[[], None]]:
    """``mark`` begins what is compared at the end."""
    if not wanted:
        yield lambda: None
        return
    tracemalloc.start(8)
    before: list[tracemalloc.Snapshot] = []
    yield lambda: before.append(tracemalloc.take_snapshot()) if not before else None
    for line in tracemalloc.take_snapshot().compare_to(before[0], "lineno")[:12]:
        print(f"    {line}", flush=True)
    tracemalloc.stop()


def soak(kind: str, seconds: float, every: float, trace: bool) -> None:
    """Repeat one kind of call for ``seconds``, as a rank."""
    communicator = mr.init()
    program = Program()
    call = getattr(program, kind)
    began = time.monotonic()
    next_sample, calls, samples = 0.0, 0, []
    with traced(trace and program.rank == 0) as mark:
        going = True
        while going:
            # All make as many calls: rank 0 says how many took half a second.
            count = communicator.broadcast_object(max(1, calls))
            start = time.monotonic()
            for _ in range(count):
                call()
            took = time.monotonic() - start
            calls = min(2 * count, max(1, int(count * SECONDS_A_ROUND / took)))
            now = time.monotonic() - began
            if program.rank == 0 and now >= next_sample:
                next_sample += every
                samples.append(sampled())
                shown = " ".join(f"{name} {value}" for name, value in samples[-1].items())
                print(f"{kind:12} {now:6.0f} s  {shown}", flush=True)
                if now > seconds / 2:
                    mark()
            going = communicator.broadcast_object(now < seconds)
        if program.rank == 0:
            grown = {name: samples[-1][name] - samples[len(samples) // 2][name] for name in samples[-1]}
            print(f"{kind:12} grew in the second half, in KB: {grown}", flush=True)
    mr.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description="memory over time")
    parser.add_argument("--seconds", type=float, default=900.0, help="of each kind")
    parser.add_argument("--kind", default="mixed", choices=["mixed", "each", *KINDS])
    parser.add_argument("--every", type=float, default=10.0, help="seconds between samples")
    parser.add_argument("--trace", action="store_true", help="trace Python's allocations")
    options = parser.parse_args()
    if os.environ.get("SOAK_RANK"):
        soak(options.kind, options.seconds, options.every, options.trace)
        return
    paths = os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "SOAK_RANK": "1", "PYTHONPATH": paths}
    for kind in KINDS if options.kind == "each" else [options.kind]:
        given = ["--kind", kind, "--seconds", str(options.seconds), "--every", str(options.every)]
        command = [sys.executable, "-m", "multiring", "run", "-n", "2", "--", sys.executable, __file__, *given]
        subprocess.run(command + ["--trace"] * options.trace, env=environment, check=True)


if __name__ == "__main__":
    main()
