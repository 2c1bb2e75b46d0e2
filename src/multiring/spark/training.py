"""The work of each rank in `fit`: it keeps its partition, takes every step with the others, and counts by its rows."""

from __future__ import annotations

import importlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from multiring import api, whole_files
from multiring.spark.columns import Block, ModelInput, Reader, Spill, batches, unpacked
from multiring.worker import reason_of

NO_ROWS = "the DataFrame has no rows: there is nothing to train on"

CHECKPOINT = "multiring-checkpoint"
"""The file in the store: a line of JSON with the fit and its history, then what the trainer has saved."""


@dataclass(frozen=True)
class TrainingJob:
    """The job, as all ranks need to know it."""

    frontend: str
    """The module of the framework."""
    parts: Mapping[str, bytes]
    """Model, optimizer, loss and metrics, each pickled."""
    inputs: tuple[ModelInput, ...]
    """Inputs of the model, then the labels, then the column that marks the rows for validation, if one does."""
    validation: float | None
    """The share of rows for validation; None: the column says it."""
    batch_size: int
    epochs: int
    shuffle: bool
    seed: int
    predicts_class: bool
    store: str | None
    identity: Mapping[str, str]
    """Values that decide the fit, by name, for the checkpoint; what only ranks know is added to them."""

    @property
    def labels(self) -> ModelInput:
        return self.inputs[-1 if self.validation is not None else -2]

    @property
    def streams(self) -> bool:
        """True if each row is needed once, in the order in which it comes."""
        return self.epochs == 1 and not self.shuffle

    @property
    def validates(self) -> bool:
        return self.validation is None or self.validation > 0

    def seeds(self, *purpose: int) -> np.random.SeedSequence:
        """Random numbers of this rank, the same ones after a failure."""
        return np.random.SeedSequence([self.seed, api.rank(), *purpose])


@dataclass(frozen=True)
class Trained:
    """Result of rank 0 for the driver."""

    model: bytes
    history: dict[str, list[float]]
    output_shape: tuple[int, ...]
    resumed: int
    """Number of epochs that a checkpoint had."""


class Trainer(Protocol):
    """Result of a framework's ``trainer(parts, zeros, columns, seed)``.

    ``zeros`` is a row of zeros for each input, then for the labels, and ``columns`` names the labels in messages.
    """

    output_shape: tuple[int, ...]
    """The shape of what the model gives for one row."""

    def begin(self, seed: int) -> None:
        """Forget the metrics, and draw random numbers from this seed."""

    def train(self, block: Block | None) -> None:
        """Take a step with the other ranks, without a row where ``block`` is None."""

    def evaluate(self, block: Block) -> None: ...

    def metrics(self) -> dict[str, float]:
        """Means over the rows since `begin`."""

    def buffers(self) -> list[Any]:
        """Arrays of what the model learns without gradients, such as running means."""

    def set_buffers(self, values: list[Any]) -> None: ...

    def identity(self) -> dict[str, str]:
        """The model with its first weights, and the optimizer with its hyperparameters, told for a checkpoint."""

    def saved(self) -> bytes:
        """The model and its optimizer."""

    def restore(self, saved: bytes) -> None: ...

    def result(self) -> bytes:
        """The model, as `predictor` of the same module takes it."""


