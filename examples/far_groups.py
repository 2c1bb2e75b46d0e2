"""The cost and gain of training apart, on handwritten digits: two groups of ranks exchange every step or seldom.

    multiring run -n 4 examples/far_groups.py

Each half of the ranks stands for a host. Synchronous training averages all gradients in every step. With outer
optimization, a step averages within each group, and groups exchange parameters once in 10 or 50 steps, by averaging
or by DiLoCo's outer momentum. All trainings see the same number of samples. Mean over three seeds, on 360 images.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
from collections.abc import Callable

import torch
from large_batch import digits, network
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

import multiring as mr
from multiring import recipes
from multiring.torch import DistributedOptimizer, Outer, broadcast_parameters

BATCH, RATE = 64, 0.02
"""Images of all ranks in a step, and the highest learning rate."""

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def momentum(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


WAYS: dict[str, tuple[int, Make | None]] = {
    "synchronous": (1, None),
    "every 10, averaging": (10, None),
    "every 10, momentum": (10, momentum),
    "every 50, averaging": (50, None),
    "every 50, momentum": (50, momentum),
}
"""Steps between exchanges, and the outer optimizer; None for the one of `Outer`."""


def sent_to_others() -> float:
    """Bytes that this rank has sent to ranks of the other half."""
    half = mr.world_size() // 2
    peers = mr.stats()["peers"].items()
    return sum(counted["bytes_sent"] for rank, counted in peers if rank // half != mr.rank() // half)


def train(every: int, make: Make | None, seed: int, epochs: int) -> tuple[float, float, float]:
    """Loss and accuracy on the images held out, and the bytes between the groups, up and down."""
    images, labels, test_images, test_labels = digits()
    torch.manual_seed(seed)
    net = network()
    half = mr.world_size() // 2
    groups = [list(range(half)), list(range(half, mr.world_size()))]
    broadcast_parameters(net.state_dict())
    outer = Outer(net, every, groups=groups, optimizer=make) if every > 1 else None
    inner = torch.optim.SGD(net.parameters(), RATE, momentum=0.9, nesterov=True)
    optimizer = DistributedOptimizer(inner, net.named_parameters(), group=outer.group if outer else None)
    each = len(images) // BATCH
    rates = LambdaLR(inner, recipes.cosine(epochs * each))
    before = sent_to_others()
    for epoch, part in itertools.product(range(epochs), range(each)):
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(1000 * seed + epoch))
        chosen = order[part * BATCH : (part + 1) * BATCH][mr.rank() :: mr.world_size()]
        optimizer.zero_grad()
        F.cross_entropy(net(images[chosen]), labels[chosen]).backward()
        optimizer.step()
        rates.step()
        if outer is not None:
            outer.step(len(chosen))
    if outer is not None:
        outer.finish()
    sent = mr.average(sent_to_others() - before) * mr.world_size()
    with torch.no_grad():
        scores = net(test_images)
        loss = F.cross_entropy(scores, test_labels).item()
        return loss, (scores.argmax(1) == test_labels).double().mean().item(), sent


def main() -> None:
    parser = argparse.ArgumentParser(description="What training apart costs and saves on handwritten digits.")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=20)
    args = parser.parse_args()
    rank, size = int(os.environ["MULTIRING_RANK"]), int(os.environ["MULTIRING_WORLD_SIZE"])
    if size % 2:
        parser.error(f"{size} ranks are no two groups of equal size: give an even number")
    os.environ["MULTIRING_HOST"] = f"host{rank * 2 // size}"
    mr.init()
    for name, (every, make) in WAYS.items():
        runs = [train(every, make, seed, args.epochs) for seed in range(args.seeds)]
        loss, accuracy, sent = (statistics.mean(column) for column in zip(*runs, strict=True))
        spread = max(run[1] for run in runs) - min(run[1] for run in runs)
        if rank == 0:
            print(
                f"{name:20s}   loss {loss:.3f}   accuracy {accuracy:.1%} (range {spread:.1%})   {sent / 1e6:.2f} MB",
                flush=True,
            )
    mr.shutdown()


if __name__ == "__main__":
    main()
