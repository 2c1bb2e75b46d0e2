"""Collectives on tensors that lie on a CUDA device.

A collective begins after what the caller's current stream has queued, and the stream that waits for its work goes on
when the tensors are there; the host waits for neither. The engine moves the elements segment by segment through memory
that the device's copy engines reach (``csrc/device.hpp``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllToAllOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)

from multiring.errors import MultiringError
from multiring.runtime.buffers import DeviceBlocks, DeviceBuffer
from multiring.runtime.comm import Communicator, group_of
from multiring.runtime.engine import DevicePart
from multiring.runtime.group import Group
from multiring.torch.buffers import REDUCIBLE, divided, is_cut_off, only, op_name, single, tensors_in, with_options
from multiring.torch.layouts import refuse_form, refuse_missing_memory, refuse_overlap, refuse_shared, unwritten
from multiring.torch.work import Watcher

_LOOK_AT = 64
"""Calls are kept up to this number before those that are done are let go."""

_Method = TypeVar("_Method", bound=Callable[..., Any])


class _Group(Protocol):
    """Methods of a `MultiringGroup` that calls on CUDA devices need."""

    communicator: Communicator
    group: Group
    on_cuda: CudaCollectives

    @property
    def _collectives(self) -> Watcher: ...
    def rank(self) -> int: ...
    def size(self) -> int: ...
    def _check(self, name: str, whole: Tensor, count: int, other: Tensor) -> None: ...
    def _check_blocks(self, name: str, blocks: Sequence[Tensor], other: Tensor) -> None: ...
    def _check_inputs(self, output: Tensor, blocks: Sequence[Tensor]) -> None: ...
    def _seconds(self, opts: Any = None) -> float: ...


def also_on_cuda(method: _Method) -> _Method:
    """A method of the process group that hands calls on CUDA tensors to its namesake of `CudaCollectives`."""

    name = method.__name__

    @functools.wraps(method)
    def call(self: _Group, *arguments: Any, **keywords: Any) -> Any:
        if _is_first_on_cuda(arguments):
            return getattr(self.on_cuda, name)(*arguments, **keywords)
        return method(self, *arguments, **keywords)

    return call  # type: ignore[return-value]


def _is_first_on_cuda(argument: Any) -> bool | None:
    """True if the first tensor of a call is on a CUDA device; None if it has no tensor."""
    if isinstance(argument, Tensor):
        return argument.is_cuda
    if isinstance(argument, list | tuple):
        for item in argument:
            found = _is_first_on_cuda(item)
            if found is not None:
                return found
    return None


def _current(device: torch.device) -> int:
    """The address of the current stream, without an object for it, which would slow small calls.

    Measured: benchmarks/results/2026-11-28-constants.md, Engine."""
    stream: int = torch._C._cuda_getCurrentRawStream(device.index)
    return stream


class DeviceWork(dist.Work):
    """Collectives that are queued on a CUDA device, and what is queued there after them.

    ``finish`` runs kernels on the stream that brings the results. Errors of the job are raised by every later call, and
    by `wait` where they are known by then; with ``blocks`` (MULTIRING_BLOCKING_WAIT) `wait` holds the host until the
    device is done, and raises what went wrong.
    """

    def __init__(
        self,
        parts: Sequence[DevicePart],
        result: Any,
        device: torch.device,
        finish: Sequence[Callable[[], None]] = (),
        *,
        blocks: bool = False,
        watcher: Watcher,
    ) -> None:
        super().__init__()
        self._parts, self._result, self._device, self._blocks = parts, result, device, blocks
        self._watcher = watcher
        self._future: torch.futures.Future[Any] | None = None
        self._completes: torch.futures.Future[Any] | None = None
        self._event: torch.cuda.Event | None = None
        if finish:
            own = self.stream()
            for part in parts[:-1]:
                part.join(own.cuda_stream)
            with torch.cuda.stream(own):
                for step in finish:
                    step()
                self._event = own.record_event()

    def stream(self) -> torch.cuda.Stream:
        """The stream on which the last of it is queued."""
        for part in reversed(self._parts):
            if part.last_stream:
                return torch.cuda.ExternalStream(part.last_stream, self._device)  # type: ignore[no-untyped-call]
        return torch.cuda.current_stream(self._device)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Make the current stream wait; with a ``timeout`` the host too, and CollectiveTimeout when it is up."""
        seconds = timeout.total_seconds()
        for part in self._parts:
            if self._blocks or seconds > 0:
                part.wait(seconds if seconds > 0 else None)
            elif part.done():
                part.wait()  # it raises what went wrong
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)
        else:
            for part in self._parts:
                part.join(_current(self._device))
        return True

    def synchronize(self) -> None:
        """`wait`."""
        self.wait()

    block_current_stream = synchronize

    def is_completed(self) -> bool:
        """True if it succeeded or failed, on the device too."""
        if not all(part.done() for part in self._parts):
            return False
        return self._event is None or self._event.query()  # type: ignore[no-untyped-call]

    def is_success(self) -> bool:
        """True if it is completed without an error."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """The error that is known by now, if any; with ``blocks`` after waiting."""
        if self._blocks:
            try:
                self.wait()
            except Exception as raised:
                return raised
        for part in self._parts:
            if part.done() and (error := part.error()) is not None:
                return error
        return None

    def result(self) -> Any:
        """The tensors that the collective writes, once the current stream comes to them."""
        self.wait()
        return self._result

    def source_rank(self) -> int:
        raise RuntimeError("only a receive has a source rank")

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the tensors: complete at once, and who waits for it makes its stream wait, as for NCCL's."""
        if self._future is None:
            future: torch.futures.Future[Any] = torch.futures.Future(devices=[self._device])
            if self._blocks:
                self._completes, self._future = future, future.then(lambda _: self.result())
                self._watcher.watch(self)
            else:
                with torch.cuda.stream(self.stream()):
                    self.wait()
                    future.set_result(self._result)
                self._future = future
        return self._future

    def learn(self) -> None:
        """Block until it is known how this ended."""
        self.exception()

    def complete(self) -> None:
        """Complete the future of one that holds the host."""
        if self._completes is not None:
            self._completes.set_result(None)

    def when_known(self, then: Callable[[], None]) -> None:
        """Call ``then`` now: what follows is the device's."""
        then()


