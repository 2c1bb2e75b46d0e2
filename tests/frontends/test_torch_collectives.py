"""Every collective of torch.distributed over real processes."""

from __future__ import annotations

import itertools
import threading
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch_helpers import caught, everyone, group, own, same
from torch_ranks import values
from workers import worker, workers

import multiring
from multiring import _native

FORMATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int16]
FORMATS += [torch.int32, torch.int64]
SIZES = [0, 1, 2, 3, 17, 1000]


@worker
def all_reduce() -> None:
    reductions = {
        dist.ReduceOp.SUM: lambda all: all.sum(0),
        dist.ReduceOp.PRODUCT: lambda all: all.prod(0),
        dist.ReduceOp.MIN: lambda all: all.amin(0),
        dist.ReduceOp.MAX: lambda all: all.amax(0),
    }
    with group() as (rank, size):
        for dtype in FORMATS:
            for count in SIZES:
                for op, expected in reductions.items():
                    x = own(rank, count, dtype)
                    dist.all_reduce(x, op)
                    same(x, expected(everyone(size, count, torch.float64)).to(dtype))
        for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
            x = own(rank, 17, dtype) * size
            dist.all_reduce(x, dist.ReduceOp.AVG)
            same(x, everyone(size, 17, torch.float64).sum(0).to(dtype))
        for asynchronous in (False, True):
            x = own(rank, 17, torch.int64)
            work = dist.all_reduce(x, dist.ReduceOp.AVG, async_op=asynchronous)
            if work is not None:
                work.wait()
            same(x, everyone(size, 17, torch.int64).sum(0) // size)
        x = own(rank, 17, torch.int32)
        dist.all_reduce(x, dist.ReduceOp.BOR)
        expected = torch.zeros(17, dtype=torch.int32)
        for contribution in everyone(size, 17, torch.int32):
            expected |= contribution
        same(x, expected)
        z = torch.complex(own(rank, 5), own(rank + 1, 5))
        dist.all_reduce(z)
        same(z, sum(torch.complex(own(r, 5), own(r + 1, 5)) for r in range(size)))
        flags = torch.arange(4) == rank
        dist.all_reduce(flags, dist.ReduceOp.MAX)
        same(flags, torch.arange(4) < size)


FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]


@worker
def rare_formats() -> None:
    with group() as (rank, size):
        for dtype in (*FLOAT8, torch.uint16, torch.uint32, torch.uint64):
            expected = everyone(size, 1000, torch.float64).sum(0).to(dtype).float()
            x = own(rank, 1000, dtype)
            dist.all_reduce(x)
            same(x.float(), expected)
            x = own(rank, 1000, dtype)
            dist.reduce(x, size - 1, dist.ReduceOp.MAX)
            if rank == size - 1:
                same(x.float(), everyone(size, 1000).amax(0))
            mine = torch.cat([own(rank + block, 100, dtype) for block in range(size)])
            output = torch.empty(100, dtype=dtype)
            dist.reduce_scatter_tensor(output, mine)
            same(output.float(), sum(own(r + rank, 100, torch.float64) for r in range(size)).to(dtype).float())
            received = torch.empty_like(mine)
            dist.all_to_all_single(received, mine)
            same(received.float(), torch.cat([own(peer + rank, 100) for peer in range(size)]))
            outputs = [torch.empty(7, dtype=dtype) for _ in range(size)] if rank == 0 else None
            dist.gather(own(rank, 7, dtype), outputs)
            if outputs is not None:
                same(torch.stack(outputs).float(), everyone(size, 7))
            if rank == 0:
                dist.send(own(5, 9, dtype), 1)
            elif rank == 1:
                received = torch.empty(9, dtype=dtype)
                dist.recv(received, 0)
                same(received.float(), own(5, 9))
        for dtype in FLOAT8:
            x = own(rank, 17, dtype)
            dist.all_reduce(x, dist.ReduceOp.AVG)
            same(x, (everyone(size, 17).sum(0) / size).to(dtype))
        scales = torch.ones(4).to(torch.float8_e8m0fnu)
        dist.broadcast(scales, 0)
        error = caught(TypeError, lambda: dist.all_reduce(scales))
        assert "cannot reduce torch.float8_e8m0fnu" in str(error), error


