"""Ranks of the ImageNet application that fail where a test says so, or whose model counts the samples that it has had.

Variables that tests set, of which each begins with TEST_:
KILLS=FOLDER kills rank R before step S, once, where the folder has a file R-S;
KILL=RANK:STEP kills that rank before that step, or before the ranks begin (STEP is "start"), if it is no replacement;
KEEP=RANK:CYCLE kills that rank before it keeps the network of that cycle's end;
NAN=RANK:STEP makes the loss of that rank in that step no number;
FAIL=STEP raises what short memory does in that step; COUNT=SAMPLES trains a model that counts; DIFFERS=RANK gives that
rank another seed; WRONG=NUMBER lets that replacement find its data wrong; ALONE=yes makes replacements of all ranks;
LEAST=WEIGHTS is the size from which on the factors of a layer are gathered, however long that takes.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "imagenet"))

import torch
import train
from torch import Tensor, nn
from torch.utils.data import Dataset

import multiring as mr
from multiring.data import DataError
from multiring.torch import factors


class Failing(train.Training):
    def __init__(self, args: Any) -> None:
        if os.environ.get("TEST_DIFFERS") == str(mr.rank()):
            args.seed += 7
        if least := os.environ.get("TEST_LEAST"):
            factors.LEAST_WEIGHTS, factors.WORTH = int(least), float("inf")
        if "TEST_ALONE" in os.environ:
            os.environ["MULTIRING_REPLACEMENT"] = "1"  # before init it would wait for others
        if os.environ.get("TEST_WRONG") == os.environ.get("MULTIRING_REPLACEMENT", "0"):
            raise DataError("the data are wrong here")
        super().__init__(args)

    def run(self) -> None:
        self.dies("start")
        super().run()

    def step(self, pixels: Tensor, labels: Tensor) -> None:
        step = str(self.epoch * self.each + self.done)
        self.dies(step)
        if os.environ.get("TEST_FAIL") == step:
            raise RuntimeError(f"out of memory in step {step}")
        super().step(pixels, labels)

    def loss(self, net: nn.Module, pixels: Tensor, labels: Tensor, smoothing: float) -> Tensor:
        found = super().loss(net, pixels, labels, smoothing)
        here = f"{mr.rank()}:{self.epoch * self.each + self.done}"
        return found * float("nan") if os.environ.get("TEST_NAN") == here else found

    def keep(self, result: dict[str, float]) -> int:
        cycle = f"{mr.rank()}:{sum(end <= self.epoch + 1 for end in self.preset.cycles)}"
        if self.world == 3 and os.environ.get("TEST_KEEP") == cycle:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().keep(result)

    def dies(self, step: str) -> None:
        if kills := os.environ.get("TEST_KILLS"):
            try:
                Path(kills, f"{mr.rank()}-{step}").unlink()
            except FileNotFoundError:
                pass
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        if not train.replaces() and os.environ.get("TEST_KILL") in (f"{mr.rank()}:{step}", f"all:{step}"):
            os.kill(os.getpid(), signal.SIGKILL)


class Numbers(Dataset[tuple[Tensor, int]]):
    """Each image is its own number, in a pixel of three colours."""

    classes = ("one", "other")

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        if number >= self.length:
            raise IndexError(number)
        return torch.tensor([number // 100, number % 100, 0], dtype=torch.uint8).view(3, 1, 1), 0


class Tally(nn.Module):
    """One weight for each sample, from which a step takes something whenever it trains on that sample."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(length, dtype=torch.float64))

    def forward(self, images: Tensor) -> Tensor:
        hundreds, rest = images[:, :2, 0, 0].long().T
        had = self.weights[100 * hundreds + rest]
        return torch.stack([had, torch.zeros_like(had)], 1)


class Counting(Failing):
    def loss(self, net: nn.Module, pixels: Tensor, labels: Tensor, smoothing: float) -> Tensor:
        assert 0 < len(labels) <= self.preset.micro
        return net(pixels)[:, 0].sum()

    def answers(self, net: nn.Module, pixels: Tensor) -> Tensor:
        return net(pixels)

    def result(self) -> str:
        """Return how often the model had its samples, as a line; a step takes 1/batch off a weight, at a rate of 1."""
        times = -self.net.weights.detach() * self.preset.batch
        everywhere = torch.stack(list(map(torch.tensor, mr.all_gather_object(times.tolist()))))
        alike = bool((everywhere == everywhere[0]).all())
        return f"times {sorted({round(each, 6) for each in times.tolist()})}, world {self.world}, alike {alike}"


if __name__ == "__main__":
    if "TEST_COUNT" in os.environ:
        length = int(os.environ["TEST_COUNT"])
        train.parts = lambda *_: (Numbers(length), Numbers(7))
        train.build = lambda *_, **__: Tally(length)
        train.main(Counting)
    else:
        train.main(Failing)
