"""Layers by their shapes: how many parameters they have, and how much a sample costs them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Layer:
    """Parameters, and floating-point operations of forward for one sample: a product and its addition are two."""

    name: str
    parameters: int
    flops: float


def convolution(name: str, inputs: int, outputs: int, kernel: int, size: int, bias: bool = False) -> Layer:
    """Square kernels over ``inputs`` channels, giving ``outputs`` channels of ``size`` x ``size``."""
    weights = kernel * kernel * inputs * outputs
    return Layer(name, weights + outputs * bias, 2.0 * weights * size * size)


def normalisation(name: str, channels: int) -> Layer:
    """Scale and shift a channel; its time is small and counted with the layer that it follows."""
    return Layer(name, 2 * channels, 0.0)


def linear(name: str, inputs: int, outputs: int, samples: int = 1) -> Layer:
    """A matrix and a bias, applied to ``samples`` vectors of a sample (the tokens of a sentence)."""
    return Layer(name, inputs * outputs + outputs, 2.0 * inputs * outputs * samples)


def embedding(name: str, entries: int, width: int) -> Layer:
    """A table to look up."""
    return Layer(name, entries * width, 0.0)
