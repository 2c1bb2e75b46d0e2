"""Helpers of the ranks in the torch tests: the group, contributions that depend on rank and index, a training."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import multiring as mr
from multiring._torch_entry import register
from multiring.runtime.comm import group_of

register()  # installing does this; the tests run from a source tree as well

_meeting = itertools.count()  # every group meets in a file of its own


@contextmanager
def group(backend: str = "multiring", **options: Any) -> Iterator[tuple[int, int]]:
    """The default group; yields rank and size."""
    store = f"file://{os.environ['FOLDER']}/store{next(_meeting)}"
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=size, **options)
    yield rank, size
    dist.destroy_process_group()


def own(rank: int, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Contributions that depend on rank and index, small enough to be exact in every format."""
    return ((torch.arange(count) * 3 + rank * 5) % 7).to(dtype)


def everyone(size: int, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.stack([own(rank, count, dtype) for rank in range(size)])


def same(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def tell(sign: str) -> None:
    """Let those that `wait_for` the sign go on."""
    Path(os.environ["FOLDER"], sign).touch()


def wait_for(sign: str) -> None:
    while not Path(os.environ["FOLDER"], sign).exists():
        time.sleep(0.01)


def kill_after_others(sign: str, victim: int, others: Iterable[int]) -> None:
    """Kill rank ``victim`` once the ``others`` have called this with the same sign; ranks are those at the start.

    None of them is in an earlier call of multiring then, in which it would hear of the loss too soon.
    """
    if (rank := int(os.environ["RANK"])) != victim:
        tell(f"{sign}, rank {rank}")
        return
    for other in others:
        wait_for(f"{sign}, rank {other}")
    os.kill(os.getpid(), signal.SIGKILL)


def until_lost() -> None:
    """Wait, in no call, until this rank's engine has heard that another one is lost."""
    while group_of(mr.init()).world.engine.failure() is None:
        time.sleep(0.01)


def deadly(call: int) -> Callable[[Tensor], None]:
    """A hook that kills its rank in its call ``call``; after the first, when the others may be in an earlier step."""
    calls = itertools.count(1)

    def hook(_: Tensor) -> None:
        if next(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)

    return hook


def caught(error: type[Exception], call: Callable[[], object]) -> Exception:
    """The error that ``call`` raises."""
    try:
        call()
    except error as found:
        return found
    raise AssertionError(f"{error.__name__} was not raised")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 3))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def batch(step: int, rank: int, size: int) -> tuple[Tensor, Tensor]:
    """This rank's rows of a batch of 12 that is the same for any number of ranks."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(12, 6, generator=generator, dtype=torch.float64)
    return x[rank::size], (x.abs().sum(1) * 2).long()[rank::size] % 3


def steps(
    net: nn.Module, optimizer: torch.optim.Optimizer, rank: int, size: int, count: int = 20, first: int = 0
) -> None:
    for step in range(first, first + count):
        x, y = batch(step, rank, size)
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()


def alone() -> list[Tensor]:
    net = Net()
    steps(net, torch.optim.Adam(net.parameters(), 0.01), 0, 1)
    return [p.detach() for p in net.parameters()]


def close(net: nn.Module) -> None:
    for actual, expected in zip(net.parameters(), alone(), strict=True):
        torch.testing.assert_close(actual.detach(), expected, rtol=0, atol=1e-12)
