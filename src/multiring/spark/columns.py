"""Columns of a DataFrame as arrays: what the driver selects, what a rank reads, and where it keeps its rows."""

from __future__ import annotations

import os
import re
import reprlib
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

import numpy as np

Array = np.ndarray[Any, Any]
Block = list[Array]
"""Some rows: an array for each input of the model, then the labels; all as long as there are rows."""

INTEGERS = ("boolean", "tinyint", "smallint", "int", "bigint")
FLOATS = ("float", "double")


@dataclass(frozen=True)
class ModelInput:
    """Columns of numbers that make one array together, side by side."""

    names: tuple[str, ...]
    dtype: str
    flat: bool = False
    """One number a row, without a dimension for the columns: a label."""


def input_of(schema: Any, names: Sequence[str], *, label: bool = False, trained_on: str | None = None) -> ModelInput:
    """Float32, or int64 where all columns have integers; ValueError or TypeError for what holds no numbers.

    ``trained_on`` is the type that a trained model takes, to which integers are cast, and other numbers not to int64.
    """
    kinds = [_kind(schema, name) for name in names]
    integers = all(kind.removeprefix("array<").removesuffix(">") in INTEGERS for kind in kinds)
    if trained_on == "int64" and not integers:
        given = ", ".join(f"{name!r} ({kind})" for name, kind in zip(names, kinds, strict=True))
        raise TypeError(f"the model was trained on integers, and some of the column(s) {given} hold others: cast them")
    one = label and len(kinds) == 1 and kinds[0] in (*INTEGERS, *FLOATS)
    return ModelInput(tuple(names), trained_on or ("int64" if integers else "float32"), one)


def _kind(schema: Any, name: str) -> str:
    """Return a column's type as Spark writes it: "vector" for both kinds of vectors, decimals as "double"."""
    if name not in schema.names:
        raise ValueError(f"column {name!r} is not in the DataFrame, which has {', '.join(schema.names)}")
    kind = re.sub(r"\bdecimal\(\d+,\d+\)", "double", schema[name].dataType.simpleString())
    if kind == "vector" or kind.removeprefix("array<").removesuffix(">") in (*INTEGERS, *FLOATS):
        return kind
    raise TypeError(
        f"column {name!r} is of type {kind}: features and labels are numbers, arrays of numbers or vectors of "
        "pyspark.ml; cast, index or flatten it first"
    )


def quoted(name: str) -> str:
    """A column's name as Spark takes it where dots and backticks belong to the name."""
    escaped = name.replace("`", "``")
    return f"`{escaped}`"


def expressions(frame: Any, inputs: Iterable[ModelInput]) -> list[Any]:
    """Spark's columns of the inputs, vectors as arrays, under names of our own (a column may stand in two inputs)."""
    from pyspark.ml.functions import vector_to_array
    from pyspark.sql import functions

    found: list[Any] = []
    for each in inputs:
        for name in each.names:
            kind, column = _kind(frame.schema, name), frame[quoted(name)]
            number = "float" if each.dtype == "float32" else "bigint"
            if kind == "vector":
                absent = functions.lit(None).cast("array<float>")
                column = functions.when(column.isNull(), absent).otherwise(vector_to_array(column, "float32"))
            elif kind.startswith("array<"):
                column = column.cast(f"array<{number}>")
            else:
                column = column.cast(number)
            found.append(column.alias(f"multiring_{len(found)}"))
    return found


class Reader:
    """Makes arrays of Arrow's columns, which are those of `expressions`; ValueError for nulls and ragged arrays."""

    def __init__(self, inputs: Sequence[ModelInput]) -> None:
        self._inputs = inputs
        self._names = [name for each in inputs for name in each.names]
        self.widths: dict[str, int] = {}
        """Number of numbers in a row of each column; empty before the first row."""

    def read(self, columns: Sequence[Any]) -> Block:
        arrays = iter([self._numbers(columns, i) for i in range(len(self._names))])
        block = []
        for each in self._inputs:
            parts = [next(arrays) for _ in each.names]
            whole = np.concatenate(parts, axis=1).astype(each.dtype, copy=False)
            block.append(whole[:, 0] if each.flat else whole)
        return block

    def _numbers(self, columns: Sequence[Any], i: int) -> Array:
        column, name = columns[i], self._names[i]
        if column.null_count:
            self._refuse(columns, i, column.is_null().to_numpy(zero_copy_only=False), "is null")
        if not hasattr(column, "offsets"):
            self.widths[name] = 1
            return np.asarray(column.to_numpy(zero_copy_only=False))[:, None]
        lengths = np.diff(column.offsets.to_numpy())
        width = self.widths.get(name) or int(lengths[0])
        if not width:
            self._refuse(columns, i, lengths == 0, "has no numbers")
        if (lengths != width).any():
            self._refuse(columns, i, lengths != width, f"has not the {width} numbers of the rows before")
        values = column.flatten()
        if values.null_count:
            nulls = values.is_null().to_numpy(zero_copy_only=False).reshape(-1, width)
            self._refuse(columns, i, nulls.any(1), "has a null")
        self.widths[name] = width
        return np.asarray(values.to_numpy(zero_copy_only=False)).reshape(-1, width)

    def _refuse(self, columns: Sequence[Any], i: int, where: Array, what: str) -> None:
        row = int(np.argmax(where))
        values = {name: column[row].as_py() for name, column in zip(self._names, columns, strict=True)}
        shown = ", ".join(f"{name}={reprlib.repr(value)}" for name, value in values.items())
        raise ValueError(f"column {self._names[i]!r} {what} in the row with {shown}: fill it, or drop such rows")


