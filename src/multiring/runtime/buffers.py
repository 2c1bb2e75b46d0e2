"""Checks of a caller's buffers, and the errors about those that it may not hand over."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from multiring import _native

DTYPES = {name: code for code, name in enumerate(_native.DTYPES)}
OPS = {name: code for code, name in enumerate(_native.OPS)}
COLLECTIVES = {name: code for code, name in enumerate(_native.COLLECTIVES)}
ITEMSIZES = dict(zip(_native.DTYPES, _native.ITEMSIZES, strict=True))
OPS_OF = _native.OPS_OF

_IMMUTABLE = ("jax", "jaxlib", "tensorflow")


@dataclass(slots=True)
class Piece:
    """Elements in memory, and the object that keeps it; a buffer too, for front ends that know their tensors."""

    owner: Any
    pointer: int
    count: int
    dtype: str

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return ITEMSIZES[self.dtype]

    @property
    def shape(self) -> tuple[int, ...]:
        """Flat."""
        return (self.count,)


class DeviceBlocks(NamedTuple):
    """Blocks of a buffer on a CUDA device: ``blocks`` of them from block ``first`` on, the first at ``pointer``, the
    others ``pitch`` bytes apart."""

    pointer: int
    pitch: int
    first: int
    blocks: int


@dataclass(frozen=True, slots=True)
class DeviceBuffer:
    """A call's buffer on a CUDA device, of ``count`` elements a block: what is read of it, and what is written.

    Its elements are ready when ``stream`` has done what it has been given; ``owner`` keeps the memory.
    """

    owner: Any
    count: int
    dtype: str
    device: int
    stream: int
    out: DeviceBlocks | None
    into: DeviceBlocks | None


def all_of(x: Any, found: _native.Description) -> Piece:
    """The whole of a buffer that was found to be such."""
    return Piece(keeper(x), found.pointer, found.count, found.dtype)


def readable(x: Any) -> Piece:
    """The whole of a buffer that is read; TypeError or ValueError with the remedy if it cannot be."""
    return all_of(x, source(x))


def writable(x: Any) -> Piece:
    """The whole of a buffer that is written in place; TypeError or ValueError with the remedy if it cannot be."""
    return all_of(x, target(x))


def keeper(x: Any) -> Any:
    """Return the owner of a buffer's memory: a torch tensor's storage, as ``x.data = y`` gives the tensor another."""
    storage = getattr(x, "untyped_storage", None)
    return x if storage is None else storage()


def source(x: Any) -> _native.Description:
    """Describe a buffer that is read; TypeError or ValueError with the remedy if it cannot be."""
    found = _described(x)
    if not found.contiguous or found.device != "cpu":
        raise _refusal(found, written=False)
    return found


def target(x: Any) -> _native.Description:
    """Describe a buffer that is written in place; TypeError or ValueError with the remedy if it cannot be."""
    if type(x) is not np.ndarray and type(x).__module__.partition(".")[0] in _IMMUTABLE:
        raise TypeError(
            f"{type(x).__module__}.{type(x).__qualname__} is immutable, and the result is written in place: hand over "
            "numpy.array(x), and convert it back"
        )
    found = _described(x)
    if not found.contiguous or not found.writable or found.device != "cpu":
        raise _refusal(found, written=True)
    return found


def _described(x: Any) -> _native.Description:
    if type(x) is not np.ndarray and isinstance(x, np.ndarray) and isinstance(x, np.ma.MaskedArray):
        raise TypeError(
            "a masked array is moved without its mask, so that what it hides would count: hand over x.filled(0), or "
            "x.data if it is to count"
        )
    return _native.describe(x)


def _refusal(found: _native.Description, *, written: bool) -> Exception:
    what = f"the buffer (shape {found.shape}, {found.dtype})"
    if found.device != "cpu":
        return ValueError(
            f"{what} lies on {found.device}, and multiring moves memory of the CPU: hand over x.cpu() and copy it back"
        )
    if not found.contiguous and written:
        return ValueError(
            f"{what} is not contiguous in C order, and the result is written in place: hand over "
            "y = numpy.ascontiguousarray(x), or y = x.contiguous() in torch, and copy the result back: x[...] = y"
        )
    if not found.contiguous:
        return ValueError(
            f"{what} is not contiguous in C order: hand over numpy.ascontiguousarray(x), or x.contiguous() in torch"
        )
    return ValueError(
        f"{what} is read-only, and the result is written in place: hand over y = numpy.array(x), and use y afterwards"
    )


def apart(origin: Piece, written: Piece) -> Piece:
    """Return the source, or a copy of it if it partly overlaps the memory that is written meanwhile."""
    nbytes = origin.count * origin.itemsize
    if (
        origin.pointer + nbytes <= written.pointer
        or written.pointer + written.count * written.itemsize <= origin.pointer
    ):
        return origin
    scratch = np.empty(nbytes, np.uint8)
    copy(scratch.ctypes.data, origin.pointer, nbytes)
    return Piece(scratch, scratch.ctypes.data, origin.count, origin.dtype)


def gathered(mine: Piece, whole: Piece, rank: int) -> Piece:
    """The first block of an all_gather in ``whole``, where this rank's block is filled now."""
    nbytes = mine.count * mine.itemsize
    copy(whole.pointer + rank * nbytes, mine.pointer, nbytes)
    return Piece(whole.owner, whole.pointer, mine.count, mine.dtype)


