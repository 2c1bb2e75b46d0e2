"""Models of Keras in the Estimators: on the ranks that train them, and in the tasks that predict."""

from __future__ import annotations

import inspect
import io
import pickle
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
from pyspark import cloudpickle

from multiring import api
from multiring import keras as distributed
from multiring.spark.columns import Array, Block
from multiring.spark.identity import digest, told


def check(model: Any, optimizer: Any, loss: Any, metrics: Any) -> None:
    """TypeError or ValueError, in the driver, for what no rank could train with."""
    if not callable(model):
        raise TypeError(f"model={model!r}: expected a keras.Model, or a function that makes one")
    _known("optimizer", optimizer, keras.optimizers.get, "such as 'adam' or keras.optimizers.Adam(1e-3)")
    _known("loss", loss, keras.losses.get, "such as 'mse', or a function of labels and outputs")
    if getattr(loss, "reduction", "mean") not in ("mean", "sum_over_batch_size"):
        raise ValueError(f"loss={loss!r}: its reduction has to be the mean, since ranks count by their rows")
    if isinstance(metrics, str) or not isinstance(metrics, Sequence):
        raise TypeError(f"metrics={metrics!r}: expected a list, as compile() takes it")
    for metric in metrics:
        if metric not in ("accuracy", "acc"):  # which compile() chooses by the labels
            _known("metrics", metric, keras.metrics.get, "such as 'accuracy' or keras.metrics.AUC()")


def _known(name: str, value: Any, get: Callable[[Any], Any], remedy: str) -> None:
    try:
        found = None if value is None else get(value)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{name}={value!r}: Keras knows none of this name: give one {remedy}") from error
    if found is None:
        raise ValueError(f"{name}={value!r}: give one {remedy}")


def portable(part: Any) -> Any:
    """Return a part in a form to pickle: objects of Keras as configurations, as their variables are the backend's."""
    if isinstance(part, keras.optimizers.Optimizer | keras.metrics.Metric | keras.losses.Loss):
        return _Configured(keras.saving.serialize_keras_object(part))
    return [portable(each) for each in part] if isinstance(part, list | tuple) else part


class _Configured:
    def __init__(self, configuration: Any) -> None:
        self._configuration = configuration

    def made(self) -> Any:
        return keras.saving.deserialize_keras_object(self._configuration)


def _made(part: Any) -> Any:
    if isinstance(part, list):
        return [_made(each) for each in part]
    return part.made() if isinstance(part, _Configured) else part


@contextmanager
def isolated() -> Iterator[None]:
    """Gives the process its random numbers back, as Spark uses it again."""
    before = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])


