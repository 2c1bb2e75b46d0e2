"""Elements of tensors, which `layouts` has put in order, as the communicator takes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from multiring.runtime.buffers import DTYPES, Piece, readable

_T = TypeVar("_T")

_OPS: dict[Any, str] = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.AVG: "avg",
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.MAX: "max",
    dist.ReduceOp.PRODUCT: "prod",
    dist.ReduceOp.BAND: "band",
    dist.ReduceOp.BOR: "bor",
    dist.ReduceOp.BXOR: "bxor",
}

_USUAL = (torch.Tensor, torch.nn.Parameter)
REDUCIBLE = {getattr(torch, name): name for name in DTYPES if hasattr(torch, name)}
_IN_NUMPY = {dtype for dtype in REDUCIBLE if not str(dtype).startswith(("torch.bfloat", "torch.float8"))}


def op_name(op: dist.ReduceOp) -> str:
    """The communicator's name of a torch reduction; ValueError for one that it does not have."""
    for known, name in _OPS.items():
        if op == known:
            return name
    raise ValueError(f"multiring cannot reduce by {getattr(op, 'op', op)}; it knows {', '.join(_OPS.values())}")


def is_cut_off(op: str, dtype: torch.dtype) -> bool:
    """True if it is an average of integers, which is NCCL's: their sum, `divided`."""
    return op == "avg" and not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def divided(x: torch.Tensor, by: int) -> torch.Tensor:
    """Integers divided, and cut off; torch itself has no division for most formats without sign."""
    if x.dtype in (torch.uint16, torch.uint32):
        return x.to(torch.int64).div(by, rounding_mode="trunc").to(x.dtype)
    if x.dtype == torch.uint64:
        bits = x.view(torch.int64)
        half = ((bits >> 1) & torch.iinfo(torch.int64).max).div(by, rounding_mode="trunc")
        return (2 * half + (bits - 2 * half * by >= by)).view(torch.uint64)
    return x.div(by, rounding_mode="trunc")


def single(entries: Sequence[torch.Tensor] | torch.Tensor) -> torch.Tensor:
    """The one tensor of a list, or that which is handed over without one."""
    return entries if isinstance(entries, torch.Tensor) else only(entries)


def tensors_in(entry: Any) -> list[torch.Tensor]:
    """The tensors of an argument of torch's: one, or those in lists and tuples of lists and tuples."""
    if isinstance(entry, torch.Tensor):
        return [entry]
    return [tensor for part in entry for tensor in tensors_in(part)] if isinstance(entry, list | tuple) else []


def only(entries: Sequence[_T]) -> _T:
    """The one entry of a list: torch passes lists for the sake of many GPUs in a process."""
    if len(entries) != 1:
        raise ValueError(f"multiring takes one tensor for a process, not {len(entries)}")
    return entries[0]


def with_options(opts: Any, **given: Any) -> Any:
    """Options in which some stand that torch's own groups take in their place."""
    for name, value in given.items():
        setattr(opts, name, value)
    return opts


def dense(tensor: torch.Tensor) -> bool:
    """True if the tensor is a permutation of a contiguous one, such as in channels_last."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def form(tensor: torch.Tensor) -> str:
    """Type, shape, layout and order in memory, in words.

    Ranks on which they differ cannot exchange elements as they lie.
    """
    words = str(tensor.dtype).removeprefix("torch.")
    if tensor.is_nested:
        return f"nested {words}"
    words += f" of shape {tuple(tensor.shape)}"
    if tensor.layout != torch.strided:
        return f"{words} in {str(tensor.layout).removeprefix('torch.')}"
    return words if tensor.is_contiguous() or not dense(tensor) else f"{words} with strides {tensor.stride()}"


def raw(elements: torch.Tensor) -> Piece:
    """Elements in order for a collective that only moves them: formats unknown to the communicator travel as bytes."""
    return _shared(elements if elements.dtype in REDUCIBLE else elements.view(torch.uint8))


def reducible(elements: torch.Tensor) -> Piece:
    """Elements in order for a collective that computes; TypeError for a number format that cannot be reduced."""
    if elements.dtype not in REDUCIBLE:
        known = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in REDUCIBLE))
        raise TypeError(f"multiring cannot reduce {elements.dtype}; it knows {known}")
    return _shared(elements)


def _shared(elements: torch.Tensor) -> Piece:
    """The same memory, described here where the tensor is a usual one: a view of it in NumPy takes as long as a small
    call, and its storage could never be resized again.

    The storage is kept, not the tensor, which can be given another one while the call is in flight.
    """
    if type(elements) in _USUAL:
        return Piece(elements.untyped_storage(), elements.data_ptr(), elements.numel(), REDUCIBLE[elements.dtype])
    return readable(elements.numpy() if elements.dtype in _IN_NUMPY else elements)
