"""Checks of every collective of torch.distributed on CUDA tensors, by ranks that share a device."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

FORMATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8]
SIZES = [0, 1, 3, 17, 1000, 100_003, 3_000_017]
DEVICE = torch.device("cuda", 0)


def own(rank: int, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Contributions that depend on rank and index, small enough to be exact in every format."""
    return ((torch.arange(count) * 3 + rank * 5) % 7).to(dtype)


def everyone(size: int, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.stack([own(rank, count, dtype) for rank in range(size)])


def everyone_from(first: int, size: int, count: int) -> Tensor:
    return torch.stack([own(first + rank, count) for rank in range(size)])


def same(actual: Tensor, expected: Tensor) -> None:
    assert actual.device.type == "cuda"
    torch.testing.assert_close(actual.cpu(), expected, rtol=0, atol=0)


def busy(seconds: float = 0.02) -> None:
    """Keep the current stream busy, so that what does not wait for it is seen."""
    torch.cuda._sleep(int(seconds * 1.5e9))


def all_reduce(rank: int, size: int) -> None:
    reductions: dict[Any, Callable[[Tensor], Tensor]] = {
        dist.ReduceOp.SUM: lambda all: all.sum(0),
        dist.ReduceOp.MAX: lambda all: all.amax(0),
        dist.ReduceOp.PRODUCT: lambda all: all.prod(0),
    }
    for dtype in FORMATS:
        for count in SIZES:
            for op, expected in reductions.items():
                if count > 100_003 and op != dist.ReduceOp.SUM:
                    continue
                x = own(rank, count, dtype).to(DEVICE)
                dist.all_reduce(x, op)
                same(x, expected(everyone(size, count, torch.float64)).to(dtype))
    for dtype in (torch.float32, torch.bfloat16):
        x = (own(rank, 17, dtype) * size).to(DEVICE)
        dist.all_reduce(x, dist.ReduceOp.AVG)
        same(x, everyone(size, 17, torch.float64).sum(0).to(dtype))
    for asynchronous in (False, True):
        x = own(rank, 17, torch.int64).to(DEVICE)
        work = dist.all_reduce(x, dist.ReduceOp.AVG, async_op=asynchronous)
        if work is not None:
            work.wait()
        same(x, everyone(size, 17, torch.int64).sum(0) // size)


def stream_order(rank: int, size: int) -> None:
    """The call follows what the caller's stream has queued, and precedes what it queues after `wait`."""
    count = 5_000_000
    base = own(rank, count).to(DEVICE)
    side = torch.cuda.Stream(DEVICE)
    for stream in (torch.cuda.current_stream(DEVICE), side):
        with torch.cuda.stream(stream):
            stream.wait_stream(torch.cuda.default_stream(DEVICE))
            x = torch.zeros(count, device=DEVICE)
            busy()
            x += base
            work = dist.all_reduce(x, async_op=True)
            work.wait()
            y = x * 2
            same(y, everyone(size, count).sum(0) * 2)
    # Tensors that nobody keeps stay alive until the device has done with them.
    for round in range(20):
        busy(0.002)
        works, results = [], []
        for piece in range(4):
            x = (own(rank + piece, 300_000) + round).to(DEVICE)
            works.append(dist.all_reduce(x, async_op=True))
            results.append(x)
        for work in works:
            work.wait()
        for piece, x in enumerate(results):
            same(x, sum(own(r + piece, 300_000) + round for r in range(size)))
    for _ in range(20):
        dist.all_reduce(own(rank, 1_000_000).to(DEVICE), async_op=True)
        del x
        x = torch.full((1_000_000,), 7.0, device=DEVICE)
        assert (x == 7).all()


def futures(rank: int, size: int) -> None:
    x = own(rank, 400_000).to(DEVICE)
    future = dist.all_reduce(x, async_op=True).get_future()
    doubled = future.then(lambda done: done.value()[0] * 2)
    same(doubled.wait(), everyone(size, 400_000).sum(0) * 2)
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    assert work.get_future().value()[0] is x or torch.equal(work.get_future().value()[0], x)
    torch.cuda.synchronize()
    while not work.is_completed():
        pass
    assert work.is_success()
    assert work.exception() is None


def moving(rank: int, size: int) -> None:
    """Broadcast, reduce, gathers, scatters and exchanges."""
    for count in SIZES:
        for root in (0, size - 1):
            busy(0.0005)
            x = own(rank + 1, count, torch.int32).to(DEVICE)
            dist.broadcast(x, root)
            same(x, own(root + 1, count, torch.int32))
            x = own(rank, count, torch.float64).to(DEVICE)
            dist.reduce(x, root)
            if rank == root:
                same(x, everyone(size, count, torch.float64).sum(0))
        x = own(rank, count).to(DEVICE)
        whole = torch.empty(size * count, device=DEVICE)
        dist.all_gather_into_tensor(whole, x)
        same(whole, everyone(size, count).reshape(-1))
        blocks = [torch.empty(count, device=DEVICE) for _ in range(size)]
        work = dist.all_gather(blocks, x, async_op=True)
        work.wait()
        for other, block in enumerate(blocks):
            same(block, own(other, count))
        mine = torch.cat([own(rank + block, count) for block in range(size)]).to(DEVICE)
        out = torch.empty(count, device=DEVICE)
        dist.reduce_scatter_tensor(out, mine)
        same(out, sum(own(other + rank, count) for other in range(size)))
        same(mine, torch.cat([own(rank + block, count) for block in range(size)]))
        dist.reduce_scatter(out.zero_(), list(mine.chunk(size)) if count else [mine[:0]] * size)
        same(out, sum(own(other + rank, count) for other in range(size)))
        swapped = torch.empty(size * count, device=DEVICE)
        dist.all_to_all_single(swapped, mine)
        same(swapped, torch.cat([own(other + rank, count) for other in range(size)]))


def by_messages(rank: int, size: int) -> None:
    following, preceding = (rank + 1) % size, (rank - 1) % size
    for count in (0, 1, 1000, 1_000_003):
        x, y = own(rank, count).to(DEVICE), torch.full((count,), -1.0, device=DEVICE)
        receipt = dist.irecv(y, preceding)
        dist.isend(x, following).wait()
        receipt.wait()
        same(y, own(preceding, count))
        splits = [rank + other + 1 for other in range(size)]
        mine = torch.cat([own(rank + other, splits[other]) for other in range(size)]).to(DEVICE)
        incoming = torch.empty(sum(splits), device=DEVICE)
        dist.all_to_all_single(incoming, mine, splits, splits)
        same(incoming, torch.cat([own(other + rank, splits[other]) for other in range(size)]))
        outputs = [torch.empty(count, device=DEVICE) for _ in range(size)]
        dist.all_to_all(outputs, [own(rank + other, count).to(DEVICE) for other in range(size)])
        for other, output in enumerate(outputs):
            same(output, own(other + rank, count))
        gathered = [torch.empty(count, device=DEVICE) for _ in range(size)] if rank == 1 else None
        dist.gather(x, gathered, dst=1)
        for other, block in enumerate(gathered or []):
            same(block, own(other, count))
        given = [own(other + 3, count).to(DEVICE) for other in range(size)] if rank == 0 else None
        dist.scatter(y, given, src=0)
        same(y, own(rank + 3, count))


def layouts(rank: int, size: int) -> None:
    """Element [i, j] arrives at [i, j], however the tensors lie."""
    shape = (50, 70)
    expected = everyone(size, 3500).sum(0).view(shape)
    for change in (lambda x: x, lambda x: x.t().contiguous().t(), lambda x: torch.stack([x, x], 2)[:, :, 0]):
        x = change(own(rank, 3500).view(shape).to(DEVICE))
        dist.all_reduce(x)
        same(x, expected)
        x = change(own(rank, 3500).view(shape).to(DEVICE))
        whole = change(torch.empty(size * 50, 70, device=DEVICE))
        dist.all_gather_into_tensor(whole, x)
        same(whole, torch.cat([own(other, 3500).view(shape) for other in range(size)]))
        dist.broadcast(x, 1)
        same(x, own(1, 3500).view(shape))
    x = own(rank, 3500).view(shape).to(DEVICE)
    if rank == 0:
        x = x.t().contiguous().t()
    dist.all_reduce(x)
    same(x, expected)


def views(rank: int, size: int) -> None:
    """Inputs that lie where results are written; views that show other numbers than their memory holds are refused."""
    count = 1_500_000
    for start in (rank * count, count // 2):
        whole = torch.full((size * count,), -1.0, device=DEVICE)
        mine = whole[start : start + count]
        mine.copy_(own(rank, count))
        dist.all_gather_into_tensor(whole, mine)
        same(whole, everyone(size, count).reshape(-1))
    turned = torch._neg_view(own(rank, 600).to(DEVICE))
    for call in (lambda: dist.all_reduce(turned), lambda: dist.all_gather_into_tensor(whole[: size * 600], turned)):
        refused = ""
        try:
            call()
        except ValueError as error:
            refused = str(error)
        assert "shows its memory negated" in refused


def small_and_busy(rank: int, size: int) -> None:
    """Small calls right behind kernels that make their inputs, and before kernels that read their results."""
    for round in range(300):
        base = own(rank + round, 600).to(DEVICE)
        expected = everyone_from(round, size, 600).sum(0)
        x = -base
        dist.all_reduce(x)
        same(x * 1, -expected)
        x = base.view(20, 30).t().contiguous().t()
        dist.all_reduce(x)
        same(x.contiguous().view(-1), expected)


def captured(rank: int, size: int) -> None:
    """A call in a CUDA graph is refused, and nobody waits for it."""
    x = own(rank, 1000).to(DEVICE)
    refused = ""
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            dist.all_reduce(x)
    except RuntimeError as error:
        refused = str(error)
    assert "cannot be captured" in refused
    dist.all_reduce(x)
    same(x, everyone(size, 1000).sum(0))


def closed_groups(rank: int, size: int) -> None:
    """Results of a group that was closed are freed after it."""
    group = dist.new_group(list(range(size)))
    x = own(rank, 100_003).to(DEVICE)
    blocks = [torch.empty_like(x) for _ in range(size)]
    dist.all_gather(blocks, x, group=group)
    dist.destroy_process_group(group)
    for other, block in enumerate(blocks):
        same(block, own(other, 100_003))
    del blocks, block, x
    torch.cuda.empty_cache()


def mixed(rank: int, size: int) -> None:
    """Some ranks have CUDA tensors, others CPU tensors; all get the same bits."""
    for count in (1, 1000, 2_000_003):
        generator = torch.Generator().manual_seed(rank)
        x = torch.randn(count, generator=generator)
        here = x.to(DEVICE) if rank % 2 == 0 else x
        dist.all_reduce(here)
        seen: list[Any] = [None] * size
        dist.all_gather_object(seen, here.cpu().view(torch.int32).sum().item())
        assert len(set(seen)) == 1, seen
        whole = torch.empty(size * count, device=here.device)
        dist.all_gather_into_tensor(whole, own(rank, count).to(here.device))
        torch.testing.assert_close(whole.cpu(), everyone(size, count).reshape(-1), rtol=0, atol=0)


def as_on_cpu(rank: int, size: int) -> None:
    """Sums have the bits that they have in memory of the CPU, over narrow wires too (MULTIRING_WIRE)."""
    generator = torch.Generator().manual_seed(rank)
    for count in (1, 1000, 70_001, 5_000_011):
        x = torch.randn(count, generator=generator)
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            expected, y = x.clone(), x.to(DEVICE)
            dist.all_reduce(expected, op)
            dist.all_reduce(y, op)
            same(y, expected)


def many(rank: int, size: int) -> None:
    """A thousand collectives, of which up to sixteen are in flight."""
    flying: list[Callable[[], None]] = []

    def land(work: Any, x: Tensor, expected: Tensor) -> None:
        work.wait()
        same(x, expected)

    for number in range(1000):
        count = (number * 7919) % 4001 if number % 50 else 600_000 + number
        x = own(rank + number, count).to(DEVICE)
        if number % 3 == 0:
            work, result = dist.all_reduce(x, async_op=True), x
            expected = everyone_from(number, size, count).sum(0)
        elif number % 3 == 1:
            work, result = dist.broadcast(x, number % size, async_op=True), x
            expected = own(number % size + number, count)
        else:
            result = torch.empty(size * count, device=DEVICE)
            work = dist.all_gather_into_tensor(result, x, async_op=True)
            expected = everyone_from(number, size, count).reshape(-1)
        flying.append(functools.partial(land, work, result, expected))
        if len(flying) == 16:
            flying.pop(0)()
    for end in flying:
        end()


def groups(rank: int, size: int) -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([1, 0])]
    for round in range(3):
        works = []
        for number, group in enumerate(pairs):
            if rank < 2:
                x = own(rank + number + round, 700_000).to(DEVICE)
                works.append((x, number, dist.all_reduce(x, group=group, async_op=True)))
        for x, number, work in works:
            work.wait()
            same(x, own(number + round, 700_000) + own(1 + number + round, 700_000))
    for group in pairs:
        dist.destroy_process_group(group)


CHECKS = (
    all_reduce,
    stream_order,
    futures,
    moving,
    by_messages,
    layouts,
    views,
    small_and_busy,
    captured,
    closed_groups,
    mixed,
    as_on_cpu,
    many,
    groups,
)


def run(checks: Sequence[Callable[[int, int], None]], backend: str) -> None:
    """Make the checks one after the other, all ranks together; rank 0 tells which have passed."""
    dist.init_process_group(backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    for check in checks:
        check(rank, size)
        dist.barrier()
        if rank == 0:
            print(check.__name__, "passed", flush=True)
    dist.destroy_process_group()


def chosen(checks: Sequence[Callable[[int, int], None]]) -> list[Callable[[int, int], None]]:
    """Return the checks that the command line names, or all if it names none."""
    return [check for check in checks if check.__name__ in sys.argv[1:] or not sys.argv[1:]]


if __name__ == "__main__":
    run(chosen(CHECKS), "multiring")
