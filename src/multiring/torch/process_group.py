"""The ``torch.distributed`` process group over a communicator.

torch calls the methods below with lists of tensors, because a process may drive many GPUs; here each list holds one. A
method that has two names was renamed in torch 2.13.
"""

# torch's stub has overloads, and names of arguments, that its Python code does not use.
# mypy: disable-error-code="override, assignment, misc"

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    Backend,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)
from torch.autograd import profiler

from multiring.errors import MultiringError
from multiring.runtime.buffers import Piece, exchanged, gathered, scattered
from multiring.runtime.comm import Communicator, group_of
from multiring.runtime.engine import Waitable
from multiring.runtime.group import valid_tag
from multiring.runtime.work import Work
from multiring.torch.backend import DeviceBackend
from multiring.torch.buffers import divided, is_cut_off, only, op_name, raw, reducible, single, with_options
from multiring.torch.cuda import CudaCollectives, also_on_cuda
from multiring.torch.layouts import (
    Finish,
    TensorTarget,
    apart,
    fill,
    filling,
    on_cpu,
    refuse_form,
    refuse_shared,
    source,
    target,
    unwritten,
)
from multiring.torch.profiler import recorded
from multiring.torch.sparse import all_reduce_sparse
from multiring.torch.work import OrderedWatcher, TorchWork, Watcher

_SENT_AT_ONCE = 64 << 10  # bytes of a message at most that does not wait for its reader, if it has to be staged


class StepInFlight(NamedTuple):
    """Calls of the communicator in flight, and what remains to be done when they are complete."""

    parts: Sequence[Waitable]
    finish: Finish | None = None


Begin: TypeAlias = "Callable[[], StepInFlight]"
"""A call whose arguments are checked; it begins when this is called."""


