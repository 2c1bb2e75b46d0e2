"""Estimators and Models of Spark ML: a DataFrame's partitions train a model of PyTorch or Keras, which predicts."""

from __future__ import annotations

import importlib
import logging
import os
import pickle
import re
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar
from urllib.parse import unquote

import numpy as np
from pyspark import StorageLevel, cloudpickle
from pyspark.ml import Estimator, Model
from pyspark.ml.param import Param, Params
from pyspark.ml.util import DefaultParamsReader, DefaultParamsWriter, MLReadable, MLReader, MLWritable, MLWriter
from pyspark.sql import DataFrame
from pyspark.sql.utils import is_remote

from multiring.env import whole_number
from multiring.errors import MultiringError
from multiring.spark import training
from multiring.spark.columns import Array, ModelInput, Reader, expressions, fits_a_barrier, input_of, packed
from multiring.spark.identity import told
from multiring.spark.stage import active_context, check_settings, number_of_ranks, run_stage
from multiring.worker import reason_of

PREDICTION = "multiring_prediction"
"""Name of the column of predictions until it gets its own."""

_log = logging.getLogger("multiring")


def _param(name: str, words: str) -> Any:
    return Param(Params._dummy(), name, words)


class _Columns(Params):  # type: ignore[misc]
    """Columns that an Estimator hands on to its Model."""

    feature_cols = _param(
        "feature_cols", "columns that make the model's input, or a list of such lists, one for each input"
    )
    prediction_col = _param("prediction_col", "the column that transform adds")
    predict = _param("predict", "'output' of the model, or 'class': the index of the largest output")
    batch_size = _param("batch_size", "rows that a rank takes in a step, and that are predicted at once")

    def _value(self, name: str) -> Any:
        return self.getOrDefault(name)

    def _predicts_class(self) -> bool:
        if (given := self._value("predict")) not in ("output", "class"):
            raise ValueError(f"predict={given!r}: expected 'output' or 'class'")
        return bool(given == "class")

    def _prediction_column(self) -> str:
        if not isinstance(given := self._value("prediction_col"), str) or not given:
            raise ValueError(f"prediction_col={given!r}: expected the name of a column")
        return given

    def _inputs(self, schema: Any, trained_on: Sequence[str] | None = None) -> tuple[ModelInput, ...]:
        given = _names("feature_cols", self._value("feature_cols"), nested=True)
        if trained_on is not None and len(given) != len(trained_on):
            raise ValueError(f"feature_cols={given!r}: the model was trained on {len(trained_on)} input(s)")
        types: Sequence[str | None] = trained_on or [None] * len(given)
        return tuple(input_of(schema, names, trained_on=one) for names, one in zip(given, types, strict=True))


def _names(param: str, given: Any, *, nested: bool = False) -> list[list[str]]:
    """Lists of columns' names; one list where there is one input."""
    listed = [given] if isinstance(given, str) else given
    if nested and isinstance(listed, list | tuple) and listed and all(isinstance(one, list | tuple) for one in listed):
        groups = [list(one) for one in listed]
    else:
        groups = [list(listed)] if isinstance(listed, list | tuple) else []
    if not groups or not all(group and all(isinstance(name, str) for name in group) for group in groups):
        raise TypeError(f"{param}={given!r}: expected names of columns" + (", or lists of names" if nested else ""))
    return groups


