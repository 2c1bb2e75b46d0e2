"""Multiring in Caffe: a solver of pycaffe whose gradients are those of all ranks.

Caffe calls back between the backward pass and the update, and holds Python's lock all the while: nothing overlaps but
the buckets one another.
"""

from __future__ import annotations

import hashlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from multiring import api
from multiring.runtime.buffers import writable
from multiring.runtime.comm import Communicator, group_of
from multiring.training.buckets import BUCKET_BYTES, Buckets, GradientSpec, check_bucket_bytes, fill
from multiring.training.labels import label, part

__all__ = ["Distribution", "distribute"]

_KEPT = "_multiring_distribution"
"""The attribute of a solver that keeps its Distribution."""


def distribute(
    solver: Any,
    *,
    weight: float | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    group: Communicator | None = None,
) -> Distribution:
    """Give the solver's net the parameters of rank 0, and average the gradients before every update from now on.

    The outputs of the net that have no axes, such as the loss, are averaged with them: after ``solver.step(1)``,
    ``solver.net.blobs["loss"].data`` is the same on all ranks. What Caffe itself logs is this rank's. A solver that is
    distributed once more belongs to the last Distribution only. ValueError where the solvers have taken steps of their
    own, whose momentum Caffe does not show.
    """
    if not hasattr(solver, "add_callback"):
        kind = type(solver)
        raise TypeError(f"{kind.__module__}.{kind.__qualname__} is no solver of pycaffe")
    made = Distribution(solver, weight, bucket_bytes, api.joined(group))
    is_first = not hasattr(solver, _KEPT)
    setattr(solver, _KEPT, made)
    if is_first:
        solver.add_callback(_nothing, _averaging(solver))
    return made


class Distribution:
    """The result of `distribute`. Set ``weight`` before a step, to the number of samples in this rank's batch.

    It is None, which counts all ranks the same, on all ranks or on none.
    """

    def __init__(self, solver: Any, weight: float | None, bucket_bytes: int, communicator: Communicator) -> None:
        check_bucket_bytes(bucket_bytes)
        self.weight = weight
        self._net = solver.net
        named = list(_parameters(self._net))
        if not named:
            raise ValueError("this solver's net has no parameters")
        _check_steps(solver, communicator)
        for name, blob in named:
            value = np.array(blob.data)
            parameter = label("parameters", [part(name, value.shape)])
            group_of(communicator).run("broadcast", writable(value), label=parameter)
            blob.data[...] = value
        outputs = [(name, self._net.blobs[name]) for name in self._net.outputs]
        # Each element of a top with axes belongs to a sample of this rank, even where there is but one.
        scalars = [(name, blob) for name, blob in outputs if blob.data.ndim == 0]
        names = [name for name, _ in [*named, *scalars]]
        # A view is asked for whenever it is needed: Caffe moves a blob's memory when the blob is reshaped.
        self._averaged = [(blob, "diff") for _, blob in named] + [(blob, "data") for _, blob in scalars]
        # No wire rounds float64: in one block of a narrow wire a loss would make zeros of small gradients.
        types = [blob.data.dtype.name for _, blob in named] + ["float64"] * len(scalars)
        gradients = [
            GradientSpec(view.size, dtype, part(name, view.shape))
            for name, dtype, view in zip(names, types, self._views(), strict=True)
        ]
        self._buckets = Buckets(communicator, gradients, reversed(range(len(gradients))), bucket_bytes=bucket_bytes)

    def average(self) -> None:
        """Average gradients and outputs without axes now; all ranks call it.

        ``solver.step`` does so by itself. A loop of ``net.forward()``, ``net.backward()`` and ``solver.apply_update()``
        calls it before the update.
        """
        views = self._views()
        factor = self._buckets.begin(self.weight)
        for i in reversed(range(len(views))):
            fill(self._buckets.slot(i), views[i], factor)
            self._buckets.ready(i)
        self._buckets.finish()
        for i, view in enumerate(views):
            view[...] = self._buckets.slot(i).reshape(view.shape)

    def _views(self) -> list[Any]:
        return [getattr(blob, name) for blob, name in self._averaged]


def _parameters(net: Any) -> Iterator[tuple[str, Any]]:
    """Every parameter by its layer: ``net.params`` has only the last of the layers that share a name."""
    uses: Counter[str] = Counter()
    for name, layer in zip(net._layer_names, net.layers, strict=True):
        uses[name] += 1
        shown = name if uses[name] == 1 else f"{name} ({uses[name]})"
        for i, blob in enumerate(layer.blobs):
            yield f"{shown}/{i}", blob


def _check_steps(solver: Any, communicator: Communicator) -> None:
    """ValueError, on all ranks, where the solvers are not as far, or went different ways."""
    mine = np.array([solver.iter], np.int64)
    taken = communicator.all_gather(mine).ravel().tolist()
    if not any(taken):
        return
    shown = ", ".join(f"{steps} on rank {rank}" for rank, steps in enumerate(taken))
    remedy = "distribute before the first step, or restore the same snapshot on every rank"
    if len(set(taken)) > 1:
        raise ValueError(f"the solvers have taken different numbers of steps, {shown}: {remedy}")
    found = hashlib.blake2b(digest_size=16)
    for layer in solver.net.layers:
        if layer.type != "BatchNorm":  # its running means are each rank's own
            for blob in layer.blobs:
                found.update(blob.data.tobytes())
    digests = communicator.all_gather(np.frombuffer(found.digest(), np.uint8))
    if strangers := np.flatnonzero((digests != digests[0]).any(1)).tolist():
        raise ValueError(
            f"after {taken[0]} steps the parameters of rank {strangers[0]} are not those of rank 0, and so their "
            f"momentum may differ, which Caffe does not show: {remedy}"
        )


def _averaging(solver: Any) -> Callable[[], None]:
    """The callback before an update. Caffe never deletes a callback, so this one keeps nothing alive."""
    found = weakref.ref(solver)

    def average() -> None:
        getattr(found(), _KEPT).average()

    return average


def _nothing() -> None:
    """Caffe asks for a function to call before a step, too."""
