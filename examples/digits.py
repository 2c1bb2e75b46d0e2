"""Train a small residual network on handwritten digits, with one process or many.

    one process     python examples/digits.py
    one host        multiring run -n 2 examples/digits.py
    two hosts       multiring run -n 4 -H a:2,b:2 examples/digits.py

The same over Gloo:  torchrun --nproc-per-node 2 examples/digits.py --backend gloo

With several ranks it ends with a report: the plan, what communication cost, the same step with one process, over Gloo
and over multiring, and a check that the ranks together compute what one process computes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

Images = tuple[torch.Tensor, torch.Tensor]

DISTRIBUTED = "RANK" in os.environ  # set by multiring run, torchrun and their like
RANK = int(os.environ.get("RANK", 0))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))

# --- the model, the data, the training loop ---


class Block(nn.Module):
    """Two 3x3 convolutions beside an identity; GroupNorm, so that no statistic couples the images of a batch."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.GroupNorm(8, width) for _ in range(2))
        self.convolutions = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for norm, convolution in zip(self.norms, self.convolutions, strict=True):
            y = convolution(F.relu(norm(y)))
        return x + y


def network(width: int = 64, blocks: int = 3) -> nn.Module:
    """The same weights on every rank and in every run."""
    torch.manual_seed(0)
    body = [Block(width) for _ in range(blocks)]
    head = [nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * width, 10)]
    return nn.Sequential(nn.Conv2d(1, width, 3, padding=1), *body, *head)


def digits() -> tuple[Images, Images]:
    """The 1,797 images of scikit-learn, 8x8 pixels in [0, 1]: 1,437 to train on and 360 to test."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, test = order[:1437], order[1437:]
    return (images[train], labels[train]), (images[test], labels[test])


def batches(data: Images, size: int, epoch: int) -> Iterator[Images]:
    """The batches of an epoch, shuffled alike on every rank; each rank then takes its part."""
    images, labels = data
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
    for chosen in order.split(size):
        if len(chosen) == size:
            yield images[chosen], labels[chosen]


def part(batch: Images) -> Images:
    """This rank's share of a batch."""
    images, labels = batch
    return images[RANK::WORLD_SIZE], labels[RANK::WORLD_SIZE]


def step(net: nn.Module, optimizer: torch.optim.Optimizer, batch: Images) -> float:
    images, labels = batch
    optimizer.zero_grad()
    loss = F.cross_entropy(net(images), labels)
    loss.backward()
    optimizer.step()
    return loss.item()