class _Estimator(Estimator, _Columns, MLReadable, MLWritable):  # type: ignore[misc]
    _frontend: ClassVar[str]
    _model_class: ClassVar[Callable[..., Any]]

    model = _param("model", "the model, or a function that makes it")
    optimizer = _param("optimizer", "the optimizer, or a function that makes it")
    loss = _param("loss", "the mean loss of a batch")
    metrics = _param("metrics", "metrics beside the loss")
    label_cols = _param("label_cols", "columns that make the labels")
    epochs = _param("epochs", "number of times that all rows are trained on")
    num_proc = _param("num_proc", "number of ranks; None: as many as tasks run at once, and partitions there are")
    validation = _param("validation", "share of rows to validate on, or a boolean column that says which; None: none")
    shuffle = _param("shuffle", "whether each rank draws a new order of its rows for each epoch")
    seed = _param("seed", "seed of all random numbers")
    store = _param("store", "a directory that all executors see, for a checkpoint of each epoch; None: no checkpoints")
    start_timeout = _param("start_timeout", "seconds for all ranks to start")
    settings = _param("settings", "settings of multiring.init")

    def __init__(self, **given: Any) -> None:
        super().__init__()
        for name, value in given.items():
            self.set(self.getParam(name), value)
        self._check()

    def _check(self) -> None:
        """ValueError or TypeError for values that no DataFrame could be trained with."""
        value = self._value
        _names("feature_cols", value("feature_cols"), nested=True)
        _names("label_cols", value("label_cols"))
        for name in ("batch_size", "epochs"):
            if whole_number(name, value(name)) < 1:
                raise ValueError(f"{name}={value(name)!r}: expected 1 or more")
        if isinstance(value("seed"), bool) or not isinstance(value("seed"), int) or value("seed") < 0:
            raise ValueError(f"seed={value('seed')!r}: expected a whole number, 0 or more")
        share = value("validation")
        is_share = isinstance(share, int | float) and not isinstance(share, bool) and 0 < share < 1
        if not (share is None or isinstance(share, str) or is_share):
            raise ValueError(
                f"validation={share!r}: expected a share between 0 and 1, a boolean column's name, or None"
            )
        self._predicts_class()
        self._prediction_column()
        if not isinstance(value("shuffle"), bool):
            raise TypeError(f"shuffle={value('shuffle')!r}: expected True or False")
        self._store_path()
        if not isinstance(value("settings"), Mapping):
            raise TypeError(f"settings={value('settings')!r}: expected a dictionary, such as {{'timeout': 60}}")
        check_settings(value("start_timeout"), value("settings"))

    def _store_path(self) -> str | None:
        given = self._value("store")
        if given is None:
            return None
        if not isinstance(given, str) or not given:
            raise TypeError(f"store={given!r}: expected a directory's path, or None")
        scheme, colon, path = given.partition(":")
        if not colon or not re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]*", scheme):
            return os.path.abspath(given)  # an executor's working directory is another one
        if scheme.lower() != "file" or not (found := re.fullmatch(r"(?://(?:localhost)?)?(/[^/].*)", path)):
            raise ValueError(
                f"store={given!r}: a checkpoint is a file in a directory: give the path of one that all executors see, "
                "such as /shared/fit-7"
            )
        return os.path.abspath(unquote(found[1]))

    def _fit(self, dataset: Any) -> Any:
        context = active_context()
        if not isinstance(dataset, DataFrame):
            raise TypeError(f"fit({reprlib.repr(dataset)}): expected a DataFrame")
        self._check()  # fit(frame, params) has set others
        inputs = self._all_inputs(dataset.schema)
        job = training.TrainingJob(
            frontend=self._frontend,
            parts=self._parts(),
            inputs=inputs,
            validation=None if isinstance(self._value("validation"), str) else self._value("validation") or 0.0,
            predicts_class=self._predicts_class(),
            **{name: self._value(name) for name in ("batch_size", "epochs", "shuffle", "seed")},
            store=self._store_path(),
            identity={} if self._value("store") is None else self._identity(inputs),
        )
        ranks = number_of_ranks(context, self._value("num_proc"), self._value("start_timeout"))
        rows = packed(dataset.select(*expressions(dataset, inputs)))
        partitions = rows.getNumPartitions()
        if not partitions:
            raise ValueError(training.NO_ROWS)
        if ranks > partitions and self._value("num_proc") is not None:
            raise ValueError(
                f"num_proc={ranks}, and the DataFrame has {partitions} partition(s), each of which goes to one rank as "
                f"a whole: ask for no more, or call repartition({ranks}) on it"
            )
        trained = self._run(context, job, rows, min(ranks, partitions))
        if trained.resumed:
            _log.warning(
                "fit went on after epoch %d of %d, from the checkpoint in %s", trained.resumed, job.epochs, job.store
            )
        columns = {name: self._value(name) for name in ("feature_cols", "prediction_col", "predict", "batch_size")}
        types = [each.dtype for each in self._inputs(dataset.schema)]
        return type(self)._model_class(trained.model, trained.history, trained.output_shape, types, columns)

    def _run(self, context: Any, job: training.TrainingJob, rows: Any, ranks: int) -> training.Trained:
        call = cloudpickle.dumps((training.train, (job,), {}))
        stored = rows if ranks == rows.getNumPartitions() else rows.coalesce(ranks)
        direct = fits_a_barrier(stored)
        try:
            if not direct:
                # Spark cannot compute it within a barrier stage: executors keep it on their disks until the ranks have
                # read it. A task that fails here is run again.
                stored.persist(StorageLevel.DISK_ONLY)
                stored.localCheckpoint()
                stored._jrdd.count()
            found = run_stage(context, call, ranks, self._value("start_timeout"), self._value("settings"), stored)
        finally:
            if not direct:
                stored.unpersist(blocking=True)
        trained: training.Trained = found[0]
        return trained

    def _all_inputs(self, schema: Any) -> tuple[ModelInput, ...]:
        (labels,) = _names("label_cols", self._value("label_cols"))
        inputs = (*self._inputs(schema), input_of(schema, labels, label=True))
        column = self._value("validation")
        if not isinstance(column, str):
            return inputs
        flags = input_of(schema, [column], label=True)
        if schema[column].dataType.simpleString() != "boolean":
            kind = schema[column].dataType.simpleString()
            raise TypeError(f"validation={column!r}: the column is of type {kind}: expected a boolean one")
        return (*inputs, flags)

    def _parts(self) -> dict[str, bytes]:
        """Return model, optimizer, loss and metrics, each pickled, so that a message can name one that cannot be."""
        frontend: Any = importlib.import_module(self._frontend)
        given = {name: self._value(name) for name in ("model", "optimizer", "loss", "metrics")}
        frontend.check(**given)
        return {name: _pickled(name, part, frontend.portable) for name, part in given.items()}

    def _identity(self, inputs: Sequence[ModelInput]) -> dict[str, str]:
        """Values that decide a fit, by name, without the model and the optimizer, which a rank makes."""
        frontend: Any = importlib.import_module(self._frontend)
        columns = [f"{', '.join(each.names)} as {each.dtype}" for each in inputs]
        count = len(columns) - (2 if isinstance(self._value("validation"), str) else 1)
        return {
            "feature_cols": "; ".join(columns[:count]),
            "label_cols": columns[count],
            **{name: repr(self._value(name)) for name in ("validation", "batch_size", "shuffle", "seed")},
            **{name: told(frontend.portable(self._value(name))) for name in ("loss", "metrics")},
        }

    def write(self) -> Any:
        return _EstimatorWriter(self)

    @classmethod
    def read(cls) -> Any:
        return _EstimatorReader(cls)