class CudaCollectives:
    """The methods of `MultiringGroup` for tensors on CUDA devices, by the same names."""

    def __init__(self, group: _Group) -> None:
        self._group = group
        self._in_flight: list[DevicePart] = []

    def note(self, part: DevicePart) -> None:
        """Keep a collective that was queued, until it is done: nobody has to wait for it before the group goes."""
        if len(self._in_flight) >= _LOOK_AT:
            self._in_flight = [earlier for earlier in self._in_flight if not earlier.done()]
        self._in_flight.append(part)

    def wait_for_all(self) -> None:
        """Return when what was queued is done, or has failed, as every later call says."""
        for part in self._in_flight:
            with suppress(MultiringError):
                part.wait()
        self._in_flight = []

    # --- over plans: queued on the device ---

    def _allreduce_any(self, tensors: list[Tensor] | Tensor, opts: Any) -> Any:
        return self._reduce_all([single(tensors)], opts)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Any:
        return self._reduce_all(tensors, opts or AllreduceCoalescedOptions())

    def _reduce_all(self, tensors: list[Tensor], opts: Any) -> Any:
        if any(tensor.is_sparse for tensor in tensors):
            return self._through_host("_allreduce_any", (tensors,), (opts,), inputs=tensors, outputs=tensors)
        call = _Call(self._group, opts, tensors)
        for tensor in tensors:
            call.all_reduce(tensor)
        return call.work()

    def broadcast(self, tensors: list[Tensor] | Tensor, opts: Any = None) -> Any:
        if isinstance(opts, int):
            opts = with_options(BroadcastOptions(), rootRank=opts)
        tensor = single(tensors)
        call = _Call(self._group, opts or BroadcastOptions(), [tensor])
        call.broadcast(tensor)
        return call.work()

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        call = _Call(self._group, opts or ReduceOptions(), tensors)
        call.reduce(only(tensors))
        return call.work()

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        call = _Call(self._group, opts or AllgatherOptions(), outputs)
        call.all_gather_list(only(outputs), only(inputs))
        return call.work()

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        call = _Call(self._group, opts or AllgatherOptions(), outputs)
        for blocks, tensor in zip(zip(*outputs, strict=True), inputs, strict=True):
            call.all_gather_list(list(blocks), tensor)
        return call.work()

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        call = _Call(self._group, opts or AllgatherOptions(), outputs)
        for output, tensor in zip(outputs, unwritten(inputs, outputs), strict=True):
            call.all_gather(output, tensor)
        return call.work()

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Any:
        output, blocks = only(outputs), only(inputs)
        self._group._check_inputs(output, blocks)
        return self.reduce_scatter_single_coalesced(outputs, [torch.cat([block.reshape(-1) for block in blocks])], opts)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        call = _Call(self._group, opts or ReduceScatterOptions(), outputs)
        for output, tensor in zip(outputs, unwritten(inputs, outputs), strict=True):
            call.reduce_scatter(output, tensor)
        return call.work()

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> Any:
        opts = opts or AllToAllOptions()
        if output_splits or input_splits:
            splits = (output_splits, input_splits, opts)
            return self._through_host("all_to_all_single", (output, input), splits, inputs=[input], outputs=[output])
        call = _Call(self._group, opts, [output])
        call.all_to_all(output, input)
        return call.work()

    # --- by messages: copied to the host before, and back when they have come ---

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        opts = opts or AllToAllOptions()
        return self._through_host("alltoall", (outputs, inputs), (opts,), inputs=inputs, outputs=outputs)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        opts = opts or GatherOptions()
        return self._through_host("gather", (outputs, inputs), (opts,), inputs=inputs, outputs=tensors_in(outputs))

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Any:
        opts = opts or ScatterOptions()
        return self._through_host("scatter", (outputs, inputs), (opts,), inputs=tensors_in(inputs), outputs=outputs)

    def send(self, tensors: list[Tensor], dstRank: int, tag: int) -> Any:
        return self._through_host("send", (tensors,), (dstRank, tag), inputs=tensors, outputs=[])

    def recv(self, tensors: list[Tensor], srcRank: int, tag: int) -> Any:
        return self._through_host("recv", (tensors,), (srcRank, tag), inputs=[], outputs=tensors)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> Any:
        return self._through_host("recv_anysource", (tensors,), (tag,), inputs=[], outputs=tensors)

    def _through_host(
        self, name: str, tensors: tuple[Any, ...], settings: tuple[Any, ...], *, inputs: Any, outputs: Any
    ) -> Any:
        """The group's own method on copies in memory of the host, which wait for the current stream.

        Nothing is queued on the device for what has not come: a stream that waits for a message would hold up kernels
        that its sender may wait for.
        """
        copies: dict[int, Tensor] = {id(tensor): tensor.detach().cpu() for tensor in inputs}
        for tensor in outputs:
            if id(tensor) not in copies:
                copies[id(tensor)] = torch.empty(tensor.shape, dtype=tensor.dtype)
        work = getattr(self._group, name)(*_replaced(tensors, copies), *settings)

        def bring_back() -> None:
            for tensor in outputs:
                with torch.no_grad():
                    tensor.copy_(copies[id(tensor)])

        if work is None:
            bring_back()
            return None
        device = tensors_in(tensors)[0].device
        return work.followed_by(bring_back, list(outputs), device)


