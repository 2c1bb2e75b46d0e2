"""A program for ranks that another launcher starts.

Given "torch", it starts torch.distributed too; given "without MASTER_ADDR", as if nobody had set that variable.
"""

from __future__ import annotations

import os
import sys

import numpy as np

import multiring as mr


def main() -> None:
    if "without MASTER_ADDR" in sys.argv:
        del os.environ["MASTER_ADDR"]
    if "torch" in sys.argv:
        torch_distributed()
    mr.init(init_timeout=40)
    x = np.array([10.0 ** mr.rank()])
    mr.all_reduce(x)
    print(f"rank {mr.rank()} of {mr.world_size()} sums to {x[0]:.0f}", flush=True)


def torch_distributed() -> None:
    import torch
    import torch.distributed as dist

    from multiring._torch_entry import register
    from multiring.torch import init

    register()
    init(init_timeout=40)
    x = torch.tensor([10.0 ** dist.get_rank()])
    dist.all_reduce(x)
    assert x.item() == int("1" * dist.get_world_size())


if __name__ == "__main__":
    main()
