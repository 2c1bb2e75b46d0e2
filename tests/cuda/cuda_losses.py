"""Ranks that share a device, of which the last is killed with copies in flight: the others learn of it, and go on."""

from __future__ import annotations

import os
import signal
import time

import torch
import torch.distributed as dist
from cuda_collectives import DEVICE, everyone, own, same

import multiring.torch
from multiring.errors import PeerLost

COUNT = 32_000_000
"""Elements of 128 MB."""


def lose(rank: int, size: int) -> float:
    """Seconds from the kill to the error on a rank that is left."""
    x = torch.ones(COUNT, device=DEVICE)
    dist.all_reduce(x)
    torch.cuda.synchronize()
    dist.barrier()
    dist.all_reduce(x, async_op=True)
    if rank == size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begun = time.monotonic()
    lost = -1
    while lost < 0:
        try:
            dist.all_reduce(x)
            torch.cuda.synchronize()
        except PeerLost as error:
            lost = error.rank
    assert lost == size - 1
    return time.monotonic() - begun


def main() -> None:
    dist.init_process_group("multiring")
    rank, size = dist.get_rank(), dist.get_world_size()
    seconds = lose(rank, size)
    assert seconds < 2, seconds
    torch.cuda.synchronize()  # no stream waits for ever
    y = own(rank, 1000).to(DEVICE) * 2
    same(y, own(rank, 1000) * 2)
    print(f"rank {rank}: PeerLost after {seconds:.2f} s", flush=True)
    if size > 2:
        multiring.torch.shrink()
        rank, size = dist.get_rank(), dist.get_world_size()
        x = own(rank, 100_003).to(DEVICE)
        dist.all_reduce(x)
        same(x, everyone(size, 100_003).sum(0))
        print(f"rank {rank} of {size} went on", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
