"""Programs for ranks whose data MPI moves."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import collectives
import numpy as np

import multiring as mr
from multiring.runtime.buffers import writable
from multiring.runtime.comm import group_of
from multiring.training.labels import label


def on_hosts(hosts: str, program: str, *arguments: int) -> Any:
    """A program of `collectives` over hosts named by letters, one a rank: plans of several levels."""
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["MULTIRING_RANK"])
    os.environ["MULTIRING_HOST"] = hosts[rank]
    return getattr(collectives, program)(*arguments)


def what_is_not_one_plan() -> str:
    """Messages, objects, calls in flight, groups; and what this engine does not have."""
    collectives.others()
    collectives.groups()
    communicator = mr.init()
    mr.barrier()
    before = communicator.stats()["collectives"]
    assert before["barrier"]["operations"] > 0
    mr.all_gather(np.full(10 + 7, mr.rank(), np.int16))
    if mr.rank() < 2:
        x = np.zeros(3 * 5, np.float64)
        mr.send(x, 1) if mr.rank() == 0 else mr.recv(x, 0)
    after, none = communicator.stats()["collectives"], {"operations": 0, "bytes": 0, "seconds": 0.0}
    for name, nbytes in {"all_gather": mr.world_size() * 34, ("send", "recv", "")[min(mr.rank(), 2)]: 120}.items():
        then = before.get(name, none)
        if name:
            assert after[name]["operations"] - then["operations"] == 1
            assert after[name]["bytes"] - then["bytes"] == nbytes
            assert after[name]["seconds"] > then["seconds"]
    assert sum(counted["bytes_sent"] for counted in communicator.stats()["peers"].values()) > 0
    try:
        group_of(communicator).publish()
    except mr.MultiringError as error:
        return str(error)
    return "published"


def torch_training() -> list[Any]:
    """DistributedDataParallel and DistributedOptimizer: the gradient of rank r is r + 1 times the index."""
    import torch
    import torch.distributed as dist

    from multiring._torch_entry import register
    from multiring.torch import DistributedOptimizer, init

    register()
    init(init_timeout=40)
    index = torch.arange(1000.0)
    layer = torch.nn.Linear(1000, 1, bias=False)
    torch.nn.init.zeros_(layer.weight)
    model = torch.nn.parallel.DistributedDataParallel(layer)
    model(index * (dist.get_rank() + 1)).sum().backward()
    mean = (dist.get_world_size() + 1) / 2
    assert layer.weight.grad is not None
    assert torch.equal(layer.weight.grad, mean * index[None])
    other = torch.nn.Linear(1000, 1, bias=False)
    torch.nn.init.zeros_(other.weight)
    DistributedOptimizer(torch.optim.SGD(other.parameters(), 0.1), other.named_parameters(), bucket_bytes=1000)
    other(index * (dist.get_rank() + 1)).sum().backward()
    assert torch.equal(other.weight.grad, mean * index[None])
    gathered = [torch.empty(3) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, torch.arange(3.0) + 10 * dist.get_rank())
    dist.destroy_process_group()
    return [block.tolist() for block in gathered]


def fail(how: str) -> None:
    """Rank 1 fails after the first collective, the others call the next one."""
    communicator = mr.init()
    x = np.arange(100.0) + communicator.rank
    communicator.all_reduce(x)
    if communicator.rank == 1 and how == "raise":
        raise KeyError("no such sample")
    if communicator.rank == 1 and how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if communicator.rank == 1 and how == "leave":
        sys.exit()
    try:
        names = ["kernel", "bias"][:: -1 if communicator.rank == 1 and how == "rename" else 1]
        given = x[:10] if communicator.rank == 1 and how == "differ" else x
        group_of(communicator).run("all_reduce", writable(given), label=label("gradients", names))
        communicator.all_reduce(x)
    except mr.MultiringError as error:
        print(type(error).__name__, error.rank, error.host, error.collective, error.number, file=sys.stderr)
        raise