def train(rows: Iterable[Any], job: TrainingJob) -> Trained | None:
    """Train with all other ranks; None on all but rank 0."""
    frontend: Any = importlib.import_module(job.frontend)
    with ExitStack() as stack:
        stack.enter_context(frontend.isolated())
        kept, held = stack.enter_context(closing(Spill())), stack.enter_context(closing(Spill()))
        reader = Reader(job.inputs)
        rows_in_all = None
        stream = _training_rows(rows, reader, job, held)
        if not job.streams:
            for block in stream:
                kept.append(block)
            rows_in_all = _check_rows(job, kept.rows, held.rows)
        elif (first := next(stream, None)) is not None:
            stream = itertools.chain([first], stream)
        columns = ", ".join(map(repr, job.labels.names))
        trainer: Trainer = frontend.trainer(job.parts, _agreed_zeros(job, reader), columns, job.seed)
        check_output(trainer.output_shape, predicts_class=job.predicts_class)
        checkpoint = None if job.store is None else _Checkpoint(job, trainer, rows_in_all)
        history = {} if checkpoint is None else checkpoint.restore()
        resumed = len(history.get("loss", []))
        for epoch in range(resumed, job.epochs):
            if job.streams:
                blocks = batches(stream, job.batch_size)
            else:
                draw = np.random.default_rng(job.seeds(1, epoch))
                blocks = kept.batches(job.batch_size, draw.permutation(kept.rows) if job.shuffle else None)
            trained = _train_epoch(trainer, blocks, job.seeds(2, epoch))
            if job.streams:
                _check_rows(job, trained, held.rows)
            _average_buffers(trainer, trained)
            found = _mean(trainer.metrics(), trained)
            if job.validates:
                trainer.begin(_number(job.seeds(3, epoch)))
                for block in held.batches(job.batch_size):
                    trainer.evaluate(block)
                found |= {f"val_{name}": value for name, value in _mean(trainer.metrics(), held.rows).items()}
            for name, value in found.items():
                history.setdefault(name, []).append(value)
            if checkpoint is not None:
                checkpoint.save(history)
        result = Trained(trainer.result(), history, trainer.output_shape, resumed) if api.rank() == 0 else None
        if checkpoint is not None:
            checkpoint.remove()
        return result


def _training_rows(rows: Iterable[Any], reader: Reader, job: TrainingJob, held: Spill) -> Iterator[Block]:
    """The partition's rows, but for those for validation, which are held back."""
    draw = np.random.default_rng(job.seeds(0))
    for batch in unpacked(rows):
        *block, last = reader.read(batch.columns)
        if job.validation is None:
            where = last != 0
        else:
            block.append(last)
            where = draw.random(len(last)) < job.validation
        if where.any():
            held.append([array[where] for array in block])
        if not where.all():
            yield [array[~where] for array in block]


def _agreed_zeros(job: TrainingJob, reader: Reader) -> Block:
    """A row of zeros for each input of the model, and of labels; ValueError if ranks read different widths."""
    widths: dict[str, int] = {}
    for rank, theirs in enumerate(api.all_gather_object(reader.widths)):
        for name, width in theirs.items():
            if widths.setdefault(name, width) != width:
                raise ValueError(
                    f"column {name!r} has {width} numbers in the rows of rank {rank}, and {widths[name]} in others: "
                    "all rows need equally many"
                )
    if not widths:
        _check_rows(job, 0, 0)
    needed = job.inputs[: None if job.validation is not None else -1]
    shapes = [(1,) if each.flat else (1, sum(widths[name] for name in each.names)) for each in needed]
    return [np.zeros(shape, each.dtype) for shape, each in zip(shapes, needed, strict=True)]


def _check_rows(job: TrainingJob, trained: int, held: int) -> int:
    """Return the number of rows in all; ValueError on all ranks if the DataFrame had no rows for what is asked."""
    counts = np.array([trained, held])
    api.all_reduce(counts)
    rows, share = int(counts.sum()), "a column" if job.validation is None else f"validation={job.validation}"
    if not rows:
        raise ValueError(NO_ROWS)
    if not counts[0] or (job.validates and not counts[1]):
        raise ValueError(
            f"{counts[0]} of the DataFrame's {rows} row(s) are for training and {counts[1]} for validation, by "
            f"{share}: both need some; give another share, or more rows"
        )
    return rows


def check_output(shape: tuple[int, ...], *, predicts_class: bool) -> None:
    """ValueError for a model whose outputs for a row are no prediction."""
    if len(shape) > 1 or (shape and not shape[0]):
        raise ValueError(
            f"the model gives an array of shape {shape} for each row: a prediction is a number or a vector"
        )
    if predicts_class and shape in ((), (1,)):
        raise ValueError("predict='class': the model gives one number for each row, and not one for each class")