def train(net: nn.Module, data: Images, args: argparse.Namespace) -> None:
    steps = args.epochs * (len(data[0]) // args.batch)
    optimizer = torch.optim.AdamW(net.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, steps)
    with tqdm(total=steps, desc=f"training, {WORLD_SIZE} rank(s)", unit="step", disable=RANK != 0) as bar:
        for epoch in range(args.epochs):
            for batch in batches(data, args.batch, epoch):
                loss = step(net, optimizer, part(batch))
                schedule.step()
                bar.set_postfix(epoch=epoch, loss=f"{loss:.3f}", refresh=False)
                bar.update()


@torch.no_grad()
def accuracy(net: nn.Module, data: Images) -> float:
    images, labels = data
    return (net(images).argmax(1) == labels).float().mean().item()


# --- the report: what the ranks cost, what they gain, and that they are right ---


def host_cores() -> set[int]:
    """All cores that the ranks of this host may use: what one process would have in their place."""
    name, mine = os.uname().nodename, os.sched_getaffinity(0)
    everyone: list[tuple[str, set[int]]] = [("", set())] * WORLD_SIZE
    dist.all_gather_object(everyone, (name, mine))
    return set().union(*(cores for host, cores in everyone if host == name))


def seconds_per_step(net: nn.Module, batch: Images, steps: int) -> float:
    optimizer = torch.optim.AdamW(net.parameters())
    step(net, optimizer, batch)  # not timed: threads start, buckets form
    start = time.perf_counter()
    for _ in range(steps):
        step(net, optimizer, batch)
    return (time.perf_counter() - start) / steps


def alone(net: nn.Module, batch: Images, steps: int, cores: set[int]) -> float:
    """One process with the whole batch on all cores: rank 0, while the others sleep in the barrier."""
    seconds, mine, threads = 0.0, os.sched_getaffinity(0), torch.get_num_threads()
    if RANK == 0:
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(len(cores))
        seconds = seconds_per_step(net, batch, steps)
        torch.set_num_threads(threads)
        os.sched_setaffinity(0, mine)
    dist.barrier()
    return seconds


def time_steps(data: Images, args: argparse.Namespace) -> dict[str, float]:
    """Median seconds of a step.

    The contestants take turns, in one order and then in the other, so that each meets the same moods of the machine.
    """
    batch = next(batches(data, args.batch, epoch=0))
    cores = host_cores()
    groups = {name: dist.group.WORLD if name == args.backend else dist.new_group(backend=name) for name in BACKENDS}
    nets = {name: DistributedDataParallel(network(), process_group=group) for name, group in groups.items()}

    def unsynchronised() -> float:
        with nets[args.backend].no_sync():
            return seconds_per_step(nets[args.backend], part(batch), args.steps)

    contestants: dict[str, Callable[[], float]] = {
        "one process": lambda: alone(network(), batch, args.steps, cores),
        **{name: lambda net=net: seconds_per_step(net, part(batch), args.steps) for name, net in nets.items()},
        "no communication": unsynchronised,
    }
    orders = 3 * [list(contestants), list(reversed(contestants))]
    rounds = [{name: contestants[name]() for name in order} for order in tqdm(orders, "timing", disable=RANK != 0)]
    return {name: statistics.median(seconds[name] for seconds in rounds) for name in contestants}


def largest_difference(data: Images, steps: int = 50) -> float:
    """Train in float64 with all ranks and with rank 0 alone; the largest difference between any two weights."""
    images, labels = data
    together = DistributedDataParallel(network(width=16).double())
    single = network(width=16).double()
    optimizers = [torch.optim.AdamW(net.parameters()) for net in (together, single)]
    size = 16 * WORLD_SIZE
    for number in tqdm(range(steps), "checking", unit="step", disable=RANK != 0):
        chosen = torch.arange(number * size, (number + 1) * size) % len(images)
        batch = images[chosen].double(), labels[chosen]
        step(together, optimizers[0], part(batch))
        if RANK == 0:
            step(single, optimizers[1], batch)
    for weights in single.parameters():
        dist.broadcast(weights.detach(), 0)
    pairs = zip(together.parameters(), single.parameters(), strict=True)
    difference = torch.stack([(a - b).abs().max() for a, b in pairs]).max().detach()
    dist.all_reduce(difference, dist.ReduceOp.MAX)
    return difference.item()


BACKENDS = ("gloo", "multiring")


def verdict(seconds: dict[str, float]) -> str:
    ratio = seconds["one process"] / seconds["multiring"]
    rule = "ranks pay when dividing a batch saves more computing than exchanging the gradients costs"
    return f"{rule}: here {WORLD_SIZE} ranks are {ratio:.2f} times as fast as one process on the same cores."


def report(net: nn.Module, data: Images, args: argparse.Namespace) -> int:
    """Print what the run cost and gained; the exit code: 1 if the ranks do not compute what one process does."""
    seconds = time_steps(data, args)
    difference = largest_difference(data)
    if RANK == 0:
        if args.json:
            args.json.write_text(json.dumps({"ranks": WORLD_SIZE, "images": args.batch, "seconds": seconds}) + "\n")
        gradient = sum(p.numel() * p.element_size() for p in net.parameters())
        if args.backend == "multiring":
            import multiring

            print(f"\nPlan for the gradient of {gradient / 2**20:.2f} MiB\n{multiring.plan(gradient)}")
        share = 1 - seconds["no communication"] / seconds[args.backend]
        print(f"\nCommunication takes {max(share, 0):.0%} of a step; the rest of it is hidden behind the computation.")
        print(f"\nOne step of {args.batch} images, median of 6 alternated rounds of {args.steps}")
        print(f"  one process, all cores   {seconds['one process'] * 1e3:7.1f} ms")
        for name in BACKENDS:
            print(f"  {WORLD_SIZE} ranks, {name:<16}  {seconds[name] * 1e3:7.1f} ms")
        print(verdict(seconds))
        print(
            f"\nAfter 50 steps in float64 the weights of {WORLD_SIZE} ranks and one process differ by {difference:.1e}"
        )
    if not difference <= 1e-9:
        print(f"rank {RANK}: that is above 1e-9: the ranks do not train the same network", file=sys.stderr)
        return 1
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small residual network on handwritten digits.")
    parser.add_argument("--backend", choices=BACKENDS, default="multiring", help="what carries the gradients")
    parser.add_argument("--batch", type=int, default=64, help="images in a step, of all ranks together")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--lr", type=float, default=4e-3, help="highest learning rate of the schedule")
    parser.add_argument("--steps", type=int, default=10, help="steps in a timed round")
    parser.add_argument("--json", type=Path, help="with several ranks: also write the seconds of a step here")
    args = parser.parse_args()
    if args.batch % WORLD_SIZE:
        parser.error(f"--batch {args.batch} cannot be divided equally between {WORLD_SIZE} ranks")
    return args


def main() -> int:
    args = arguments()
    data, held_out = digits()
    net = network()
    if DISTRIBUTED:
        dist.init_process_group(args.backend)
        net = DistributedDataParallel(net)
    start = time.perf_counter()
    train(net, data, args)
    if RANK == 0:
        print(f"\nTest accuracy {accuracy(net, held_out):.1%} after {time.perf_counter() - start:.1f} s of training")
    code = report(net, data, args) if WORLD_SIZE > 1 else 0
    if DISTRIBUTED:
        dist.destroy_process_group()
    return code


if __name__ == "__main__":
    sys.exit(main())