class MultiringGroup(dist.ProcessGroup):
    """A group of ranks that torch knows by the backend name ``multiring``; made by ``init_process_group``."""

    def __init__(
        self, communicator: Communicator, timeout: float, close: Callable[[], None], *, owns_default: bool = False
    ) -> None:
        """``close`` releases what was made for this group: the default communicator, too, if ``owns_default``."""
        super().__init__(communicator.rank, communicator.size)  # type: ignore[call-arg]
        self.communicator = communicator
        self.group = group_of(communicator)
        self._timeout = timeout
        self._close = close
        self.owns_default = owns_default
        self._name = ""
        self._description = ""
        self._collectives = OrderedWatcher()
        self._messages = Watcher()
        self.on_cuda = CudaCollectives(self)

    # --- identity: torch asks a group that has no device backends of its own ---

    def getBackendName(self) -> str:
        return "multiring"

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    _set_group_name = setGroupName
    _set_group_desc = setGroupDesc
    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)
    _device_types = property(lambda self: [torch.device("cpu"), torch.device("cuda")][: 1 + torch.cuda.is_available()])

    def _get_backend(self, device: torch.device) -> DeviceBackend:
        """Return the backend for a device; RuntimeError, which torch expects, if the group does not serve it."""
        if torch.device(device).type not in [known.type for known in self._device_types]:
            raise RuntimeError(f"No backend type associated with device type {torch.device(device).type}")
        return DeviceBackend(self)

    @property
    def options(self) -> Backend.Options:
        """Options from which torch reads the time limit of a group."""
        return Backend.Options(self.getBackendName(), timedelta(seconds=self._timeout))

    def _get_sequence_number_for_group(self) -> int:
        """Return the number of collectives completed here; where nothing is in flight it is the same on all ranks."""
        return self.group.engine.completed(self.group.number)

    def _set_sequence_number_for_group(self) -> None:
        """Nothing: all ranks count from 0."""

    def set_timeout(self, timeout: timedelta) -> None:
        """Change the time that a collective may take."""
        self._timeout = timeout.total_seconds()

    def split_group(self, *_: Any, **__: Any) -> Any:
        """Torch's own looks for a backend that is not there, and ends the process."""
        raise RuntimeError("multiring cannot split a group: make one by torch.distributed.new_group")

    def merge_remote_group(self, *_: Any, **__: Any) -> Any:
        """See `split_group`."""
        raise RuntimeError("multiring cannot merge groups: make one by torch.distributed.new_group")

    def shutdown(self) -> None:
        """Release the communicator; called by ``destroy_process_group``."""
        try:
            self.on_cuda.wait_for_all()
        finally:
            self.abort()

    def abort(self) -> None:
        """The same, without waiting for what is queued on a CUDA device."""
        self._collectives.close()
        self._close()

    # --- collectives ---

    def allreduce(self, tensors: list[Tensor] | Tensor, opts: Any = None) -> TorchWork | None:
        return (self._allreduce_recorded if profiler._is_profiler_enabled else self._allreduce)(tensors, opts)

    def _allreduce(self, tensors: list[Tensor] | Tensor, opts: Any) -> TorchWork | None:
        # The usual call in as few steps as can be: where ranks outnumber cores, neither code nor objects of Python are
        # in the caches after the previous one. What it does not take, `_allreduce_any` does.
        if type(opts) is not AllreduceOptions:
            if isinstance(opts, (dist.ReduceOp, dist.ReduceOp.RedOpType)):
                opts = with_options(AllreduceOptions(), reduceOp=opts)
            opts = opts or AllreduceOptions()
        if not opts.asyncOp:
            tensor = tensors[0] if type(tensors) is list and len(tensors) == 1 else single(tensors)
            seconds = opts.timeout.total_seconds()
            if self.group.calls.all_reduce_plain(
                tensor, op_name(opts.reduceOp), seconds if seconds >= 0 else self._timeout
            ):
                return None
        return self._allreduce_any(tensors, opts)

    _allreduce_recorded = recorded("all_reduce")(_allreduce)

    @also_on_cuda
    def _allreduce_any(self, tensors: list[Tensor] | Tensor, opts: Any) -> TorchWork | None:
        """An all-reduce in the steps of Python, such as the native call leaves to them."""
        tensor = single(tensors)
        if tensor.is_sparse:
            all_reduce_sparse(self.communicator, tensor, op_name(opts.reduceOp), self._seconds(opts))
            return self._work(opts, [], [tensor])
        return self._work(opts, [self._all_reduce(tensor, opts)()], [tensor])

    @recorded("all_reduce")
    @also_on_cuda
    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> TorchWork | None:
        opts = opts or AllreduceCoalescedOptions()
        refuse_shared(tensors)
        return self._work(opts, _begun([self._all_reduce(tensor, opts) for tensor in tensors]), tensors)

    @recorded("broadcast")
    @also_on_cuda
    def broadcast(self, tensors: list[Tensor] | Tensor, opts: Any = None) -> TorchWork | None:
        if isinstance(opts, int):
            opts = with_options(BroadcastOptions(), rootRank=opts)
        opts = opts or BroadcastOptions()
        tensor, is_root = single(tensors), self.rank() == opts.rootRank
        x = self._target(tensor, read=is_root, write=not is_root)
        step = self._run(opts, "broadcast", raw(x.elements), root=opts.rootRank, finish=x.finish)
        return self._work(opts, [step], [tensor])

    @recorded("reduce")
    @also_on_cuda
    def reduce(self, tensors: list[Tensor], opts: Any = None) -> TorchWork | None:
        opts = opts or ReduceOptions()
        is_root = self.rank() == opts.rootRank
        x = self._target(only(tensors), read=True, write=is_root)
        op, finish = self._reduction(opts, x)
        step = self._run(
            opts, "reduce", reducible(x.elements), op, opts.rootRank, finish=finish if is_root else x.finish
        )
        return self._work(opts, [step], tensors)

    @recorded("all_gather", argument=1)
    @also_on_cuda
    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> TorchWork | None:
        opts = opts or AllgatherOptions()
        return self._work(opts, [self._all_gather_list(only(outputs), only(inputs), opts)()], outputs)

    @recorded("all_gather", argument=1)
    @also_on_cuda
    def allgather_coalesced(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> TorchWork | None:
        opts = opts or AllgatherOptions()
        _check_lists("all_gather", outputs, inputs, self.size())
        refuse_shared([block for blocks in outputs for block in blocks])
        pairs = zip(zip(*outputs, strict=True), inputs, strict=True)
        steps = [self._all_gather_list(list(blocks), tensor, opts) for blocks, tensor in pairs]
        return self._work(opts, _begun(steps), outputs)

    @recorded("all_gather", argument=1)
    @also_on_cuda
    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> TorchWork | None:
        opts = opts or AllgatherOptions()
        return self._work(opts, [self._all_gather(output, input, opts)()], [output])

    @recorded("all_gather", argument=1)
    @also_on_cuda
    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> TorchWork | None:
        opts = opts or AllgatherOptions()
        pairs = _pairs("all_gather", outputs, inputs)
        return self._work(opts, _begun([self._all_gather(output, tensor, opts) for output, tensor in pairs]), outputs)

    @recorded("reduce_scatter", argument=1)
    @also_on_cuda
    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> TorchWork | None:
        opts = opts or ReduceScatterOptions()
        output, blocks = only(outputs), only(inputs)
        self._check_inputs(output, blocks)
        whole = self._allocate(len(blocks) * output.numel(), dtype=output.dtype)
        torch.cat([source(block) for block in blocks], out=whole)
        return self._work(opts, [self._reduce_scatter(output, whole, opts)()], outputs)

    @recorded("reduce_scatter", argument=1)
    @also_on_cuda
    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> TorchWork | None:
        opts = opts or ReduceScatterOptions()
        return self._work(opts, [self._reduce_scatter(output, input, opts)()], [output])

    @recorded("reduce_scatter", argument=1)
    @also_on_cuda
    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> TorchWork | None:
        opts = opts or ReduceScatterOptions()
        steps = [self._reduce_scatter(*pair, opts) for pair in _pairs("reduce_scatter", outputs, inputs)]
        return self._work(opts, _begun(steps), outputs)

    @recorded("all_to_all", argument=1)
    @also_on_cuda
    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> TorchWork | None:
        opts = opts or AllToAllOptions()
        if not output_splits and not input_splits:
            return self._work(opts, [self._all_to_all(output, input, opts)], [output])
        of_output = _splits("output", output, output_splits, self.size())
        of_input = _splits("input", input, input_splits, self.size())
        received, sent = self._target(output), self._source(input)
        outputs = torch.split(received.elements.view(output.shape), of_output)
        inputs = torch.split(sent.view(input.shape), of_input)
        step = self._exchange(outputs, inputs, opts)
        return self._work(opts, [step, StepInFlight([], received.finish)], [output])

    @recorded("all_to_all", argument=1)
    @also_on_cuda
    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> TorchWork | None:
        opts = opts or AllToAllOptions()
        return self._work(opts, [self._exchange(outputs, inputs, opts)], outputs)

    @recorded("gather", argument=1)
    @also_on_cuda
    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> TorchWork | None:
        opts = opts or GatherOptions()
        tensor, seconds = only(inputs), self.group.ready(self._seconds(opts))
        self._check_lists_of_root("gather", "outputs", outputs, opts.rootRank)
        if self.rank() != opts.rootRank:
            part = self.group.send_part("gather", raw(self._source(tensor)), opts.rootRank, seconds)
            return self._work(opts, [StepInFlight([part])], [])
        blocks = only(outputs)
        self._check_blocks("gather", blocks, tensor)
        refuse_shared(blocks)
        targets = [self._target(block) for block in blocks]
        fill(targets[self.rank()].elements, apart([self._source(tensor)], [targets[self.rank()].elements])[0])
        pieces = {peer: raw(targets[peer].elements) for peer in self._others()}
        steps = [StepInFlight([self.group.recv_part("gather", piece, peer, seconds)]) for peer, piece in pieces.items()]
        return self._work(opts, [*steps, *(StepInFlight([], block.finish) for block in targets)], outputs)

    @recorded("scatter")
    @also_on_cuda
    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> TorchWork | None:
        opts = opts or ScatterOptions()
        tensor, seconds = only(outputs), self.group.ready(self._seconds(opts))
        self._check_lists_of_root("scatter", "inputs", inputs, opts.rootRank)
        x = self._target(tensor)
        if self.rank() != opts.rootRank:
            part = self.group.recv_part("scatter", raw(x.elements), opts.rootRank, seconds)
            return self._work(opts, [StepInFlight([part], x.finish)], outputs)
        self._check_blocks("scatter", only(inputs), tensor)
        blocks = apart([self._source(block) for block in only(inputs)], [x.elements])
        pieces = {peer: raw(blocks[peer]) for peer in self._others()}
        fill(x.elements, blocks[self.rank()])
        parts = [self.group.send_part("scatter", piece, peer, seconds) for peer, piece in pieces.items()]
        return self._work(opts, [StepInFlight(parts, x.finish)], outputs)

    @recorded("barrier", argument=-1)
    def barrier(self, opts: Any = None) -> TorchWork | None:
        opts = opts or BarrierOptions()
        if not opts.asyncOp:
            self.communicator.barrier(timeout=self._seconds(opts))
            return None
        part = self.communicator.barrier(async_op=True, timeout=self._seconds(opts))
        return self._work(opts, [StepInFlight([part])], [])

    # --- messages ---

    @recorded("send")
    @also_on_cuda
    def send(self, tensors: list[Tensor], dstRank: int, tag: int) -> TorchWork:
        x = raw(self._source(only(tensors)))
        part = self.group.send(x, dstRank, valid_tag(tag), timeout=self._timeout)
        return TorchWork([part], tensors, watcher=self._messages)

    @recorded("recv")
    @also_on_cuda
    def recv(self, tensors: list[Tensor], srcRank: int, tag: int) -> TorchWork:
        return self._recv(tensors, srcRank, tag)

    @recorded("recv")
    @also_on_cuda
    def recv_anysource(self, tensors: list[Tensor], tag: int) -> TorchWork:
        return self._recv(tensors, None, tag)

    # --- names that torch used before 2.13 ---

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # --- how ---

    def _allocate(self, count: int, /, *, dtype: torch.dtype) -> Tensor:
        """Memory of the arena, whose pages stay there from call to call; other memory where that is full."""
        nbytes = count * dtype.itemsize
        if nbytes > _SENT_AT_ONCE:
            with suppress(MultiringError):  # a call that cannot be made says so itself
                return torch.from_numpy(self.group.engine.empty(nbytes, copy=True)).view(dtype)
        return on_cpu(count, dtype=dtype)

    def _source(self, tensor: Tensor) -> Tensor:
        return source(tensor, self._allocate)

    def _target(self, tensor: Tensor, *, read: bool = False, write: bool = True) -> TensorTarget:
        return target(tensor, self._allocate, read=read, write=write)

    def _seconds(self, opts: Any = None) -> float:
        """The call's own time limit, else the group's: torch marks "none given" by a negative one."""
        seconds: float = opts.timeout.total_seconds() if opts else -1
        return seconds if seconds >= 0 else self._timeout

    def _run(
        self, opts: Any, collective: str, piece: Piece, op: str = "sum", root: int = 0, *, finish: Finish | None = None
    ) -> StepInFlight:
        """A collective in place; one that torch will wait for at once is made in this thread."""
        seconds = self._seconds(opts)
        if opts.asyncOp:
            return StepInFlight([self.group.start(collective, piece, op, root, timeout=seconds)], finish)
        self.group.run(collective, piece, op, root, timeout=seconds)
        return StepInFlight([], finish)

    def _work(self, opts: Any, steps: list[StepInFlight], result: list[Any]) -> TorchWork | None:
        """Return the work for torch; None if all is done and torch asks for none: a work costs like a small call."""
        parts = [part for step in steps for part in step.parts]
        finish = [step.finish for step in steps if step.finish is not None]
        if not parts and not opts.asyncOp:
            for complete in finish:
                complete()
            return None
        work = TorchWork(parts, result, finish, watcher=self._collectives)
        if not parts:
            work.wait()
        return work

    def _recv(self, tensors: list[Tensor], peer: int | None, tag: int) -> TorchWork:
        x = self._target(only(tensors))
        part = self.group.recv(raw(x.elements), peer, valid_tag(tag), timeout=self._timeout)
        work = Work([part], finish=lambda: self.group.members.index(part.other))
        return TorchWork([work], tensors, [] if x.finish is None else [x.finish], watcher=self._messages)

    def _check(self, name: str, whole: Tensor, count: int, other: Tensor) -> None:
        """ValueError unless ``whole`` has ``count`` elements of the type of ``other``."""
        if whole.numel() != count or whole.dtype != other.dtype:
            raise ValueError(
                f"{name} over {self.size()} ranks: a tensor of {whole.numel()} x {whole.dtype} does not go with one of "
                f"{other.numel()} x {other.dtype}"
            )

    def _check_inputs(self, output: Tensor, blocks: Sequence[Tensor]) -> None:
        """ValueError unless there is an input of a reduce_scatter for each rank, each like the output."""
        if len(blocks) != self.size():
            raise ValueError(
                f"reduce_scatter over {self.size()} ranks needs {self.size()} inputs, one for each rank, not "
                f"{len(blocks)}"
            )
        for rank, block in enumerate(blocks):
            if block.numel() != output.numel() or block.dtype != output.dtype:
                raise ValueError(
                    f"reduce_scatter: the input for rank {rank} is {block.numel()} x {block.dtype}, the output "
                    f"{output.numel()} x {output.dtype}"
                )

    def _check_blocks(self, name: str, blocks: Sequence[Tensor], other: Tensor) -> None:
        """ValueError unless there is a block for each rank, of as many elements and the type of ``other``."""
        if len(blocks) != self.size() or any((b.numel(), b.dtype) != (other.numel(), other.dtype) for b in blocks):
            raise ValueError(
                f"{name} over {self.size()} ranks needs {self.size()} tensors of {other.numel()} x {other.dtype}, not "
                f"{[f'{block.numel()} x {block.dtype}' for block in blocks]}"
            )

    def _check_lists_of_root(self, name: str, which: str, lists: Sequence[Sequence[Tensor]], root: int) -> None:
        """ValueError unless the root has a list of tensors, one for each rank, and the others have none."""
        rank, size = self.rank(), self.size()
        self.group.valid_rank("root", root)
        if rank == root and len(lists) != 1:
            raise ValueError(
                f"{name}: rank {rank} is the root, which hands over one list of {size} {which}, one for each rank, not "
                f"{len(lists)} lists"
            )
        if rank != root and any(lists):
            raise ValueError(
                f"{name}: rank {rank} hands over {sum(map(len, lists))} {which}, and rank {root} is the root: only "
                f"that has a list of {which}, the others none"
            )

    def _others(self) -> list[int]:
        return [rank for rank in range(self.size()) if rank != self.rank()]

    # What these return is ready to begin: of calls that torch makes at once, none begins before all are checked.

    def _all_reduce(self, tensor: Tensor, opts: Any) -> Begin:
        x = self._target(tensor, read=True)
        op, finish = self._reduction(opts, x)
        return partial(self._run, opts, "all_reduce", reducible(x.elements), op, finish=finish)

    def _reduction(self, opts: Any, x: TensorTarget) -> tuple[str, Finish | None]:
        """The communicator's operation for a sum in ``x``, and what remains to be done with that afterwards."""
        op = op_name(opts.reduceOp)
        if not is_cut_off(op, x.elements.dtype):
            return op, x.finish

        def divide() -> None:
            fill(x.elements, divided(x.elements, self.size()))
            if x.finish is not None:
                x.finish()

        return "sum", divide

    def _all_gather(self, output: Tensor, input: Tensor, opts: Any) -> Begin:
        self._check("all_gather", output, self.size() * input.numel(), input)
        x, mine = self._target(output), raw(self._source(input))
        whole = raw(x.elements)

        def begin() -> StepInFlight:
            self.group.ready(self._seconds(opts))
            return self._run(opts, "all_gather", gathered(mine, whole, self.rank()), finish=x.finish)

        return begin

    def _all_gather_list(self, outputs: list[Tensor], input: Tensor, opts: Any) -> Begin:
        self._check_blocks("all_gather", outputs, input)
        refuse_shared(outputs)
        staging = self._allocate(self.size() * input.numel(), dtype=input.dtype)
        put = [filling(output) for output in outputs]
        begin = self._all_gather(staging, input, opts)

        def finish() -> None:
            for fill_output, block in zip(put, staging.chunk(len(outputs)), strict=True):
                fill_output(block)

        return lambda: StepInFlight(begin().parts, finish)

    def _reduce_scatter(self, output: Tensor, input: Tensor, opts: Any) -> Begin:
        self._check("reduce_scatter", input, self.size() * output.numel(), output)
        whole, x = reducible(self._source(input)), self._target(output)
        mine = reducible(x.elements)
        op, then = self._reduction(opts, x)

        def begin() -> StepInFlight:
            self.group.ready(self._seconds(opts))
            blocks, put = scattered(whole, mine, self.rank())

            def finish() -> None:
                put()
                if then is not None:
                    then()

            return self._run(opts, "reduce_scatter", blocks, op, finish=finish)

        return begin

    def _all_to_all(self, output: Tensor, input: Tensor, opts: Any) -> StepInFlight:
        self._check("all_to_all", output, input.numel(), input)
        for tensor in (output, input):
            _equal(tensor, self.size())
        x, mine = self._target(output), raw(self._source(input))
        self.group.ready(self._seconds(opts))
        blocks = exchanged(mine, raw(x.elements), self.size())
        return self._run(opts, "all_to_all", blocks, finish=x.finish)

    def _exchange(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any) -> StepInFlight:
        """An all-to-all of any sizes: a message to and from every other rank."""
        here, size, seconds = self.rank(), self.size(), self.group.ready(self._seconds(opts))
        if (len(outputs), len(inputs)) != (size, size):
            raise ValueError(
                f"all_to_all over {size} ranks needs {size} outputs and {size} inputs, one of each for each rank, not "
                f"{len(outputs)} and {len(inputs)}"
            )
        self._check("all_to_all", outputs[here], inputs[here].numel(), inputs[here])
        refuse_shared(outputs)
        targets = [self._target(output) for output in outputs]
        sources = apart([self._source(tensor) for tensor in inputs], [x.elements for x in targets])
        incoming = {peer: raw(targets[peer].elements) for peer in self._others()}
        outgoing = {peer: raw(sources[peer]) for peer in self._others()}
        fill(targets[here].elements, sources[here])
        parts = [self.group.recv_part("all_to_all", piece, peer, seconds) for peer, piece in incoming.items()]
        parts += [self.group.send_part("all_to_all", piece, peer, seconds) for peer, piece in outgoing.items()]

        def finish() -> None:
            for x in targets:
                if x.finish is not None:
                    x.finish()

        return StepInFlight(parts, finish)


def _begun(calls: Sequence[Begin]) -> list[StepInFlight]:
    return [begin() for begin in calls]


def _pairs(name: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Each output with its input, as that is when the calls are made."""
    if len(outputs) != len(inputs):
        raise ValueError(
            f"{name} of several tensors at once: {len(outputs)} outputs do not go with {len(inputs)} inputs"
        )
    refuse_shared(outputs)
    for tensor in inputs:
        refuse_form(tensor)
    return list(zip(outputs, unwritten(inputs, outputs), strict=True))


def _check_lists(name: str, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], size: int) -> None:
    """ValueError unless there is a list of outputs for each rank, with one for each input."""
    counts = [len(blocks) for blocks in outputs]
    if counts != [len(inputs)] * size:
        raise ValueError(
            f"{name} of {len(inputs)} tensors at once over {size} ranks needs {size} lists of {len(inputs)} outputs, "
            f"not lists of {counts}"
        )


def _splits(which: str, tensor: Tensor, counts: list[int], size: int) -> list[int]:
    """Return the number of a tensor's rows for each rank; equal numbers if nobody said."""
    if not counts:
        return _equal(tensor, size)
    rows = tensor.shape[0] if tensor.dim() else 0
    if not tensor.dim() or len(counts) != size or min(counts) < 0 or sum(counts) != rows:
        raise ValueError(
            f"{which} splits {counts} do not go with the {which} of shape {tuple(tensor.shape)}: {size} numbers, one "
            f"for each rank, each 0 or more, that add up to {rows} are needed"
        )
    return counts


def _equal(tensor: Tensor, size: int) -> list[int]:
    if not tensor.dim() or tensor.shape[0] % size:
        raise ValueError(
            f"{size} ranks cannot share the first dimension of {tuple(tensor.shape)} equally: give the splits"
        )
    return [tensor.shape[0] // size] * size