def _replaced(value: Any, copies: dict[int, Tensor]) -> Any:
    if isinstance(value, Tensor):
        return copies[id(value)]
    return type(value)(_replaced(item, copies) for item in value)


class _Call:
    """One call of torch: one collective or several, and what is to be done on the device after them."""

    def __init__(self, group: _Group, opts: Any, result: Any) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "multiring's collectives cannot be captured in a CUDA graph, whose replay the host would know nothing "
                "of: call them outside"
            )
        self._group, self._opts, self._result = group, opts, result
        self._device = tensors_in(result)[0].device
        self._parts: list[DevicePart] = []
        self._finish: list[Callable[[], None]] = []
        self._kept: list[Tensor] = []

    def work(self) -> DeviceWork | None:
        """Return the work for torch. The current stream waits at once if the caller asks for no work."""
        group = self._group
        blocks = group.communicator.world.settings.blocking_wait
        work = DeviceWork(
            self._parts, self._result, self._device, self._finish, blocks=blocks, watcher=group._collectives
        )
        for tensor in self._kept:  # which `finish` reads or writes when the engine has let go of them
            tensor.record_stream(work.stream())
        if not self._opts.asyncOp:
            work.wait()
        return work

    def all_reduce(self, tensor: Tensor) -> None:
        x = self._in_place(tensor)
        self._start("all_reduce", x, x.numel(), self._operation(x), 0, _all(x), _all(x))
        self._divide(x)
        self._bring_back(x, tensor)

    def broadcast(self, tensor: Tensor) -> None:
        root = self._opts.rootRank
        x, here = self._in_place(tensor), self._group.rank() == root
        elements = _bytes(x)
        blocks = _all(elements)
        self._start("broadcast", elements, elements.numel(), "sum", root, *((blocks, None) if here else (None, blocks)))
        if not here:
            self._bring_back(x, tensor)

    def reduce(self, tensor: Tensor) -> None:
        root, x = self._opts.rootRank, self._in_place(tensor)
        here = self._group.rank() == root
        self._start("reduce", x, x.numel(), self._operation(x), root, _all(x), _all(x) if here else None)
        if here:
            self._divide(x)
            self._bring_back(x, tensor)

    def all_gather(self, output: Tensor, input: Tensor) -> None:
        size, rank = self._group.size(), self._group.rank()
        self._group._check("all_gather", output, size * input.numel(), input)
        whole, mine = self._in_place(output, fill=False), _ordered(input)
        pitch = mine.numel() * mine.element_size()
        mine = _apart(mine, whole, rank * pitch)
        to, origin = _bytes(whole), _bytes(mine)
        self._start(
            "all_gather",
            to,
            origin.numel(),
            "sum",
            0,
            DeviceBlocks(origin.data_ptr(), pitch, rank, 1),
            DeviceBlocks(to.data_ptr(), pitch, 0, size),
            mine,
        )
        self._bring_back(whole, output)

    def all_gather_list(self, outputs: list[Tensor], input: Tensor) -> None:
        size = self._group.size()
        self._group._check_blocks("all_gather", outputs, input)
        refuse_shared(outputs)
        for output in outputs:
            _refuse_other_numbers(output)
        staging = torch.empty(size * input.numel(), dtype=input.dtype, device=input.device)
        self.all_gather(staging, input)

        def finish() -> None:
            with torch.no_grad():
                for output, block in zip(outputs, staging.chunk(size), strict=True):
                    output.copy_(block.view(output.shape))

        if input.numel():
            self._finish.append(finish)
            self._kept += [staging, *outputs]

    def reduce_scatter(self, output: Tensor, input: Tensor) -> None:
        size, rank = self._group.size(), self._group.rank()
        self._group._check("reduce_scatter", input, size * output.numel(), output)
        x, whole = self._in_place(output, fill=False), _ordered(input)
        pitch = x.numel() * x.element_size()
        whole = _apart(whole, x, -rank * pitch)
        self._start(
            "reduce_scatter",
            x,
            x.numel(),
            self._operation(x),
            0,
            DeviceBlocks(whole.data_ptr(), pitch, 0, size),
            DeviceBlocks(x.data_ptr(), pitch, rank, 1),
            whole,
        )
        self._divide(x)
        self._bring_back(x, output)

    def all_to_all(self, output: Tensor, input: Tensor) -> None:
        size = self._group.size()
        self._group._check("all_to_all", output, input.numel(), input)
        if input.numel() % size:
            raise ValueError(f"all_to_all: {input.numel()} elements cannot be cut into {size} equal blocks")
        to = self._in_place(output, fill=False)
        origin = _apart(_ordered(input), to, 0)
        elements = _bytes(to)
        count = elements.numel() // size
        pitch = count * elements.element_size()
        self._start(
            "all_to_all",
            elements,
            count,
            "sum",
            0,
            DeviceBlocks(origin.data_ptr(), pitch, 0, size),
            DeviceBlocks(elements.data_ptr(), pitch, 0, size),
            origin,
        )
        self._bring_back(to, output)

    def _in_place(self, tensor: Tensor, fill: bool = True) -> Tensor:
        """The tensor, or one whose elements lie in order, which is copied back in the end."""
        refuse_form(tensor)
        refuse_missing_memory(tensor)
        _refuse_other_numbers(tensor)
        plain = tensor.detach()
        if plain.is_contiguous():
            return plain
        refuse_overlap(plain)
        return _ordered(plain) if fill else plain.new_empty(plain.shape)

    def _operation(self, x: Tensor) -> str:
        """The communicator's operation for the reduction asked for; `_divide` may have to follow it."""
        op = op_name(self._opts.reduceOp)
        return "sum" if is_cut_off(op, x.dtype) else op

    def _divide(self, x: Tensor) -> None:
        if is_cut_off(op_name(self._opts.reduceOp), x.dtype):
            self._finish.append(lambda: _copy(x, divided(x, self._group.size())))
            self._kept.append(x)

    def _bring_back(self, x: Tensor, tensor: Tensor) -> None:
        if x.data_ptr() == tensor.data_ptr() and x.stride() == tensor.stride():
            return
        self._kept += [x, tensor]

        def finish() -> None:
            with torch.no_grad():
                tensor.detach().copy_(x)

        self._finish.append(finish)

    def _start(
        self,
        collective: str,
        x: Tensor,
        count: int,
        op: str,
        root: int,
        out: DeviceBlocks | None,
        into: DeviceBlocks | None,
        *kept: Tensor,
    ) -> None:
        if not x.is_cuda or any(not tensor.is_cuda for tensor in kept):
            raise ValueError(
                "multiring moves tensors of the CPU and of CUDA devices, all of a call on one kind: hand over "
                "tensor.cuda() or tensor.cpu()"
            )
        if x.dtype not in REDUCIBLE:
            known = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in REDUCIBLE))
            raise TypeError(f"multiring cannot reduce {x.dtype}; it knows {known}")
        owner = (x.untyped_storage(), *(tensor.untyped_storage() for tensor in kept))
        buffer = DeviceBuffer(owner, count, REDUCIBLE[x.dtype], x.device.index, _current(x.device), out, into)
        seconds = self._group._seconds(self._opts)
        part = self._group.group.start_on_device(collective, buffer, op, root, timeout=seconds)
        self._parts.append(part)
        self._group.on_cuda.note(part)


