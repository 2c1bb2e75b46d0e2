"""Accuracy on handwritten digits at growing batches, with the recipe for large batches and without.

    multiring run -n 2 examples/large_batch.py --plot large_batch.png

A small batch at its own learning rate is the standard; larger batches train for the same number of epochs. The recipe
is linear scaling, five epochs of warm-up, decay along a cosine, and no weight decay on biases and norms. Without it,
the rate is that of the small batch, or the scaled one without warm-up. Mean over three seeds, on 360 images.
"""

from __future__ import annotations

import argparse
import itertools
import statistics

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

import multiring as mr
from multiring import recipes
from multiring.torch import DistributedOptimizer

SMALL, RATE, EPOCHS, WARM_UP = 16, 0.005, 20, 5
BATCHES = (16, 64, 128, 256, 512, 1024)
WAYS = ("recipe", "scaled, no warm-up", "not scaled")


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    data = load_digits()
    order = torch.randperm(1797, generator=torch.Generator().manual_seed(0))
    images, labels = torch.tensor(data.data, dtype=torch.float32)[order] / 16, torch.tensor(data.target)[order]
    return images[:1437], labels[:1437], images[1437:], labels[1437:]


def network() -> nn.Module:
    layers = [nn.Sequential(nn.Linear(size, 64), nn.LayerNorm(64), nn.ReLU()) for size in (64, 64, 64)]
    return nn.Sequential(*layers, nn.Linear(64, 10))


def accuracy(batch: int, way: str, seed: int) -> float:
    images, labels, test_images, test_labels = digits()
    torch.manual_seed(seed)
    net = network()
    rate = RATE if way == "not scaled" else recipes.linear_scaling(RATE, batch, SMALL)
    decayed = [p for p in net.parameters() if recipes.decays(p.shape)]
    others = [p for p in net.parameters() if not recipes.decays(p.shape)]
    groups = [{"params": decayed, "weight_decay": 5e-4}, {"params": others}]
    optimizer = DistributedOptimizer(torch.optim.SGD(groups, rate, momentum=0.9, nesterov=True))
    each = -(-len(images) // batch)
    schedule = recipes.cosine(EPOCHS * each)
    if way == "recipe":
        schedule = recipes.warm_up(schedule, WARM_UP * each, start=SMALL / batch)
    rates = LambdaLR(optimizer, schedule)
    for epoch, part in itertools.product(range(EPOCHS), range(each)):
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(1000 * seed + epoch))
        chosen = order[part * batch : (part + 1) * batch][mr.rank() :: mr.world_size()]
        optimizer.weight = len(chosen)
        optimizer.zero_grad()
        if len(chosen):
            F.cross_entropy(net(images[chosen]), labels[chosen]).backward()
        optimizer.step()
        rates.step()
    with torch.no_grad():
        return (net(test_images).argmax(1) == test_labels).double().mean().item()


def answer(means: dict[tuple[int, str], float], batches: list[int]) -> str:
    """Up to which batch the recipe keeps the accuracy of the first one."""
    standard = means[batches[0], "recipe"]
    kept = [batch for batch in batches if means[batch, "recipe"] >= standard - 0.01][-1]
    lost = standard - means[kept, "not scaled"]
    return f"the recipe keeps the accuracy within 1 % up to batch {kept}; there, {lost:.1%} are lost without it"


def draw(path: str, means: dict[tuple[int, str], float], batches: list[int]) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8.5, 4.5), layout="constrained")
    lowest = min(means.values())
    # Names stand at the last points, which are pushed apart where they are nearer than a line of text.
    gap, free = (1 - lowest) / 14, float("-inf")
    for way in sorted(WAYS, key=lambda way: means[batches[-1], way]):
        (line,) = axes.plot(batches, [100 * means[batch, way] for batch in batches], marker="o", linewidth=2)
        last = means[batches[-1], way]
        free = max(last, free + gap)
        label = f"{way} {last:.1%}"
        axes.annotate(label, (batches[-1] * 1.08, 100 * free), color=line.get_color(), verticalalignment="center")
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, map(str, batches))
    axes.set_xlim(batches[0] / 1.1, batches[-1] * 5)
    axes.set(xlabel="batch, all ranks together", ylabel="accuracy on 360 images, %")
    axes.grid(alpha=0.3)
    first, second = answer(means, batches).split("; ")
    axes.set_title(f"{first[0].upper()}{first[1:]};\n{second}", loc="left", fontweight="bold", fontsize=11)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description="How large a batch keeps the accuracy on handwritten digits.")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES, help="the first one is the standard")
    parser.add_argument("--plot", metavar="FILE", help="draw a picture")
    args = parser.parse_args()
    mr.init()
    means = {}
    for batch in args.batches:
        for way in WAYS:
            means[batch, way] = statistics.mean(accuracy(batch, way, seed) for seed in range(args.seeds))
        if mr.rank() == 0:
            shown = "   ".join(f"{way} {means[batch, way]:.1%}" for way in WAYS)
            print(f"batch {batch:4d}   {shown}", flush=True)
    if mr.rank() == 0:
        print(answer(means, args.batches))
        if args.plot:
            draw(args.plot, means, args.batches)
    mr.shutdown()


if __name__ == "__main__":
    main()