def _pickled(name: str, part: Any, portable: Callable[[Any], Any] = lambda part: part) -> bytes:
    try:
        packed: bytes = cloudpickle.dumps(portable(part))
    except Exception as error:
        raise TypeError(
            f"{name}={reprlib.repr(part)} cannot be pickled for Spark's executors ({reason_of(error)}): give a "
            "function that makes it, with open files, locks and connections inside"
        ) from error
    return packed


class _Model(Model, _Columns, MLReadable, MLWritable):  # type: ignore[misc]
    _frontend: ClassVar[str]

    def __init__(
        self,
        packed_model: bytes,
        history: dict[str, list[float]],
        output_shape: Sequence[int],
        input_types: Sequence[str],
        columns: Mapping[str, Any],
    ) -> None:
        super().__init__()
        for name, value in columns.items():
            self.set(self.getParam(name), value)
        self._packed = packed_model
        self.history = history
        """The loss and the metrics of each epoch, and those of the rows for validation, as ``val_loss``."""
        self._output_shape = tuple(output_shape)
        self._input_types = tuple(input_types)

    @property
    def model(self) -> Any:
        """The trained model, one more with each call."""
        return importlib.import_module(self._frontend).loaded(self._packed)

    def _transform(self, dataset: Any) -> Any:
        from pyspark.ml.functions import array_to_vector
        from pyspark.sql.types import ArrayType, DoubleType, StructField, StructType

        column = self._prediction_column()
        if column in dataset.columns:
            raise ValueError(f"the DataFrame has a column {column!r} already: drop it, or set another prediction_col")
        by_class, inputs = self._predicts_class(), self._inputs(dataset.schema, self._input_types)
        training.check_output(self._output_shape, predicts_class=by_class)
        is_vector = not by_class and self._output_shape not in ((), (1,))
        kind = ArrayType(DoubleType(), False) if is_vector else DoubleType()
        # Columns travel under names of our own: theirs may have dots, and may be there twice.
        kept = [
            StructField(f"multiring_kept_{i}", field.dataType, field.nullable, field.metadata)
            for i, field in enumerate(dataset.schema.fields)
        ]
        schema = StructType([*kept, StructField(PREDICTION, kind, False)])
        given = dataset.select("*", *(each := expressions(dataset, inputs)))
        given = given.toDF(*[field.name for field in kept], *[f"multiring_{i}" for i in range(len(each))])
        body = _prediction(self._frontend, self._packed, inputs, self._value("batch_size"), by_class)
        found = given.mapInArrow(body, schema)
        if is_vector:
            found = found.withColumn(PREDICTION, array_to_vector(PREDICTION))
        return found.toDF(*dataset.columns, column)

    def write(self) -> Any:
        return _ModelWriter(self)

    @classmethod
    def read(cls) -> Any:
        return _ModelReader(cls)


