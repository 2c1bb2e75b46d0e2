"""Multiring in Caffe: a solver of pycaffe whose gradients are those of all ranks.

Caffe calls back between the backward pass and the update, and holds Python's lock all the while: nothing overlaps but
the buckets one another.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from multiring import api
from multiring.buckets import BUCKET_BYTES, Buckets, Gradient, fill
from multiring.comm import Communicator
from multiring.labels import label, part

__all__ = ["Distribution", "distribute"]


def distribute(
    solver: Any,
    *,
    weight: float | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    group: Communicator | None = None,
) -> Distribution:
    """Give the solver's net the parameters of rank 0, and average the gradients before every update from now on.

    The scalar outputs of the net, such as the loss, are averaged with them: after ``solver.step(1)``,
    ``solver.net.blobs["loss"].data`` is the same on all ranks. What Caffe itself logs is this rank's.
    """
    if not hasattr(solver, "add_callback"):
        kind = type(solver)
        raise TypeError(f"{kind.__module__}.{kind.__qualname__} is no solver of pycaffe")
    return Distribution(solver, weight, bucket_bytes, api.joined(group))


class Distribution:
    """What `distribute` returns. Set ``weight`` before a step, to the number of samples in this rank's batch.

    It is None, which counts all ranks the same, on all ranks or on none.
    """

    def __init__(self, solver: Any, weight: float | None, bucket_bytes: int, communicator: Communicator) -> None:
        self.weight = weight
        self._net = solver.net
        self._communicator = communicator
        named = [(f"{layer}/{i}", blob) for layer, blobs in self._net.params.items() for i, blob in enumerate(blobs)]
        if not named:
            raise ValueError("this solver's net has no parameters")
        parameters = [blob for _, blob in named]
        for name, blob in named:
            value = np.array(blob.data)
            communicator.broadcast(value, label=label("parameters", [part(name, value.shape)]))
            blob.data[...] = value
        outputs = [(name, self._net.blobs[name]) for name in self._net.outputs]
        scalars = [(name, blob) for name, blob in outputs if blob.data.size == 1]
        names = [name for name, _ in [*named, *scalars]]
        # A view is asked for whenever it is needed: Caffe moves a blob's memory when the blob is reshaped.
        self._averaged = [(blob, "diff") for blob in parameters] + [(blob, "data") for _, blob in scalars]
        gradients = [
            Gradient(view.size, view.dtype.name, part(name, view.shape))
            for name, view in zip(names, self._views(), strict=True)
        ]
        self._buckets = Buckets(communicator, gradients, reversed(range(len(gradients))), bucket_bytes=bucket_bytes)
        solver.add_callback(_nothing, self._average)

    def _views(self) -> list[Any]:
        return [getattr(blob, name) for blob, name in self._averaged]

    def _average(self) -> None:
        views = self._views()
        factor = self._buckets.begin(self.weight)
        for i in reversed(range(len(views))):
            fill(self._buckets.slot(i), views[i], factor)
            self._buckets.ready(i)
        self._buckets.finish()
        for i, view in enumerate(views):
            view[...] = self._buckets.slot(i).reshape(view.shape)


def _nothing() -> None:
    """Caffe asks for a function to call before a step, too."""
