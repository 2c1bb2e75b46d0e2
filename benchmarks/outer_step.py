"""A training step by DistributedDataParallel over Gloo and over multiring, and by `Outer`, in turns in one run.

    multiring lab up lab/topologies/sites.toml
    multiring lab run benchmarks/outer_step.py
    MULTIRING_WIRE=rack=int8,site=int8 multiring lab run benchmarks/outer_step.py

The network is an MLP of 6 million parameters, 25 MB of gradients, with a small batch. `Outer` exchanges parameters once
in 50 steps, in 4 fragments that are applied 5 steps after they were sent; its groups are the sites, the racks, and
each rank by itself, as far as the topology has them. Within a group gradients are averaged in every step. One turn of
`Outer` is 50 steps, in which each fragment goes once. Printed: the median time of a step on rank 0, the longest turn,
and how many of its steps fit in one over Gloo and over multiring.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from ddp_step import mlp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import multiring as mr
from multiring.torch import Outer


def steps_of(net: nn.Module, x: torch.Tensor, outer: Outer | None = None) -> Callable[[int], float]:
    """Trains ``net`` for a number of steps, and returns the seconds that one took."""
    optimizer = torch.optim.SGD(net.parameters(), 0.1)

    def train(steps: int) -> float:
        started = time.perf_counter()
        for _ in range(steps):
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()
            if outer is not None:
                outer.step()
        return (time.perf_counter() - started) / steps

    return train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="turns of each way")
    parser.add_argument("--steps", type=int, default=2, help="steps in a turn of DistributedDataParallel")
    parser.add_argument("--every", type=int, default=50, help="steps between exchanges, and in a turn of Outer")
    parser.add_argument("--fragments", type=int, default=4)
    parser.add_argument("--delay", type=int, default=5, help="steps after which an exchange is applied")
    parser.add_argument("--images", type=int, default=8, help="rows of the batch of one rank")
    parser.add_argument("--width", type=int, default=1250, help="of each of 4 layers")
    args = parser.parse_args()

    dist.init_process_group("multiring")
    x = torch.randn(args.images, args.width)
    ways: dict[str, tuple[Callable[[int], float], int]] = {}
    for backend in ("gloo", "multiring"):
        net = DistributedDataParallel(mlp(args.width, 4), process_group=dist.new_group(backend=backend))
        ways[f"{backend}, each step"] = steps_of(net, x), args.steps
    levels, outers = mr.init().levels, []
    for level in [*reversed(levels[2:]), levels[0]]:
        model = mlp(args.width, 4)
        outer = Outer(model, args.every, groups=level, fragments=args.fragments, delay=args.delay)
        trained = model if level == "rank" else DistributedDataParallel(model, process_group=outer.process_group)
        outers.append(outer)
        ways[f"outer, each {level}"] = steps_of(trained, x, outer), args.every
    for train, steps in ways.values():
        train(max(steps, 2))  # not timed: buckets are rebuilt after the first step, and links are made
    rounds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(args.rounds):
        for name, (train, steps) in ways.items():
            dist.barrier()
            rounds[name].append(train(steps))
    if dist.get_rank() == 0:
        size = sum(parameter.nbytes for parameter in mlp(args.width, 4).parameters()) / 1e6
        wire = os.environ.get("MULTIRING_WIRE", "float32")
        print(f"{dist.get_world_size()} ranks, {size:.0f} MB of gradients, {wire}, load {os.getloadavg()[1]:.0f}")
        medians = {name: statistics.median(seconds) for name, seconds in rounds.items()}
        for name, median in medians.items():
            print(
                f"{name:<20} {median * 1e3:8.1f} ms   longest {max(rounds[name]) * 1e3:8.1f} ms   "
                f"gloo / this {medians['gloo, each step'] / median:6.2f}   "
                f"multiring / this {medians['multiring, each step'] / median:6.2f}"
            )
    for outer in outers:
        outer.finish()  # some exchanges are on their way
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