def _ordered(tensor: Tensor) -> Tensor:
    """A contiguous tensor with the same values: itself, if it is one."""
    refuse_missing_memory(tensor)
    _refuse_other_numbers(tensor)
    return tensor.detach().contiguous()


def _refuse_other_numbers(tensor: Tensor) -> None:
    """ValueError for a view that shows other numbers than its memory holds.

    Results that were written back through one were seen to be a rank's own numbers, at times, and it is not known why.
    """
    if tensor.is_neg() or tensor.is_conj():
        shown, resolve = ("negated", "resolve_neg") if tensor.is_neg() else ("conjugated", "resolve_conj")
        raise ValueError(
            f"a tensor on {tensor.device} is a view that shows its memory {shown}, which multiring does not take: "
            f"hand over tensor.{resolve}(), and copy a result back"
        )


def _apart(read: Tensor, written: Tensor, place: int) -> Tensor:
    """Return ``read``, or a copy if it overlaps ``written`` and does not begin ``place`` bytes after the start of that,
    where each chunk is written after it was read."""
    begin, end = read.data_ptr(), read.data_ptr() + read.nbytes
    first, last = written.data_ptr(), written.data_ptr() + written.nbytes
    return read.clone() if begin < last and first < end and begin - first != place else read


def _copy(x: Tensor, y: Tensor) -> None:
    x.copy_(y)


def all_reduce_on_device(communicator: Communicator, x: Tensor, op: str, watcher: Watcher) -> DeviceWork:
    """Start to combine contiguous CUDA tensors of all ranks in place."""
    buffer = DeviceBuffer(
        x.untyped_storage(), x.numel(), REDUCIBLE[x.dtype], x.device.index, _current(x.device), _all(x), _all(x)
    )
    part = group_of(communicator).start_on_device("all_reduce", buffer, op)
    blocks = communicator.world.settings.blocking_wait
    return DeviceWork([part], [x], x.device, blocks=blocks, watcher=watcher)


def _all(x: Tensor) -> DeviceBlocks:
    return DeviceBlocks(x.data_ptr(), x.numel() * x.element_size(), 0, 1)


def _bytes(x: Tensor) -> Tensor:
    """The elements for a collective that only moves them: formats unknown to the communicator travel as bytes."""
    flat = x.view(-1)
    return flat if flat.dtype in REDUCIBLE else flat.view(torch.uint8)