class KerasTrainer:
    """Ranks train replicas, by `train_on_batch`."""

    def __init__(self, parts: Mapping[str, bytes], zeros: Block, columns: str, seed: int) -> None:
        keras.utils.set_random_seed(seed)
        model = loaded(parts["model"])
        if not isinstance(model, keras.Model):
            model = model()
        if not isinstance(model, keras.Model):
            raise TypeError(f"the function given as model made a {type(model).__name__}: expected a keras.Model")
        self._model = model
        *inputs, labels = zeros
        self.output_shape = _outputs(model, inputs).shape[1:]  # builds it too
        self._rows = 0
        optimizer, loss, metrics = (_made(pickle.loads(parts[name])) for name in ("optimizer", "loss", "metrics"))
        _check_shapes(loss, self.output_shape, labels, columns)
        optimizer = keras.optimizers.get(optimizer)
        decisive = {name: value for name, value in optimizer.get_config().items() if value and name != "name"}
        self._described = f"{type(optimizer).__name__} {told(decisive)}"
        optimizer = distributed.DistributedOptimizer(optimizer, weight=lambda _: self._rows)
        model.compile(optimizer, loss, metrics=metrics)
        first = distributed.BroadcastGlobalVariablesCallback(0)
        first.set_model(model)
        first.on_train_begin()
        self.begin(seed)

    def begin(self, seed: int) -> None:
        keras.utils.set_random_seed(seed)
        self._counted = 0
        self._sums: dict[str, float] = {}

    def train(self, block: Block | None) -> None:
        self._rows = 0 if block is None else len(block[-1])
        if block is None:
            # As a step of `train_on_batch` on zeros would, without what such a step leaves in running means.
            variables = self._model.trainable_variables
            self._model.optimizer.apply([keras.ops.zeros(each.shape, each.dtype) for each in variables], variables)
            return
        *inputs, labels = block
        try:
            found = self._model.train_on_batch(_given(inputs), labels, return_dict=True)
        except Exception as error:
            if "PeerLost: " in str(error):
                api.barrier()  # raises it as itself, where TensorFlow or JAX has put it into an error of theirs
            raise
        self._count(labels, found)

    def evaluate(self, block: Block) -> None:
        *inputs, labels = block
        self._count(labels, self._model.test_on_batch(_given(inputs), labels, return_dict=True))

    def _count(self, labels: Array, found: Mapping[str, Any]) -> None:
        """Add what was found in a batch, which Keras forgets before the next one."""
        self._counted += len(labels)
        for name, value in found.items():
            self._sums[name] = self._sums.get(name, 0.0) + len(labels) * float(value)

    def metrics(self) -> dict[str, float]:
        return {name: value / self._counted for name, value in self._sums.items()}

    def buffers(self) -> list[Array]:
        return [np.array(keras.ops.convert_to_numpy(one), np.float64) for one in self._floats()]

    def set_buffers(self, values: list[Array]) -> None:
        for one, value in zip(self._floats(), values, strict=True):
            one.assign(value)

    def _floats(self) -> list[Any]:
        return [one for one in self._model.non_trainable_variables if "float" in one.dtype]

    def identity(self) -> dict[str, str]:
        weights = digest(("", keras.ops.convert_to_numpy(one)) for one in self._model.variables)
        return {"model": f"{type(self._model).__name__} {weights}", "optimizer": self._described}

    def _variables(self) -> list[Any]:
        return [*self._model.variables, *self._model.optimizer.variables]

    def saved(self) -> bytes:
        np.savez(file := io.BytesIO(), *[keras.ops.convert_to_numpy(one) for one in self._variables()])
        return file.getvalue()

    def restore(self, saved: bytes) -> None:
        with np.load(io.BytesIO(saved), allow_pickle=False) as arrays:
            values = [arrays[f"arr_{i}"] for i in range(len(arrays.files))]
        for variable, value in zip(self._variables(), values, strict=True):
            if tuple(variable.shape) != value.shape:
                raise ValueError(f"{variable.path} is {tuple(variable.shape)}, and {value.shape} in the file")
        for variable, value in zip(self._variables(), values, strict=True):
            variable.assign(value)

    def result(self) -> bytes:
        self._model.compiled, self._model.optimizer = False, None  # how it was trained, none of which predicts
        packed: bytes = cloudpickle.dumps(self._model)
        return packed


trainer = KerasTrainer


def _check_shapes(loss: Any, outputs: tuple[int, ...], labels: Array, columns: str) -> None:
    """ValueError where a loss of Keras would pair an output with several labels; other losses know what they take."""
    found = keras.losses.get(loss)
    if not (found if inspect.isfunction(found) else type(found)).__module__.startswith("keras."):
        return
    widths = [shape[0] if shape else 1 for shape in (labels.shape[1:], outputs)]
    if widths[0] == widths[1]:
        return
    rows = 2 if 2 not in widths else 3
    taken = [np.zeros((rows, width) if width > 1 else (rows,), np.float32) for width in widths]
    try:
        found(*taken)  # as losses of classes can, and no difference of so many rows and these columns
    except Exception as error:  # each backend has its own
        raise ValueError(
            f"the loss {loss!r} cannot take labels of {widths[0]} number(s) (column(s) {columns}) and outputs of "
            f"{widths[1]}: give the model an output for each label"
        ) from error


def _given(inputs: Block) -> Any:
    return inputs[0] if len(inputs) == 1 else inputs


def _outputs(model: Any, inputs: Block) -> Array:
    outputs = model(_given(inputs), training=False)
    if isinstance(outputs, list | tuple | dict):
        raise TypeError(f"the model gives a {type(outputs).__name__}: expected a tensor with an entry for each row")
    found: Array = keras.ops.convert_to_numpy(outputs)
    return found


def predictor(model: Any) -> Callable[[Block], Array]:
    """A function from inputs to outputs."""
    return lambda inputs: _outputs(model, inputs)


def loaded(packed: bytes) -> Any:
    """The model that `KerasTrainer.result` has packed."""
    return pickle.loads(packed)
