"""A stand-in for pycaffe where Caffe is not installed, written from the behaviour of BVLC Caffe 1.0.

It has what `multiring.caffe`, its tests and its example touch, with Caffe's semantics: blobs in float32 whose views are
of their own memory, which a reshape moves; gradients that accumulate until they are cleared; callbacks between the
backward pass and the update. Layers: Input, InnerProduct, TanH, SoftmaxWithLoss. Solver: SGD at a fixed rate.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np


def set_mode_cpu() -> None:
    pass


class Blob:
    def __init__(self, shape: tuple[int, ...]) -> None:
        self.reshape(*shape)

    def reshape(self, *shape: int) -> None:
        self._data, self._diff = np.zeros(shape, np.float32), np.zeros(shape, np.float32)

    @property
    def data(self) -> np.ndarray:
        return self._data[...]

    @property
    def diff(self) -> np.ndarray:
        return self._diff[...]


class Layer:
    """One layer; ``bottoms`` and ``tops`` are blobs of the net."""

    def __init__(self, text: dict[str, list], bottoms: list[Blob], tops: list[Blob]) -> None:
        self.bottoms, self.tops = bottoms, tops
        self.blobs: list[Blob] = []
        self.setup(text)

    def setup(self, text: dict[str, list]) -> None:
        pass

    def forward(self) -> None:
        pass

    def backward(self) -> None:
        pass


class Input(Layer):
    def setup(self, text: dict[str, list]) -> None:
        for top, shape in zip(self.tops, text["input_param"][0]["shape"], strict=True):
            top.reshape(*map(int, shape["dim"]))


class InnerProduct(Layer):
    def setup(self, text: dict[str, list]) -> None:
        outputs, inputs = int(text["inner_product_param"][0]["num_output"][0]), self.bottoms[0].data.shape[1]
        self.blobs = [Blob((outputs, inputs)), Blob((outputs,))]
        limit = np.sqrt(3 / inputs)  # xavier
        self.blobs[0].data[...] = np.random.uniform(-limit, limit, (outputs, inputs))

    def forward(self) -> None:
        weight, bias = self.blobs
        result = self.bottoms[0].data @ weight.data.T + bias.data
        self.tops[0].reshape(*result.shape)
        self.tops[0].data[...] = result

    def backward(self) -> None:
        weight, bias = self.blobs
        weight.diff[...] += self.tops[0].diff.T @ self.bottoms[0].data
        bias.diff[...] += self.tops[0].diff.sum(0)
        self.bottoms[0].diff[...] = self.tops[0].diff @ weight.data


class TanH(Layer):
    def forward(self) -> None:
        result = np.tanh(self.bottoms[0].data)
        self.tops[0].reshape(*result.shape)
        self.tops[0].data[...] = result

    def backward(self) -> None:
        self.bottoms[0].diff[...] = self.tops[0].diff * (1 - self.tops[0].data ** 2)


class SoftmaxWithLoss(Layer):
    def forward(self) -> None:
        scores, labels = self.bottoms[0].data, self.bottoms[1].data.astype(int)
        exponentials = np.exp(scores - scores.max(1, keepdims=True))
        self.probabilities = exponentials / exponentials.sum(1, keepdims=True)
        self.tops[0].reshape()
        self.tops[0].data[...] = -np.log(self.probabilities[np.arange(len(labels)), labels]).mean()

    def backward(self) -> None:
        labels = self.bottoms[1].data.astype(int)
        gradient = self.probabilities.copy()
        gradient[np.arange(len(labels)), labels] -= 1
        self.bottoms[0].diff[...] = gradient / len(labels)


KINDS = {kind.__name__: kind for kind in (Input, InnerProduct, TanH, SoftmaxWithLoss)}


class Net:
    def __init__(self, text: dict[str, list]) -> None:
        self.blobs: OrderedDict[str, Blob] = OrderedDict()
        self.layers: list[Layer] = []
        self.params: OrderedDict[str, list[Blob]] = OrderedDict()
        used: set[str] = set()
        for layer in text["layer"]:
            for name in layer["top"]:
                self.blobs.setdefault(name, Blob(()))
            used.update(layer.get("bottom", []))
            bottoms = [self.blobs[name] for name in layer.get("bottom", [])]
            made = KINDS[layer["type"][0]](layer, bottoms, [self.blobs[name] for name in layer["top"]])
            made.forward()  # gives the blobs their shapes
            self.layers.append(made)
            if made.blobs:
                self.params[layer["name"][0]] = made.blobs
        self.outputs = [name for name in self.blobs if name not in used]

    def forward(self) -> dict[str, np.ndarray]:
        for layer in self.layers:
            layer.forward()
        return {name: self.blobs[name].data for name in self.outputs}

    def backward(self) -> None:
        for layer in reversed(self.layers):
            layer.backward()

    def clear_param_diffs(self) -> None:
        for blob in self._parameters():
            blob.diff[...] = 0

    def _parameters(self) -> list[Blob]:
        return [blob for blobs in self.params.values() for blob in blobs]


class SGDSolver:
    def __init__(self, path: str) -> None:
        text = _parse(Path(path).read_text())
        self.net = Net(_parse(Path(text["net"][0]).read_text()))
        self.iter = 0
        self._rate = np.float32(text["base_lr"][0])
        self._momentum = np.float32(text["momentum"][0])
        self._history = [np.zeros_like(blob.data) for blob in self.net._parameters()]
        self._callbacks: list[tuple[Any, Any]] = []

    def add_callback(self, on_start: Any, on_gradients_ready: Any) -> None:
        self._callbacks.append((on_start, on_gradients_ready))

    def step(self, count: int) -> None:
        for _ in range(count):
            self.net.clear_param_diffs()
            for on_start, _ in self._callbacks:
                on_start()
            self.net.forward()
            self.net.backward()
            for _, on_gradients_ready in self._callbacks:
                on_gradients_ready()
            self.apply_update()
            self.iter += 1

    def apply_update(self) -> None:
        for blob, history in zip(self.net._parameters(), self._history, strict=True):
            history[...] = self._momentum * history + self._rate * blob.diff
            blob.diff[...] = history
            blob.data[...] -= blob.diff


def _parse(text: str) -> dict[str, list]:
    """The text format of protocol buffers: each name with the list of its values."""
    return _message(re.findall(r'"[^"]*"|[{}]|[^\s{}:]+', re.sub(r"#.*", "", text)))


def _message(words: list[str]) -> dict[str, list]:
    found: dict[str, list] = {}
    while words and (name := words.pop(0)) != "}":
        value: Any = words.pop(0)
        found.setdefault(name, []).append(_message(words) if value == "{" else value.strip('"'))
    return found
