"""Models, losses and metrics that the tests of the Estimators hand to the ranks, and what goes wrong in them."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

import multiring as mr


def linear(inputs: int = 4, outputs: int = 1) -> torch.nn.Module:
    """The same parameters in each process: they depend on their places."""
    model = torch.nn.Linear(inputs, outputs)
    with torch.no_grad():
        model.weight.copy_(torch.arange(model.weight.numel()).reshape(model.weight.shape) / 10)
        model.bias.fill_(0.25)
    return model


def masked() -> torch.nn.Module:
    """With a buffer whose first entry 0 times is no number, and whose second one no mean gives to the last bit."""
    model = linear()
    model.register_buffer("mask", torch.tensor([-torch.inf, 0.1], dtype=torch.float64))
    return model


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)


def normed() -> torch.nn.Module:
    return torch.nn.Sequential(linear(4, 2), torch.nn.BatchNorm1d(2, momentum=None), linear(2))


def digits() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), 3e-3)


def accuracy(outputs: torch.Tensor, labels: torch.Tensor) -> float:
    return float((outputs.argmax(1) == labels).float().mean())


class TwoInputs(torch.nn.Module):
    """Looks up a row of a table by its second input."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(3, 1)
        with torch.no_grad():
            self.table.weight.copy_(torch.tensor([[1.0], [20.0], [300.0]]))

    def forward(self, numbers: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        assert numbers.dtype == torch.float32
        return numbers.sum(1, keepdim=True) + self.table(index[:, 0])


class FatalLoss:
    """Kills the culprit, or its executor, in its ``step``th step, where the folder has not seen that before."""

    def __init__(self, folder: Path, culprit: int, step: int, *, executor: bool = False) -> None:
        self._marker, self._culprit, self._step, self._executor = folder / "killed", culprit, step, executor
        self._steps = 0

    def __call__(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self._steps += 1
        if self._steps == self._step and mr.rank() == self._culprit and not self._marker.exists():
            self._marker.touch()
            victim = os.getpid()
            if self._executor:
                victim = int(Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1])
            os.kill(victim, signal.SIGKILL)
            time.sleep(600)
        wide = outputs.shape[1] > 1
        return functional.cross_entropy(outputs, labels) if wide else functional.mse_loss(outputs, labels)


def absolute(outputs: torch.Tensor, labels: torch.Tensor) -> Any:
    return (outputs - labels).abs().mean()


def flat_and_column(outputs: torch.Tensor, labels: torch.Tensor) -> Any:
    return (outputs[:, 0] - labels).abs().mean()


def per_row(outputs: torch.Tensor, labels: torch.Tensor) -> Any:
    return (outputs - labels) ** 2
