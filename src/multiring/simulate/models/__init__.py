"""Known models as data: their layers, and from these a recording for a device of known speed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial

from ..recording import Gradient, Recording
from .architectures import bert, resnet, vgg
from .layers import Layer

__all__ = ["MODELS", "Layer", "Model", "model"]

BACKWARD = 2.0
"""Backward costs twice what forward does: the gradient of the inputs, and that of the weights."""


@dataclass(frozen=True)
class Model:
    """A model by its layers, from input to output."""

    name: str
    about: str
    architecture: Callable[[], Iterator[Layer]]

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """The layers, from input to output."""
        return tuple(self.architecture())

    @property
    def parameters(self) -> int:
        """Number of parameters of all layers."""
        return sum(layer.parameters for layer in self.layers)

    @property
    def flops(self) -> float:
        """Floating-point operations of a training step for each sample."""
        return (1 + BACKWARD) * sum(layer.flops for layer in self.layers)

    def recording(self, samples: int, samples_a_second: float, itemsize: int = 4) -> Recording:
        """A step with a batch of ``samples`` at a speed; each layer takes its share of the operations.

        Gradients have ``itemsize`` bytes a parameter: 4, or 2 where they travel in half precision.
        """
        seconds = samples / samples_a_second
        gradients = []
        waiting = 0.0
        for layer in reversed(self.layers):
            waiting += seconds * BACKWARD * layer.flops / self.flops
            if layer.parameters:
                gradients.append(Gradient(layer.parameters * itemsize, waiting))
                waiting = 0.0
        return Recording(self.name, seconds / (1 + BACKWARD), tuple(gradients))


def model(name: str) -> Model:
    """One of ``MODELS``."""
    if name not in MODELS:
        raise ValueError(f"unknown model {name!r}; known are {', '.join(MODELS)}")
    return MODELS[name]


_ALL = (
    Model("resnet50", "ResNet-50, 1,000 classes", partial(resnet, (3, 4, 6, 3), 1000)),
    Model("resnet101", "ResNet-101, 1,000 classes", partial(resnet, (3, 4, 23, 3), 1000)),
    Model("resnet101-22k", "ResNet-101, 22,000 classes (ImageNet-22K)", partial(resnet, (3, 4, 23, 3), 22000)),
    Model("resnet152", "ResNet-152, 1,000 classes", partial(resnet, (3, 8, 36, 3), 1000)),
    Model("wide-resnet50", "wide ResNet-50-2, 1,000 classes", partial(resnet, (3, 4, 6, 3), 1000, width=128)),
    Model(
        "vgg16",
        "VGG-16, 1,000 classes",
        partial(vgg, ((64, 64), (128, 128), (256,) * 3, (512,) * 3, (512,) * 3), 1000),
    ),
    Model("bert-base", "BERT-base, sentences of 128 tokens", partial(bert, 12, 768, 128)),
)

MODELS = {each.name: each for each in _ALL}
"""The models, by their names."""
