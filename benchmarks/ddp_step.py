"""A DistributedDataParallel step over Gloo and over multiring, in turns in one run.

    multiring run -n 2 benchmarks/ddp_step.py
    multiring lab run benchmarks/ddp_step.py --rounds 3 --steps 1    # on the emulated cluster that is up
    multiring lab run -H a:1,b:1,c:1,d:1 benchmarks/ddp_step.py --classes 22000 --factors --rounds 17 --steps 1

The network is an MLP of 25 million parameters, 100 MB of gradients in buckets of DistributedDataParallel's default
size, with a small batch, so that a step is nearly all communication. With --classes it is the classifier of a
ResNet-101, from 2048 features, behind three small layers in the place of its trunk: 45 million weights for 22,000
classes. With --factors one more network leaves its large linear layers to `multiring.torch.Factors`. Printed: the
median time of a step on rank 0, the longest turn, by how much the median is longer than a step without communication,
and by how much the process grew by a network and its first two steps. Where nothing is sent, buckets are filled and
emptied as ever: that much DistributedDataParallel itself exposes, over any backend.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from multiring.torch import Factors


def mlp(width: int, layers: int) -> nn.Module:
    return nn.Sequential(*(layer for _ in range(layers) for layer in (nn.Linear(width, width, bias=False), nn.ReLU())))


FEATURES = 2048
"""Features per sample that a ResNet-101's trunk hands to its classifier."""


def classifier(classes: int) -> nn.Module:
    """The last layer of a ResNet-101 for images of 32x32, and too small a trunk to learn much."""
    trunk = [nn.Conv2d(3, 32, 3, 2), nn.ReLU(), nn.Conv2d(32, 128, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(2)]
    return nn.Sequential(*trunk, nn.Flatten(), nn.Linear(512, FEATURES), nn.ReLU(), nn.Linear(FEATURES, classes))


def megabytes() -> float:
    """Memory of this process; a page that several processes share counts for each in part."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1000


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
    parser.add_argument("--classes", type=int, help="train a classifier with so many instead of the MLP")
    parser.add_argument("--factors", action="store_true", help="also with multiring.torch.Factors")
    args = parser.parse_args()

    dist.init_process_group("gloo")

    def make() -> nn.Module:
        return classifier(args.classes) if args.classes else mlp(args.width, args.layers)

    x = torch.randn(args.images, *((3, 32, 32) if args.classes else (args.width,)))
    nets, grown = {}, {}
    # The first also grows by what any network needs once.
    for name in ("nothing sent", "gloo", "multiring", *(["factors"] if args.factors else [])):
        before = megabytes()
        sends = name != "nothing sent"
        group = dist.new_group(backend="multiring" if name == "factors" else name) if sends else None
        net = make()
        if name == "factors":
            Factors(net, group=group.communicator)
        nets[name] = DistributedDataParallel(net, process_group=group)
        if not sends:
            nets[name].register_comm_hook(None, lambda _, bucket: done(bucket.buffer()))
        seconds_per_step(nets[name], x, 2)  # not timed: buckets are rebuilt after the first step
        if sends:
            grown[name] = megabytes() - before
    alone = DistributedDataParallel(make())

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
        load = f"load {os.getloadavg()[1]:.0f}"
        print(f"{dist.get_world_size()} ranks, {size:.0f} MB of gradients, {args.rounds} rounds, {load}")
        silent = medians["no communication"]
        for name, median in medians.items():
            memory = f"   memory {grown[name]:6.0f} MB" if name in grown else ""
            worst = f"longest {max(rounds[name]) * 1e3:8.1f} ms   exposed {median - silent:8.1f} ms"
            print(f"{name:<18} {median:8.1f} ms   {worst}{memory}")
        print(f"gloo / multiring   {medians['gloo'] / medians['multiring']:8.2f}")
        exposed = {name: medians[name] - silent for name in grown}
        if min(exposed.values()) > 0:  # where steps are short, what else runs outweighs them
            for name in list(grown)[1:]:
                print(f"exposed, {name} / gloo {exposed[name] / exposed['gloo']:.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