@worker
def all_reduce_asynchronously() -> None:
    with group() as (rank, size):
        tensors = [own(rank + i, 100 * i) for i in range(20)]
        works = [dist.all_reduce(x, async_op=True) for x in tensors]
        for i, (work, x) in reversed(list(enumerate(zip(works, tensors, strict=True)))):
            assert work.wait(timedelta(seconds=20))
            assert work.is_completed()
            assert work.is_success()
            assert work.exception() is None
            same(x, sum(own(r + i, 100 * i) for r in range(size)))
        x = own(rank, 50)
        doubled = dist.all_reduce(x, async_op=True).get_future().then(lambda future: future.value()[0] * 2)
        same(doubled.wait(), everyone(size, 50).sum(0) * 2)
        with dist.distributed_c10d._coalescing_manager():
            first, second = own(rank, 5), own(rank, 6)
            dist.all_reduce(first)
            dist.all_reduce(second)
        same(first, everyone(size, 5).sum(0))
        same(second, everyone(size, 6).sum(0))


@worker
def all_reduce_any_layout() -> None:
    with group() as (rank, size):
        images = own(rank, 2 * 3 * 4 * 5).view(2, 3, 4, 5).to(memory_format=torch.channels_last)
        dist.all_reduce(images)
        same(images, everyone(size, 120).sum(0).view(2, 3, 4, 5))
        learned = own(rank, 6).requires_grad_()
        dist.all_reduce(learned)
        same(learned.detach(), everyone(size, 6).sum(0))
        strided = torch.stack([own(rank, 5), torch.zeros(5)], 1)[:, 0]
        dist.all_reduce(strided)
        same(strided, everyone(size, 5).sum(0))


class Twice(torch.Tensor):
    """A class of tensors whose memory may hold anything."""


@worker
def plain_tensors() -> None:
    """Plain tensors are reduced in one native call; others are left as they are, for Python's steps."""
    with group() as (rank, size):
        reduce_plain = dist.group.WORLD.group.calls.all_reduce_plain
        whole = own(rank, 12)
        assert reduce_plain(whole[2:7], "sum")
        same(whole[2:7], everyone(size, 12).sum(0)[2:7])
        same(whole[7:], own(rank, 12)[7:])
        single = own(rank, 2, torch.bfloat16)[1]
        assert reduce_plain(single, "max")
        same(single, everyone(size, 2, torch.bfloat16).amax(0)[1])
        assert reduce_plain(own(rank, 0), "sum")
        assert reduce_plain(own(rank, 6).view(2, 3).T.T, "sum")
        z = torch.complex(own(rank, 4), own(rank + 1, 4))
        left = [
            own(rank, 6).requires_grad_(),
            torch.nn.Parameter(own(rank, 6), requires_grad=False),
            own(rank, 6).as_subclass(Twice),
            own(rank, 6).view(2, 3).T,
            own(rank, 6)[::2],
            own(rank, 6)[:1].expand(3),
            own(rank, 6).to_sparse(),
            torch.empty(6, device="meta"),
            z.conj(),
            z.conj().imag,
            own(rank, 6).tolist(),
            None,
        ]
        for x in left:
            assert not reduce_plain(x, "sum"), x
        for x, op in ((own(rank, 6, torch.int32), "avg"), (own(rank, 6), "bor"), (z, "max"), (own(rank, 6), "mean")):
            before = x.clone()
            assert not reduce_plain(x, op), op
            same(x, before)