def _prediction(
    frontend: str, model: bytes, inputs: tuple[ModelInput, ...], batch_size: int, by_class: bool
) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Return the function of each task of a transformation."""

    def predict(found: Iterator[Any]) -> Iterator[Any]:
        import pyarrow

        module: Any = importlib.import_module(frontend)
        predicted, reader = module.predictor(module.loaded(model)), Reader(inputs)
        for batch in found:
            kept = batch.num_columns - sum(len(each.names) for each in inputs)
            values = pyarrow.array([], "double")
            if batch.num_rows:
                block = reader.read(batch.columns[kept:])
                starts = range(0, batch.num_rows, batch_size)
                outputs = [predicted([array[start : start + batch_size] for array in block]) for start in starts]
                values = _arrow(np.concatenate(outputs), by_class)
            names = [*batch.schema.names[:kept], PREDICTION]
            yield pyarrow.RecordBatch.from_arrays([*batch.columns[:kept], values], names)

    return predict


def _arrow(outputs: Array, by_class: bool) -> Any:
    import pyarrow

    if by_class:
        return pyarrow.array(outputs.argmax(1).astype(float))
    values = pyarrow.array(outputs.astype(float).ravel())
    if outputs.size == len(outputs):
        return values
    return pyarrow.ListArray.from_arrays(np.arange(len(outputs) + 1, dtype=np.int32) * outputs.shape[1], values)


def _context_of(files: Any) -> Any:
    """Place to write and read metadata at: Spark 3.5 wants the SparkContext, and Spark Connect has none."""
    return files.sparkSession if is_remote() else files.sc


class _StageWriter(MLWriter):  # type: ignore[misc]
    """Metadata as Spark's own stages have them, and what is pickled in Parquet beside them."""

    def __init__(self, instance: Any) -> None:
        super().__init__()
        self._instance = instance

    def _handleOverwrite(self, path: str) -> None:
        if is_remote():  # where Spark's own asks for the JVM
            raise MultiringError(
                f"overwrite().save({path!r}): a Spark Connect session cannot replace what is saved; call "
                "write().save() on a path that does not exist yet"
            )
        super()._handleOverwrite(path)

    def _save(self, path: str, pickled: bytes, extra: Any = None, params: Any = None) -> None:
        DefaultParamsWriter.saveMetadata(self._instance, path, _context_of(self), extra, params)
        frame = self.sparkSession.createDataFrame([(bytearray(pickled),)], "pickled binary")
        frame.coalesce(1).write.parquet(f"{path}/data")


class _StageReader(MLReader):  # type: ignore[misc]
    def __init__(self, cls: Any) -> None:
        super().__init__()
        self._class = cls

    def _saved(self, path: str) -> tuple[dict[str, Any], bytes]:
        metadata = DefaultParamsReader.loadMetadata(path, _context_of(self))
        named = f"{self._class.__module__}.{self._class.__qualname__}"
        if metadata["class"] != named:
            raise ValueError(f"{path} holds a {metadata['class']}: load it with that class, not with {named}")
        (row,) = self.sparkSession.read.parquet(f"{path}/data").collect()
        return metadata, bytes(row[0])


class _ModelWriter(_StageWriter):
    def saveImpl(self, path: str) -> None:
        model = self._instance
        self._save(
            path,
            model._packed,
            {
                "history": model.history,
                "outputShape": list(model._output_shape),
                "inputTypes": list(model._input_types),
            },
        )


class _ModelReader(_StageReader):
    def load(self, path: str) -> Any:
        metadata, packed = self._saved(path)
        found = (metadata[name] for name in ("history", "outputShape", "inputTypes", "paramMap"))
        model = self._class(packed, *found)
        return model._resetUid(metadata["uid"])


class _EstimatorWriter(_StageWriter):
    """All parameters are pickled: functions and models are no JSON."""

    def saveImpl(self, path: str) -> None:
        given = self._instance.extractParamMap()
        values = {param.name: _pickled(param.name, value) for param, value in given.items()}
        self._save(path, pickle.dumps(values), params={})