def _train_epoch(trainer: Trainer, blocks: Iterator[Block], seeds: np.random.SeedSequence) -> int:
    """Take steps until no rank has rows left; the number of rows that this rank had."""
    trainer.begin(_number(seeds))
    rows = 0
    while True:
        block = next(blocks, None)
        mine = 0 if block is None else len(block[-1])
        api.all_reduce(anybody := np.array([mine]))
        if not anybody[0]:
            return rows
        trainer.train(block)
        rows += mine


def _mean(metrics: dict[str, float], rows: int) -> dict[str, float]:
    """The metrics over the rows of all ranks; those without rows need not know what there is."""
    everyone = [each for each in api.all_gather_object((rows, metrics)) if each[0]]
    total = sum(count for count, _ in everyone)
    return {name: sum(count * found[name] for count, found in everyone) / total for name in everyone[0][1]}


def _average_buffers(trainer: Trainer, rows: int) -> None:
    """Take the mean by the ranks' rows, in float64; what is equal on all ranks that have rows stays as it is."""
    values = trainer.buffers()
    if not values:
        return
    api.all_reduce(total := np.array([float(rows)]))
    means = []
    for value in values:  # infinite ones too, which no product with 0 may meet
        low, high = (value.copy(), value.copy()) if rows else (np.full_like(value, fill) for fill in (np.inf, -np.inf))
        api.all_reduce(low, "min")
        api.all_reduce(high, "max")
        mean = np.zeros_like(value)
        if rows:
            mean += value * (rows / total[0])
        api.all_reduce(mean)
        means.append(np.where(low == high, low, mean))
    trainer.set_buffers(means)


def _number(seeds: np.random.SeedSequence) -> int:
    return int(seeds.generate_state(1)[0])


class _Checkpoint:
    """The file in the store, which rank 0 reads and writes."""

    def __init__(self, job: TrainingJob, trainer: Trainer, rows: int | None) -> None:
        """``trainer`` has not trained yet; ``rows`` is None where they are not counted before they are trained on."""
        assert job.store is not None
        self._path = Path(job.store) / CHECKPOINT
        self._job, self._trainer = job, trainer
        self._identity = {**job.identity, **trainer.identity()}
        if rows is not None:
            self._identity["number of rows"] = str(rows)

    def restore(self) -> dict[str, list[float]]:
        """Go on from the checkpoint of a `fit` that failed; the history until then. ValueError for another fit's."""
        refused, found = None, None
        if api.rank() == 0:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            found = self._path.read_bytes() if self._path.exists() else None
            refused = None if found is None else self._refusal(found)
        refused, found = api.broadcast_object((refused, None if refused else found))
        remedy = "delete the file, or give this fit a store of its own"
        if refused is not None:
            raise ValueError(f"{self._path} {refused}: {remedy}")
        if found is None:
            return {}
        header, _, saved = found.partition(b"\n")
        try:
            self._trainer.restore(saved)
        except Exception as error:
            raise ValueError(f"{self._path} cannot be resumed ({reason_of(error)}): {remedy}") from error
        history: dict[str, list[float]] = json.loads(header)["history"]
        return history

    def _refusal(self, found: bytes) -> str | None:
        """Return why this fit cannot go on from it."""
        try:
            header = json.loads(found.partition(b"\n")[0])
            before, epochs = dict(header["fit"]), len(header["history"]["loss"])
        except (ValueError, TypeError, KeyError) as error:
            return f"is no checkpoint of a fit ({reason_of(error)})"
        mine = self._identity
        differing = [
            f"{name} was {before[name]}, and is {mine[name]}"
            for name in mine.keys() & before.keys()
            if mine[name] != before[name]
        ]
        if differing:
            return f"is the checkpoint of another fit ({'; '.join(sorted(differing))})"
        if epochs > self._job.epochs:
            return f"has {epochs} epochs of this fit, and epochs={self._job.epochs} asks for fewer"
        return None

    def save(self, history: dict[str, list[float]]) -> None:
        if api.rank() == 0:
            header = json.dumps({"fit": self._identity, "history": history}).encode() + b"\n"
            whole_files.replace(self._path, [header, self._trainer.saved()], lasting=True)

    def remove(self) -> None:
        """Remove it, once nobody has failed."""
        api.barrier()
        if api.rank() == 0:
            self._path.unlink(missing_ok=True)