def finish(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()


@worker
def averages_of_integers() -> None:
    """Cut off to integers, by every reduction."""
    formats = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64)
    with group() as (rank, size):
        for dtype in formats:
            sign = -1 if dtype.is_signed else 1
            for large in (0, 2**63) if dtype == torch.uint64 else (0,):
                # One rank alone is large, so that the sum has room.
                mine = [sign * int(x) + large * (rank == 0) for x in own(rank, 2 * size)]
                sums = [sign * int(x) + large for x in everyone(size, 2 * size).sum(0)]
                expected = torch.tensor([sign * (abs(total) // size) for total in sums], dtype=dtype)
                x = torch.tensor(mine, dtype=dtype)
                for asynchronous in (False, True):
                    y = x.clone()
                    finish(dist.all_reduce(y, dist.ReduceOp.AVG, async_op=asynchronous))
                    same(y, expected)
                    y = x.clone()
                    finish(dist.reduce(y, size - 1, dist.ReduceOp.AVG, async_op=asynchronous))
                    if rank == size - 1:
                        same(y, expected)
                    y = torch.zeros(6, dtype=dtype)[1:5:2]
                    finish(dist.reduce_scatter_tensor(y, x, dist.ReduceOp.AVG, async_op=asynchronous))
                    same(y, expected[2 * rank : 2 * rank + 2])
                y = torch.zeros(2, dtype=dtype)
                dist.reduce_scatter(y, list(x.chunk(size)), dist.ReduceOp.AVG)
                same(y, expected[2 * rank : 2 * rank + 2])
        with pytest.raises(ValueError, match="avg is not defined for bool"):
            dist.all_reduce(torch.ones(3, dtype=torch.bool), dist.ReduceOp.AVG)


@worker
def tensors_without_memory() -> None:
    with group() as (_, size):
        zeros = torch._efficientzerotensor((3,))
        with pytest.raises(ValueError, match="zeros for which torch keeps no memory"):
            dist.all_reduce(zeros)
        with pytest.raises(ValueError, match="shows 3 elements and has no memory"):
            multiring.all_reduce(zeros)
        gathered = torch.ones(3 * size)
        dist.all_gather_into_tensor(gathered, zeros)
        same(gathered, torch.zeros(3 * size))
        whole = torch.ones(8)
        part = whole[4:]
        whole.untyped_storage().resize_(0)
        for freed in (whole, part):
            for asynchronous in (False, True):
                with pytest.raises(ValueError, match="has no memory"):
                    dist.all_reduce(freed, async_op=asynchronous)
        same(gathered, torch.zeros(3 * size))
        for call in (dist.group.WORLD.split_group, dist.group.WORLD.merge_remote_group):
            with pytest.raises(RuntimeError, match="new_group"):
                call([0])


@worker
def tensors_that_are_more_than_their_elements() -> None:
    with group() as (_, size), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls some formats deprecated, or prototypes
        quantised = torch.quantize_per_tensor(torch.arange(4.0), 0.5, 1, torch.quint8)
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
        whole = distribute_tensor(torch.arange(4.0), init_device_mesh("cpu", (size,)), [Replicate()])
        for odd, told in ((quantised, "int_repr"), (nested, "unbind"), (whole, r"not a DTensor.*to_local")):
            calls = (
                lambda x: dist.all_reduce(x),
                lambda x: dist.all_reduce(x, async_op=True),
                lambda x: dist.broadcast(x, 0),
                lambda x: dist.reduce(x, 0),
            )
            for call in calls:
                with pytest.raises(TypeError, match=told):
                    call(odd)
        same(whole.to_local(), torch.arange(4.0))
        x = quantised.int_repr().t()
        dist.broadcast(x, 0)  # and the next call is as right as if nothing had been refused
        same(x, torch.tensor([1, 3, 5, 7], dtype=torch.uint8))


@worker
def sparse_tensors_of_other_shapes() -> None:
    """An index of one may lie outside of the other."""
    with group() as (rank, _):
        x = torch.sparse_coo_tensor([[17 if rank else 9]], [1.0], (20 if rank else 10,))
        with pytest.raises(multiring.Mismatch, match=r"float32 \(10,\), 1 of its dimensions sparse") as raised:
            dist.all_reduce(x)
        assert "float32 (20,), 1 of its dimensions sparse" in str(raised.value)


@worker
def sparse_all_reduce() -> None:
    with group() as (rank, size):
        rows = torch.tensor([[0, rank + 1, rank + 1]])
        x = torch.sparse_coo_tensor(rows, own(rank, 6).view(3, 2), (size + 2, 2))
        expected = sum(
            torch.sparse_coo_tensor(torch.tensor([[0, r + 1, r + 1]]), own(r, 6).view(3, 2), (size + 2, 2)).to_dense()
            for r in range(size)
        )
        dist.all_reduce(x)
        same(x.to_dense(), expected)
        nothing = torch.sparse_coo_tensor(size=(3, 2))
        dist.all_reduce(nothing)
        assert nothing._nnz() == 0


@worker
def broadcast_and_reduce() -> None:
    with group() as (rank, size):
        for root in range(size):
            for dtype in (*FORMATS, torch.float8_e4m3fn, torch.uint16, torch.complex64):
                x = own(rank, 33, dtype)
                dist.broadcast(x, root)
                same(x.to(torch.complex64), own(root, 33, torch.complex64))
            x = own(rank, 33)
            dist.reduce(x, root)
            if rank == root:
                same(x, everyone(size, 33).sum(0))


@worker
def all_gather() -> None:
    with group() as (rank, size):
        for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.float8_e4m3fn):
            for count in SIZES:
                outputs = [torch.empty(count, dtype=dtype) for _ in range(size)]
                dist.all_gather(outputs, own(rank, count, dtype))
                same(torch.stack(outputs).float(), everyone(size, count, dtype).float())
                flat = torch.empty(size * count, dtype=dtype)
                dist.all_gather_into_tensor(flat, own(rank, count, dtype))
                same(flat.view(size, count).float(), everyone(size, count, dtype).float())
        in_place = torch.zeros(size, 4)
        in_place[rank] = own(rank, 4)
        dist.all_gather_into_tensor(in_place.view(-1), in_place[rank])
        same(in_place, everyone(size, 4))
        work = dist.all_gather_into_tensor(flat, own(rank, count, dtype), async_op=True)
        work.wait()
        outputs = [torch.empty(3, 5) for _ in range(size)]
        work = dist.all_gather(outputs, own(rank, 15).view(3, 5), async_op=True)
        while not work.is_completed():
            time.sleep(0.001)
        same(torch.stack(outputs).view(size, 15), everyone(size, 15))
        with dist.distributed_c10d._coalescing_manager():
            one, two = torch.empty(size * 2), torch.empty(size * 3)
            dist.all_gather_into_tensor(one, own(rank, 2))
            dist.all_gather_into_tensor(two, own(rank, 3))
        same(one.view(size, 2), everyone(size, 2))
        same(two.view(size, 3), everyone(size, 3))
        unequal = [torch.empty(2 + (r == 1)) for r in range(size)]
        error = caught(ValueError, lambda: dist.all_gather(unequal, own(rank, 2)))
        assert "['2 x torch.float32', '3 x torch.float32'" in str(error), error


@worker
def reduce_scatter() -> None:
    with group() as (rank, size):
        for count in SIZES:
            mine = torch.cat([own(rank + block, count) for block in range(size)])
            before = mine.clone()
            expected = sum(own(r + rank, count) for r in range(size))
            output = torch.empty(count)
            dist.reduce_scatter_tensor(output, mine)
            same(output, expected)
            same(mine, before)
            output = torch.empty(count)
            dist.reduce_scatter(output, list(mine.chunk(size)) if count else [torch.empty(0)] * size)
            same(output, expected)
            work = dist.reduce_scatter_tensor(output, mine, op=dist.ReduceOp.MAX, async_op=True)
            work.wait()
            same(output, torch.stack([own(r + rank, count) for r in range(size)]).amax(0))
        with dist.distributed_c10d._coalescing_manager():
            one, two = torch.empty(2), torch.empty(3)
            dist.reduce_scatter_tensor(one, own(rank, 2 * size))
            dist.reduce_scatter_tensor(two, own(rank, 3 * size))
        same(one, everyone(size, 2 * size).sum(0).view(size, 2)[rank])
        same(two, everyone(size, 3 * size).sum(0).view(size, 3)[rank])


@worker
def inputs_in_outputs_of_other_calls() -> None:
    """Inputs of calls that are made together count as they were, whatever the calls before them write."""
    with group() as (rank, size):
        for count, is_async in itertools.product((2, 30_000), (False, True)):
            a, out = torch.cat([own(rank, count)] * size), torch.empty(size * count)
            with dist.distributed_c10d._coalescing_manager(async_ops=is_async) as pending:
                dist.all_gather_into_tensor(a, own(rank + 10, count))
                dist.all_gather_into_tensor(out, a[:count])
            if is_async:
                pending.wait()
            same(a.view(size, count), torch.stack([own(r + 10, count) for r in range(size)]))
            same(out.view(size, count), everyone(size, count))
            y, mine = own(rank, size * count), torch.empty(count)
            with dist.distributed_c10d._coalescing_manager(async_ops=is_async) as pending:
                dist.reduce_scatter_tensor(y[:count], own(rank + 10, size * count))
                dist.reduce_scatter_tensor(mine, y)
            if is_async:
                pending.wait()
            begin = rank * count
            same(y[:count], sum(own(r + 10, size * count) for r in range(size))[begin : begin + count])
            same(mine, everyone(size, size * count).sum(0)[begin : begin + count])
        # In place, each in a part of its own output, is as it was: nothing is copied for it.
        whole = [torch.zeros(size, 4) for _ in range(3)]
        for number, each in enumerate(whole):
            each[rank] = own(rank + number, 4)
        with dist.distributed_c10d._coalescing_manager():
            for each in whole:
                dist.all_gather_into_tensor(each.view(-1), each[rank])
        for number, each in enumerate(whole):
            same(each, torch.stack([own(r + number, 4) for r in range(size)]))


@worker
def result_waits_for_its_caller() -> None:
    """A completed work keeps what it has not handed over yet, whatever happens before ``wait``."""
    with group() as (rank, size):
        output = torch.empty(1000)
        work = dist.reduce_scatter_tensor(output, own(rank, 1000 * size), async_op=True)
        while not all(part.done() for part in work._parts):
            time.sleep(0.001)
        dist.barrier()
        litter = [torch.full((1000 * size,), -1.0) for _ in range(100)]
        work.wait()
        same(output, everyone(size, 1000 * size).sum(0).view(size, 1000)[rank])
        assert len(litter) == 100


@worker
def all_to_all() -> None:
    with group() as (rank, size):
        mine = torch.cat([own(rank * 10 + peer, 3) for peer in range(size)])
        output = torch.empty_like(mine)
        dist.all_to_all_single(output, mine)
        same(output, torch.cat([own(peer * 10 + rank, 3) for peer in range(size)]))
        # rank r sends r + peer rows to peer
        inputs = [own(rank * 10 + peer, 2 * (rank + peer)).view(-1, 2) for peer in range(size)]
        outputs = torch.empty(sum(rank + peer for peer in range(size)), 2)
        splits = [rank + peer for peer in range(size)]
        dist.all_to_all_single(outputs, torch.cat(inputs), splits, splits)
        same(outputs, torch.cat([own(peer * 10 + rank, 2 * (rank + peer)).view(-1, 2) for peer in range(size)]))
        pieces = [torch.empty(peer + rank + 1) for peer in range(size)]
        dist.all_to_all(pieces, [own(rank * 10 + peer, peer + rank + 1) for peer in range(size)])
        for peer, piece in enumerate(pieces):
            same(piece, own(peer * 10 + rank, peer + rank + 1))


@worker
def storage_given_up_in_flight() -> None:
    with group() as (rank, size):
        for start in (dist.all_reduce, lambda x, async_op: dist.broadcast(x, 0, async_op=async_op)):
            x = own(rank, 100_000)
            if rank == size - 1:
                time.sleep(0.3)  # the others' calls are in flight for as long
            work = start(x, async_op=True)
            x.data = torch.zeros(1)
            others = [torch.zeros(100_000) for _ in range(20)]  # one would get the memory, if it were free
            work.wait()
            assert x.numel() == 1
            assert not any(other.any() for other in others)


@worker
def storage_taken_by_another_thread() -> None:
    with group() as (rank, size):
        x, others = own(rank, 100_000), []

        def take() -> None:
            x.data = torch.zeros(1)
            others.extend(torch.zeros(100_000) for _ in range(20))

        if rank == size - 1:
            time.sleep(0.5)  # the others' calls are in flight for as long
            dist.all_reduce(x)
        else:
            thread = threading.Timer(0.2, take)
            thread.start()
            dist.all_reduce(x)
            thread.join()
        assert not any(other.any() for other in others)


@worker
def storage_of_a_call_by_multiring() -> None:
    with group() as (rank, size):
        x = own(rank, 100_000)
        if rank == size - 1:
            time.sleep(0.3)
        work = multiring.all_reduce(x, async_op=True)
        x.data = torch.zeros(1)
        others = [torch.zeros(100_000) for _ in range(20)]
        work.wait()
        assert not any(other.any() for other in others)


@worker
def calls_as_torch_makes_them_itself() -> None:
    with group() as (rank, size):
        here = dist.group.WORLD
        x = own(rank, 12)
        here.allreduce(x).wait()
        same(x, everyone(size, 12).sum(0))
        x = own(rank, 12)
        here.allreduce([x], dist.ReduceOp.MAX).wait()
        same(x, everyone(size, 12).amax(0))
        x = own(rank, 12)
        here.broadcast(x, size - 1).wait()
        same(x, own(size - 1, 12))
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3), find_unused_parameters=True)
        with model.join():
            for _ in range(2 + rank):
                model(torch.ones(2, 3)).sum().backward()


