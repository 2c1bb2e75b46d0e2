"""Ways to train on a shared device over multiring, each compared with one process that has the whole batch."""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from cuda_collectives import DEVICE, chosen, run
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import multiring.torch


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def batch(step: int, rank: int, size: int) -> tuple[Tensor, Tensor]:
    """This rank's rows of a batch of 12 that is the same for any number of ranks."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(12, 6, generator=generator, dtype=torch.float64)
    y = (x.abs().sum(1) * 2).long() % 3
    return x[rank::size].to(DEVICE), y[rank::size].to(DEVICE)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, rank: int, size: int, steps: int = 50) -> None:
    for step in range(steps):
        x, y = batch(step, rank, size)
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()


def alone() -> list[Tensor]:
    net = Net().to(DEVICE)
    train(net, torch.optim.Adam(net.parameters(), 0.01), 0, 1)
    return [p.detach() for p in net.parameters()]


def close(parameters: list[Tensor]) -> None:
    for actual, expected in zip(parameters, alone(), strict=True):
        torch.testing.assert_close(actual.detach(), expected, rtol=0, atol=1e-9)


def data_parallel(rank: int, size: int) -> None:
    net = DistributedDataParallel(Net().to(DEVICE), device_ids=[0], bucket_cap_mb=0.01)
    train(net, torch.optim.Adam(net.parameters(), 0.01), rank, size)
    close(list(net.parameters()))


def accumulated(rank: int, size: int) -> None:
    """Two micro-batches, the first without synchronising."""
    net = DistributedDataParallel(Net().to(DEVICE), device_ids=[0])
    optimizer = torch.optim.Adam(net.parameters(), 0.01)
    for step in range(50):
        x, y = batch(step, rank, size)
        half = len(x) // 2
        optimizer.zero_grad()
        with net.no_sync():
            (F.cross_entropy(net(x[:half]), y[:half]) / 2).backward()
        (F.cross_entropy(net(x[half:]), y[half:]) / 2).backward()
        optimizer.step()
    close(list(net.parameters()))


def compiled(rank: int, size: int) -> None:
    net = DistributedDataParallel(Net().to(DEVICE), device_ids=[0])
    faster = torch.compile(net, backend="aot_eager")
    train(faster, torch.optim.Adam(net.parameters(), 0.01), rank, size)
    close(list(net.parameters()))


def redundancy_removed(rank: int, size: int) -> None:
    net = DistributedDataParallel(Net().to(DEVICE), device_ids=[0])
    train(net, ZeroRedundancyOptimizer(net.parameters(), torch.optim.Adam, lr=0.01), rank, size)
    close(list(net.parameters()))


def sharded(rank: int, size: int) -> None:
    """FSDP2, and a checkpoint of its state."""
    net = Net().to(DEVICE)
    mesh = init_device_mesh("cuda", (size,))
    for layer in net.layers:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    train(net, torch.optim.Adam(net.parameters(), 0.01), rank, size)
    close([p.full_tensor() for p in net.parameters()])
    folder = [tempfile.mkdtemp()] if rank == 0 else [None]
    dist.broadcast_object_list(folder)
    path = Path(str(folder[0]))
    state = {"net": net.state_dict()}
    checkpoint.save(state, checkpoint_id=path)
    with torch.no_grad():
        for p in net.parameters():
            p.zero_()
    state = {"net": net.state_dict()}
    checkpoint.load(state, checkpoint_id=path)
    net.load_state_dict(state["net"])
    close([p.full_tensor() for p in net.parameters()])


def tensors(rank: int, size: int) -> None:
    """DTensor: sharded by columns, multiplied, replicated."""
    mesh = init_device_mesh("cuda", (size,))
    whole = torch.arange(size * 60, dtype=torch.float64, device=DEVICE).view(6, size * 10)
    split = distribute_tensor(whole, mesh, [Shard(1)])
    assert torch.equal(split.redistribute(mesh, [Replicate()]).to_local(), whole)
    assert torch.equal(split.redistribute(mesh, [Shard(0)]).full_tensor(), whole)
    product = split @ distribute_tensor(whole.t().contiguous(), mesh, [Shard(0)])
    torch.testing.assert_close(product.full_tensor(), whole @ whole.t(), rtol=1e-12, atol=0)


def hooked(rank: int, size: int) -> None:
    """`comm_hook`, beside a group of another backend."""
    beside = dist.new_group(backend="gloo")
    net = DistributedDataParallel(Net().to(DEVICE), device_ids=[0], process_group=beside)
    net.register_comm_hook(None, multiring.torch.comm_hook)
    train(net, torch.optim.Adam(net.parameters(), 0.01), rank, size)
    close(list(net.parameters()))


def same_everywhere(rank: int, size: int) -> None:
    """All ranks end with the same bits."""
    net = DistributedDataParallel(Net().to(DEVICE).float(), device_ids=[0])
    before = copy.deepcopy(net.module.state_dict())
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for step in range(20):
        x, y = batch(step, rank, size)
        optimizer.zero_grad()
        F.cross_entropy(net(x.float()), y).backward()
        optimizer.step()
    for name, value in net.module.state_dict().items():
        assert not torch.equal(value, before[name])
        first = value.clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, value), name


def states(rank: int, size: int) -> None:
    """Parameters and an optimizer's state go from rank to rank through memory of the CPU."""
    net = Net().to(DEVICE)
    optimizer = torch.optim.Adam(net.parameters(), 0.01)
    train(net, optimizer, rank, size, steps=3 + rank)
    multiring.torch.sync_state(net, optimizer, root=1)
    expected = Net().to(DEVICE)
    theirs = torch.optim.Adam(expected.parameters(), 0.01)
    train(expected, theirs, 1, size, steps=4)
    for name, value in net.state_dict().items():
        assert value.is_cuda
        assert torch.equal(value, expected.state_dict()[name]), name
    for p, q in zip(net.parameters(), expected.parameters(), strict=True):
        for key, value in optimizer.state[p].items():
            same_place = theirs.state[q][key]
            assert value.device == same_place.device
            assert torch.equal(value, same_place), key


