"""Sums of float32 by each wire beside those of float32, in turns in one run.

    multiring lab up lab/topologies/racks.toml
    multiring lab run benchmarks/narrow_wires.py rack=bfloat16 rack=int8 host=int8,rack=int8

Each wire keeps what it rounds off (a residual), as training does. Printed: the median and the longest time of a sum on
rank 0, and how many of its sums fit in one of float32.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import numpy as np

import multiring as mr

FLOAT32 = "float32"


def seconds(wire: str, size: int, sums: int) -> tuple[int, list[float]]:
    """This rank, and how long each of so many sums of ``size`` bytes takes, of ranks that begin it together."""
    levels = {} if wire == FLOAT32 else dict(part.split("=") for part in wire.split(","))
    communicator = mr.init(wire=levels or None)
    x = np.ones(size // 4, np.float32)
    kept = np.zeros_like(x) if levels else None
    found = []
    for number in range(sums + 2):
        x.fill(communicator.rank + 1)
        communicator.barrier()
        started = time.perf_counter()
        communicator.all_reduce(x, residual=kept)
        if number >= 2:  # links are made and buffers are touched before
            found.append(time.perf_counter() - started)
    rank = communicator.rank
    mr.shutdown()
    return rank, found


def main() -> None:
    parser = argparse.ArgumentParser(description="Time sums by each wire beside those of float32.")
    parser.add_argument("wires", nargs="+", help="such as rack=int8 or host=int8,rack=int8")
    parser.add_argument("--bytes", type=int, default=8 << 20, help="of a sum")
    parser.add_argument("--sums", type=int, default=5, help="in a turn of a wire")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each wire")
    args = parser.parse_args()
    times: dict[str, list[float]] = {wire: [] for wire in (FLOAT32, *args.wires)}
    for _ in range(args.rounds):
        for wire, so_far in times.items():
            rank, found = seconds(wire, args.bytes, args.sums)
            so_far += found
    if rank == 0:
        usual = statistics.median(times[FLOAT32])
        print(f"{args.bytes} bytes, {args.rounds * args.sums} sums each, load {os.getloadavg()[0]:.0f}")
        for wire, each in times.items():
            median = statistics.median(each)
            print(f"{wire:<28} {median * 1e3:8.1f} ms   longest {max(each) * 1e3:8.1f} ms   {usual / median:6.2f}")


if __name__ == "__main__":
    main()
