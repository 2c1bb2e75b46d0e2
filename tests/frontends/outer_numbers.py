"""Parameters that the tests of `Outer` move by numbers which depend on the step, the group and the index."""

from __future__ import annotations

import numpy as np
import torch
from outer_rule import change, weights
from torch import Tensor, nn

import multiring as mr


class Numbers(nn.Module):
    """Parameters of several shapes, which the tests move by themselves."""

    def __init__(self, first: float = 0.0) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.from_numpy(weight) for weight in weights(first))


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
