"""A stand-in for pycaffe where Caffe is not installed, written from the behaviour of BVLC Caffe 1.0.

It has what `multiring.caffe`, its tests and its example touch, with Caffe's semantics, also where they surprise:

- what Python gets of nets, layers and blobs are wrappers, new ones each time it asks; their vectors are no lists;
- a blob's views are of its own memory, which a reshape keeps where the new size fits, and else gives back;
- ``net.params`` is a dictionary by the layers' names, and has the last of those that share one;
- ``net.outputs`` are in alphabetical order;
- callbacks come between the backward pass and the update, and are never deleted;
- all ranks write a snapshot to the same file; an empty batch ends the process by SIGFPE.

Layers: Input, InnerProduct, BatchNorm, TanH, SoftmaxWithLoss. Solver: SGD at a fixed rate.
"""

from __future__ import annotations

import os
import re
import signal
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

_CALLBACKS: list[Any] = []
"""Callbacks of all solvers that ever were."""


def set_mode_cpu() -> None:
    pass


class _Blob:
    """A blob as Caffe holds it."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.memory = [np.zeros(0, np.float32), np.zeros(0, np.float32)]
        self.reshape(*shape)

    def reshape(self, *shape: int) -> None:
        self.shape = shape
        size = int(np.prod(shape, dtype=int))
        if size > self.memory[0].size:
            for given_back in self.memory:
                given_back[:] = np.nan  # others write there: whoever reads on in an old view is to notice
            self.memory = [np.zeros(size, np.float32), np.zeros(size, np.float32)]

    def view(self, which: int) -> np.ndarray:
        return self.memory[which][: int(np.prod(self.shape, dtype=int))].reshape(self.shape)

    @property
    def data(self) -> np.ndarray:
        return self.view(0)

    @property
    def diff(self) -> np.ndarray:
        return self.view(1)


class Blob:
    """A blob as Python sees it."""

    def __init__(self, own: _Blob) -> None:
        self._own = own

    @property
    def shape(self) -> _Vector:
        return _Vector(self._own.shape)

    @property
    def data(self) -> np.ndarray:
        return self._own.data

    @property
    def diff(self) -> np.ndarray:
        return self._own.diff

    def reshape(self, *shape: int) -> None:
        self._own.reshape(*shape)


class _Vector:
    """A vector of C++ as Boost.Python shows it: no list, and its items are new wrappers each time."""

    def __init__(self, items: Sequence[Any], wrapper: Any = lambda item: item) -> None:
        self._items, self._wrapper = items, wrapper

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Any:
        return self._wrapper(self._items[index])

    def __iter__(self) -> Any:
        return map(self._wrapper, self._items)


class _Layer:
    """One layer; ``bottoms`` and ``tops`` are blobs of the net."""

    def __init__(self, text: dict[str, list], bottoms: list[_Blob], tops: list[_Blob]) -> None:
        self.bottoms, self.tops = bottoms, tops
        self.blobs: list[_Blob] = []
        self.setup(text)

    def setup(self, text: dict[str, list]) -> None:
        pass

    def forward(self) -> None:
        pass

    def backward(self) -> None:
        pass


class Layer:
    """A layer as Python sees it."""

    def __init__(self, own: _Layer) -> None:
        self.type = type(own).__name__
        self.blobs = _Vector(own.blobs, Blob)


class Input(_Layer):
    def setup(self, text: dict[str, list]) -> None:
        for top, shape in zip(self.tops, text["input_param"][0]["shape"], strict=True):
            top.reshape(*map(int, shape["dim"]))


class InnerProduct(_Layer):
    def setup(self, text: dict[str, list]) -> None:
        outputs, inputs = int(text["inner_product_param"][0]["num_output"][0]), self.bottoms[0].data.shape[1]
        self.blobs = [_Blob((outputs, inputs)), _Blob((outputs,))]
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


class TanH(_Layer):
    def forward(self) -> None:
        result = np.tanh(self.bottoms[0].data)
        self.tops[0].reshape(*result.shape)
        self.tops[0].data[...] = result

    def backward(self) -> None:
        self.bottoms[0].diff[...] = self.tops[0].diff * (1 - self.tops[0].data ** 2)


class BatchNorm(_Layer):
    """Normalises each column; its parameters are sums of means and variances, and how many were added, all fading."""

    FADING, EPSILON = np.float32(0.999), np.float32(1e-5)

    def setup(self, text: dict[str, list]) -> None:
        columns = self.bottoms[0].data.shape[1]
        self.blobs = [_Blob((columns,)), _Blob((columns,)), _Blob((1,))]

    def forward(self) -> None:
        values = self.bottoms[0].data
        mean, variance, count = values.mean(0), values.var(0), len(values)
        self.deviation = np.sqrt(variance + self.EPSILON)
        added = (mean, variance * count / max(1, count - 1), np.float32(1))
        for blob, each in zip(self.blobs, added, strict=True):
            blob.data[...] = self.FADING * blob.data + each
        self.tops[0].reshape(*values.shape)
        self.tops[0].data[...] = (values - mean) / self.deviation

    def backward(self) -> None:
        normal, diff = self.tops[0].data, self.tops[0].diff
        centred = diff - diff.mean(0) - normal * (diff * normal).mean(0)
        self.bottoms[0].diff[...] = centred / self.deviation


class SoftmaxWithLoss(_Layer):
    def forward(self) -> None:
        scores, labels = self.bottoms[0].data, self.bottoms[1].data.astype(int)
        if not len(labels):
            os.kill(os.getpid(), signal.SIGFPE)
        exponentials = np.exp(scores - scores.max(1, keepdims=True))
        self.probabilities = exponentials / exponentials.sum(1, keepdims=True)
        self.tops[0].reshape()
        self.tops[0].data[...] = -np.log(self.probabilities[np.arange(len(labels)), labels]).mean()

    def backward(self) -> None:
        labels = self.bottoms[1].data.astype(int)
        gradient = self.probabilities.copy()
        gradient[np.arange(len(labels)), labels] -= 1
        self.bottoms[0].diff[...] = gradient / len(labels)


KINDS = {kind.__name__: kind for kind in (Input, InnerProduct, BatchNorm, TanH, SoftmaxWithLoss)}


class _Net:
    """A net as Caffe holds it."""

    def __init__(self, text: dict[str, list]) -> None:
        self.blobs: OrderedDict[str, _Blob] = OrderedDict()
        self.layers: list[_Layer] = []
        self.names: list[str] = []
        used: set[str] = set()
        for layer in text["layer"]:
            for name in layer["top"]:
                self.blobs.setdefault(name, _Blob(()))
            used.update(layer.get("bottom", []))
            bottoms = [self.blobs[name] for name in layer.get("bottom", [])]
            made = KINDS[layer["type"][0]](layer, bottoms, [self.blobs[name] for name in layer["top"]])
            made.forward()  # gives the blobs their shapes
            self.layers.append(made)
            self.names.append(layer["name"][0])
        self.outputs = sorted(name for name in self.blobs if name not in used)

    def forward(self) -> None:
        for layer in self.layers:
            layer.forward()

    def backward(self) -> None:
        for layer in reversed(self.layers):
            layer.backward()

    def clear_param_diffs(self) -> None:
        for blob in self.parameters():
            blob.diff[...] = 0

    def parameters(self) -> list[_Blob]:
        return [blob for layer in self.layers for blob in layer.blobs]


class Net:
    """A net as Python sees it."""

    def __init__(self, own: _Net) -> None:
        self._own = own

    @property
    def blobs(self) -> OrderedDict[str, Blob]:
        return OrderedDict((name, Blob(blob)) for name, blob in self._own.blobs.items())

    @property
    def layers(self) -> _Vector:
        return _Vector(self._own.layers, Layer)

    @property
    def _layer_names(self) -> _Vector:
        return _Vector(self._own.names)

    @property
    def params(self) -> OrderedDict[str, _Vector]:
        named = zip(self._own.names, self._own.layers, strict=True)
        return OrderedDict((name, _Vector(layer.blobs, Blob)) for name, layer in named if layer.blobs)

    @property
    def outputs(self) -> list[str]:
        return list(self._own.outputs)

    def forward(self) -> dict[str, np.ndarray]:
        self._own.forward()
        return {name: self._own.blobs[name].data for name in self._own.outputs}

    def backward(self) -> None:
        self._own.backward()

    def clear_param_diffs(self) -> None:
        self._own.clear_param_diffs()


class SGDSolver:
    def __init__(self, path: str) -> None:
        text = _parse(Path(path).read_text())
        self._net = _Net(_parse(Path(text["net"][0]).read_text()))
        self.iter = 0
        self._rate = np.float32(text["base_lr"][0])
        self._momentum = np.float32(text["momentum"][0])
        self._passes = int(text.get("iter_size", ["1"])[0])
        self._prefix = text.get("snapshot_prefix", [""])[0]
        self._history = [np.zeros_like(blob.data) for blob in self._net.parameters()]
        self._callbacks: list[tuple[Any, Any]] = []

    @property
    def net(self) -> Net:
        return Net(self._net)

    def add_callback(self, on_start: Any, on_gradients_ready: Any) -> None:
        self._callbacks.append((on_start, on_gradients_ready))
        _CALLBACKS.append((on_start, on_gradients_ready))

    def step(self, count: int) -> None:
        for _ in range(count):
            self._net.clear_param_diffs()
            for on_start, _ in self._callbacks:
                on_start()
            for _ in range(self._passes):
                self._net.forward()
                self._net.backward()
            for _, on_gradients_ready in self._callbacks:
                on_gradients_ready()
            self.apply_update()
            self.iter += 1

    def apply_update(self) -> None:
        for blob, history in zip(self._net.parameters(), self._history, strict=True):
            history[...] = self._momentum * history + self._rate * blob.diff / np.float32(self._passes)
            blob.diff[...] = history
            blob.data[...] -= blob.diff

    def snapshot(self) -> None:
        arrays = [*(blob.data for blob in self._net.parameters()), *self._history]
        with Path(f"{self._prefix}_iter_{self.iter}.solverstate").open("wb") as file:
            np.savez(file, np.array(self.iter), *arrays)

    def restore(self, path: str) -> None:
        with np.load(path) as found:
            steps, *arrays = found.values()
        self.iter = int(steps)
        for mine, value in zip([*(b.data for b in self._net.parameters()), *self._history], arrays, strict=True):
            mine[...] = value


def _parse(text: str) -> dict[str, list]:
    """The text format of protocol buffers: each name with the list of its values."""
    return _message(re.findall(r'"[^"]*"|[{}]|[^\s{}:]+', re.sub(r"#.*", "", text)))


def _message(words: list[str]) -> dict[str, list]:
    found: dict[str, list] = {}
    while words and (name := words.pop(0)) != "}":
        value: Any = words.pop(0)
        found.setdefault(name, []).append(_message(words) if value == "{" else value.strip('"'))
    return found
