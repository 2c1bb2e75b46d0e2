"""Accuracy and loss of 1, 2, 3, 4 and 8 ranks at the same global batch, beside what another seed changes.

    python benchmarks/ranks_and_seeds.py --json result.json

A small convolutional network with batch norms learns scikit-learn's digits, 96 images a step. The statistics of a
batch norm are those of one rank's part, which is 12 images on 8 ranks, so another number of ranks is another
computation. Each number of ranks trains with each seed, which sets weights and order alike for all. Printed, for each
number of ranks: mean, deviation, least and largest of accuracy and loss on 360 other images; the difference of the mean
from that of one rank, beside twice its standard error. The first seed is trained twice in a job and once in another
one, all with `reproducible=True`: the bits of the weights have to be the same.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import multiring as mr
import multiring.torch
from multiring.bench import report

RANKS = 1, 2, 3, 4, 8
BATCH, TRAINED_WITH = 96, 1437


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    first = nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()
    second = nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(32 * 16, 10))


def train(seed: int, epochs: int) -> dict[str, Any]:
    """Train on all ranks with one seed; what came out is the same on each."""
    data = load_digits()
    images, labels = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16, torch.tensor(data.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    own, others = order[:TRAINED_WITH], order[TRAINED_WITH:]
    net = network(seed)
    parallel = DistributedDataParallel(net, forward_sync_buffers=False)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)
    each = TRAINED_WITH // BATCH
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * each)
    shuffle = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for chosen in own[torch.randperm(TRAINED_WITH, generator=shuffle)][: each * BATCH].view(each, BATCH):
            part = chosen[mr.rank() :: mr.world_size()]
            optimizer.zero_grad()
            F.cross_entropy(parallel(images[part]), labels[part]).backward()
            optimizer.step()
            schedule.step()
    for values in net.buffers():
        if values.is_floating_point():
            mr.all_reduce(values, op="avg")
    net.eval()
    with torch.no_grad():
        answers = net(images[others])
    weights = b"".join(values.numpy().tobytes() for values in net.state_dict().values())
    return {
        "ranks": mr.world_size(),
        "seed": seed,
        "accuracy": (answers.argmax(1) == labels[others]).float().mean().item(),
        "loss": F.cross_entropy(answers, labels[others]).item(),
        "bits": hashlib.sha256(weights).hexdigest(),
    }


def on_a_rank(file: Path, seeds: list[int], epochs: int) -> None:
    torch.set_num_threads(1)
    multiring.torch.init(reproducible=True)
    rows = [train(seed, epochs) for seed in seeds]
    bits = mr.all_gather_object([row["bits"] for row in rows])
    if any(each != bits[0] for each in bits):
        raise RuntimeError("ranks of one job have different weights")
    if mr.rank() == 0:
        file.write_text(json.dumps(rows))
    torch.distributed.destroy_process_group()


def job(ranks: int, seeds: list[int], epochs: int) -> list[dict[str, Any]]:
    """A row for each training of a job of so many ranks."""
    with tempfile.TemporaryDirectory() as directory:
        result = Path(directory, "rows.json")
        options = ["--seeds", *map(str, seeds), "--epochs", str(epochs), "--on-a-rank", str(result)]
        words = [sys.executable, "-m", "multiring", "run", "-n", str(ranks), __file__, *options]
        done = subprocess.run(words, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stderr)
        rows: list[dict[str, Any]] = json.loads(result.read_text())
    return rows


def told(rows: dict[int, list[dict[str, Any]]], what: str, scale: float) -> None:
    """Print a table of one result, a row for each number of ranks."""
    one = [scale * row[what] for row in rows[RANKS[0]]]
    print(f"\n| ranks | {what}: mean | deviation | least to largest | from one rank | twice its standard error |")
    print("|---|---|---|---|---|---|")
    for ranks, found in rows.items():
        values = [scale * row[what] for row in found]
        mean, deviation = statistics.mean(values), statistics.stdev(values)
        error = 2 * math.sqrt((deviation**2 + statistics.stdev(one) ** 2) / len(values))
        differs = f"{mean - statistics.mean(one):+.3f} | {error:.3f}" if ranks != RANKS[0] else " | "
        print(f"| {ranks} | {mean:.3f} | {deviation:.3f} | {min(values):.3f} to {max(values):.3f} | {differs} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(10)), metavar="SEED", help="two or more")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--json", type=Path, help="also write everything here")
    parser.add_argument("--on-a-rank", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.on_a_rank:
        return on_a_rank(args.on_a_rank, args.seeds, args.epochs)
    if len(set(args.seeds)) < 2:
        parser.error(f"--seeds {' '.join(map(str, args.seeds))}: two different ones or more are needed for a deviation")
    rows, changed = {}, []
    for ranks in RANKS:
        first, *others = job(ranks, [args.seeds[0], *args.seeds], args.epochs)
        (again,) = job(ranks, args.seeds[:1], args.epochs)
        if not first["bits"] == others[0]["bits"] == again["bits"]:
            changed.append(str(ranks))
        rows[ranks] = others
    told(rows, "accuracy", 100)
    told(rows, "loss", 1)
    print(f"\nother bits in another run, with ranks: {', '.join(changed) or 'none'}")
    if args.json:
        ran = shlex.join(["python", "benchmarks/ranks_and_seeds.py", *sys.argv[1:]])
        found = report.record([row for each in rows.values() for row in each], command=ran, other_bits=changed)
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    sys.exit(1 if changed else 0)


if __name__ == "__main__":
    main()