def outer(rank: int, size: int) -> None:
    """Ranks that train apart and exchange how their parameters changed: all hold the mean after each exchange."""
    net = Net().to(DEVICE).float()
    exchange = multiring.torch.Outer(
        net, 5, groups=[[other] for other in range(size)], optimizer=lambda shared: torch.optim.SGD(shared, 1.0)
    )
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    apart = [copy.deepcopy(net) for _ in range(size)]
    theirs = [torch.optim.SGD(each.parameters(), 0.1) for each in apart]
    for step in range(10):
        for other in range(size):
            x, y = batch(step, other, size)
            theirs[other].zero_grad()
            F.cross_entropy(apart[other](x.float()), y).backward()
            theirs[other].step()
        x, y = batch(step, rank, size)
        optimizer.zero_grad()
        F.cross_entropy(net(x.float()), y).backward()
        optimizer.step()
        exchange.step()
        if step % 5 == 4:
            with torch.no_grad():
                for values in zip(*(each.parameters() for each in apart), strict=True):
                    mean = torch.stack(values).mean(0)
                    for value in values:
                        value.copy_(mean)
    for p, q in zip(net.parameters(), apart[0].parameters(), strict=True):
        assert p.is_cuda
        torch.testing.assert_close(p, q, rtol=0, atol=1e-5)


CHECKS: tuple[Callable[[int, int], None], ...] = (
    data_parallel,
    accumulated,
    compiled,
    redundancy_removed,
    sharded,
    tensors,
    hooked,
    states,
    outer,
    same_everywhere,
)


if __name__ == "__main__":
    torch.cuda.set_device(DEVICE)
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    run(chosen(CHECKS), "cpu:multiring,cuda:multiring")
