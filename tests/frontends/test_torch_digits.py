"""The example on real digits: ranks with uneven shards end where one process ends; a killed rank is named by all."""

from __future__ import annotations

import contextlib
import io
import re
import sys
import time
from pathlib import Path

import losing
import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch_helpers import group
from torch_ranks import run, the_killed_last_rank_is_named, values

import multiring as mr

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.append(str(EXAMPLES))
import torch_optimizer as example  # noqa: E402

EPOCHS = 15


def together() -> tuple[list[float], list[list[float]]]:
    with group() as (rank, size):
        torch.manual_seed(rank)
        net = example.network()
        losses = list(example.train(net, example.digits(), EPOCHS, batch=1797))
        assert len(mr.shard(1797)) == 1797 // size + (rank < 1797 % size)
        return losses, [p.detach().view(-1).tolist() for p in net.parameters()]


def alone() -> tuple[list[float], list[list[float]]]:
    """The same by plain torch, at the full batch."""
    torch.manual_seed(0)
    net = example.network()
    images, labels = example.digits()
    optimizer = torch.optim.AdamW(net.parameters(), 0.005)
    losses = []
    for _ in range(EPOCHS):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.detach().view(-1).tolist() for p in net.parameters()]


@pytest.mark.parametrize("world_size", [2, 3])
def test_uneven_shards_end_where_one_process_ends(world_size: int) -> None:
    ((losses, weights),) = values(alone, world_size=1)
    assert losses[-1] < losses[0] / 2
    for their_losses, their_weights in values(together, world_size=world_size):
        np.testing.assert_allclose(their_losses, losses, rtol=0, atol=1e-9)
        for theirs, expected in zip(their_weights, weights, strict=True):
            np.testing.assert_allclose(theirs, expected, rtol=0, atol=1e-9)


def die_in_the_third_epoch() -> str:
    with group():
        epochs = example.train(example.network(), example.digits(), EPOCHS, batch=96)
        next(epochs)
        started = time.monotonic()
        with pytest.raises(mr.PeerLost) as error:
            losing.the_last_between(lambda: next(epochs))
        assert time.monotonic() - started < 10
        return str(error.value)


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_killed_rank_raises_everywhere(world_size: int) -> None:
    the_killed_last_rank_is_named(run(die_in_the_third_epoch, world_size=world_size))


def main() -> str:
    printed = io.StringIO()
    with group(), contextlib.redirect_stdout(printed):
        example.main()
    return printed.getvalue()


@pytest.mark.parametrize("world_size", [1, 3])
def test_the_example_is_as_good_on_three_ranks_as_on_one(world_size: int) -> None:
    printed, *others = values(main, world_size=world_size)
    found = re.search(r"accuracy ([\d.]+)% on (\d) rank", printed)
    assert found, printed
    assert float(found[1]) > 94
    assert int(found[2]) == world_size
    assert not any(others)
