"""Averages the gradients of parameters while the backward pass computes them."""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from multiring.runtime.comm import Communicator
from multiring.torch.buffers import dense, form
from multiring.torch.factors import Factors, factors_of
from multiring.torch.feedback import Feedback, NamedSlot, check_names
from multiring.torch.sparse import all_reduce_sparse
from multiring.training.buckets import Buckets, GradientSpec, Slot, agreed_order
from multiring.training.labels import part

_reducers = WeakTensorKeyDictionary()
"""The last reducer that watches each parameter, as a weak reference."""


class Reducer:
    """Replaces ``grad`` of each parameter by the mean over all ranks, at the end of each backward pass.

    A parameter's hook copies its gradient into its slot of a bucket, and ``grad`` becomes another tensor on that
    memory: the optimizer reads what was reduced where it lies, and the slot stays what it is whatever becomes of that
    tensor (new ``data``, another layout, memory that processes share). Which gradients are sparse, and in which order
    they become ready, is known after the first pass only: that one is reduced when it has ended.
    """

    def __init__(
        self,
        communicator: Communicator,
        bucket_bytes: int,
        before: Callable[[], None],
        feedback: Feedback | None = None,
    ) -> None:
        """``before`` is called before the first collective of each pass; ``feedback`` serves the communicator."""
        self.weight: float | None = None
        self.pending = True
        """True if there may be gradients that were not reduced yet."""
        self._communicator = communicator
        self._bucket_bytes = bucket_bytes
        self._before = before
        self._feedback = feedback
        self._parameters: list[Tensor] = []
        self._names: list[str] = []
        self._factors: dict[int, Factors] = {}
        """All that average others of the parameters, by identity."""
        self._hooks: list[RemovableHandle] = []
        self._replaced: str | None = None  # a parameter that another reducer watches now
        self._trained: list[int] = []
        """Indices of the parameters that are not frozen."""
        self._buckets: Buckets | None = None
        self._slots: dict[int, Tensor] = {}
        self._handed: dict[int, Tensor] = {}
        """The tensors on slots that users have, as ``grad``."""
        self._memory: set[tuple[int, int]] = set()
        """Begin and end of each bucket in memory."""
        self._factor: float | None = None
        self._seen: dict[int, None] = {}  # in the order of readiness
        self._paused = False
        self._lock = threading.Lock()  # autograd may call hooks from several threads
        # A step that torch compiles leaves it to Python, as it does the hooks.
        self.synchronize: Callable[[], None] = torch.compiler.disable(self._synchronize)  # type: ignore[no-untyped-call]
        """Reduce what has not been reduced since the last backward pass, and wait; all ranks call it."""

    def watch(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Reduce the gradients of these parameters, from the next backward pass on; in the same order on all ranks.

        Those that are frozen take no part until they are to be trained again. A reducer that watched one of them before
        is replaced: it reduces nothing any more.
        """
        named = list(named)
        if self._feedback is not None:
            check_names([*self._names, *(name for name, _ in named)])
            self._feedback.serve(named)
        for name, parameter in named:
            if (factors := factors_of(parameter)) is not None:
                factors.follow(self)
                self._factors[id(factors)] = factors
                continue
            trained = parameter.requires_grad
            if not trained and not (parameter.is_cpu and (parameter.is_floating_point() or parameter.is_complex())):
                continue
            if not parameter.is_cpu:
                raise ValueError(
                    f"parameter {name} lies on {parameter.device}, and multiring reduces gradients in memory of the "
                    "CPU: train there, or use DistributedDataParallel, over backend 'multiring' too"
                )
            earlier = _reducers[parameter]() if parameter in _reducers else None
            if earlier is not None and earlier is not self and earlier._replaced is None:
                earlier._leave(name)
            _reducers[parameter] = weakref.ref(self)
            index = len(self._parameters)
            self._parameters.append(parameter)
            self._names.append(name)
            parameter.requires_grad_(True)  # only then it takes a hook, which stays
            became_ready = torch.compiler.disable(self._hook(index))  # type: ignore[no-untyped-call]
            hook = parameter.register_post_accumulate_grad_hook(became_ready)  # type: ignore[no-untyped-call]
            self._hooks.append(hook)
            parameter.requires_grad_(trained)
        self._buckets = None

    def _leave(self, name: str) -> None:
        for hook in self._hooks:
            hook.remove()
        self._replaced = name

    def check(self) -> None:
        """ValueError if another reducer watches one of the parameters now."""
        if self._replaced is not None:
            raise ValueError(
                f"another DistributedOptimizer was made for parameter {self._replaced} since: use that one, or make "
                "one of an optimizer with all of the parameters"
            )

    @property
    def paused(self) -> bool:
        """True where backward passes only add to the gradients of this rank."""
        return self._paused

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes within only add to the gradients of this rank; the next one outside reduces the sum."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def _synchronize(self) -> None:
        if not self._seen:
            self._begin()
            for factors in self._factors.values():
                factors.begin_without_pass(has_passes_elsewhere=bool(self._trained))
        if self._buckets is not None and self._factor is None:
            self._factor = self._begun(self._buckets)  # others wait for it in their passes
        for factors in self._factors.values():
            factors.complete()
        buckets = self._buckets or self._learn()
        if self._factor is None:
            self._factor = self._begun(buckets)
        for index, parameter in enumerate(self._parameters):
            if index in buckets and parameter.grad is not None and not buckets.is_ready(index):
                self._fill(buckets, index)
        present = buckets.finish()
        for index in self._trained:
            parameter = self._parameters[index]
            if index not in buckets:
                self._reduce_sparse(parameter)
            elif index in present and parameter.grad is None:
                parameter.grad = self._handed_slot(index)
        self._factor = None
        self._seen.clear()
        self.pending = False

    def _hook(self, index: int) -> Callable[[Tensor], None]:
        def became_ready(_: Tensor) -> None:
            self.pending = True
            if self._paused:
                return
            with self._lock:
                if index in self._seen:
                    self._abandon()
                if not self._seen:
                    self._begin()
                    # Called by autograd when the pass is complete, as for DistributedDataParallel and FSDP.
                    Variable._execution_engine.queue_callback(self.synchronize)
                self._seen[index] = None
                buckets = self._buckets
                if buckets is None:
                    return
                if self._factor is None:
                    self._factor = self._begun(buckets)
                if index in buckets:
                    self._fill(buckets, index)

        return became_ready

    def _begin(self) -> None:
        """A pass begins, or a step without any."""
        self._before()
        trained = [index for index, parameter in enumerate(self._parameters) if parameter.requires_grad]
        if trained != self._trained:
            self._trained, self._buckets = trained, None

    def _begun(self, buckets: Buckets) -> float:
        if self._feedback is not None:
            self._feedback.in_units("avg" if self.weight is None else "sum")
        return buckets.begin(self.weight)

    def _abandon(self) -> None:
        """A gradient comes again before all had come: the pass before this one ended in an error."""
        if self._communicator.size > 1:
            raise ValueError(
                "the backward pass before this one ended before all gradients were there, or used a parameter twice: "
                "the other ranks have counted on it, so end the job, or go on from a checkpoint with a new model and "
                "optimizer on all ranks"
            )
        if self._buckets is not None:
            self._buckets.abandon()
        self._seen.clear()
        self._factor = None

    @torch.no_grad()
    def _fill(self, buckets: Buckets, index: int) -> None:
        """Move a gradient into its slot, multiplied by this rank's share."""
        parameter, slot, factor = self._parameters[index], self._slots[index], self._factor
        gradient = parameter.grad
        assert gradient is not None
        assert factor is not None
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        if not _lie_alike(gradient, slot):
            if any(begin <= gradient.data_ptr() < end for begin, end in self._memory):
                raise ValueError(
                    f"the gradient of parameter {self._names[index]} lies where gradients of others are reduced, or "
                    "there in another order: assign a copy (grad.clone()), or call zero_grad() first"
                )
            if factor == 1:
                slot.copy_(gradient)
            elif factor == 0:  # also where it is NaN
                slot.zero_()
            else:
                torch.mul(gradient, factor, out=slot)
            parameter.grad = self._handed_slot(index)
        elif factor == 0:
            slot.zero_()
        elif factor != 1:
            slot.mul_(factor)
        buckets.ready(index)

    def _handed_slot(self, index: int) -> Tensor:
        """The slot for users: a new tensor where something has become of the last one."""
        slot, handed = self._slots[index], self._handed[index]
        if not _lie_alike(handed, slot):
            handed = self._handed[index] = _another(slot)
        return handed

    @torch.no_grad()
    def _reduce_sparse(self, parameter: Tensor) -> None:
        """All ranks reduce the parameter by what rows each has, which may be none."""
        gradient = parameter.grad
        if gradient is None or self._factor == 0:  # also where it is NaN
            rows, values = torch.empty((1, 0), dtype=torch.int64), parameter.new_empty((0, *parameter.shape[1:]))
            gradient = torch.sparse_coo_tensor(rows, values, parameter.shape, check_invariants=False)
        elif not gradient.is_sparse:
            gradient = gradient.to_sparse(1)
        assert self._factor is not None
        mean = gradient * (self._factor if self.weight is not None else 1 / self._communicator.size)
        all_reduce_sparse(self._communicator, mean, "sum", self._communicator.timeout)
        if parameter.grad is not None or mean._nnz():
            parameter.grad = mean

    def _learn(self) -> Buckets:
        """Make the buckets, by what the first pass has shown; ValueError if the ranks have different models."""
        trained = [(self._names[index], self._parameters[index]) for index in self._trained]
        mine = [(name, form(parameter), _checksum(parameter)) for name, parameter in trained]
        sparse = {i for i, p in enumerate(self._parameters) if p.grad is not None and p.grad.is_sparse}
        everyones = self._communicator.all_gather_object((mine, sparse))
        for rank, (theirs, _) in enumerate(everyones):
            _compare(mine, theirs, rank)
        anywhere = set().union(*(their_sparse for _, their_sparse in everyones))
        seen = list(self._seen)
        if self._feedback is not None:  # what was loaded goes on bit for bit only in buckets like those it was saved in
            seen = self._feedback.take_order(self._names) or seen
        order = agreed_order(self._communicator, seen, len(self._parameters))
        fused = [index for index in order if index in self._trained and index not in anywhere]
        gradients = [
            GradientSpec(p.numel(), str(p.dtype).removeprefix("torch."), part(name, p.shape))
            for name, p in zip(self._names, self._parameters, strict=True)
        ]
        residual_of = None if self._feedback is None else self._residual_of
        buckets = Buckets(
            self._communicator,
            gradients,
            fused,
            bucket_bytes=self._bucket_bytes,
            view=_tensor,
            residual_of=residual_of,
        )
        self._slots = {index: _shaped(buckets.slot(index), self._parameters[index]) for index in fused}
        self._handed = {index: _another(slot) for index, slot in self._slots.items()}
        storages = [slot.untyped_storage() for slot in self._slots.values()]
        self._memory = {(storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in storages}
        self._buckets = buckets
        return buckets

    def _residual_of(self, slots: Sequence[Slot], count: int) -> np.ndarray[Any, Any]:
        assert self._feedback is not None
        named = [NamedSlot(self._names[slot.gradient], slot.start, slot.elements) for slot in slots]
        residual: np.ndarray[Any, Any] = self._feedback.of_bucket(named, count).numpy()
        return residual


def _tensor(memory: np.ndarray[Any, Any], dtype: str) -> Tensor:
    return torch.from_numpy(memory).view(getattr(torch, dtype))


def _shaped(slot: Tensor, parameter: Tensor) -> Tensor:
    """The slot in the shape of its parameter, and in the order of its memory, as autograd wants gradients."""
    if dense(parameter):
        return slot.as_strided(parameter.shape, parameter.stride(), slot.storage_offset())
    return slot.view(parameter.shape)


def _lie_alike(one: Tensor, other: Tensor) -> bool:
    if one.data_ptr() != other.data_ptr() or one.shape != other.shape:
        return False
    # The stride of a dimension of one element says nothing.
    return all(n == 1 or here == there for n, here, there in zip(one.shape, one.stride(), other.stride(), strict=True))


def _another(slot: Tensor) -> Tensor:
    """A tensor on the same memory, with a storage of its own: `Tensor.share_memory_` moves a storage."""
    if not slot.numel():
        return slot
    memory = slot.as_strided((slot.numel(),), (1,)).view(torch.uint8).numpy()  # NumPy has no bfloat16
    return torch.from_numpy(memory).view(slot.dtype).as_strided(slot.shape, slot.stride())


def _checksum(parameter: Tensor) -> int:
    elements: Any = parameter.detach().reshape(-1).contiguous().view(torch.uint8).numpy()
    return zlib.crc32(elements)


def _compare(mine: Sequence[Any], theirs: Sequence[Any], rank: int) -> None:
    """ValueError unless rank ``rank`` trains the same parameters, and they have the same values."""
    for number, (here, there) in enumerate(itertools.zip_longest(mine, theirs)):
        if here == there:
            continue
        if here is None or there is None or here[:-1] != there[:-1]:
            shown = ["none" if one is None else f"{one[0]} ({one[1]})" for one in (here, there)]
            raise ValueError(
                f"parameter {number} of the optimizer is {shown[0]} here and {shown[1]} on rank {rank}: all ranks need "
                "the same parameters in the same order"
            )
        raise ValueError(
            f"parameter {here[0]} has other values here than on rank {rank}: call "
            "multiring.torch.broadcast_parameters(model.state_dict()) before the first step"
        )
