"""Layer-wise adaptive rate scaling for any optimizer of torch."""

from __future__ import annotations

from typing import Any

import torch

from multiring import recipes


def use_lars(optimizer: Any, trust: float = 0.001) -> Any:
    """Let every weight of the optimizer take steps in proportion to its own norm, and return the optimizer.

    Before each step, or when its closure has been called, a gradient is scaled such that gradient and weight decay
    together, of the group's ``weight_decay``, are multiplied by `multiring.recipes.lars`. Biases and norms are left as
    they are. For optimizers that add the decay to the gradient, as SGD does. Source: You et al. 2017, arXiv 1708.03888.
    """
    if not trust > 0:
        raise ValueError(f"trust={trust}: it is above 0, such as 0.001")

    def before(stepping: Any, arguments: Any, options: Any) -> Any:
        closure = options.get("closure", arguments[1] if len(arguments) > 1 else None)
        if closure is None:
            _scale(stepping, trust)
            return None

        def scaled() -> Any:
            loss = closure()
            _scale(stepping, trust)
            return loss

        return (arguments[0], scaled), {}

    optimizer.register_step_pre_hook(before)
    return optimizer


@torch.no_grad()
def _scale(optimizer: torch.optim.Optimizer, trust: float) -> None:
    for group in optimizer.param_groups:
        decay = group.get("weight_decay", 0.0)
        for weight in group["params"]:
            if weight.grad is None or not recipes.decays(weight.shape):
                continue
            if weight.grad.is_sparse:
                raise ValueError(
                    f"LARS needs dense gradients, and that of a weight of shape {tuple(weight.shape)} is sparse: give "
                    "such weights an optimizer of their own"
                )
            factor = recipes.lars(weight.norm().item(), weight.grad.norm().item(), decay, trust)
            # The optimizer will add decay * weight: that is scaled in advance.
            weight.grad.mul_(factor).add_(weight, alpha=(factor - 1) * decay)