@worker
def blocks_that_do_not_fit() -> None:
    with group() as (rank, size):
        unequal = [own(rank, 4 + (peer == 0) - (peer == 1)) for peer in range(size)]
        with pytest.raises(ValueError, match=r"the input for rank 0 is 5 x torch.float32, the output 4 x"):
            dist.reduce_scatter(torch.empty(4), unequal)
        dist.barrier()


@worker
def future_after_the_group() -> None:
    with group() as (rank, _):
        dist.all_reduce(own(rank, 3), async_op=True).get_future().wait()
        work = dist.all_reduce(own(rank, 5), async_op=True)
        work.wait()
    asked = threading.Thread(target=work.get_future().wait, daemon=True)
    asked.start()
    asked.join(20)
    assert not asked.is_alive()


@worker
def storage_is_resized_later() -> None:
    with group() as (rank, size):
        x = own(rank, 6)
        dist.all_reduce(x)
        dist.broadcast(x, 0)
        whole, part = torch.empty(6 * size), torch.empty(6)
        dist.all_gather_into_tensor(whole, x)
        dist.reduce_scatter_tensor(part, whole)
        for tensor in (x, whole, part):
            tensor.untyped_storage().resize_(0)
            tensor.resize_(1000)


@worker
def negated_views() -> None:
    with group() as (rank, size):
        x = torch.full((1,), complex(1, 1 + rank)).conj().imag
        assert "hand over x.resolve_neg()" in str(caught(ValueError, partial(multiring.send, x, (rank + 1) % size)))
        assert "copy the result back" in str(caught(ValueError, partial(multiring.all_reduce, x)))
        dist.all_reduce(x)
        same(x, torch.tensor([-sum(1.0 + r for r in range(size))]))


