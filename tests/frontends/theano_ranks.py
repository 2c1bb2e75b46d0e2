"""The ranks of the Theano, Aesara and PyTensor tests; the command line names a library and its tests."""

from __future__ import annotations

import importlib
import sys
import time

import losing
import numpy as np
import pytest
from sklearn.datasets import load_digits
from workers import run, worker

import multiring as mr
from multiring.theano import average, broadcast_variables

library = importlib.import_module(sys.argv[1])
tensor = importlib.import_module(f"{sys.argv[1]}.tensor")

mr.init()
RANK, SIZE = mr.rank(), mr.world_size()
WEIGHTS = np.arange(1.0, SIZE + 1)


def own(rank: int, shape: tuple[int, ...], dtype: str = "float64") -> np.ndarray:
    """Contributions that depend on rank and index."""
    return ((np.arange(np.prod(shape, dtype=int)) * 3 + rank * 5) % 7).reshape(shape).astype(dtype)


@worker
def averages() -> None:
    shapes = ((7, 100), (5,), ())
    weight = tensor.dscalar("weight")
    inputs, outputs, expected = [], [], []
    for dtype in ("float64", "float32"):
        x = [tensor.TensorType(dtype, (False,) * len(shape))(f"x{len(shape)}") for shape in shapes]
        inputs += x
        for bucket_bytes in (1, 1 << 20):
            outputs += average(x, bucket_bytes=bucket_bytes) + average(x, weight=weight, bucket_bytes=bucket_bytes)
            for weights in (None, WEIGHTS):
                everyone = [np.stack([own(rank, shape) for rank in range(SIZE)]) for shape in shapes]
                expected += [np.average(one, 0, weights).astype(dtype) for one in everyone]
    outputs += average([tensor.as_tensor_variable(own(RANK, (4,)))])  # not folded when the function is compiled
    expected.append(np.mean([own(rank, (4,)) for rank in range(SIZE)], 0))
    call = library.function([*inputs, weight], outputs)
    mine = [np.asarray(own(RANK, shape, dtype)) for dtype in ("float64", "float32") for shape in shapes]
    for _ in range(2):
        for found, mean in zip(call(*mine, WEIGHTS[RANK]), expected, strict=True):
            assert found.dtype == mean.dtype
            np.testing.assert_allclose(found, mean, rtol=1e-12 if found.dtype == np.float64 else 1e-6)
    for i, array in enumerate(mine):
        assert (array == own(RANK, shapes[i % 3], array.dtype)).all()
    assert average([]) == []


@worker
def mistakes() -> None:
    with pytest.raises(TypeError, match=r"numpy\.ndarray is no variable of theano, aesara, pytensor"):
        average([np.zeros(3)])
    with pytest.raises(TypeError, match="has dtype int64: averages are of float16, float32 and float64"):
        average([tensor.lvector("n")])


@worker
def variables() -> None:
    columns_first = np.asfortranarray(own(RANK, (3, 2))) if RANK else own(RANK, (3, 2))
    shared = [library.shared(own(RANK, (2, 3))), library.shared(np.asarray(RANK)), library.shared(columns_first)]
    broadcast_variables(shared, root=SIZE - 1)
    assert (shared[0].get_value() == own(SIZE - 1, (2, 3))).all()
    assert shared[1].get_value() == SIZE - 1
    assert (shared[2].get_value() == own(SIZE - 1, (3, 2))).all()


def network(seed: int) -> list:
    random = np.random.default_rng(seed)
    return [library.shared(random.normal(0, 0.1, shape)) for shape in ((64, 32), (32,), (32, 10))]


def training_step(parameters: list, weight: float) -> object:
    x, y = tensor.dmatrix("x"), tensor.lvector("y")
    logits = tensor.dot(tensor.tanh(tensor.dot(x, parameters[0]) + parameters[1]), parameters[2])
    correct = logits[tensor.arange(y.shape[0]), y]
    loss = (tensor.log(tensor.exp(logits).sum(axis=1)) - correct).mean()
    gradients = library.gradient.grad(loss, parameters)
    loss, *gradients = average([loss, *gradients], weight=weight, bucket_bytes=4096)
    updates = [
        (parameter, parameter - 0.5 * gradient) for parameter, gradient in zip(parameters, gradients, strict=True)
    ]
    return library.function([x, y], loss, updates=updates)


def trained(parameters: list[np.ndarray], x: np.ndarray, y: np.ndarray, steps: int) -> tuple[float, list[np.ndarray]]:
    """The same in NumPy, whose derivatives are written out: the last loss, and the parameters after all steps."""
    rows = np.arange(len(y))
    for _ in range(steps):
        first, bias, second = parameters
        hidden = np.tanh(x @ first + bias)
        logits = hidden @ second
        exponentials = np.exp(logits)
        loss = (np.log(exponentials.sum(axis=1)) - logits[rows, y]).mean()
        errors = exponentials / exponentials.sum(axis=1, keepdims=True)
        errors[rows, y] -= 1
        errors /= len(y)
        below = errors @ second.T * (1 - hidden**2)
        gradients = [x.T @ below, below.sum(axis=0), hidden.T @ errors]
        parameters = [parameter - 0.5 * gradient for parameter, gradient in zip(parameters, gradients, strict=True)]
    return loss, parameters


@worker
def training() -> None:
    """Ranks with uneven parts of 1,797 images end where one process with all of them ends."""
    images, labels = load_digits(return_X_y=True)
    images, labels = images / 16, labels.astype("int64")
    mine, parts, whole = mr.shard(len(images)), network(RANK), [one.get_value() for one in network(0)]
    broadcast_variables(parts)
    step = training_step(parts, len(mine))
    for _ in range(30):
        found = step(images[mine], labels[mine])
    expected, ends = trained(whole, images, labels, 30)
    np.testing.assert_allclose(found, expected, rtol=1e-9)
    for part, one in zip(parts, ends, strict=True):
        np.testing.assert_allclose(part.get_value(), one, rtol=0, atol=1e-9)


@worker
def loss_of_a_rank() -> None:
    """The highest rank is killed in a step; prints what the others are told."""
    x = tensor.dvector("x")
    step = library.function([x], average([x])[0])
    step(own(RANK, (1000,)))
    started = time.monotonic()
    with pytest.raises(mr.PeerLost, match=f"rank {SIZE - 1} "):  # Theano raises a copy of it, with more text
        losing.the_last_between(lambda: step(own(RANK, (1000,))))
    assert time.monotonic() - started < 10
    with pytest.raises(mr.PeerLost) as named:
        mr.barrier()
    print("lost rank", named.value.rank)


run(sys.argv[2:])
