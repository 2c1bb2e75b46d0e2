"""DistributedDataParallel over multiring trains what one process trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch_helpers import Net, batch, close, group, steps
from torch_ranks import values
from workers import worker, workers


def ddp_equals_one_process(**options: Any) -> None:
    with group() as (rank, size):
        net = DistributedDataParallel(Net(), bucket_cap_mb=0.002, **options)
        steps(net, torch.optim.Adam(net.parameters(), 0.01), rank, size)
        close(net)


@worker
def ddp_options() -> None:
    ddp_equals_one_process(gradient_as_bucket_view=True)
    ddp_equals_one_process(static_graph=True)
    ddp_equals_one_process(find_unused_parameters=True)


@worker
def ddp_hooks() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    with group() as (rank, size):
        net = DistributedDataParallel(Net())
        net.register_comm_hook(None, default_hooks.allreduce_hook)
        steps(net, torch.optim.Adam(net.parameters(), 0.01), rank, size)
        close(net)
        net, expected = DistributedDataParallel(Net().float()), Net()
        net.register_comm_hook(None, default_hooks.fp16_compress_hook)
        for model, (x, y) in ((net, batch(0, rank, size)), (expected, batch(0, 0, 1))):
            F.cross_entropy(model(x.to(next(model.parameters()).dtype)), y).backward()
        for actual, exact in zip(net.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(actual.grad, exact.grad.float(), rtol=0.002, atol=0.001)


@worker
def ddp_power_sgd() -> None:
    """A hook whose callbacks wait for collectives that they start: it trains what it trains over Gloo.

    In one bucket: of several, callbacks and backward start collectives in an order that ranks need not share.
    """
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    with group() as (rank, size):
        weights = []
        for processes in (dist.group.WORLD, dist.new_group(backend="gloo")):
            net = DistributedDataParallel(Net(), process_group=processes)
            state = powerSGD_hook.PowerSGDState(processes, start_powerSGD_iter=2, min_compression_rate=0.5)
            net.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
            optimizer = torch.optim.SGD(net.parameters(), 0.1)
            for number in range(5):
                x, y = batch(number, rank, size)
                optimizer.zero_grad()
                F.cross_entropy(net(x), y).backward()
                optimizer.step()
            weights.append(torch.cat([p.detach().view(-1) for p in net.parameters()]))
        assert state.compression_stats()[1] > 0
        torch.testing.assert_close(*weights, rtol=0, atol=1e-9)


@worker
def callbacks_that_wait() -> None:
    with group() as (rank, size):
        x = torch.full((4,), rank + 1.0, dtype=torch.float64)
        y = torch.full((4,), 10.0 * rank, dtype=torch.float64)
        first = dist.all_reduce(x, async_op=True).get_future()
        second = dist.all_reduce(y, async_op=True).get_future()  # behind the first, and waited for by its callback

        def both(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            total = future.value()[0] + second.wait()[0]
            return dist.all_reduce(total, async_op=True).get_future().wait()[0]

        expected = size * (size * (size + 1) / 2 + 10 * size * (size - 1) / 2)
        assert first.then(both).wait().tolist() == [expected] * 4


@worker
def ddp_sparse_embedding() -> None:
    with group() as (rank, size):
        torch.manual_seed(0)
        table = nn.Embedding(10, 4, sparse=True).double()
        reference = table.weight.detach().clone()
        net = DistributedDataParallel(table)
        optimizer = torch.optim.SGD(net.parameters(), 1.0)
        net(torch.tensor([rank, 5])).sum().backward()
        optimizer.step()
        expected = reference.clone()
        for r in range(size):
            expected[[r, 5]] -= 1.0 / size
        torch.testing.assert_close(table.weight.detach(), expected, rtol=0, atol=1e-12)


@worker
def ddp_uneven_inputs() -> None:
    from torch.distributed.algorithms.join import Join

    with group() as (rank, size):
        net = DistributedDataParallel(Net())
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        with Join([net]):
            steps(net, optimizer, rank, size, count=2 + rank)
        mine = torch.cat([p.detach().view(-1) for p in net.parameters()])
        everyones = [torch.empty_like(mine) for _ in range(size)]
        dist.all_gather(everyones, mine)
        for theirs in everyones:
            torch.testing.assert_close(theirs, mine, rtol=0, atol=0)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("worker", workers(__name__), ids=lambda worker: worker.__name__)
def test_training(worker: Callable[[], None], world_size: int) -> None:
    values(worker, world_size=world_size)