def exchanged(whole: Piece, received: Piece, size: int) -> Piece:
    """The first block of an all_to_all in ``received``, which is filled with what the ranks are to get."""
    copy(received.pointer, whole.pointer, whole.count * whole.itemsize)
    return Piece(received.owner, received.pointer, whole.count // size, whole.dtype)


def scattered(whole: Piece, mine: Piece, rank: int) -> tuple[Piece, Callable[[], None]]:
    """The first block of a reduce_scatter, and what puts this rank's result into ``mine`` afterwards.

    The blocks are a copy of ``whole``, as a plan leaves partial sums in all of them.
    """
    nbytes = mine.count * mine.itemsize
    scratch = np.empty(whole.count * whole.itemsize, np.uint8)
    copy(scratch.ctypes.data, whole.pointer, scratch.nbytes)

    def finish() -> None:  # keeps scratch alive: the engine lets go of it before
        copy(mine.pointer, scratch.ctypes.data + rank * nbytes, nbytes)

    return Piece(scratch, scratch.ctypes.data, mine.count, whole.dtype), finish


def check_residual(piece: Piece, op: str, residual: Piece) -> None:
    """ValueError unless ``residual`` can keep what rounding ``piece`` loses on its way to a sum."""
    if piece.dtype != "float32" or op not in ("sum", "avg"):
        raise ValueError(
            f"residual: only float32 is rounded, where it is summed or averaged, and x is {piece.dtype}, op {op!r}: "
            "leave residual out"
        )
    if residual.dtype != "float32" or residual.count != piece.count:
        raise ValueError(
            f"residual is {residual.count} x {residual.dtype}, and x {piece.count} x float32: give as many float32, "
            "zeros at first"
        )
    nbytes = piece.count * piece.itemsize
    if residual.pointer < piece.pointer + nbytes and piece.pointer < residual.pointer + nbytes:
        raise ValueError("residual shares memory with x: give an array of its own, which keeps what x has lost")


def check_fit(name: str, out: _native.Description, count: int, dtype: str) -> None:
    """ValueError unless ``out`` holds ``count`` elements of ``dtype``."""
    if out.count != count or out.dtype != dtype:
        raise ValueError(f"{name}: out is {out.count} x {out.dtype}, but {count} x {dtype} arrive")


def like(x: Any, found: _native.Description, shape: tuple[int, ...]) -> Any:
    """A new NumPy array of the type of ``x``."""
    if isinstance(x, np.ndarray):
        return np.empty(shape, x.dtype)
    try:
        return np.empty(shape, found.dtype)
    except TypeError:
        raise TypeError(f"NumPy has no {found.dtype}: give the array that receives the result as out=") from None


def copy(destination: int, origin: int, nbytes: int) -> None:
    """Copy between addresses, without the GIL."""
    ctypes.memmove(destination, origin, nbytes)
