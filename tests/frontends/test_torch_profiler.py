"""A program's collectives in ``torch.profiler``."""

from __future__ import annotations

from collections import Counter

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from torch_helpers import Net, batch, caught, group, own, same
from torch_ranks import values


def profiled() -> None:
    with group() as (rank, size):
        x = own(rank, 1000)
        dist.all_reduce(x.clone())  # without a profiler
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
            dist.all_reduce(x)
            first = dist.all_reduce(own(rank, 20), async_op=True)
            second = dist.broadcast(own(rank, 30), 0, async_op=True)
            first.wait()
            second.get_future().wait()
            dist.all_gather([torch.empty(4) for _ in range(size)], own(rank, 4))
            dist.reduce_scatter_tensor(torch.empty(2), own(rank, 2 * size))
            dist.all_to_all_single(torch.empty(size, 3), own(rank, 3 * size).view(size, 3))
            if rank == 0:
                dist.send(own(0, 7), 1)
            elif rank == 1:
                dist.recv(torch.empty(7))
            dist.barrier()
            caught(ValueError, lambda: dist.all_reduce(torch.zeros(1).expand(5)))
        same(x, sum(own(r, 1000) for r in range(size)))
        ours = [event for event in seen.events() if event.name.startswith("multiring:")]
        sizes = [(event.name.removeprefix("multiring:"), event.input_shapes) for event in ours]
        message = [("send", [[7]])] if rank == 0 else [("recv", [[7]])]
        assert sorted(sizes, key=str) == sorted(
            [
                ("all_reduce", [[1000]]),
                ("all_reduce", [[20]]),
                ("broadcast", [[30]]),
                ("all_gather", [[4]]),
                ("reduce_scatter", [[2 * size]]),
                ("all_to_all", [[size, 3]]),
                ("barrier", []),
                ("all_reduce", [[5]]),
                *message,
            ],
            key=str,
        ), sizes
        assert all(event.time_range.end > event.time_range.start for event in ours)


def profiled_training() -> None:
    """The buckets of a backward pass: their outcome is learnt in another thread than they were started in."""
    with group() as (rank, size):
        net = DistributedDataParallel(Net(), bucket_cap_mb=0.002)
        x, y = batch(0, rank, size)
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
            for _ in range(3):
                F.cross_entropy(net(x), y).backward()
        elements: Counter[str] = Counter()
        for event in seen.events():
            if event.name == "multiring:all_reduce":
                elements[event.name] += event.input_shapes[0][0]
        assert elements["multiring:all_reduce"] >= 3 * sum(p.numel() for p in net.parameters())


def test_collectives_are_shown_by_name_and_size() -> None:
    values(profiled)


def test_buckets_of_a_training_are_shown() -> None:
    values(profiled_training)
