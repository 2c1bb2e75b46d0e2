"""Multiring in Keras 3, on the backends of TensorFlow, JAX and PyTorch: what Horovod's users know by these names.

The optimizer averages the gradients of all ranks in `apply`, through which all trainers of Keras pass, eager and
compiled. The names of the callbacks are Horovod's; a saved model is a plain one of Keras.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import keras
import numpy as np

from multiring import api
from multiring.env import whole_number
from multiring.errors import MultiringError
from multiring.runtime.buffers import writable
from multiring.runtime.comm import Communicator, group_of
from multiring.training.buckets import BUCKET_BYTES, GradientSpec, averages, check_bucket_bytes
from multiring.training.labels import label, part, variable_names
from multiring.training.shared import SharedParameters
from multiring.training.weights import average, valid

_F = TypeVar("_F", bound=Callable[..., Any])
_log = logging.getLogger("multiring")

__all__ = [
    "BroadcastGlobalVariablesCallback",
    "DistributedOptimizer",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
    "MomentumCorrectionCallback",
    "Outer",
]


def DistributedOptimizer(
    optimizer: Any,
    *,
    weight: float | Callable[[int], float] | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    group: Communicator | None = None,
) -> Any:
    """Make ``optimizer`` average the gradients over the ranks before it applies them, and return it.

    It keeps its class's name and all its state. ``weight`` is the number of samples in a batch of this rank, where it
    is not the same on all ranks; give it on all or on none. Where batches differ it is a function: called with the
    number of batches that the optimizer has seen before, it returns the weight of the next one. A rank of weight 0
    counts for nothing, and its gradients may be NaN. A model that was loaded has a plain optimizer: call
    ``DistributedOptimizer(model.optimizer)`` once more; a model that was trained with it is then to be compiled again.
    A ``LossScaleOptimizer`` goes inside: it looks for overflow in what was averaged, so that all ranks skip the same
    steps. A copy of the optimizer, or a pickled one, averages too and begins without state, as copies of Keras's do.
    """
    _check(optimizer, weight, bucket_bytes, group)
    base = type(optimizer)
    average_gradients, weight_of = _averaging(), _weighing(weight)

    @_not_compiled
    def means_of(self: Any, grads: Any, variables: Sequence[Any]) -> list[Any]:
        self.averages_over_ranks = True
        averaged: list[Any] = list(grads)
        names = variable_names([getattr(variable, "path", "") or variable.name for variable in variables])
        there = [i for i, gradient in enumerate(averaged) if gradient is not None]
        means = average_gradients(
            [averaged[i] for i in there],
            names=[names[i] for i in there],
            weight=weight_of(self),
            bucket_bytes=bucket_bytes,
            group=group,
        )
        for i, mean in zip(there, means, strict=True):
            averaged[i] = mean
        return averaged

    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        variables = self._trainable_variables if trainable_variables is None else list(trainable_variables)
        return base.apply(self, means_of(self, grads, variables), trainable_variables)

    def stateless_apply(self: Any, optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:
        means = means_of(self, grads, self._trainable_variables)
        return base.stateless_apply(self, optimizer_variables, means, trainable_variables)

    def reduce(self: Any) -> tuple[Any, ...]:
        again = functools.partial(DistributedOptimizer, weight=weight, bucket_bytes=bucket_bytes, group=group)
        return functools.partial(_made_again, base, again), (self.get_config(),)

    set_plain: Any = base.__setattr__

    def set_attribute(self: Any, name: str, value: Any) -> None:
        if name == "loss_scale_factor" and value is None:  # a LossScaleOptimizer around it does, as `compile` puts one
            raise ValueError(_own_scaling(base.__name__))
        set_plain(self, name, value)

    names = {"apply": apply, "averages_over_ranks": False, "__reduce__": reduce, "__setattr__": set_attribute}
    if _scales(base):  # on JAX it passes its own `apply` by
        names["stateless_apply"] = stateless_apply
    optimizer.__class__ = _derived(base, names)
    return optimizer


def _check(optimizer: Any, weight: Any, bucket_bytes: Any, group: Any) -> None:
    """TypeError or ValueError for what cannot be served, before a step is compiled."""
    base = type(optimizer)
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(f"{base.__module__}.{base.__qualname__} is no optimizer of Keras 3")
    if hasattr(base, "averages_over_ranks"):
        raise ValueError(f"this {base.__name__} averages over the ranks already")
    if group is not None:
        api.joined(group)
    check_bucket_bytes(bucket_bytes)
    if callable(weight) and _scales(base):
        raise ValueError(
            "a LossScaleOptimizer does not count the batches that it skips, so that a weight cannot be a function of "
            "their number: give a number"
        )


def _scales(base: type) -> bool:
    return issubclass(base, keras.optimizers.LossScaleOptimizer)


def _derived(base: Any, names: dict[str, Any]) -> type:
    """A class of the same name that has ``names`` besides. Keras saves it by the module and name of ``base``."""
    derived = type(base.__name__, (base,), {**names, "__module__": base.__module__, "__doc__": base.__doc__})
    registered = keras.saving.get_registered_name(base)
    if registered != base.__name__:
        for each in (derived, base):  # the last one is what the name stands for when a model is loaded
            keras.saving.register_keras_serializable(*registered.split(">"))(each)
    return derived


def _made_again(base: Any, wrap: Callable[[Any], Any], config: dict[str, Any]) -> Any:
    return wrap(base.from_config(config))


def _not_compiled(function: _F) -> _F:
    """Leave it to Python in a step that torch compiles: it moves bytes between arrays."""
    if keras.backend.backend() != "torch":
        return function
    import torch

    uncompiled: _F = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return uncompiled


def _averaging() -> Callable[..., Sequence[Any]]:
    backend = keras.backend.backend()
    if backend == "tensorflow":
        from multiring import _tensorflow_average

        return _tensorflow_average.average
    if backend == "jax":
        from multiring import jax

        return jax.average
    if backend == "torch":
        return _average_torch
    raise ValueError(f"the Keras backend {backend!r} does not train: use tensorflow, jax or torch")


def _weighing(weight: float | Callable[[int], float] | None) -> Callable[[Any], Any]:
    """A function that gives an optimizer's weight of its next batch, as `average` takes it, in compiled steps too."""
    if not callable(weight):
        return lambda optimizer: weight
    function, backend = weight, keras.backend.backend()

    def weigh(batch: Any) -> np.ndarray[Any, Any]:
        return np.asarray(valid(function(int(batch))), keras.config.floatx() if backend == "jax" else "float64")

    def on_tensorflow(optimizer: Any) -> Any:
        import tensorflow

        return tensorflow.numpy_function(weigh, [optimizer._iterations.value], tensorflow.float64)

    def on_jax(optimizer: Any) -> Any:
        import jax

        form = jax.ShapeDtypeStruct((), keras.config.floatx())
        return jax.pure_callback(weigh, form, optimizer._iterations.value)

    def on_torch(optimizer: Any) -> Any:
        return float(weigh(optimizer._iterations.value))

    return {"tensorflow": on_tensorflow, "jax": on_jax, "torch": on_torch}[backend]


