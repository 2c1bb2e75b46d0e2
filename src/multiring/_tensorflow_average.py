"""The mean over the ranks of TensorFlow's tensors, which `multiring.tensorflow` and `multiring.keras` share."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from multiring import api
from multiring.runtime.buffers import OPS_OF
from multiring.runtime.comm import Communicator
from multiring.training import weights
from multiring.training.buckets import BUCKET_BYTES, Bucket, GradientSpec, arrange, fill
from multiring.training.labels import part


def average(
    tensors: Any,
    *,
    weight: Any = None,
    bucket_bytes: int = BUCKET_BYTES,
    group: Communicator | None = None,
    names: Sequence[str] | None = None,
) -> Any:
    """The mean over the ranks of a nest of gradients or metrics, fused in buckets of ``bucket_bytes``.

    Shapes must be known; IndexedSlices come back dense, None stays None and must be so on all ranks, or a Mismatch
    shows what each has, by its place in the nest or, where given, by ``names`` of the leaves. With ``weight``, a number
    or a scalar tensor, the ranks count by their weights: the number of samples that each has in this step;
    what a rank of weight 0 has may be NaN. ValueError for integers and bool.
    """
    communicator = api.joined(group)
    leaves = tf.nest.flatten(tensors)
    places = [i for i, leaf in enumerate(leaves) if leaf is not None]
    if names is None:
        names = [str(i) for i in range(len(leaves))]
    dense = [tf.convert_to_tensor(leaves[i]) for i in places]
    for tensor in dense:
        if not tensor.shape.is_fully_defined():
            raise ValueError(f"the gradient {tensor} has no fixed shape: give it one by tf.ensure_shape")
        if "avg" not in OPS_OF.get(tensor.dtype.name, ()):
            raise ValueError(f"avg is not defined for {tensor.dtype.name}: make it float by tf.cast")
    if communicator.size > 1:
        gradients = [
            GradientSpec(tensor.shape.num_elements(), tensor.dtype.name, part(names[i], tensor.shape.as_list()))
            for i, tensor in zip(places, dense, strict=True)
        ]
        for place, tensor in zip(places, _reduced(dense, gradients, weight, bucket_bytes, communicator), strict=True):
            leaves[place] = tensor
    return tf.nest.pack_sequence_as(tensors, leaves)


def _reduced(
    tensors: Sequence[Any],
    gradients: Sequence[GradientSpec],
    weight: Any,
    bucket_bytes: int,
    communicator: Communicator,
) -> list[Any]:
    members = arrange(gradients, reversed(range(len(tensors))), bucket_bytes)
    exchange = _Exchange(communicator, "avg" if weight is None else "sum")
    factor = 1.0 if weight is None else tf.numpy_function(exchange.share, [weight], tf.float64)
    numbers = [
        tf.numpy_function(
            partial(exchange.start, [gradients[i] for i in bucket]), [factor, *(tensors[i] for i in bucket)], tf.int64
        )
        for bucket in members
    ]
    results: list[Any] = [None] * len(tensors)
    for number, bucket in zip(numbers, members, strict=True):
        arrays = tf.numpy_function(exchange.finish, [number], [tensors[i].dtype for i in bucket])
        for i, flat in zip(bucket, tf.nest.flatten(arrays), strict=True):  # one alone comes bare
            results[i] = tf.reshape(flat, tensors[i].shape)
    return results


class _Exchange:
    """Function that TensorFlow calls from its own threads; stateful, so that a graph keeps the program's order."""

    def __init__(self, communicator: Communicator, op: str) -> None:
        self._communicator = communicator
        self._op = op
        self._number = itertools.count()
        self._buckets: dict[int, Bucket] = {}

    def share(self, weight: Any) -> np.float64:
        return np.float64(weights.share(self._communicator, float(weight)))

    def start(self, gradients: Sequence[GradientSpec], factor: Any, *views: Any) -> np.int64:
        bucket = Bucket(self._communicator, gradients)
        for slot, view in zip(bucket.slots, views, strict=True):
            fill(slot, view, factor)
        bucket.start(self._op)
        number = next(self._number)
        self._buckets[number] = bucket
        return np.int64(number)

    def finish(self, number: Any) -> list[Any]:
        bucket = self._buckets.pop(int(number))
        bucket.wait()
        return bucket.slots
