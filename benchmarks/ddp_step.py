"""A DistributedDataParallel step over Gloo and over multiring, in turns in one run.

    multiring run -n 2 benchmarks/ddp_step.py
    multiring lab run benchmarks/ddp_step.py --rounds 3 --steps 1    # on the emulated cluster that is up

The network is an MLP of 25 million parameters, 100 MB of gradients in buckets of DistributedDataParallel's default
size, with a small batch, so that a step is nearly all communication. Printed: the median time of a step on rank 0, and
by how much it is longer than one without communication. Where nothing is sent, buckets are filled and emptied as ever:
that much DistributedDataParallel itself exposes, over any backend.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def mlp(width: int, layers: int) -> nn.Module:
    return nn.Sequential(*(layer for _ in range(layers) for layer in (nn.Linear(width, width, bias=False), nn.ReLU())))


def seconds_per_step(net: nn.Module, x: torch.Tensor, steps: int) -> float:
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    started = time.perf_counter()
    for _ in range(steps):
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()
    return (time.perf_counter() - started) / steps


def done(tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(tensor)
    return future


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10, help="turns of each backend")
    parser.add_argument("--steps", type=int, default=5, help="steps in a turn")
    parser.add_argument("--images", type=int, default=8, help="rows of the batch of one rank")
    parser.add_argument("--width", type=int, default=2500, help="of each layer")
    parser.add_argument("--layers", type=int, default=4)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    x = torch.randn(args.images, args.width)
    nets = {}
    for name in ("gloo", "multiring"):
        net = mlp(args.width, args.layers)
        nets[name] = DistributedDataParallel(net, process_group=dist.new_group(backend=name))
    nets["nothing sent"] = DistributedDataParallel(mlp(args.width, args.layers))
    nets["nothing sent"].register_comm_hook(None, lambda _, bucket: done(bucket.buffer()))
    for net in nets.values():
        seconds_per_step(net, x, 2)  # not timed: buckets are rebuilt after the first step
    alone = DistributedDataParallel(mlp(args.width, args.layers))

    def unsynchronised() -> float:
        with alone.no_sync():
            return seconds_per_step(alone, x, args.steps)

    rounds: dict[str, list[float]] = {name: [] for name in (*nets, "no communication")}
    for _ in range(args.rounds):
        for name, net in nets.items():
            rounds[name].append(seconds_per_step(net, x, args.steps))
        rounds["no communication"].append(unsynchronised())
    if dist.get_rank() == 0:
        medians = {name: statistics.median(seconds) * 1e3 for name, seconds in rounds.items()}
        size = sum(parameter.nbytes for parameter in alone.parameters()) / 1e6
        print(f"{dist.get_world_size()} ranks, {size:.0f} MB of gradients, {args.rounds} rounds")
        for name, median in medians.items():
            exposed = median - medians["no communication"]
            print(f"{name:<18} {median:8.1f} ms   exposed {exposed:8.1f} ms")
        print(f"gloo / multiring   {medians['gloo'] / medians['multiring']:8.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
