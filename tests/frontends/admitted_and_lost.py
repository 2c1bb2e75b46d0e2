"""Rank 0 is lost, then its replacement, as it makes torch's store for those that have admitted it; the next stays."""

from __future__ import annotations

import os
import signal
import time

import torch
import torch.distributed as dist

import multiring as mr
import multiring.torch
from multiring.runtime.comm import Communicator
from multiring.torch import start

NUMBER = int(os.environ["MULTIRING_REPLACEMENT"])


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def summed() -> None:
    x = torch.arange(50) * (dist.get_rank() + 1)
    dist.all_reduce(x)
    size = dist.get_world_size()
    assert x.tolist() == [index * size * (size + 1) // 2 for index in range(50)]


make = start._store


def make_and_die(communicator: Communicator) -> dist.Store:
    make(communicator)
    die()
    raise AssertionError("not reached")


if NUMBER == 1:
    start._store = make_and_die

multiring.torch.init()
done, was_there = 0, False
while done < 3:
    try:
        summed()
        if not NUMBER and not was_there and mr.rank() == 0:
            die()
        if was_there or NUMBER:
            done += mr.world_size() == 3
        if done == 0:
            before = mr.world_size()
            agreement = multiring.torch.grow()
            if agreement is not None:
                assert [rank for rank in agreement.members if rank >= 0] == list(range(before))
            time.sleep(0.05)
    except mr.PeerLost:
        multiring.torch.shrink()
        was_there = True
print("rank", dist.get_rank(), "of", dist.get_world_size(), "ends", flush=True)
dist.destroy_process_group()
