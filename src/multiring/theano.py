"""Multiring in Theano, Aesara and PyTensor: averages over the ranks as one node of a graph.

The three have the same interface; a graph is built with the one that its variables come from. All gradients go into one
node: two nodes would be executed in an order that need not be the same on all ranks. A node runs when all its inputs
are there, so nothing overlaps but the buckets one another.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from multiring import api
from multiring.runtime.buffers import writable
from multiring.runtime.comm import Communicator, group_of
from multiring.training.buckets import BUCKET_BYTES, GradientSpec, averages, check_bucket_bytes, fill
from multiring.training.labels import label, part

__all__ = ["average", "broadcast_variables"]

LIBRARIES = ("theano", "aesara", "pytensor")

_communicators: dict[int, Communicator] = {}
"""Communicators by their numbers. Ops hold the numbers, since PyTensor's Numba pickles an Op, and a communicator cannot
be pickled."""


def average(
    variables: Sequence[Any],
    *,
    weight: Any = None,
    bucket_bytes: int = BUCKET_BYTES,
    group: Communicator | None = None,
) -> list[Any]:
    """The means over the ranks of gradients and metrics, symbolic floats of any shapes; they have no derivatives.

    Name all in one call: ``loss, *gradients = average([loss, *gradients])``. With ``weight``, a number or a scalar
    variable, the ranks count by their weights: the number of samples that each has in this step.
    """
    variables = list(variables)
    if not variables:
        return []
    bucket_bytes = check_bucket_bytes(bucket_bytes)
    library = _library(variables[0])
    as_variable = importlib.import_module(f"{library}.tensor").as_tensor_variable
    inputs = [as_variable(variable) for variable in variables]
    for variable in inputs:
        if variable.dtype not in ("float16", "float32", "float64"):
            raise TypeError(f"{variable} has dtype {variable.dtype}: averages are of float16, float32 and float64")
    if weight is not None:
        inputs.append(as_variable(weight).astype("float64"))
    communicator = api.joined(group)
    number = group_of(communicator).publish()
    _communicators[number] = communicator
    op = _average_op(library)(number, bucket_bytes, weight is not None)
    return list(op.make_node(*inputs).outputs)


def broadcast_variables(variables: Iterable[Any], root: int = 0, *, group: Communicator | None = None) -> None:
    """Set shared variables of parameters and of an optimizer's state to their values on rank ``root``."""
    ranks = group_of(api.joined(group))
    for i, variable in enumerate(variables):
        value = np.array(variable.get_value(), order="C")
        named = label("variables", [part(variable.name or str(i), value.shape)])
        ranks.run("broadcast", writable(value), root=root, label=named)
        variable.set_value(value)


def _library(variable: Any) -> str:
    name = type(variable).__module__.partition(".")[0]
    if name not in LIBRARIES:
        kind = type(variable)
        raise TypeError(f"{kind.__module__}.{kind.__qualname__} is no variable of {', '.join(LIBRARIES)}")
    return name


@functools.cache
def _average_op(library: str) -> Any:
    """The Op, as a subclass of that of ``library``."""
    package = importlib.import_module(library)
    apply: Any = package.Apply if library == "theano" else importlib.import_module(f"{library}.graph.basic").Apply
    base: Any = package.Op if library == "theano" else importlib.import_module(f"{library}.graph.op").Op

    class Average(base):  # type: ignore[misc]
        """All inputs averaged over the ranks; the last one is the weight if ``weighted``."""

        __props__ = ("communicator", "bucket_bytes", "weighted")

        def __init__(self, communicator: int, bucket_bytes: int, weighted: bool) -> None:
            self.communicator = communicator
            self.bucket_bytes = bucket_bytes
            self.weighted = weighted

        def make_node(self, *inputs: Any) -> Any:
            averaged = inputs[:-1] if self.weighted else inputs
            return apply(self, list(inputs), [variable.type() for variable in averaged])

        def perform(self, node: Any, inputs: Any, outputs: Any, *_: Any) -> None:
            arrays = [np.asarray(value) for value in inputs]
            weight = float(arrays.pop()) if self.weighted else None
            for output, mean in zip(outputs, _means(self, arrays, weight), strict=True):
                output[0] = mean

        def infer_shape(self, *arguments: Any) -> Any:
            shapes = arguments[-1]
            return list(shapes[:-1] if self.weighted else shapes)

        def do_constant_folding(self, *arguments: Any) -> bool:
            return False  # it would be called while the graph is compiled

    return Average


def _means(op: Any, arrays: Sequence[Any], weight: float | None) -> list[Any]:
    slots = averages(
        _communicators[op.communicator],
        [GradientSpec(array.size, array.dtype.name, part(str(i), array.shape)) for i, array in enumerate(arrays)],
        lambda slot, i, factor: fill(slot, arrays[i], factor),
        weight=weight,
        bucket_bytes=op.bucket_bytes,
    )
    return [slot.reshape(array.shape) for slot, array in zip(slots, arrays, strict=True)]
