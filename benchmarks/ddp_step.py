"""A DistributedDataParallel step over Gloo and over multiring, in turns in one run.

    multiring run -n 2 benchmarks/ddp_step.py

The network is one linear layer whose gradient fills one 25 MB bucket, DistributedDataParallel's default size, so that a
step is nearly all communication. Printed: median seconds of a step on rank 0 and their ratio.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

BUCKET_BYTES = 25 << 20


def seconds_per_step(net: nn.Module, x: torch.Tensor, steps: int) -> float:
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    started = time.perf_counter()
    for _ in range(steps):
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()
    return (time.perf_counter() - started) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10, help="turns of each backend")
    parser.add_argument("--steps", type=int, default=5, help="steps in a turn")
    parser.add_argument("--images", type=int, default=8, help="rows of the batch of one rank")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    width = int((BUCKET_BYTES / 4) ** 0.5)
    x = torch.randn(args.images, width)
    nets = {}
    for name in ("gloo", "multiring"):
        layer = nn.Linear(width, width, bias=False)
        nets[name] = DistributedDataParallel(layer, process_group=dist.new_group(backend=name))
        seconds_per_step(nets[name], x, 2)  # not timed: buckets are rebuilt after the first step
    alone = DistributedDataParallel(nn.Linear(width, width, bias=False))

    def unsynchronised() -> float:
        with alone.no_sync():
            return seconds_per_step(alone, x, args.steps)

    rounds: dict[str, list[float]] = {"gloo": [], "multiring": [], "no communication": []}
    for _ in range(args.rounds):
        for name, net in nets.items():
            rounds[name].append(seconds_per_step(net, x, args.steps))
        rounds["no communication"].append(unsynchronised())
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks, gradient of {width * width * 4 / 2**20:.1f} MB, {args.rounds} rounds")
        for name, seconds in rounds.items():
            print(f"{name:<18} {statistics.median(seconds) * 1e3:8.1f} ms   best {min(seconds) * 1e3:8.1f} ms")
        medians = {name: statistics.median(seconds) for name, seconds in rounds.items()}
        print(f"gloo / multiring   {medians['gloo'] / medians['multiring']:8.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
