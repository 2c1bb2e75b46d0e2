"""Multiring in Chainer 7: what ChainerMN's users know by these names.

The optimizer averages the gradients of all ranks between the backward pass and its step. Chainer shows no gradient
before its backward pass has ended, so nothing overlaps.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from chainer import GradientMethod
from chainer.serializers import DictionarySerializer, NpzDeserializer

from multiring import api
from multiring.runtime.comm import Communicator
from multiring.training.buckets import BUCKET_BYTES, Buckets, GradientSpec, check_bucket_bytes, fill
from multiring.training.labels import part
from multiring.training.weights import average

__all__ = ["broadcast", "create_multi_node_evaluator", "create_multi_node_optimizer"]


def create_multi_node_optimizer(
    actual_optimizer: Any,
    communicator: Communicator | None = None,
    *,
    weight: float | None = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> Any:
    """Make ``actual_optimizer`` average the gradients over the ranks before each step, and return it.

    It keeps all its state. In the first ``update``, and whenever the model has got parameters, model and optimizer
    become those of rank 0. Called without a loss function, that ``update`` takes no step, as ChainerMN's: the gradients
    belong to other parameters. The attribute ``weight``, the number of samples of this rank's batch, is given on all
    ranks or on none and may be set before each step.
    """
    base = type(actual_optimizer)
    if not isinstance(actual_optimizer, GradientMethod):
        raise TypeError(f"{base.__module__}.{base.__qualname__} is no gradient method of Chainer")
    if hasattr(base, "averages_over_ranks"):
        raise ValueError(f"this {base.__name__} averages over the ranks already")
    ranks = _Ranks(_communicator(communicator), bucket_bytes)

    def update(self: Any, lossfun: Any = None, *args: Any, **kwds: Any) -> None:
        changed = ranks.settle(self)
        if lossfun is not None:
            _backward(self, lossfun, *args, **kwds)
            if ranks.settle(self):  # the pass gave the parameters their shapes
                _backward(self, lossfun, *args, **kwds)
        elif changed:
            return
        ranks.average(self)
        base.update(self)

    names = {"update": update, "averages_over_ranks": True, "__module__": base.__module__, "__doc__": base.__doc__}
    actual_optimizer.__class__ = type(base.__name__, (base,), names)
    actual_optimizer.weight = weight
    return actual_optimizer


def create_multi_node_evaluator(
    actual_evaluator: Any, communicator: Communicator | None = None, *, weight: float = 1.0
) -> Any:
    """Make the results of an evaluator their means over the ranks, and return it.

    ``weight`` is the number of samples that this rank evaluates, where it is not the same on all ranks.
    """
    evaluate = actual_evaluator.evaluate
    ranks = _communicator(communicator)

    def evaluate_everywhere() -> Any:
        return average(ranks, {name: float(value) for name, value in evaluate().items()}, weight)

    actual_evaluator.evaluate = evaluate_everywhere
    return actual_evaluator


def broadcast(target: Any, root: int = 0, *, communicator: Communicator | None = None) -> None:
    """Load into a link, or an optimizer that is set up, what rank ``root`` would save of it: all of its state."""
    ranks = _communicator(communicator)
    saved = DictionarySerializer()
    saved.save(target)
    values = ranks.broadcast_object(saved.target, root)
    if ranks.rank == root:
        return
    if isinstance(target, GradientMethod):
        for parameter in target.target.params():
            parameter.update_rule._state = None  # or what the root has none of would stay
    NpzDeserializer(values, strict=False).load(target)


class _Ranks:
    """State of an optimizer's parameters on all ranks."""

    def __init__(self, communicator: Communicator, bucket_bytes: int) -> None:
        self._communicator = communicator
        self._bucket_bytes = check_bucket_bytes(bucket_bytes)
        self._layout: list[tuple[str, GradientSpec]] = []
        self._buckets: Buckets

    def settle(self, optimizer: Any) -> bool:
        """Take over new parameters from rank 0; return True if there are any."""
        layout = [(name, GradientSpec(p.size, p.dtype.name, part(name, p.shape))) for name, p in _parameters(optimizer)]
        if layout == self._layout:
            return False
        self._layout = layout
        broadcast(optimizer.target, communicator=self._communicator)
        broadcast(optimizer, communicator=self._communicator)
        order = reversed(range(len(layout)))
        gradients = [gradient for _, gradient in layout]
        self._buckets = Buckets(self._communicator, gradients, order, bucket_bytes=self._bucket_bytes)
        return True

    def average(self, optimizer: Any) -> None:
        """Replace the gradients by their means; where only other ranks have one, this rank counts as zeros."""
        parameters = [parameter for _, parameter in _parameters(optimizer)]
        factor = self._buckets.begin(optimizer.weight)
        for i in reversed(range(len(parameters))):
            if parameters[i].grad is not None:
                fill(self._buckets.slot(i), _on_host(parameters[i]), factor)
                self._buckets.ready(i)
        for i in self._buckets.finish():
            parameters[i].grad = self._buckets.slot(i).reshape(parameters[i].shape)


def _backward(optimizer: Any, lossfun: Any, *args: Any, **kwds: Any) -> None:
    loss = lossfun(*args, **kwds)
    optimizer.target.cleargrads()
    loss.backward(loss_scale=optimizer._loss_scale)


def _parameters(optimizer: Any) -> list[tuple[str, Any]]:
    return sorted(optimizer.target.namedparams(include_uninit=False))


def _on_host(parameter: Any) -> Any:
    if not isinstance(parameter.grad, np.ndarray):
        kind = type(parameter.grad)
        raise TypeError(
            f"the gradient of {parameter.name} is a {kind.__module__}.{kind.__qualname__}: move the model by to_cpu()"
        )
    return parameter.grad


def _communicator(communicator: Communicator | None) -> Communicator:
    if communicator is None:
        return api.init()
    if not isinstance(communicator, Communicator):
        kind = type(communicator)
        raise TypeError(
            f"communicator is a {kind.__module__}.{kind.__qualname__}: give what multiring.init() returns, or none"
        )
    return communicator