@worker
def gather_and_scatter() -> None:
    with group() as (rank, size):
        for root in range(size):
            outputs = [torch.empty(7) for _ in range(size)] if rank == root else None
            dist.gather(own(rank, 7), outputs, dst=root)
            if outputs is not None:
                same(torch.stack(outputs), everyone(size, 7))
            inputs = [own(peer + root, 5) for peer in range(size)] if rank == root else None
            output = torch.empty(5)
            dist.scatter(output, inputs, src=root)
            same(output, own(rank + root, 5))


@worker
def objects() -> None:
    with group() as (rank, size):
        found: list[Any] = [None] * size
        dist.all_gather_object(found, {"rank": rank, "text": "x" * (10 * rank)})
        assert found == [{"rank": r, "text": "x" * (10 * r)} for r in range(size)], found
        told = [("from", rank), rank]
        dist.broadcast_object_list(told, src=size - 1)
        assert told == [("from", size - 1), size - 1], told
        gathered: list[Any] | None = [None] * size if rank == 0 else None
        dist.gather_object(rank * 11, gathered, dst=0)
        assert rank or gathered == [r * 11 for r in range(size)], gathered
        part: list[Any] = [None]
        dist.scatter_object_list(part, [f"to {r}" for r in range(size)] if rank == 0 else None, src=0)
        assert part == [f"to {rank}"], part


