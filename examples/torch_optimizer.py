"""Train on handwritten digits without DistributedDataParallel; the ranks have different numbers of images.

    one process     python examples/torch_optimizer.py
    three ranks     multiring run -n 3 examples/torch_optimizer.py

Both end with the same accuracy: each step takes the gradient of the mean loss over the whole batch of all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import multiring as mr
from multiring.torch import DistributedOptimizer, broadcast_parameters

Images = tuple[Tensor, Tensor]


def digits() -> Images:
    """The 1,797 images of scikit-learn, 8x8 pixels in [0, 1], in float64."""
    data = load_digits()
    return torch.tensor(data.data) / 16, torch.tensor(data.target)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 10)).double()


def train(net: nn.Module, images: Images, epochs: int, batch: int) -> Iterator[float]:
    """Yield the mean loss of each epoch. ``batch`` counts the images of all ranks together."""
    optimizer = DistributedOptimizer(torch.optim.AdamW(net.parameters(), 0.005), net.named_parameters())
    broadcast_parameters(net.state_dict())
    for epoch in range(epochs):
        mine = torch.from_numpy(mr.shard(len(images[0]), epoch))
        part = -(-batch // mr.world_size())
        total = 0.0
        for start in range(0, -(-len(images[0]) // mr.world_size()), part):
            chosen = mine[start : start + part]
            pixels, labels = (tensor[chosen] for tensor in images)
            optimizer.weight = len(chosen)  # every image counts the same, and a rank without any for nothing
            optimizer.zero_grad()
            loss = F.cross_entropy(net(pixels), labels, reduction="sum") / max(len(chosen), 1)
            loss.backward()
            optimizer.step()
            total += loss.item() * len(chosen)
        yield mr.average(total / max(len(mine), 1), weight=len(mine))


@torch.no_grad()
def accuracy(net: nn.Module, images: Images) -> float:
    return (net(images[0]).argmax(1) == images[1]).double().mean().item()


def main() -> None:
    mr.init()
    torch.manual_seed(mr.rank())  # whatever the ranks begin with: broadcast_parameters makes them equal
    images = digits()
    order = torch.randperm(len(images[0]), generator=torch.Generator().manual_seed(0))
    training, held_out = ((images[0][part], images[1][part]) for part in (order[:1437], order[1437:]))
    net = network()
    for epoch, loss in enumerate(train(net, training, epochs=10, batch=96)):
        if mr.rank() == 0:
            print(f"epoch {epoch}: loss {loss:.4f}")
    if mr.rank() == 0:
        print(f"accuracy {accuracy(net, held_out):.1%} on {mr.world_size()} rank(s)")
    mr.shutdown()


if __name__ == "__main__":
    main()
