"""Train on handwritten digits by Accelerate.

    two ranks       multiring run -n 2 examples/accelerate_digits.py

The one line that Accelerate needs is marked: it would start Gloo, and uses a group that is there.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    torch.manual_seed(0)
    dist.init_process_group("multiring")  # the one line
    accelerator = Accelerator(cpu=True)
    data = load_digits()
    images, labels = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)
    order = torch.randperm(len(images))
    training, held_out = (TensorDataset(images[part], labels[part]) for part in (order[:1437], order[1437:]))
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    net, optimizer, batches, tests = accelerator.prepare(
        net,
        torch.optim.AdamW(net.parameters(), 0.005),
        DataLoader(training, 48, shuffle=True),
        DataLoader(held_out, 90),
    )
    for _ in range(10):
        for pixels, digits in batches:
            optimizer.zero_grad()
            accelerator.backward(F.cross_entropy(net(pixels), digits))
            optimizer.step()
    with torch.no_grad():
        right = [accelerator.gather_for_metrics(net(pixels).argmax(1) == digits) for pixels, digits in tests]
    accelerator.print(
        f"accuracy {torch.cat(right).float().mean():.1%} on {accelerator.num_processes} rank(s) "
        f"over {dist.get_backend()}"
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
