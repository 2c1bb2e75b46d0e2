"""Element [i, j] of a tensor arrives at [i, j], in every collective, however the tensors of the ranks lie."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch_helpers import caught, group, same
from torch_ranks import values
from workers import worker, workers

import multiring
from multiring.torch import broadcast_parameters

Options = TypeVar("Options", dist.GatherOptions, dist.ReduceOptions, dist.ScatterOptions)

SHAPE = (6, 2, 3, 4)  # cut into 2 or 3 along the first axis
NOTHING = (6, 0, 3, 4)
LARGE = (12, 10, 9, 18)  # what the library copies itself, in memory that the ranks share


def _column(x: Tensor) -> Tensor:
    wider = torch.zeros(*x.shape, 3, dtype=x.dtype)
    wider[..., 1] = x
    return wider[..., 1]


def _step(x: Tensor) -> Tensor:
    longer = torch.zeros(2 * x.shape[0], *x.shape[1:], dtype=x.dtype)
    longer[::2] = x
    return longer[::2]


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x.clone(),
    "transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "permuted": lambda x: x.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0),
    "channels_last": lambda x: x.clone(memory_format=torch.channels_last),
    "column": _column,
    "step": _step,
    "negative": lambda x: torch._neg_view(-x),
    "negative column": lambda x: torch._neg_view(_column(-x)),
}
"""Functions that give a tensor's elements another place in memory."""

INPUTS = {**LAYOUTS, "expanded": lambda x: x[:1].clone().expand(x.shape)}
"""Layouts that can be read; an expanded one repeats its first row."""


class Case:
    """A layout of inputs and one of outputs for each rank, and what the inputs hold."""

    def __init__(self, inputs: Sequence[str], outputs: Sequence[str], dtype: torch.dtype, shape: tuple[int, ...]):
        self.inputs, self.outputs, self.dtype, self.shape = inputs, outputs, dtype, shape
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def input(self, rank: int, salt: int = 0) -> Tensor:
        """Return ``rank``'s input, in that rank's layout."""
        x = torch.arange(torch.Size(self.shape).numel()).view(self.shape) * 3 + rank * 1000 + salt * 100_000
        x = torch.complex(x.float(), -2 * x.float()) if self.dtype.is_complex else x.to(self.dtype)
        return INPUTS[self.inputs[rank]](x)

    def value(self, rank: int, salt: int = 0) -> Tensor:
        return self.input(rank, salt).resolve_neg().contiguous()

    def everyones(self, salt: int = 0) -> list[Tensor]:
        return [self.value(rank, salt) for rank in range(self.size)]

    def output(self, shape: Sequence[int] | None = None) -> Tensor:
        return LAYOUTS[self.outputs[self.rank]](torch.full(shape or self.shape, -1, dtype=self.dtype))

    def in_place(self) -> Tensor:
        """The input of this rank, which is to be written too: no expanded one."""
        mine = self.input(self.rank)
        return mine.clone() if self.inputs[self.rank] == "expanded" else mine


