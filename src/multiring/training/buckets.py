"""Gradients fused into buckets: few large all-reduces instead of many small ones, each begun as soon as it can be.

A bucket is one buffer in the arena. Every gradient has a slot there, and after the slots each has a mark, which a rank
sets if it has that gradient in this step. The sum of the marks says who else had it, at no further message. They begin
where a block of a narrow wire does, or small gradients beside them would travel as zeros, and marks beside large ones;
where even a mark is small beside another, each has a block:

    | gradient 7 | gradient 6 |  gradient 5  | zeros | marks 7 6 5 |

Backward passes finish gradients from the last layer to the first, so the buckets are filled in that order, and all
ranks reduce them in the same one, whatever the order in which their own gradients become ready.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from multiring.env import parse_wire, whole_number
from multiring.errors import ResourceError
from multiring.planning.plan import LONGEST_BLOCK, NARROW
from multiring.runtime.buffers import ITEMSIZES, Piece, check_residual, writable
from multiring.runtime.comm import Communicator, group_of
from multiring.runtime.engine import Part
from multiring.runtime.group import Group
from multiring.training.labels import label
from multiring.training.weights import share

BUCKET_BYTES = 4 << 20
"""A bucket is closed before it would exceed this: large enough to be reduced at full bandwidth, and several in a model,
so that the first is on its way while the rest is being computed."""

ALIGNMENT = 64

_log = logging.getLogger("multiring")


class GradientSpec(NamedTuple):
    """Number and type of a gradient's elements, and the label that tells it from others.

    ``name`` is compared between the ranks: `labels.part` makes one of a name and a shape.
    """

    elements: int
    dtype: str
    name: str = ""


View: TypeAlias = "Callable[[np.ndarray[Any, Any], str], Any]"
"""Makes an array of a framework of bytes in memory, of the given type."""


class Slot(NamedTuple):
    """Place of a gradient: its bucket, its first element there, and the number of its elements."""

    gradient: int
    start: int
    elements: int


ResidualOf: TypeAlias = "Callable[[Sequence[Slot], int], np.ndarray[Any, Any]]"
"""Makes the residual of a bucket with these slots and so many float32, all in all: an array of as many."""


def numpy_view(memory: np.ndarray[Any, Any], dtype: str) -> Any:
    """The bytes as a NumPy array; for bfloat16, ``ml_dtypes`` has to be imported."""
    return memory.view(dtype)


def check_bucket_bytes(bucket_bytes: Any) -> int:
    """A size of buckets that a caller gave, as an int; ValueError if it is none."""
    try:
        size = whole_number("bucket_bytes", bucket_bytes)
    except TypeError:
        size = 0
    if size < 1:
        raise ValueError(
            f"bucket_bytes={bucket_bytes!r}: a number of bytes is needed, whole and 1 or more, such as {BUCKET_BYTES}"
        )
    return size


def arrange(
    gradients: Sequence[GradientSpec], order: Iterable[int], bucket_bytes: int = BUCKET_BYTES
) -> list[list[int]]:
    """The indices of the gradients of each bucket, when they become ready in ``order``; pure.

    A bucket holds one type. The buckets are in the order in which their last gradients become ready.
    """
    bucket_bytes = check_bucket_bytes(bucket_bytes)
    closed: list[list[int]] = []
    filling: dict[str, list[int]] = {}
    filled: dict[str, int] = {}
    last: dict[int, int] = {}
    for moment, index in enumerate(order):
        dtype, size = gradients[index].dtype, _slot_bytes(gradients[index])
        if dtype in filling and filled[dtype] + size > bucket_bytes:
            closed.append(filling.pop(dtype))
        if dtype not in filling:
            filling[dtype], filled[dtype] = [], 0
        filling[dtype].append(index)
        filled[dtype] += size
        last[index] = moment
    return sorted([*closed, *filling.values()], key=lambda members: last[members[-1]])


def agreed_order(communicator: Communicator, seen: Sequence[int], count: int) -> list[int]:
    """All of ``count`` gradients in the order in which rank 0 has ``seen`` them become ready; all ranks call it.

    What it has not seen comes last.
    """
    order = communicator.broadcast_object(list(seen))
    return [*order, *sorted(set(range(count)) - set(order))]


class Bucket:
    """A buffer in the arena: ``slots[i]`` is that of the i-th gradient, one-dimensional and aligned to 64 bytes."""

    def __init__(
        self,
        communicator: Communicator,
        gradients: Sequence[GradientSpec],
        view: View = numpy_view,
        residual_of: ResidualOf | None = None,
    ) -> None:
        """``residual_of`` is asked where the gradients are float32; the slots' indices are among ``gradients``."""
        (dtype,) = {gradient.dtype for gradient in gradients}
        itemsize = ITEMSIZES[dtype]
        starts = np.cumsum([0, *map(_slot_bytes, gradients)]) // itemsize
        marks = -(-int(starts[-1]) // LONGEST_BLOCK) * LONGEST_BLOCK
        self._group = group_of(communicator)
        apart = _between_marks(self._group)
        elements = marks + apart * len(gradients)
        self._label = bucket_label(gradients)
        memory = _memory(communicator, elements * itemsize)
        buffer = view(memory, dtype)
        buffer[:] = 0  # the gaps between the slots are summed too
        self._piece = writable(buffer)
        self.slots = [
            buffer[int(start) : int(start) + gradient.elements]
            for start, gradient in zip(starts[:-1], gradients, strict=True)
        ]
        self.marks = buffer[marks::apart]
        self._marks_at = marks
        self._places = [
            Slot(i, int(start), gradient.elements)
            for i, (start, gradient) in enumerate(zip(starts[:-1], gradients, strict=True))
        ]
        self._narrowed: np.ndarray[Any, Any] | None = memory.view(np.float32) if dtype == "float32" else None
        self._gaps = np.flatnonzero(_is_gap(self._places, marks, apart, elements))
        self._residual: np.ndarray[Any, Any] | None = None
        self._kept: Piece | None = None
        if residual_of is not None and dtype == "float32":
            self._residual = residual_of(self._places, elements)
            self._kept = writable(self._residual)
            check_residual(self._piece, "sum", self._kept)
        self._set_aside: list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]] = []
        self._work: Part | None = None

    def start(self, op: str) -> None:
        """Begin to reduce it; until `wait` its memory may be neither read nor written."""
        if self._narrowed is not None:
            self._narrowed[self._gaps] = 0  # after a step in which their block was NaN they would make it NaN again
        if self._residual is not None:
            self._residual[self._marks_at :] = 0  # a mark says what is so in this step
        self._work = self._group.start("all_reduce", self._piece, op, label=self._label, residual=self._kept)

    def leave_out(self, position: int) -> None:
        """Send a gradient as zeros, and what is owed of it not now: nobody may have a use for it."""
        self.slots[position][:] = 0
        self.marks[position] = 0
        if self._residual is not None:
            _, start, elements = self._places[position]
            owed = self._residual[start : start + elements]
            self._set_aside.append((owed, owed.copy()))
            owed[:] = 0

    def wait(self) -> None:
        """Block until it is reduced."""
        if self._work is not None:
            work, self._work = self._work, None
            work.wait()
        for owed, before in self._set_aside:
            owed += before
        self._set_aside.clear()


