"""A step of DistributedOptimizer beside DistributedDataParallel over Gloo and over multiring, in turns in one run.

    multiring run -n 2 benchmarks/optimizer_step.py

The network is a stack of equal linear layers, so that gradients become ready all along the backward pass. Printed:
median milliseconds of a step on rank 0, also without communication, and with all of it after the backward pass.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from multiring.torch import DistributedOptimizer


def network(layers: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(layers)))


def stepper(
    net: nn.Module,
    x: torch.Tensor,
    optimizer: torch.optim.Optimizer,
    around: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Callable[[], None]:
    def step() -> None:
        optimizer.zero_grad()
        with around():
            net(x).square().mean().backward()
        optimizer.step()

    return step


def milliseconds(step: Callable[[], None], steps: int) -> float:
    dist.barrier()
    started = time.perf_counter()
    for _ in range(steps):
        step()
    return (time.perf_counter() - started) / steps * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description="Time DistributedOptimizer beside DistributedDataParallel.")
    parser.add_argument("--layers", type=int, default=12, help="of 4 MB each")
    parser.add_argument("--batch", type=int, default=64, help="rows on each rank")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    dist.init_process_group("multiring")
    gloo = dist.new_group(backend="gloo")
    x = torch.randn(args.batch, 1024)
    local = network(args.layers)
    contestants = {"no communication": stepper(local, x, torch.optim.SGD(local.parameters(), 1e-4))}
    for name, group in (("DDP, Gloo", gloo), ("DDP, multiring", None)):
        net = DistributedDataParallel(network(args.layers), process_group=group, gradient_as_bucket_view=True)
        contestants[name] = stepper(net, x, torch.optim.SGD(net.parameters(), 1e-4))
    net = network(args.layers)
    optimizer = DistributedOptimizer(torch.optim.SGD(net.parameters(), 1e-4), net.named_parameters())
    contestants["DistributedOptimizer"] = stepper(net, x, optimizer)
    last = network(args.layers)
    late = DistributedOptimizer(torch.optim.SGD(last.parameters(), 1e-4), last.named_parameters())
    contestants["the same, after backward"] = stepper(last, x, late, late.no_sync)
    for step in contestants.values():
        milliseconds(step, 2)
    rounds = [{name: milliseconds(step, args.steps) for name, step in contestants.items()} for _ in range(args.rounds)]
    if dist.get_rank() == 0:
        print(f"{args.layers * 4} MB of gradients, {dist.get_world_size()} ranks, {args.rounds} rounds in turns")
        for name in contestants:
            times = sorted(one[name] for one in rounds)
            print(f"  {name:<26}{statistics.median(times):8.1f} ms  ({times[0]:.1f} to {times[-1]:.1f})")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