@worker
def messages() -> None:
    with group() as (rank, size):
        after, before = (rank + 1) % size, (rank - 1) % size
        got = torch.empty(9)
        requests = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, own(rank, 9), after), dist.P2POp(dist.irecv, got, before)]
        )
        for request in requests:
            request.wait()
        same(got, own(before, 9))
        if rank == 0:
            sends = [dist.isend(own(tag, 4), 1, tag=tag) for tag in (3, 4)]
            dist.send(own(9, 100_000), 1)
            for send in sends:
                send.wait()
        elif rank == 1:
            large, four, three = torch.empty(100_000), torch.empty(4), torch.empty(4)
            assert dist.recv(large, 0) == 0
            dist.recv(four, 0, tag=4)
            dist.recv(three, 0, tag=3)
            same(large, own(9, 100_000))
            same(four, own(4, 4))
            same(three, own(3, 4))


@worker
def receive_from_any() -> None:
    with group() as (rank, size):
        for count in (6, 100_000):
            if rank == 0:
                heard = [0] * size
                for _ in range(2 * (size - 1)):
                    got = torch.empty(count)
                    source = dist.recv(got, tag=count)
                    same(got, own(10 * source + heard[source], count))
                    heard[source] += 1
                assert heard == [0] + [2] * (size - 1), heard
            else:
                for index in range(2):
                    dist.send(own(10 * rank + index, count), 0, tag=count)
        if rank == size - 1:
            z = torch.empty(3, dtype=torch.complex64)
            request = dist.irecv(z)
            request.wait()
            assert request._source_rank() == 0
            assert request.source_rank() == 0
            same(z, torch.complex(own(0, 3), own(1, 3)))
        elif rank == 0:
            dist.send(torch.complex(own(0, 3), own(1, 3)), size - 1)
        reversed_ranks = dist.new_group(list(range(size))[::-1], sort_ranks=False)
        if rank == 0:
            assert dist.recv(torch.empty(2), group=reversed_ranks) == size - 1
        elif rank == size - 1:
            dist.send(own(0, 2), 0, group=reversed_ranks)