class Buckets:
    """All buckets of a model. For each step: `begin`, fill `slot` i and call `ready` for each gradient, `finish`."""

    def __init__(
        self,
        communicator: Communicator,
        gradients: Sequence[GradientSpec],
        order: Iterable[int],
        *,
        bucket_bytes: int = BUCKET_BYTES,
        view: View = numpy_view,
        residual_of: ResidualOf | None = None,
    ) -> None:
        """``order`` holds the indices that are fused, and is the same on all ranks, as everything here is.

        With ``residual_of`` what buckets of float32 lose on narrow wires is kept, and sent in a later step.
        """
        self._communicator = communicator
        self._members = arrange(gradients, order, bucket_bytes)
        self._buckets = [
            Bucket(communicator, [gradients[i] for i in members], view, _renumbered(residual_of, members))
            for members in self._members
        ]
        self._places = {
            index: (number, position)
            for number, members in enumerate(self._members)
            for position, index in enumerate(members)
        }
        self._op = "avg"
        self._reset()

    def _reset(self) -> None:
        self._ready: set[int] = set()
        self._missing = [len(members) for members in self._members]
        self._started = 0

    def begin(self, weight: float | None = None) -> float:
        """Begin a step. Returns the factor by which gradients are to be multiplied on their way into the slots.

        Without ``weight`` it is 1 and the result is the mean over the ranks; with it, on all ranks, the ranks count by
        their weights.
        """
        self._op = "avg" if weight is None else "sum"
        return 1.0 if weight is None else share(self._communicator, weight)

    def __contains__(self, index: int) -> bool:
        return index in self._places

    def slot(self, index: int) -> Any:
        """Return the slot of gradient ``index``: written before `ready`, read after `finish`."""
        number, position = self._places[index]
        return self._buckets[number].slots[position]

    def is_ready(self, index: int) -> bool:
        """True if `ready` was called in this step."""
        return index in self._ready

    def ready(self, index: int) -> None:
        """Gradient ``index`` is in its slot; buckets that are complete, and all before them, are sent off.

        ValueError if it was ready in this step before.
        """
        if index in self._ready:
            raise ValueError(f"gradient {index} became ready twice in one step")
        self._ready.add(index)
        number, position = self._places[index]
        self._buckets[number].marks[position] = 1
        self._missing[number] -= 1
        while self._started < len(self._buckets) and self._missing[self._started] == 0:
            self._buckets[self._started].start(self._op)
            self._started += 1

    def abandon(self) -> None:
        """Forget the step that was begun, whose gradients will not all come."""
        for bucket in self._buckets[: self._started]:
            bucket.wait()
        self._reset()

    def finish(self) -> set[int]:
        """Send off what is left, a gradient that is not ready as zeros, and wait for all.

        Returns the gradients that any rank had; the slots of the others hold zeros.
        """
        for number in range(self._started, len(self._buckets)):
            for index in set(self._members[number]) - self._ready:
                self._buckets[number].leave_out(self._places[index][1])
            self._buckets[number].start(self._op)
        self._reset()
        present: set[int] = set()
        for members, bucket in zip(self._members, self._buckets, strict=True):
            bucket.wait()
            present.update(index for index, mark in zip(members, bucket.marks.tolist(), strict=True) if mark != 0)
        return present