def all_reduce(case: Case) -> None:
    for asynchronous in (False, True):
        x = case.in_place()
        work = dist.all_reduce(x, async_op=asynchronous)
        if work is not None:
            work.wait()
        same(x, sum(case.everyones()))
    if not case.dtype.is_complex:
        x = case.in_place().to(torch.int64)
        dist.all_reduce(x, dist.ReduceOp.AVG)
        same(x, sum(case.everyones()).long() // case.size)


def reduce(case: Case) -> None:
    for root in range(case.size):
        x = case.in_place() if case.rank == root else case.input(case.rank)
        dist.reduce(x, root)
        if case.rank == root:
            same(x, sum(case.everyones()))


def broadcast(case: Case) -> None:
    for root in range(case.size):
        x = case.input(case.rank) if case.rank == root else case.output()
        dist.broadcast(x, root)
        same(x, case.value(root))


def all_gather(case: Case) -> None:
    for asynchronous in (False, True):
        outputs = [case.output() for _ in range(case.size)]
        work = dist.all_gather(outputs, case.input(case.rank), async_op=asynchronous)
        if work is not None:
            work.wait()
        for output, expected in zip(outputs, case.everyones(), strict=True):
            same(output, expected)


def all_gather_into_tensor(case: Case) -> None:
    output = case.output((case.size * case.shape[0], *case.shape[1:]))
    dist.all_gather_into_tensor(output, case.input(case.rank))
    same(output, torch.cat(case.everyones()))


def coalesced(case: Case) -> None:
    x, y = case.in_place(), case.in_place()
    with dist.distributed_c10d._coalescing_manager():
        dist.all_reduce(x)
        dist.all_reduce(y)
    same(x, sum(case.everyones()))
    same(y, sum(case.everyones()))
    outputs = [case.output((case.size * case.shape[0], *case.shape[1:])) for _ in range(2)]
    with dist.distributed_c10d._coalescing_manager():
        dist.all_gather_into_tensor(outputs[0], case.input(case.rank, 1))
        dist.all_gather_into_tensor(outputs[1], case.input(case.rank, 2))
    for salt, output in enumerate(outputs, 1):
        same(output, torch.cat(case.everyones(salt)))
    shares = [case.output((case.shape[0] // case.size, *case.shape[1:])) for _ in range(2)]
    with dist.distributed_c10d._coalescing_manager():
        dist.reduce_scatter_tensor(shares[0], case.input(case.rank, 1))
        dist.reduce_scatter_tensor(shares[1], case.input(case.rank, 2))
    for salt, share in enumerate(shares, 1):
        same(share, sum(case.everyones(salt)).chunk(case.size)[case.rank])


def reduce_scatter(case: Case) -> None:
    output = case.output()
    dist.reduce_scatter(output, [case.input(case.rank, peer) for peer in range(case.size)])
    same(output, sum(case.everyones(case.rank)))


def reduce_scatter_tensor(case: Case) -> None:
    output = case.output((case.shape[0] // case.size, *case.shape[1:]))
    dist.reduce_scatter_tensor(output, case.input(case.rank))
    same(output, sum(case.everyones()).chunk(case.size)[case.rank])


def all_to_all(case: Case) -> None:
    outputs = [case.output() for _ in range(case.size)]
    dist.all_to_all(outputs, [case.input(case.rank, peer) for peer in range(case.size)])
    for peer, output in enumerate(outputs):
        same(output, case.value(peer, case.rank))


def all_to_all_single(case: Case) -> None:
    output = case.output()
    dist.all_to_all_single(output, case.input(case.rank))
    same(output, torch.cat([x.chunk(case.size)[case.rank] for x in case.everyones()]))


def all_to_all_single_with_splits(case: Case) -> None:
    splits = [case.shape[0] - case.size + 1, *[1] * (case.size - 1)]  # the most to rank 0
    output = case.output((case.size * splits[case.rank], *case.shape[1:]))
    dist.all_to_all_single(output, case.input(case.rank), [splits[case.rank]] * case.size, splits)
    same(output, torch.cat([x.split(splits)[case.rank] for x in case.everyones()]))


def gather(case: Case) -> None:
    for root in range(case.size):
        outputs = [case.output() for _ in range(case.size)] if case.rank == root else None
        dist.gather(case.input(case.rank), outputs, dst=root)
        for output, expected in zip(outputs or (), case.everyones(), strict=outputs is not None):
            same(output, expected)


def scatter(case: Case) -> None:
    for root in range(case.size):
        output = case.output()
        blocks = [case.input(root, peer) for peer in range(case.size)] if case.rank == root else None
        dist.scatter(output, blocks, src=root)
        same(output, case.value(root, case.rank))


def messages(case: Case) -> None:
    output, after, before = case.output(), (case.rank + 1) % case.size, (case.rank - 1) % case.size
    send = dist.isend(case.input(case.rank), after)
    if case.rank % 2:
        dist.recv(output, before)
    else:
        dist.irecv(output).wait()
    send.wait()
    same(output, case.value(before))


COLLECTIVES: list[Callable[[Case], None]] = [
    all_reduce,
    reduce,
    broadcast,
    all_gather,
    all_gather_into_tensor,
    coalesced,
    reduce_scatter,
    reduce_scatter_tensor,
    all_to_all,
    all_to_all_single,
    all_to_all_single_with_splits,
    gather,
    scatter,
    messages,
]


def every_layout() -> None:
    with group() as (_, size):
        for case in _cases(size):
            for collective in COLLECTIVES:
                collective(case)


def _cases(size: int) -> Iterator[Case]:
    """Each layout of inputs, of outputs, and of both, on all ranks alike and on ranks that differ."""
    plain = ["contiguous"] * size
    for first, name in enumerate(INPUTS):
        for inputs in ([name] * size, _in_turn(INPUTS, first, size)):
            yield Case(inputs, plain, torch.float32, SHAPE)
    for first, name in enumerate(LAYOUTS):
        alike, differing = [name] * size, _in_turn(LAYOUTS, first, size)
        for outputs in (alike, differing):
            for inputs in (plain, alike, differing):
                yield Case(inputs, outputs, torch.float32, SHAPE)
        yield Case(differing, alike, torch.complex64, SHAPE)
        yield Case(differing, alike, torch.float32, NOTHING)
        yield Case(differing, alike, torch.float32, LARGE)


def _in_turn(layouts: Iterable[str], first: int, size: int) -> list[str]:
    names = [*layouts]
    return [names[(first + rank) % len(names)] for rank in range(size)]


@pytest.mark.timeout(320)
@pytest.mark.parametrize("world_size", [2, 3])
def test_elements_keep_their_indices(world_size: int) -> None:
    values(every_layout, world_size=world_size, timeout=300)


@worker
def between_columns() -> None:
    """Memory between the elements of a view stays as it is; columns of one matrix are tensors of their own."""
    with group() as (rank, size):
        matrix = torch.full((5, 2 * size), -7.0)
        columns = [matrix[:, 2 * peer] for peer in range(size)]
        dist.all_gather(columns, torch.arange(5.0) + 10 * rank)
        same(matrix[:, ::2], torch.stack([torch.arange(5.0) + 10 * peer for peer in range(size)], 1))
        same(matrix[:, 1::2], torch.full((5, size), -7.0))
        dist.all_reduce(matrix[:, 0])
        same(matrix[:, 0], torch.arange(5.0) * size)
        same(matrix[:, 1::2], torch.full((5, size), -7.0))


@worker
def rare_formats() -> None:
    with group() as (rank, size):
        for dtype in (torch.float8_e8m0fnu, torch.float8_e4m3fn, torch.bfloat16, torch.uint16):
            contribution = (torch.arange(6).view(2, 3) + rank * 6).to(torch.uint8)
            mine = contribution.view(dtype) if dtype.itemsize == 1 else contribution.to(dtype)
            outputs = [torch.zeros(3, 2).to(dtype).t() for _ in range(size)]
            dist.all_gather(outputs, mine.t().contiguous().t())
            for peer, output in enumerate(outputs):
                expected = (torch.arange(6).view(2, 3) + peer * 6).to(torch.uint8)
                same(output.contiguous().view(torch.uint8), _bytes(expected, dtype))


def _bytes(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    return (numbers.view(dtype) if dtype.itemsize == 1 else numbers.to(dtype)).view(torch.uint8)


@worker
def conjugates() -> None:
    """Conjugates work where torch takes them; most of its functions name the remedy before the group is asked."""
    with group() as (rank, size):

        def conjugate(peer: int) -> Tensor:
            x = torch.arange(6.0).view(2, 3) + 10 * peer
            return torch.complex(x, -2 * x).conj()

        def expected(peer: int) -> Tensor:
            return conjugate(peer).resolve_conj()

        here = dist.group.WORLD
        for lay in (lambda x: x, lambda x: x.t()):
            x = lay(conjugate(rank))
            here.allreduce([x]).wait()
            same(x, lay(sum(expected(peer) for peer in range(size))))
            outputs = [lay(conjugate(9)) for _ in range(size)]
            here.allgather([outputs], [lay(conjugate(rank))]).wait()
            for peer, output in enumerate(outputs):
                same(output, lay(expected(peer)))
            x = lay(conjugate(rank))
            here.broadcast([x], size - 1).wait()
            same(x, lay(expected(size - 1)))
            got = lay(conjugate(9))
            send = here.send([lay(conjugate(rank))], (rank + 1) % size, 0)
            here.recv([got], (rank - 1) % size, 0).wait()
            send.wait()
            same(got, lay(expected((rank - 1) % size)))
            x = lay(conjugate(rank))
            here.reduce([x], _at(dist.ReduceOptions(), 1)).wait()
            if rank == 1:
                same(x, lay(sum(expected(peer) for peer in range(size))))
            outputs = [lay(conjugate(9)) for _ in range(size)]
            here.gather([outputs] if rank == 1 else [], [lay(conjugate(rank))], _at(dist.GatherOptions(), 1)).wait()
            for peer, output in enumerate(outputs):
                same(output, lay(expected(peer if rank == 1 else 9)))
            blocks = [[lay(conjugate(peer + 50)) for peer in range(size)]] if rank == 1 else []
            here.scatter([got], blocks, _at(dist.ScatterOptions(), 1)).wait()
            same(got, lay(expected(rank + 50)))
            here.reduce_scatter([got], [[lay(conjugate(rank + 50 * peer)) for peer in range(size)]]).wait()
            same(got, lay(sum(expected(peer + 50 * rank) for peer in range(size))))
            here.alltoall(outputs, [lay(conjugate(rank + 50 * peer)) for peer in range(size)]).wait()
            for peer, output in enumerate(outputs):
                same(output, lay(expected(peer + 50 * rank)))
            whole = torch.cat([lay(conjugate(9))] * size).resolve_conj().conj()
            here.all_gather_single(whole, lay(conjugate(rank))).wait()
            same(whole, torch.cat([lay(expected(peer)) for peer in range(size)]))
            here.reduce_scatter_single(got, torch.cat([lay(conjugate(rank + peer)) for peer in range(size)])).wait()
            same(got, lay(sum(expected(rank + peer) for peer in range(size))))


@worker
def nothing_at_all() -> None:
    """Tensors without elements go through every collective, and the next one is right."""
    with group() as (rank, size):
        for shape in ((0,), (0, 3), (3 * size, 0)):
            for lay in (Tensor.clone, lambda x: x.t().contiguous().t() if x.dim() > 1 else x[::2]):
                x = lay(torch.empty(shape))
                dist.all_reduce(x)
                dist.reduce(x, 1)
                dist.broadcast(x, size - 1)
                outputs = [lay(torch.empty(shape)) for _ in range(size)]
                dist.all_gather(outputs, x)
                dist.all_to_all(outputs, [lay(torch.empty(shape)) for _ in range(size)])
                dist.gather(x, outputs if rank == 1 else None, dst=1)
                dist.scatter(x, outputs if rank == 1 else None, src=1)
                dist.reduce_scatter(x, outputs)
                whole = torch.empty(size * shape[0], *shape[1:])
                dist.all_gather_into_tensor(whole, x)
                dist.reduce_scatter_tensor(x, whole)
                dist.all_to_all_single(lay(torch.empty(shape)), x)
                send = dist.isend(x, (rank + 1) % size)
                dist.recv(lay(torch.empty(shape)), (rank - 1) % size)
                send.wait()
                assert x.shape == torch.Size(shape)
                mine = torch.arange(3.0) + rank
                dist.all_reduce(mine)
                same(mine, sum(torch.arange(3.0) + peer for peer in range(size)))


@worker
def of_autograd_and_inference() -> None:
    with group() as (rank, size):
        expected = torch.stack([torch.arange(6.0).view(2, 3) + peer for peer in range(size)])
        learned = (torch.arange(6.0).view(2, 3) + rank).t().contiguous().t().requires_grad_()
        dist.all_reduce(learned)
        same(learned.detach(), expected.sum(0))
        assert learned.is_leaf
        assert learned.requires_grad
        outputs = [torch.zeros(3, 2).t().requires_grad_() for _ in range(size)]
        dist.all_gather(outputs, learned)
        same(torch.stack([output.detach() for output in outputs]), torch.stack([expected.sum(0)] * size))
        with torch.inference_mode():
            frozen = (torch.arange(6.0).view(2, 3) + rank).t().contiguous().t()
            copies = [torch.zeros(3, 2).t() for _ in range(size)]
            work = dist.all_gather(copies, frozen, async_op=True)
        work.get_future().wait()  # completed by a thread that is not in inference mode
        same(torch.stack(copies), expected)


@worker
def under_another_default_device() -> None:
    """Copies lie where the tensors do."""
    with group() as (rank, size):
        for length in (6, 300):
            mine = (torch.arange(length * length).view(length, length) + rank).float().t()
            blocks = [torch.full((length, 2), 10.0 * peer + rank) for peer in range(size)]
            output, outputs = torch.zeros(length, 2), [torch.zeros(length, length).t() for _ in range(size)]
            expected = [(torch.arange(length * length).view(length, length) + peer).float().t() for peer in range(size)]
            total = torch.full((length, 2), sum(10.0 * rank + peer for peer in range(size)))
            with torch.device("meta"):
                dist.all_gather(outputs, mine)
                dist.reduce_scatter(output, blocks)
                dist.all_reduce(mine)
            for peer in range(size):
                same(outputs[peer], expected[peer])
            same(output, total)
            same(mine, sum(expected))


@worker
def small_messages_that_both_send_first() -> None:
    """Up to 64 KB go at once, also where they have to be copied."""
    with group() as (rank, size):
        to, source = (rank + 1) % size, (rank - 1) % size
        got = torch.zeros(128, 128)
        dist.send((torch.arange(128.0 * 128).view(128, 128) + rank).t(), to)
        dist.recv(got, source)
        same(got, (torch.arange(128.0 * 128).view(128, 128) + source).t())


@worker
def given_other_memory_in_flight() -> None:
    """The result goes where the tensor lay when the call was made."""
    with group() as (rank, size):
        x = (torch.arange(6.0).view(2, 3) + rank).t()
        before = x.detach()
        work = dist.all_reduce(x, async_op=True)
        x.data = torch.zeros(1)
        work.wait()
        same(x, torch.zeros(1))
        same(before, sum(torch.arange(6.0).view(2, 3) + peer for peer in range(size)).t())


@worker
def memory_that_is_shared() -> None:
    """Outputs whose elements are the same memory are refused, before anything is sent, by each rank alone."""
    with group() as (rank, size):
        x, wide = torch.arange(3.0), torch.zeros(1, 3).expand(2, 3)
        windows = torch.arange(5.0).unfold(0, 3, 1)
        for call in (
            partial(dist.all_reduce, wide),
            partial(dist.all_reduce, windows),
            partial(dist.recv, wide, (rank + 1) % size),
            partial(dist.all_gather, [wide] + [torch.zeros(2, 3)] * (size - 1), torch.zeros(2, 3)),
            partial(dist.all_gather_into_tensor, torch.zeros(1, 3).expand(size, 3), x),
            partial(dist.reduce_scatter_tensor, wide, torch.zeros(2 * size, 3)),
            partial(dist.all_to_all_single, torch.zeros(1, 3).expand(size, 3), torch.zeros(size, 3)),
            partial(dist.scatter, wide, [torch.zeros(2, 3)] * size if rank == 0 else None),
        ):
            error = str(caught(ValueError, call))
            assert "share memory" in error, error
        for call in (
            partial(dist.all_gather, [x] * size, x.clone()),
            partial(dist.all_to_all, [x] * size, [x.clone() for _ in range(size)]),
        ):
            assert "outputs 0 and 1 share memory" in str(caught(ValueError, call))
        line, columns = torch.zeros(3 * size + 3), torch.zeros(3, 2 * size)
        windows_apart = [line[3 * peer : 3 * peer + 3] for peer in range(size - 1)]
        overlapping = [*windows_apart, line[3 * size - 5 : 3 * size - 2]]  # the last lies in part in the one before
        crossing = [columns[:, peer] for peer in range(size - 1)] + [columns[2, size - 2 : size + 1]]
        coalesced = dist.group.WORLD
        for call in (
            partial(dist.all_gather, overlapping, x.clone()),
            partial(dist.all_gather, crossing, x.clone()),
            partial(dist.all_to_all, overlapping, [x.clone() for _ in range(size)]),
            partial(coalesced.gather, [overlapping], [x.clone()], _at(dist.GatherOptions(), rank)),
            partial(coalesced.allreduce_coalesced, overlapping),
            partial(coalesced.all_gather_single_coalesced, [torch.zeros(3 * size)] * size, overlapping),
        ):
            error = str(caught(ValueError, call))
            pair = "0 and 1" if "_single_coalesced" in str(call) else f"{size - 2} and {size - 1}"
            assert f"outputs {pair} share memory" in error, error
        assert not line.any()
        assert not columns.any()
        among = [columns[:, peer] for peer in range(size)]  # between each other, and apart
        dist.all_gather(among, x + 10 * rank)
        same(columns[:, :size], torch.stack([x + 10 * peer for peer in range(size)], 1))
        assert not columns[:, size:].any()
        interleaved = torch.zeros(6).as_strided((2, 2), (3, 2))  # strides alone do not tell that it is sound
        interleaved += rank
        dist.all_reduce(interleaved)
        same(interleaved, torch.full((2, 2), float(sum(range(size)))))
        dist.barrier()


@worker
def inputs_that_are_overwritten() -> None:
    """An input that lies in an output is read as it was when the call was made."""
    with group() as (rank, size):

        def rows(peer: int) -> Tensor:
            return torch.arange(4.0 * size * 50_000).view(size, -1) + 1000 * peer

        mine = rows(rank)
        dist.all_to_all(list(mine), list(mine))
        same(mine, torch.stack([rows(peer)[rank] for peer in range(size)]))
        mine = rows(rank)
        dist.all_to_all_single(mine, mine, [1] * size, [1] * size)
        same(mine, torch.stack([rows(peer)[rank] for peer in range(size)]))
        mine = rows(rank)
        dist.all_to_all_single(mine, mine)
        same(mine, torch.stack([rows(peer)[rank] for peer in range(size)]))
        mine = rows(rank)  # the output is the block of another rank
        dist.scatter(mine[size - 1], list(mine) if rank == 0 else None)
        same(mine[size - 1], rows(0)[rank])
        mine = rows(rank)
        dist.gather(mine[0], list(mine) if rank == size - 1 else None, dst=size - 1)
        if rank == size - 1:
            same(mine, torch.stack([rows(peer)[0] for peer in range(size)]))


@worker
def blocks_of_other_sizes_and_types() -> None:
    with group() as (rank, size):
        x = torch.arange(4.0)
        ones = [torch.zeros(1) for _ in range(size)]
        doubles = [torch.zeros(4, dtype=torch.float64) for _ in range(size)]
        for outputs in (ones, doubles, [torch.zeros(4) for _ in range(size + 1)]):
            for call in (
                partial(dist.group.WORLD.allgather, [outputs], [x]),
                partial(dist.group.WORLD.gather, [outputs], [x], _at(dist.GatherOptions(), rank)),
                partial(dist.group.WORLD.scatter, [x], [outputs], _at(dist.ScatterOptions(), rank)),
            ):
                assert "4 x torch.float32, not ['" in str(caught(ValueError, call))
        halves = torch.arange(2.0 * size).view(2, size)[:1]  # as many elements as ranks, in one row
        error = caught(ValueError, lambda: dist.all_to_all_single(torch.empty(size), halves))
        assert f"{size} ranks cannot share the first dimension of (1, {size}) equally" in str(error)
        with torch.inference_mode():
            frozen = [torch.zeros(4) for _ in range(size)]
            sent = torch.arange(4.0) + rank
        dist.gather(sent, frozen if rank == 0 else None)
        if rank == 0:
            same(torch.stack(frozen), torch.arange(4.0) + torch.arange(size).view(-1, 1))


@worker
def storages_that_were_cut() -> None:
    """Views that reach beyond the storage under them are refused, wherever they begin and however they lie."""
    with group() as (rank, size):

        def cut(view: Callable[[Tensor], Tensor]) -> Tensor:
            whole = torch.arange(4096.0)
            part = view(whole)
            whole.untyped_storage().resize_(4 * 2050)
            return part

        views = (lambda x: x[2040:2060], lambda x: x[-20:], lambda x: x[2000:].view(-1, 8)[:20, 1])
        for part in map(cut, views):
            for call in (
                partial(dist.all_reduce, part),
                partial(dist.all_reduce, part, async_op=True),
                partial(dist.broadcast, part, rank),
                partial(dist.all_gather_into_tensor, torch.zeros(20 * size), part),
                partial(dist.all_gather, [torch.zeros(20)] + [part] + [torch.zeros(20)] * (size - 2), torch.ones(20)),
                partial(dist.send, part, (rank + 1) % size),
                partial(multiring.all_reduce, part),
            ):
                caught(ValueError, call)
        kept = cut(lambda x: x[2030:2050])
        dist.all_reduce(kept)
        same(kept, size * torch.arange(2030.0, 2050.0))
        for call in (
            partial(dist.all_reduce, torch.empty(3, device="meta")),
            partial(dist.all_gather, [torch.empty(3, device="meta")] * size, torch.ones(3)),
            partial(multiring.all_reduce, torch.empty(3, device="meta")),
        ):
            assert "hand over one that has" in str(caught(ValueError, call))
        dist.barrier()


@worker
def lists_of_other_lengths() -> None:
    """Each message says how many were handed over, and how many are needed."""
    with group() as (rank, size):
        world, other, x = dist.group.WORLD, (rank + 1) % size, torch.arange(4.0)
        few, none = [torch.zeros(4) for _ in range(size - 1)], torch.tensor(3.0)
        rows = torch.zeros(size, 2)
        for call, words in (
            (
                partial(dist.all_to_all, few, [x] * size),
                f"needs {size} outputs and {size} inputs, one of each for each",
            ),
            (partial(world.reduce_scatter, [x], [few]), f"needs {size} inputs, one for each rank, not {size - 1}"),
            (
                partial(dist.all_to_all_single, rows, rows.clone(), [1] * size, [size]),
                f"input splits [{size}] do not go with the input of shape ({size}, 2): {size} numbers",
            ),
            (
                partial(dist.all_to_all_single, rows, rows.clone(), [-1, size + 1] + [0] * (size - 2), [1] * size),
                f"output splits {[-1, size + 1] + [0] * (size - 2)} do not go with the output",
            ),
            (
                partial(dist.all_to_all_single, none, rows.clone(), [0] * size, [1] * size),
                f"output splits {[0] * size} do not go with the output of shape ()",
            ),
            (
                partial(world.gather, [], [x], _at(dist.GatherOptions(), rank)),
                f"gather: rank {rank} is the root, which hands over one list of {size} outputs, one for each rank",
            ),
            (
                partial(world.gather, [[x] * size], [x], _at(dist.GatherOptions(), other)),
                f"gather: rank {rank} hands over {size} outputs, and rank {other} is the root",
            ),
            (
                partial(world.scatter, [x], [], _at(dist.ScatterOptions(), rank)),
                f"scatter: rank {rank} is the root, which hands over one list of {size} inputs, one for each rank",
            ),
            (
                partial(world.scatter, [x], [[x] * size], _at(dist.ScatterOptions(), other)),
                f"scatter: rank {rank} hands over {size} inputs, and rank {other} is the root",
            ),
            (
                partial(world.allgather_coalesced, [[x.clone()] for _ in range(size)], [x, x]),
                f"needs {size} lists of 2 outputs, not lists of {[1] * size}",
            ),
            (
                partial(world.reduce_scatter_single_coalesced, [x], [torch.zeros(4 * size)] * 2),
                "1 outputs do not go with 2 inputs",
            ),
        ):
            error = str(caught(ValueError, call))
            assert words in error, error
        first = torch.full((4,), float(rank))
        caught(ValueError, partial(world.allreduce_coalesced, [first, torch.zeros(4, device="meta")]))
        same(first, torch.full((4,), float(rank)))  # the first was not begun before the second was looked at
        dist.barrier()


def _at(options: Options, root: int) -> Options:
    options.rootRank = root
    return options


@worker
def parameters_in_columns() -> None:
    with group() as (rank, _):
        wide = torch.zeros(3, 4)
        wide[:, 1] = torch.arange(3.0) + 10 * rank
        last = (torch.arange(24.0).view(1, 2, 3, 4) + 100 * rank).to(memory_format=torch.channels_last)
        broadcast_parameters({"column": wide[:, 1], "last": last}, root=1)
        same(wide, torch.stack([torch.zeros(3), torch.arange(3.0) + 10, torch.zeros(3), torch.zeros(3)], 1))
        same(last, torch.arange(24.0).view(1, 2, 3, 4) + 100)


@worker
def expanded_parameters() -> None:
    with group() as (rank, _):
        own = torch.full((1,), 10.0 + rank)
        said = caught(ValueError, lambda: broadcast_parameters({"expanded": own.expand(4)}, root=1))
        assert "expanded on rank 0" in str(said)
        after = torch.arange(3.0) + 10 * rank
        broadcast_parameters({"after": after}, root=1)  # no rank has begun the refused one
        same(after, torch.arange(3.0) + 10)


@pytest.mark.parametrize("worker", workers(__name__), ids=lambda worker: worker.__name__)
def test_layouts(worker: Callable[[], None]) -> None:
    values(worker, world_size=3)