def _average_torch(
    gradients: Sequence[Any],
    *,
    names: Sequence[str],
    weight: float | None,
    bucket_bytes: int,
    group: Communicator | None,
) -> list[Any]:
    """Keras hands over all gradients at once, after the backward pass: a bucket is filled while others are reduced."""
    import torch

    flat = [gradient.detach().reshape(-1) for gradient in gradients]

    def put(slot: Any, i: int, factor: float) -> None:
        if factor == 0:  # also where it is NaN
            slot.zero_()
        else:
            torch.mul(flat[i], factor, out=slot)

    slots = averages(
        api.joined(group),
        [
            GradientSpec(one.numel(), str(one.dtype).removeprefix("torch."), part(name, whole.shape))
            for one, name, whole in zip(flat, names, gradients, strict=True)
        ],
        put,
        weight=weight,
        bucket_bytes=bucket_bytes,
        view=lambda memory, dtype: torch.from_numpy(memory).view(getattr(torch, dtype)),
    )
    return [slot.view(gradient.shape) for slot, gradient in zip(slots, gradients, strict=True)]


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Before training, the variables of the model and of its optimizer become those of rank ``root``."""

    def __init__(self, root: int = 0, *, group: Communicator | None = None) -> None:
        super().__init__()
        self._root = root
        self._group = group
        self._done = False

    def on_train_begin(self, logs: Any = None) -> None:
        _refuse_own_scaling(self.model.optimizer)
        if not hasattr(self.model.optimizer, "averages_over_ranks") and api.joined(self._group).size > 1:
            _log.warning(
                "the model's %s averages nothing over the ranks, which part unless the model's own train_step does: "
                "give compile() DistributedOptimizer(optimizer), also for a model that was loaded or copied",
                type(self.model.optimizer).__name__,
            )
        self._done = False
        if self.model.built:
            if not self.model.optimizer.built:
                self.model.optimizer.build(self.model.trainable_variables)
            self._broadcast()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if getattr(self.model.optimizer, "averages_over_ranks", None) is False:
            raise MultiringError(
                "this step averaged nothing: it was compiled before DistributedOptimizer was called on the model's "
                "optimizer; call model.compile() with that optimizer once more"
            )
        if not self._done:  # the first batch has built the model
            self._broadcast()

    def _broadcast(self) -> None:
        ranks = group_of(api.joined(self._group))
        _settle(self.model)
        variables = [*self.model.variables, *self.model.optimizer.variables]
        # The names of an optimizer's variables contain those of the model's, counted by Keras, in a word.
        names = [variable.path for variable in self.model.variables] + [""] * len(self.model.optimizer.variables)
        for name, variable in zip(variable_names(names), variables, strict=True):
            value = np.array(keras.ops.convert_to_numpy(variable.value), order="C")
            # Ranks that train other variables would average them with each other.
            kind = "variables" if variable.trainable else "frozen variables"
            named = label(kind, [part(name, value.shape)])
            ranks.run("broadcast", writable(value), root=self._root, label=named)
            variable.assign(value)
        self._done = True


class MetricAverageCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Averages the metrics over the ranks at the end of each epoch; put it before callbacks that read them.

    ``weight`` is the number of samples of this rank, where it is not the same on all ranks.
    """

    def __init__(self, *, weight: float = 1.0, group: Communicator | None = None) -> None:
        super().__init__()
        self._weight = weight
        self._group = group

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if logs:
            numbers = dict(zip(variable_names(list(logs)), map(float, logs.values()), strict=True))
            means = average(api.joined(self._group), numbers, self._weight)
            logs.update(zip(logs, (means[name] for name in numbers), strict=True))


class LearningRateWarmupCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Raise the learning rate with every batch from ``initial_lr`` / number of ranks to ``initial_lr``.

    ``initial_lr`` is the rate scaled for all ranks; it is reached after ``warmup_epochs`` epochs, 0 of which set it at
    once. Source: Goyal et al., "Accurate, Large Minibatch SGD" (2017), section 2.2.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        steps_per_epoch: int | None = None,
        *,
        group: Communicator | None = None,
    ) -> None:
        super().__init__()
        if not 0 <= warmup_epochs < math.inf:
            raise ValueError(f"warmup_epochs={warmup_epochs}: 0 or more are needed")
        self._target = initial_lr
        self._epochs = warmup_epochs
        self._steps = None if steps_per_epoch is None else whole_number("steps_per_epoch", steps_per_epoch)
        self._group = group
        self._epoch = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        steps = self._steps or self.params.get("steps")
        if not steps:
            raise ValueError("the number of batches in an epoch is not known: give steps_per_epoch")
        progress = (self._epoch + (batch + 1) / steps) / self._epochs if self._epochs else math.inf
        if progress <= 1 or (batch == 0 and self._epoch == self._epochs):
            first = 1 / api.joined(self._group).size
            _settle(self.model)
            self.model.optimizer.learning_rate = self._target * (first + (1 - first) * min(progress, 1.0))


class MomentumCorrectionCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Callback that lets the momentum go on at a new learning rate; put it after what sets the rate.

    SGD keeps past updates, which were taken at the old rate: they are multiplied by new / old rate before the next
    batch, also where steps are compiled, and from one `fit` to the next that is given the same callback. TypeError for
    optimizers other than SGD with momentum. Source: Goyal et al., "Accurate, Large Minibatch SGD" (2017), section 3.
    """

    def __init__(self) -> None:
        super().__init__()
        self._corrected: Any = None
        self._rate: float | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        optimizer = self._sgd()
        if not isinstance(optimizer, keras.optimizers.SGD) or not optimizer.momentum:
            raise TypeError(
                f"{type(optimizer).__name__} keeps no past updates: momentum is corrected for SGD(momentum=...) alone, "
                "so leave MomentumCorrectionCallback out"
            )
        if optimizer is not self._corrected:
            self._corrected, self._rate = optimizer, None

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        optimizer = self._sgd()
        _settle(self.model)
        rate = float(keras.ops.convert_to_numpy(optimizer.learning_rate))
        if optimizer.built and self._rate and rate != self._rate:
            for past in optimizer.momentums:
                past.assign(past * (rate / self._rate))
        self._rate = rate

    def _sgd(self) -> Any:
        return getattr(self.model.optimizer, "inner_optimizer", self.model.optimizer)


class Outer(keras.callbacks.Callback):  # type: ignore[misc]
    """Callback that lets groups of ranks train apart and exchanges their parameters every ``every`` batches.

    Within a group gradients are averaged in each batch: give ``DistributedOptimizer`` the group, ``group=outer.group``.
    Every ``every`` batches, and at the end of training, the change of the trained parameters since the last exchange is
    averaged over all samples of all ranks, and the outer optimizer takes it for its gradient; other variables of real
    numbers, such as a batch norm's, are averaged. All begin with what the oldest rank has. Source: DiLoCo (Douillard et
    al. 2023, arXiv 2311.08105); with ``delay`` Streaming DiLoCo (arXiv 2501.18512).

    With ``unequal`` groups make unequal numbers of batches in the same time. Then a training ends by `rounds` or by
    `samples`, which all groups reach at the same exchange: a callback after this one sets ``model.stop_training``.
    """

    def __init__(
        self,
        every: int,
        *,
        groups: Any = None,
        optimizer: Any = None,
        samples: float | None = None,
        delay: int = 0,
        keep: float = 0.5,
        unequal: bool = False,
    ) -> None:
        """All ranks make it together, before the model's optimizer, which takes its `group`.

        ``every``: batches between exchanges, no fewer than the ``steps_per_execution`` of ``compile``. ``groups``: a
        level of the topology (rank, host, rack, site), whose places are the groups; lists of ranks, each rank in one;
        None: the outermost level that has several places. ``optimizer``: a plain one of Keras, without a scale of
        losses; None: parameters are averaged. ``samples``: those of a batch of this rank, where they are not the same
        on all ranks; given on all or on none.

        ``delay``: batches between sending changes and applying their average, during which training goes on, less than
        4 times ``every``. The rank's own values then count with weight ``keep``: own = keep x own + (1 - keep) x
        shared, as `multiring.torch.Outer` has it. With delay 0 ranks wait, and nothing is kept. ``unequal``: the
        slowest group makes ``every`` batches between exchanges, and a faster one as many as it can in that time;
        ``samples`` are given then.

        ValueError on the rank that gives invalid numbers or groups; on all where they differ, or their optimizers do.
        """
        super().__init__()
        if optimizer is not None and not isinstance(optimizer, keras.optimizers.Optimizer):
            kind = type(optimizer)
            raise TypeError(f"{kind.__module__}.{kind.__qualname__} is no optimizer of Keras 3")
        _check_outer(optimizer)
        self._samples = None if samples is None else valid(samples, "samples")
        if unequal is True and samples is None:
            raise ValueError(
                "samples=None: with unequal=True groups count by their samples: give Outer those of a batch of this "
                "rank"
            )
        self._exchange = SharedParameters(api.joined(None), every, groups, delay=delay, keep=keep, unequal=unequal)
        settings = {} if optimizer is None else optimizer.get_config()
        facts = {f"{name} of the outer optimizer": value for name, value in _without_names(settings).items()}
        self._exchange.check_optimizer({"the outer optimizer's class": type(optimizer).__qualname__, **facts})
        self._optimizer = optimizer
        self._is_unequal = unequal
        self._first_of_call = 0
        """The first batch of the present call of Keras, which makes several with ``steps_per_execution``."""
        self._of: Any = None
        self._trained: list[Any] = []
        """The outer optimizer's variables for the parameters that are trained."""

    @property
    def group(self) -> Communicator:
        """The communicator of this rank's group, as DistributedOptimizer takes it."""
        return self._exchange.group

    @property
    def steps(self) -> int:
        """Number of counted batches: all, or all but the first, where that one has built the model."""
        return self._exchange.steps

    @property
    def rounds(self) -> int:
        """Number of exchanges that were begun, with that at the end; all ranks come to it at the same exchange."""
        return self._exchange.rounds

    @property
    def samples(self) -> float:
        """Samples of all ranks that are in the shared values, the same on all ranks after an exchange was applied."""
        return self._exchange.samples

    @property
    def period(self) -> int:
        """Batches of this rank's group in the present round: ``every``, or with ``unequal`` as many or more."""
        return self._exchange.period

    def on_train_begin(self, logs: Any = None) -> None:
        together = self.model.steps_per_execution
        if together > self._exchange.every:
            raise ValueError(
                f"every={self._exchange.every}, and compile() was given steps_per_execution={together}: several "
                f"exchanges would be due at once, so give Outer every={together} or more"
            )
        if self.model.built and self._of is not self.model:
            self._begin()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._first_of_call = batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._of is not self.model:  # the first batch has built the model
            self._begin()
            return
        if self._is_unequal:
            _wait_for_step(self.model)  # what is computed later would count for a later batch
        values = self._exchange.step(self._samples, self._own, self._made())
        if values is not None:
            self._assign(values)

    def on_train_end(self, logs: Any = None) -> None:
        if self._of is self.model:  # there was a batch, or the model was built before
            self._assign(self._exchange.finish(self._own()))

    def _made(self) -> int:
        """Number of batches in the present call of Keras; the last of an epoch of unknown length counts as whole."""
        together = int(self.model.steps_per_execution)
        steps = self.params.get("steps")
        return together if steps is None else min(together, steps - self._first_of_call)

    def _variables(self) -> list[Any]:
        """The trained variables, then the others of real numbers."""
        others = [each for each in self.model.non_trainable_variables if "float" in each.dtype]
        return [*self.model.trainable_variables, *others]

    def _own(self) -> list[np.ndarray[Any, Any]]:
        _settle(self.model)
        return [np.asarray(keras.ops.convert_to_numpy(variable.value)) for variable in self._variables()]

    def _begin(self) -> None:
        if self._of is not None:
            raise ValueError("this Outer exchanges the parameters of another model: make one for each model")
        names = variable_names([variable.path for variable in self._variables()])
        count = len(self.model.trainable_variables)
        self._exchange.begin(names, self._own(), self._move, count)
        self._assign(self._exchange.values)
        if self._optimizer is not None:
            self._trained = [keras.Variable(value, dtype=value.dtype.name) for value in self._exchange.values[:count]]
            self._optimizer.build(self._trained)
        self._of = self.model

    def _move(self, shared: list[np.ndarray[Any, Any]], mean: list[np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
        """The outer step."""
        if self._optimizer is None:
            return [np.asarray(before - change) for before, change in zip(shared, mean, strict=True)]
        self._optimizer.apply([keras.ops.convert_to_tensor(change) for change in mean], self._trained)
        return [np.array(keras.ops.convert_to_numpy(variable.value)) for variable in self._trained]

    def _assign(self, values: Sequence[np.ndarray[Any, Any]]) -> None:
        for variable, value in zip(self._variables(), values, strict=True):
            variable.assign(value)


def _wait_for_step(model: Any) -> None:
    """On JAX, wait for what the step computes; other backends return when it is done."""
    if state := getattr(model, "_jax_state", None):
        import jax

        jax.block_until_ready([list(variables) for variables in state.values()])  # Keras's own kinds of dict and list


def _without_names(config: Any) -> Any:
    """Settings without names, which Keras counts in each process."""
    if isinstance(config, dict):
        return {key: _without_names(value) for key, value in config.items() if key != "name"}
    return [_without_names(value) for value in config] if isinstance(config, list | tuple) else config


def _check_outer(optimizer: Any) -> None:
    """ValueError for an outer optimizer that would not move the shared values by the mean change."""
    name = type(optimizer).__name__
    if optimizer is not None and (_scales(type(optimizer)) or optimizer.loss_scale_factor):
        raise ValueError(
            f"this {name} divides gradients by a scale of losses, and a change of parameters is no scaled gradient: "
            "give Outer a plain optimizer, without loss_scale_factor"
        )
    if hasattr(optimizer, "averages_over_ranks"):
        raise ValueError(
            f"this {name} averages over the ranks, which Outer has done: give it a plain optimizer, and "
            "DistributedOptimizer to compile()"
        )


def _refuse_own_scaling(optimizer: Any) -> None:
    """Around ours a LossScaleOptimizer skips steps in which this rank overflows, while the others wait for it."""
    inner = getattr(optimizer, "inner_optimizer", None)
    if hasattr(inner, "averages_over_ranks"):
        raise ValueError(_own_scaling(type(inner).__name__))


def _own_scaling(name: str) -> str:
    return (
        f"a LossScaleOptimizer around DistributedOptimizer({name}) lets every rank skip steps of its own: give "
        f"compile() DistributedOptimizer(LossScaleOptimizer({name}(...))), or auto_scale_loss=False"
    )


def _settle(model: Any) -> None:
    """On JAX, take the state of the training loop back into the variables, from which it then starts again."""
    if hasattr(model, "jax_state_sync"):
        model.jax_state_sync()