def _between_marks(group: Group) -> int:
    """Elements from a mark to the next one: where one rank's mark may be too small a part of all ranks', a block."""
    wire = parse_wire(group.world.settings.wire)
    formats = [NARROW[name] for name in wire.values()] if isinstance(wire, dict) else []
    return max((format.block for format in formats if format.steps < group.size), default=1)


def _renumbered(residual_of: ResidualOf | None, members: Sequence[int]) -> ResidualOf | None:
    """The same for the slots of one bucket, which know their gradients by position."""
    if residual_of is None:
        return None
    return lambda slots, count: residual_of([slot._replace(gradient=members[slot.gradient]) for slot in slots], count)


def bucket_label(gradients: Sequence[GradientSpec], what: str = "gradients") -> int:
    """The label of a bucket's collective: ranks that have put other gradients into it get a Mismatch."""
    return label(what, [gradient.name for gradient in gradients])


def fill(slot: np.ndarray[Any, Any], values: np.ndarray[Any, Any], factor: float) -> None:
    """Put ``values``, of any shape, times ``factor`` into a slot of NumPy; what counts for nothing may be NaN."""
    if factor == 0:
        slot[:] = 0
    else:
        np.multiply(values.reshape(-1), values.dtype.type(factor), out=slot)


def averages(
    communicator: Communicator,
    gradients: Sequence[GradientSpec],
    put: Callable[[Any, int, float], object],
    *,
    weight: float | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    view: View = numpy_view,
) -> list[Any]:
    """The means over the ranks of gradients that are all there: new one-dimensional arrays in the arena.

    ``put(slot, i, factor)`` puts gradient i, times ``factor``, into its slot, while earlier buckets are reduced. With
    ``weight`` the ranks count by their weights.
    """
    factor = 1.0 if weight is None else share(communicator, weight)
    slots: list[Any] = [None] * len(gradients)
    started = []
    for members in arrange(gradients, reversed(range(len(gradients))), bucket_bytes):
        bucket = Bucket(communicator, [gradients[i] for i in members], view)
        for slot, i in zip(bucket.slots, members, strict=True):
            put(slot, i, factor)
            slots[i] = slot
        bucket.start("avg" if weight is None else "sum")
        started.append(bucket)
    for bucket in started:
        bucket.wait()
    return slots


def _is_gap(slots: Sequence[Slot], marks: int, apart: int, elements: int) -> np.ndarray[Any, Any]:
    """True for each element of a bucket that is neither in a slot nor a mark."""
    gap = np.ones(elements, bool)
    for _, start, count in slots:
        gap[start : start + count] = False
    gap[marks::apart] = False
    return gap


def _slot_bytes(gradient: GradientSpec) -> int:
    return -(-gradient.elements * ITEMSIZES[gradient.dtype] // ALIGNMENT) * ALIGNMENT


def _memory(communicator: Communicator, nbytes: int) -> np.ndarray[Any, Any]:
    try:
        return communicator.empty(nbytes, np.uint8)
    except ResourceError as error:
        _log.warning("gradients are fused in private memory, which costs copies: %s", error)
        return np.empty(nbytes, np.uint8)
