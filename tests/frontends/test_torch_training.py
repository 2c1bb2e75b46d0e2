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


def ddp_equals_one_process(**options: Any) -> None:
    with group() as (rank, size):
        net = DistributedDataParallel(Net(), bucket_cap_mb=0.002, **options)
        steps(net, torch.optim.Adam(net.parameters(), 0.01), rank, size)
        close(net)


def ddp_options() -> None:
    ddp_equals_one_process(gradient_as_bucket_view=True)
    ddp_equals_one_process(static_graph=True)
    ddp_equals_one_process(find_unused_parameters=True)


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


WORKERS = [ddp_options, ddp_hooks, ddp_sparse_embedding, ddp_uneven_inputs]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("worker", WORKERS, ids=lambda worker: worker.__name__)
def test_training(worker: Callable[[], None], world_size: int) -> None:
    values(worker, world_size=world_size)