def packed(frame: Any) -> Any:
    """An RDD of the frame's partitions, each row a batch of rows in Arrow's stream format."""

    def pack(batches: Iterator[Any]) -> Iterator[Any]:  # travels by value, as `body` of the stage does
        import pyarrow

        for batch in batches:
            sink = pyarrow.BufferOutputStream()
            with pyarrow.ipc.new_stream(sink, batch.schema) as stream:
                stream.write_batch(batch)
            yield pyarrow.RecordBatch.from_pydict({"rows": [sink.getvalue().to_pybytes()]})

    return frame.mapInArrow(pack, "rows binary").rdd


def unpacked(rows: Iterable[Any]) -> Iterator[Any]:
    """Arrow's batches of what `packed` has made, without empty ones."""
    import pyarrow

    for row in rows:
        with pyarrow.ipc.open_stream(pyarrow.py_buffer(row[0])) as stream:
            yield from (batch for batch in stream if batch.num_rows)


def fits_a_barrier(rdd: Any) -> bool:
    """True if all that Spark computes in one stage with this RDD has as many partitions, as a barrier stage needs."""
    partitions, seen, left = rdd.getNumPartitions(), set(), [rdd._jrdd.rdd()]
    while left:
        one = left.pop()
        if one.getNumPartitions() != partitions:
            return False
        dependencies = one.dependencies()
        for i in range(dependencies.size()):
            above = dependencies.apply(i)
            if "ShuffleDependency" not in above.getClass().getName() and above.rdd().id() not in seen:
                seen.add(above.rdd().id())
                left.append(above.rdd())
    return True


class Spill:
    """Rows on this host's disk, in files without a name: nothing of them is left, however the process ends."""

    def __init__(self) -> None:
        self._files: list[IO[bytes]] = []
        self._forms: list[tuple[np.dtype[Any], tuple[int, ...]]] = []
        self.rows = 0

    def append(self, block: Block) -> None:
        if not self._files:
            # Spark's own directories of this executor, on the disks that were given to it.
            folder = os.environ.get("SPARK_LOCAL_DIRS", "").split(",")[0] or None
            self._files = [tempfile.TemporaryFile(dir=folder) for _ in block]  # noqa: SIM115
            self._forms = [(array.dtype, array.shape[1:]) for array in block]
        for file, array in zip(self._files, block, strict=True):
            file.write(np.ascontiguousarray(array).data)
        self.rows += len(block[0])

    def batches(self, size: int, order: Array | None = None) -> Iterator[Block]:
        """The rows in blocks of ``size``, by ``order`` or as they came."""
        arrays = []
        for file, (dtype, shape) in zip(self._files, self._forms, strict=True):
            file.flush()
            arrays.append(np.memmap(file, dtype, mode="r", shape=(self.rows, *shape)))
        for start in range(0, self.rows, size):
            where = slice(start, start + size) if order is None else order[start : start + size]
            yield [np.array(array[where]) for array in arrays]

    def close(self) -> None:
        for file in self._files:
            file.close()


def batches(blocks: Iterable[Block], size: int) -> Iterator[Block]:
    """The same rows in blocks of ``size``, the last one perhaps smaller."""
    rest: Block = []
    for block in blocks:
        rest = [np.concatenate(pair) for pair in zip(rest, block, strict=True)] if rest else block
        full = len(rest[0]) // size * size
        for start in range(0, full, size):
            yield [array[start : start + size] for array in rest]
        rest = [array[full:] for array in rest]
    if rest and len(rest[0]):
        yield rest
