"""Tensors of every layout as their elements in order, so that element [i, j] of one rank is element [i, j] of all.

No rank knows how the others' tensors lie, so only one order can be right for all: that of a contiguous tensor, which is
handed over where it lies. Any other one is copied into that order, and what arrives is copied back.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol

import torch
from torch import Tensor

from multiring import _native
from multiring.torch.buffers import dense

_FEW_BYTES = 32 << 10  # which torch has copied before a call into another library is described

Finish = Callable[[], None]


class Allocate(Protocol):
    """Gives memory for elements on their way, flat, as `on_cpu` does."""

    def __call__(self, count: int, /, *, dtype: torch.dtype) -> Tensor: ...


def on_cpu(count: int, /, *, dtype: torch.dtype) -> Tensor:
    """Memory of torch's own, whatever its default device is."""
    return torch.empty(count, dtype=dtype, device="cpu")


def source(tensor: Tensor, allocate: Allocate = on_cpu) -> Tensor:
    """The elements of a tensor that is read, in order and flat: its own memory if they lie so, else a copy."""
    plain = _strided(tensor)
    return _flat(plain) if _lies_in_order(plain) else _ordered(plain, allocate)


@dataclass(slots=True)
class TensorTarget:
    """Target of a collective for the elements of a tensor: in order, flat.

    ``finish``, if there is one, is called when the collective has succeeded: it copies them into the tensor.
    """

    elements: Tensor
    finish: Finish | None = None


def target(tensor: Tensor, allocate: Allocate = on_cpu, *, read: bool = False, write: bool = True) -> TensorTarget:
    """Describe a tensor that is written, and with ``read`` read before; ValueError if its elements share memory.

    Without ``write`` this rank does not want the result, such as that of a reduction for another one.
    """
    plain = _strided(tensor)
    if _lies_in_order(plain):
        return TensorTarget(_flat(plain))
    fill_it = filling(plain) if write else None
    elements = _ordered(plain, allocate) if read else allocate(plain.numel(), dtype=plain.dtype)
    return TensorTarget(elements, None if fill_it is None else lambda: fill_it(elements))


def filling(tensor: Tensor) -> Callable[[Tensor], None]:
    """Return a function that copies flat elements into a tensor of any layout; ValueError if elements share memory.

    The memory is that which the tensor has now, whatever becomes of the tensor.
    """
    plain = _strided(tensor).detach()
    _refuse_shared_places(plain)
    return lambda elements: fill(plain, elements)


def fill(tensor: Tensor, elements: Tensor) -> None:
    """Copy elements in order into a tensor of any layout."""
    _copy(tensor, elements.view(tensor.shape))


@torch.inference_mode()  # which some tensors demand of every thread that writes them
def _copy(to: Tensor, origin: Tensor) -> None:
    """Copy elements between layouts of one shape and type that share no memory."""
    if to.nbytes < _FEW_BYTES or _shows_others(to) or _shows_others(origin):
        to.copy_(origin)
        return
    refuse_missing_memory(to)  # which may be cut while the call is in flight
    # Faster than torch where tensors are large. Measured: benchmarks/results/2026-11-28-constants.md, Engine.
    _native.copy_strided(to.data_ptr(), to.stride(), origin.data_ptr(), origin.stride(), to.shape, to.element_size())


def refuse_shared(outputs: Sequence[Tensor]) -> None:
    """ValueError if two outputs share memory: which one's elements it would hold is chance."""
    for output in outputs:
        refuse_form(output)
    within = sorted((*_reach(output), number) for number, output in enumerate(outputs) if output.numel())
    last, of = 0, -1
    for begin, end, number in within:
        if begin < last:
            break
        last, of = end, number
    else:
        return
    if dense(outputs[of]) and dense(outputs[number]):
        _refuse_pair(of, number)
    # Such as the columns of a matrix, which lie between each other and share nothing.
    for output in outputs:
        refuse_overlap(output)
    places, sizes, numbers = (
        torch.cat(parts) for parts in zip(*map(_places_of, outputs, range(len(outputs))), strict=True)
    )
    order = places.argsort()
    places, sizes, numbers = places[order], sizes[order], numbers[order]
    if (both := (places[1:] < (places + sizes)[:-1]).nonzero().flatten()).numel():
        _refuse_pair(int(numbers[both[0]]), int(numbers[both[0] + 1]))


