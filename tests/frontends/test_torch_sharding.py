"""Users of collectives: sharded training, meshes, functional collectives, checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch_helpers import Net, alone, close, everyone, group, own, same, steps
from torch_ranks import values
from workers import worker, workers


def sharded_net(mesh: dist.DeviceMesh) -> Net:
    net = Net()
    for layer in net.layers[::2]:
        fully_shard(layer, mesh=mesh)
    return fully_shard(net, mesh=mesh)


@worker
def fsdp() -> None:
    with group() as (rank, size):
        net = sharded_net(init_device_mesh("cpu", (size,)))
        steps(net, torch.optim.Adam(net.parameters(), 0.01), rank, size)
        for actual, expected in zip(net.parameters(), alone(), strict=True):
            assert isinstance(actual, DTensor)
            torch.testing.assert_close(actual.full_tensor().detach(), expected, rtol=0, atol=1e-12)


@worker
def zero_redundancy_optimizer() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # its import warns

    with group() as (rank, size):
        net = DistributedDataParallel(Net())
        steps(net, ZeroRedundancyOptimizer(net.parameters(), torch.optim.Adam, lr=0.01), rank, size)
        close(net)


@worker
def device_mesh() -> None:
    with group() as (rank, size):
        mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("outer", "inner"))
        x = own(rank, 8)
        dist.all_reduce(x, group=mesh.get_group("inner"))
        same(x, everyone(size, 8).sum(0))
        dist.all_reduce(x, group=mesh.get_group("outer"))
        same(x, everyone(size, 8).sum(0))
        whole = own(3, 8 * size).view(8, size)
        column = distribute_tensor(whole, mesh["inner"], [Shard(1)])
        same(column.to_local(), whole[:, rank : rank + 1])
        same(column.redistribute(placements=[Shard(0)]).full_tensor(), whole)
        same(column.redistribute(placements=[Replicate()]).to_local(), whole)


@worker
def functional_collectives() -> None:
    with group() as (rank, size):
        world = dist.group.WORLD
        same(functional.all_reduce(own(rank, 6), "sum", world) + 0, everyone(size, 6).sum(0))
        same(functional.all_gather_tensor(own(rank, 4), 0, world) + 0, everyone(size, 4).flatten())
        scattered = functional.reduce_scatter_tensor(own(rank, 2 * size), "sum", 0, world) + 0
        same(scattered, everyone(size, 2 * size).sum(0).view(size, 2)[rank])
        same(functional.broadcast(own(rank, 5), 1, world) + 0, own(1, 5))
        exchanged = functional.all_to_all_single(own(rank, 2 * size), [2] * size, [2] * size, world) + 0
        same(exchanged, everyone(size, 2 * size).view(size, size, 2)[:, rank].flatten())
        both = functional.all_reduce_coalesced([own(rank, 3), own(rank, 4)], "max", world)
        for count, one in zip((3, 4), both, strict=True):
            same(one + 0, everyone(size, count).amax(0))


def save_and_load(asynchronously: bool) -> None:
    with group() as (rank, size):
        mesh = init_device_mesh("cpu", (size,))
        trained = sharded_net(mesh)
        steps(trained, torch.optim.SGD(trained.parameters(), 0.1), rank, size, count=3)
        folder = os.path.join(os.environ["FOLDER"], "checkpoint")
        if asynchronously:
            checkpoint.async_save(trained.state_dict(), checkpoint_id=folder).result()
        else:
            checkpoint.save(trained.state_dict(), checkpoint_id=folder)
        loaded = sharded_net(mesh)
        state = loaded.state_dict()
        checkpoint.load(state, checkpoint_id=folder)
        loaded.load_state_dict(state)
        for actual, expected in zip(loaded.parameters(), trained.parameters(), strict=True):
            same(actual.to_local().detach(), expected.to_local().detach())


@worker
def checkpoints() -> None:
    save_and_load(asynchronously=False)


@worker
def asynchronous_checkpoints() -> None:
    save_and_load(asynchronously=True)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("worker", workers(__name__), ids=lambda worker: worker.__name__)
def test_sharding(worker: Callable[[], None], world_size: int) -> None:
    values(worker, world_size=world_size)
