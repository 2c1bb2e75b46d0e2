"""CUDA devices in the front end, tested without one."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch_helpers import caught, everyone, group, own, same
from torch_ranks import values

from multiring.torch.cuda import _is_first_on_cuda


def both_devices() -> None:
    with group("cpu:multiring,cuda:multiring") as (rank, size):
        x = own(rank, 1003)
        dist.all_reduce(x)
        same(x, everyone(size, 1003).sum(0))


def test_one_group_serves_both_kinds_of_devices() -> None:
    values(both_devices)


def another_backend_beside() -> list[str]:
    messages = []
    for backend in ("cpu:gloo,cuda:multiring", "cpu:multiring,cuda:gloo"):
        with pytest.raises(ValueError, match="cannot share a group with another backend") as error, group(backend):
            pass
        messages.append(str(error.value))
    return messages


def test_another_backend_for_one_kind_is_refused() -> None:
    # One rank alone: of two, the first may be refused and gone while the other's Gloo still connects to it.
    for messages in values(another_backend_beside, world_size=1):
        assert "cpu:gloo,cuda:multiring" in messages[0]


def mixed() -> str:
    with group() as (rank, size):
        x = own(rank, 5)
        other = torch.empty(5 * size, device="meta")
        message = str(caught(ValueError, lambda: dist.all_gather_into_tensor(other, x)))
        dist.all_reduce(x)
        same(x, everyone(size, 5).sum(0))
        return message


def test_tensors_of_a_call_lie_on_one_kind_of_device() -> None:
    for message in values(mixed):
        assert "is on meta, where tensors have no elements: hand over one that has" in message


def test_calls_on_the_host_go_their_old_way() -> None:
    x = torch.zeros(3)
    assert _is_first_on_cuda(([x], [[x]], None)) is False
    assert _is_first_on_cuda(([], 3)) is None