def _refuse_pair(one: int, other: int) -> NoReturn:
    one, other = sorted((one, other))
    raise ValueError(
        f"outputs {one} and {other} share memory, so that one would overwrite the other: hand over a tensor of its own "
        "for each, such as [torch.empty_like(x) for _ in range(world_size)]"
    )


def _reach(tensor: Tensor) -> tuple[int, int]:
    """The addresses between which the elements of a tensor lie, which has some."""
    steps = sum((size - 1) * stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (steps + 1) * tensor.element_size()


def _places_of(tensor: Tensor, number: int) -> tuple[Tensor, Tensor, Tensor]:
    """The address of each element, its bytes, and the number of the tensor, all flat."""
    places = tensor.data_ptr() + _places(tensor).flatten() * tensor.element_size()
    return places, torch.full_like(places, tensor.element_size()), torch.full_like(places, number)


def apart(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> list[Tensor]:
    """The sources, flat, of which those are copied that lie where targets, flat, are written meanwhile."""
    written = [_span(target) for target in targets if target.numel()]
    lowest, highest = min(written, default=(0, 0))[0], max((end for _, end in written), default=0)

    def is_written(tensor: Tensor) -> bool:
        begin, end = _span(tensor)
        return begin < highest and lowest < end and any(begin < last and first < end for first, last in written)

    return [source.clone() if is_written(source) else source for source in sources]


def unwritten(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> list[Tensor]:
    """The inputs of calls that are made one after the other, each with the output of its own number.

    Those are copied that lie in the output of another call, which may be there before they are read.
    """
    written = sorted((*_reach(output), number) for number, output in enumerate(outputs) if output.numel())
    begins = [begin for begin, _, _ in written]
    highest = list(itertools.accumulate((end for _, end, _ in written), max))

    def is_written(number: int, tensor: Tensor) -> bool:
        begin, end = _reach(tensor)
        last = bisect.bisect_left(begins, end) - 1
        while last >= 0 and highest[last] > begin:
            if written[last][1] > begin and written[last][2] != number:
                return True
            last -= 1
        return False

    return [
        tensor.clone() if len(outputs) > 1 and tensor.numel() and is_written(number, tensor) else tensor
        for number, tensor in enumerate(inputs)
    ]


def _span(elements: Tensor) -> tuple[int, int]:
    begin = elements.data_ptr()
    return begin, begin + elements.nbytes


def _strided(tensor: Tensor) -> Tensor:
    if not tensor.is_cpu and not tensor.is_meta:
        raise ValueError(
            f"this moves CPU tensors, and one is on {tensor.device}: call torch.distributed with it, where multiring "
            "moves tensors of CUDA devices too, or hand over tensor.cpu()"
        )
    refuse_form(tensor)
    refuse_missing_memory(tensor)
    return tensor.detach() if tensor.requires_grad else tensor


def refuse_form(tensor: Tensor) -> None:
    """ValueError or TypeError for a tensor whose elements alone do not say what it is, or that has none."""
    if tensor.is_meta:
        raise ValueError(
            f"a tensor of shape {tuple(tensor.shape)} is on meta, where tensors have no elements: hand over one "
            'that has, such as torch.empty_like(tensor, device="cpu") filled with its values'
        )
    if tensor.layout != torch.strided:
        raise ValueError(f"multiring moves dense tensors, not {tensor.layout}: hand over tensor.to_dense()")
    if tensor.is_nested:
        raise TypeError("multiring moves no nested tensors: hand over its parts, tensor.unbind()")
    if tensor.is_quantized:
        raise TypeError(
            "multiring moves no quantised tensors, whose scales may differ from rank to rank: hand over "
            "tensor.int_repr(), or tensor.dequantize()"
        )
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise TypeError(
            f"multiring moves plain tensors, not a {type(tensor).__name__}, which has its own idea of its elements: "
            "hand over the tensor inside it, such as to_local() of a DTensor"
        )


def refuse_unreadable(tensor: Tensor) -> None:
    """ValueError or TypeError for a tensor of any device whose elements cannot be sent."""
    refuse_form(tensor)
    refuse_missing_memory(tensor)


def refuse_unwritable(tensor: Tensor) -> None:
    """The same for one into which what arrives cannot be copied either."""
    refuse_unreadable(tensor)
    _refuse_shared_places(tensor.detach())


def _refuse_shared_places(plain: Tensor) -> None:
    """ValueError for a tensor that has not a place in memory for each element."""
    if plain._is_zerotensor():
        raise ValueError("zeros for which torch keeps no memory cannot hold what arrives: hand over y = tensor.clone()")
    refuse_overlap(plain)


def refuse_missing_memory(tensor: Tensor) -> None:
    """ValueError for a tensor whose storage was freed, or cut to less than its elements take."""
    storage = tensor.untyped_storage()
    if not tensor.numel() or tensor._is_zerotensor():
        return
    steps = sum((size - 1) * stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    end = (tensor.storage_offset() + steps + 1) * tensor.element_size()
    if end > storage.nbytes():
        raise ValueError(
            f"a tensor of {tensor.numel()} x {tensor.dtype} has no memory for all of it: its elements end {end} bytes "
            f"from the start of a storage of {storage.nbytes()} bytes, which was freed or cut; give it that memory "
            "again (untyped_storage().resize_), or hand over a tensor that has its own"
        )


def _lies_in_order(plain: Tensor) -> bool:
    """True if the memory of a tensor holds what it shows, element by element."""
    return plain.is_contiguous() and not _shows_others(plain)


def _shows_others(plain: Tensor) -> bool:
    """True if a tensor shows other numbers than those that its memory holds."""
    return plain.is_neg() or plain.is_conj() or plain._is_zerotensor()


def _ordered(plain: Tensor, allocate: Allocate) -> Tensor:
    """A flat copy of what a tensor shows, which may be a view of other numbers."""
    elements = allocate(plain.numel(), dtype=plain.dtype)
    _copy(elements.view(plain.shape), plain)
    return elements


def _flat(plain: Tensor) -> Tensor:
    return plain if plain.dim() == 1 else plain.view(-1)


def refuse_overlap(plain: Tensor) -> None:
    """ValueError if elements of a tensor that is written share memory."""
    if plain.is_contiguous():
        return
    reach = 1  # elements that the dimensions so far span
    for stride, size in sorted(zip(plain.stride(), plain.shape, strict=True)):
        if size > 1 and stride < reach:
            break
        reach += (size - 1) * stride
    else:
        return
    if _any_twice(plain):
        raise ValueError(
            f"a tensor of shape {tuple(plain.shape)} with strides {plain.stride()} has elements that share memory, as "
            "after expand(), so that it cannot hold what arrives: hand over y = tensor.clone(), and use y afterwards"
        )


def _any_twice(plain: Tensor) -> bool:
    """True if two elements have one place in memory, found by all places where strides alone do not tell."""
    if any(stride == 0 and size > 1 for stride, size in zip(plain.stride(), plain.shape, strict=True)):
        return True
    ordered = _places(plain).flatten().sort().values
    return bool((ordered[1:] == ordered[:-1]).any())


def _places(plain: Tensor) -> Tensor:
    """Return each element's distance from the first, in elements."""
    places = torch.zeros(plain.shape, dtype=torch.int64, device="cpu")
    for dimension, (stride, size) in enumerate(zip(plain.stride(), plain.shape, strict=True)):
        places += (torch.arange(size, device="cpu") * stride).view(
            [-1 if i == dimension else 1 for i in range(plain.dim())]
        )
    return places
