"""Multiring in TensorFlow 2: averaged gradients, eager and inside ``tf.function``.

TensorFlow hands a view of a tensor's own memory to a function of Python, and other parts of a program may hold the same
memory: nothing here writes to what it was given. Gradients are copied into buckets in the arena, which all ranks of a
host read, and the averages are tensors over those buckets. A bucket is one call that starts and one that waits, so that
the rest of the backward pass goes on while it is reduced.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from multiring import api
from multiring._tensorflow_average import average
from multiring.runtime.buffers import writable
from multiring.runtime.comm import Communicator, group_of
from multiring.training.buckets import BUCKET_BYTES, check_bucket_bytes
from multiring.training.labels import label, part, variable_names

__all__ = ["DistributedGradientTape", "DistributedOptimizer", "all_reduce", "average", "broadcast_variables"]


def all_reduce(x: Any, op: str = "sum", *, group: Communicator | None = None) -> Any:
    """A tensor with ``x`` of all ranks combined, element by element; it has no derivative.

    ``op`` is sum, avg, min, max or prod, on integers also band, bor or bxor.
    """
    communicator = api.joined(group)
    x = tf.convert_to_tensor(x)

    def combine(view: Any) -> Any:
        result = np.array(view)
        communicator.all_reduce(result, op)
        return result

    result = tf.numpy_function(combine, [x], x.dtype)
    result.set_shape(x.shape)
    return result


class DistributedGradientTape:
    """A ``tf.GradientTape`` whose `gradient` is the mean over the ranks; all else, as ``jacobian``, is this rank's own.

    ``weight`` is the number of samples that this rank has in the step, on all ranks or on none.
    """

    def __init__(
        self,
        tape: Any = None,
        *,
        weight: Any = None,
        bucket_bytes: int = BUCKET_BYTES,
        group: Communicator | None = None,
    ) -> None:
        check_bucket_bytes(bucket_bytes)
        self._tape = tf.GradientTape() if tape is None else tape
        self._how = {"weight": weight, "bucket_bytes": bucket_bytes, "group": group}

    def __enter__(self) -> DistributedGradientTape:
        self._tape.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._tape.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tape, name)

    def gradient(self, target: Any, sources: Any, *arguments: Any, **options: Any) -> Any:
        """Return the gradients of ``tf.GradientTape.gradient``, averaged over the ranks."""
        gradients = self._tape.gradient(target, sources, *arguments, **options)
        return average(gradients, names=_names(tf.nest.flatten(sources)), **self._how)


def DistributedOptimizer(optimizer: Any, **options: Any) -> Any:
    """`multiring.keras.DistributedOptimizer`: the optimizers of TensorFlow 2.16 and later are those of Keras 3."""
    from multiring import keras  # which need not be there

    return keras.DistributedOptimizer(optimizer, **options)


def broadcast_variables(variables: Iterable[Any], root: int = 0, *, group: Communicator | None = None) -> None:
    """Assign the values of rank ``root`` to variables of TensorFlow or Keras; all ranks name the same ones."""
    ranks = group_of(api.joined(group))
    variables = list(variables)
    for name, variable in zip(_names(variables), variables, strict=True):
        value = np.array(variable.numpy())
        named = label("variables", [part(name, value.shape)])
        ranks.run("broadcast", writable(value), root=root, label=named)
        variable.assign(value)


def _names(sources: Sequence[Any]) -> list[str]:
    """Return the names of variables of Keras and TensorFlow; a tensor's name tells what else was traced before."""
    return variable_names(
        [
            getattr(source, "path", "") or (source.name.removesuffix(":0") if isinstance(source, tf.Variable) else "")
            for source in sources
        ]
    )
