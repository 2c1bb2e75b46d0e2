"""Parameters that the tests of `Outer` move by numbers which depend on the step, the group and the index."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import multiring as mr

SHAPES = [(3,), (2, 4), (), (5, 1), (4,)]


class Numbers(nn.Module):
    """Parameters of several shapes, which the tests move by themselves."""

    def __init__(self, first: float = 0.0) -> None:
        super().__init__()
        sizes = [int(np.prod(shape)) for shape in SHAPES]
        self.weights = nn.ParameterList(
            (torch.arange(size, dtype=torch.float64) / 4 + number + first).reshape(shape)
            for number, (size, shape) in enumerate(zip(sizes, SHAPES, strict=True))
        )


def change(step: int, place: int, weight: int, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Return what a step adds in a group: it depends on the step, the group, the parameter and the index."""
    index = np.arange(int(np.prod(shape)), dtype=np.float64)
    return ((index * 3 + step * 5 + place * 7 + weight) % 11 / 8 - place / 2).reshape(shape)


def move(net: nn.Module, step: int, place: int) -> None:
    with torch.no_grad():
        for number, weight in enumerate(net.parameters()):
            weight.add_(torch.from_numpy(np.asarray(change(step, place, number, tuple(weight.shape)))))


def elements(net: nn.Module) -> Tensor:
    return torch.cat([weight.detach().reshape(-1) for weight in net.parameters()])


def everyones(x: Tensor) -> list[Tensor]:
    return [torch.as_tensor(other) for other in mr.init().all_gather(x.contiguous())]


def nesterov(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """DiLoCo's outer optimizer, which has a state."""
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)