class _EstimatorReader(_StageReader):
    def load(self, path: str) -> Any:
        metadata, packed = self._saved(path)
        values = {name: pickle.loads(value) for name, value in pickle.loads(packed).items()}
        return self._class(**values)._resetUid(metadata["uid"])


class TorchModel(_Model):
    """A trained model of PyTorch as a Transformer of Spark ML: ``transform`` predicts each partition where it is.

    It adds the column ``prediction_col``: a number, or a vector where the model gives several numbers for each row;
    with ``predict="class"`` the index of the largest. ``model`` is the ``torch.nn.Module``, ``history`` has the loss
    and the metrics of each epoch, by name. ``write().overwrite().save(path)`` and ``load(path)`` keep it, alone or in a
    PipelineModel; what is loaded is unpickled, so load what you trust.
    """

    _frontend = "multiring.spark.torch"


class KerasModel(_Model):
    """A trained model of Keras as a Transformer of Spark ML; all else is as in `TorchModel`.

    ``model`` is the ``keras.Model``, not compiled.
    """

    _frontend = "multiring.spark.keras"


class TorchEstimator(_Estimator):
    """Trains a model of PyTorch on a DataFrame's partitions where they are: ``fit(frame)`` returns a `TorchModel`.

    ``model`` is a ``torch.nn.Module``, or a function that makes one; ``optimizer`` a function of the model; ``loss`` a
    function of outputs and labels, the mean over the rows; ``metrics`` a dictionary of such functions. The model gets
    ``feature_cols`` side by side as one tensor, rows x numbers; a list of lists is a tensor for each. Labels are a
    tensor of rows, or rows x numbers where there are several; where they are as many as the outputs they get the shape
    and the type of those. Tensors are float32, or int64 where all their columns hold integers. ValueError where the
    loss or a metric would pair an output with several labels. Numbers, arrays of numbers and Spark's vectors are taken.

    Each rank takes ``batch_size`` rows in a step, ranks count by their rows, and those that have no more take part
    with weight 0. ``num_proc`` is the number of ranks, ``validation`` a share of the rows or a boolean column,
    ``store`` a directory that all executors see, in which a `fit` that failed is resumed, and another one refused. With
    ``epochs=1`` and ``shuffle=False`` rows are trained on as they come; else each rank keeps its rows in files on its
    disk meanwhile. ``settings`` are those of `multiring.init`. Errors are those of `multiring.spark.run`.
    ``write().save(path)`` and ``load(path)`` keep all parameters, pickled, as in `TorchModel`.
    """

    _frontend = "multiring.spark.torch"
    _model_class = TorchModel

    def __init__(
        self,
        model: Any,
        optimizer: Callable[[Any], Any],
        loss: Callable[[Any, Any], Any],
        feature_cols: str | Sequence[str] | Sequence[Sequence[str]],
        label_cols: str | Sequence[str],
        *,
        metrics: Mapping[str, Callable[[Any, Any], Any]] | None = None,
        batch_size: int = 32,
        epochs: int = 1,
        num_proc: int | None = None,
        validation: float | str | None = None,
        shuffle: bool = True,
        seed: int = 0,
        predict: str = "output",
        prediction_col: str = "prediction",
        store: str | None = None,
        start_timeout: float = 600.0,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        super().__init__(**{**given, "metrics": metrics or {}, "settings": settings or {}})


class KerasEstimator(_Estimator):
    """Trains a model of Keras on a DataFrame's partitions where they are: ``fit(frame)`` returns a `KerasModel`.

    ``model`` is a ``keras.Model``, or a function that makes one; ``optimizer``, ``loss`` and ``metrics`` are as in its
    ``compile``. All else is as in `TorchEstimator`; several inputs are a list. The executors choose Keras's backend, by
    ``KERAS_BACKEND`` or their configuration. In ``history`` each metric is the mean of what batches have by their rows,
    which is not what AUC, say, would be over all rows.
    """

    _frontend = "multiring.spark.keras"
    _model_class = KerasModel

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        loss: Any,
        feature_cols: str | Sequence[str] | Sequence[Sequence[str]],
        label_cols: str | Sequence[str],
        *,
        metrics: Sequence[Any] = (),
        batch_size: int = 32,
        epochs: int = 1,
        num_proc: int | None = None,
        validation: float | str | None = None,
        shuffle: bool = True,
        seed: int = 0,
        predict: str = "output",
        prediction_col: str = "prediction",
        store: str | None = None,
        start_timeout: float = 600.0,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        super().__init__(**{**given, "settings": settings or {}})