@worker
def groups() -> None:
    with group() as (rank, size):
        pairs = [dist.new_group([0, size - 1]), dist.new_group([1, 2] if size > 2 else [1])]
        for ranks, some in zip(([0, size - 1], [1, 2] if size > 2 else [1]), pairs, strict=True):
            if rank in ranks:
                x = own(rank, 12)
                y = own(rank + 1, 12)
                work = dist.all_reduce(x, group=some, async_op=True)
                dist.all_reduce(y)
                work.wait()
                same(x, sum(own(r, 12) for r in ranks))
                dist.broadcast(x, ranks[-1], group=some)
            else:
                y = own(rank + 1, 12)
                dist.all_reduce(y)
            same(y, sum(own(r + 1, 12) for r in range(size)))
        for _ in range(3):
            again = dist.new_group(list(range(size)), use_local_synchronization=True)
            x = own(rank, 3)
            dist.all_reduce(x, group=again)
            same(x, everyone(size, 3).sum(0))
            dist.destroy_process_group(again)
        dist.barrier()
    with group():  # once more after destroy_process_group
        dist.barrier()


@worker
def beside_gloo() -> None:
    with group("gloo") as (rank, size):
        ours = dist.new_group(backend="multiring")
        x = own(rank, 12)
        dist.all_reduce(x, group=ours)
        same(x, everyone(size, 12).sum(0))


@worker
def groups_of_some_beside_gloo() -> None:
    with group("gloo") as (rank, size):
        pairs = [(a, b) for a in range(size) for b in range(a + 1, size)]
        groups = [dist.new_group(pair, backend="multiring") for pair in pairs]
        for pair, ours in zip(pairs, groups, strict=True):
            if rank in pair:
                x = own(rank, 12)
                dist.all_reduce(x, group=ours)
                same(x, own(pair[0], 12) + own(pair[1], 12))
        dist.barrier()


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("worker", workers(__name__), ids=lambda worker: worker.__name__)
def test_collectives(worker: Callable[[], None], world_size: int) -> None:
    values(worker, world_size=world_size)


def test_views_whose_memory_holds_other_numbers_are_refused() -> None:
    x = torch.tensor([1 + 2j, 3 + 4j])
    with pytest.raises(
        ValueError, match=r"holds other numbers than it shows \(is_conj\): hand over x\.resolve_conj\(\)"
    ):
        _native.describe(x.conj())
    with pytest.raises(ValueError, match=r"\(is_neg\): hand over x\.resolve_neg\(\)"):
        _native.describe(x.conj().imag)
    assert _native.describe(x.conj().resolve_conj()).count == 2


def test_memory_that_is_not_there_is_refused() -> None:
    whole = torch.arange(4096.0)
    part, before = whole[2040:2060], whole[2030:2050]
    whole.untyped_storage().resize_(4 * 2050)
    with pytest.raises(ValueError, match="shows 20 elements, the last 40 bytes of which are not in its storage"):
        _native.describe(part)
    assert _native.describe(before).count == 20
    with pytest.raises(ValueError, match="is on the device meta and has no elements: hand over one that has"):
        _native.describe(torch.empty(3, device="meta"))
