"""A rank that dies, is late or disagrees: the others raise, nothing hangs, nothing is silently wrong."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch_helpers import Net, batch, caught, deadly, group, own, tell, wait_for
from torch_ranks import run, the_killed_last_rank_is_named, values

import multiring


def die_during_backward() -> str:
    """The highest rank is killed between two buckets of a backward pass."""
    with group(timeout=timedelta(seconds=30)) as (rank, size):
        net = DistributedDataParallel(Net(), bucket_cap_mb=0.002)
        x, y = batch(0, rank, size)
        if rank == size - 1:
            net.module.layers[2].weight.register_hook(deadly(call=2))
        started = time.monotonic()
        error = caught(RuntimeError, lambda: [F.cross_entropy(net(x), y).backward() for _ in range(2)])
        assert time.monotonic() - started < 10
        return str(error)


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_killed_during_backward_is_named_by_the_others(world_size: int) -> None:
    the_killed_last_rank_is_named(run(die_during_backward, world_size=world_size))


def die_while_others_wait() -> str:
    with group() as (rank, size):
        x = own(rank, 1000)
        if rank == size - 1:
            wait_for("called")
            os.kill(os.getpid(), signal.SIGKILL)
        work = dist.all_reduce(x, async_op=True)
        future = dist.all_reduce(x, async_op=True).get_future().then(lambda done: done.value()[0])
        tell("called")
        error = caught(multiring.PeerLost, work.wait)
        assert work.is_completed()
        assert not work.is_success()
        assert isinstance(work.exception(), multiring.PeerLost)
        return f"{error} {caught(RuntimeError, future.wait)} {caught(multiring.PeerLost, dist.barrier)}"


def test_works_and_futures_raise_what_went_wrong() -> None:
    survivor, _ = run(die_while_others_wait)
    assert not survivor.error
    assert survivor.value.count("rank 1") == 3


def broadcast_last_from_different_roots() -> str:
    try:
        with group() as (rank, _):
            with pytest.raises(ValueError, match=r"tag=-3: a tag is 0 to"):
                dist.send(torch.zeros(3), 1 - rank, tag=-3)
            dist.broadcast(torch.zeros(7), src=rank)
    except multiring.Mismatch as error:
        return str(error)
    return ""


def test_a_last_call_that_was_not_the_same_is_told_on_leaving() -> None:
    seen = values(broadcast_last_from_different_roots)
    assert any(seen)
    for message in filter(None, seen):
        assert "broadcast(root=0)" in message
        assert "broadcast(root=1)" in message


def die_while_any_may_send() -> str:
    with group() as (rank, size):
        if rank == size - 1:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        return str(caught(multiring.PeerLost, lambda: dist.recv(torch.empty(3))))


def test_a_receive_from_any_rank_ends_when_one_of_them_dies() -> None:
    *survivors, dead = run(die_while_any_may_send, world_size=3)
    assert dead.exitcode == -signal.SIGKILL
    for survivor in survivors:
        assert not survivor.error
        assert "rank 2" in survivor.value
        assert "recv from any rank" in survivor.value


def be_late() -> None:
    with group() as (rank, size):
        x = own(rank, 10)
        if rank == 0:
            work = dist.all_reduce(x, async_op=True)
            started = time.monotonic()
            caught(multiring.CollectiveTimeout, lambda: work.wait(timedelta(seconds=0.3)))
            assert 0.25 < time.monotonic() - started < 5
            assert not work.is_completed()
            tell("waited")
            work.wait()
        else:
            wait_for("waited")
            dist.all_reduce(x)
        assert x.tolist() == sum(own(r, 10) for r in range(size)).tolist()


def test_wait_gives_up_and_may_be_called_again() -> None:
    values(be_late)


def never_come(of_the_group: bool) -> str:
    if not of_the_group:
        os.environ["MULTIRING_TIMEOUT"] = "1"
    with group(timeout=timedelta(seconds=1 if of_the_group else 60)) as (rank, _):
        if rank == 0:
            error = caught(multiring.CollectiveTimeout, dist.barrier)
            return str(error)
        time.sleep(3)
        return ""


@pytest.mark.parametrize("of_the_group", [True, False], ids=["the group's", "the job's"])
def test_the_lower_time_limit_holds(of_the_group: bool) -> None:
    outcomes = run(never_come, of_the_group)
    assert not outcomes[0].error
    assert "rank 1" in outcomes[0].value


def disagree() -> str:
    with group() as (rank, _):
        return str(caught(multiring.Mismatch, lambda: dist.all_reduce(own(rank, 10 + rank))))


def test_different_calls_are_shown_side_by_side() -> None:
    for outcome in run(disagree):
        assert not outcome.error
        assert "10" in outcome.value
        assert "11" in outcome.value


class Images(torch.utils.data.Dataset[Tensor]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Tensor:
        return own(index, 100)


def load_data_by_forked_workers() -> None:
    with group() as (rank, _):
        x = own(rank, 1000)
        works = [dist.all_reduce(x.clone(), async_op=True) for _ in range(10)]
        loader = torch.utils.data.DataLoader(Images(), batch_size=8, num_workers=2, multiprocessing_context="fork")
        for _ in range(2):
            for number, images in enumerate(loader):
                mean = images.mean(0)
                dist.all_reduce(mean, dist.ReduceOp.AVG)
                torch.testing.assert_close(mean, torch.stack([own(number * 8 + i, 100) for i in range(8)]).mean(0))
        for work in works:
            work.wait()
        dist.barrier()


def test_data_loaders_fork_while_collectives_run() -> None:
    values(load_data_by_forked_workers)


REFUSED = [
    ({"backend": "cpu:multiring,cuda:gloo"}, ValueError, "cpu:multiring,cuda:gloo"),
    ({"backend": "cuda:gloo,cpu:multiring"}, ValueError, "cannot share a group"),
    ({"backend": "multiring", "pg_options": {"streams": 2}}, TypeError, "multiring.torch.Options"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_wrong_arguments_are_refused(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1, **arguments)
    assert not dist.is_initialized()


def test_tensors_without_elements_are_refused_with_the_remedy() -> None:
    dist.init_process_group("multiring", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match=r"on meta, .*: hand over one that has, such as"):
            dist.all_reduce(torch.empty(3, device="meta"))
    finally:
        dist.destroy_process_group()


def stop_during_training(sharded: bool) -> str:
    """The highest rank is stopped (as by SIGSTOP) in the middle of a backward pass, until the others have raised."""
    os.environ["MULTIRING_HEARTBEAT_TIMEOUT"] = "2"
    with group() as (rank, size):
        net = Net()
        hooked = net.layers[3]
        if sharded:
            for layer in net.layers[::2]:
                fully_shard(layer)
            trained = fully_shard(net)
        else:
            trained = DistributedDataParallel(net, bucket_cap_mb=0.002)
        x, y = batch(0, rank, size)
        if rank == size - 1:
            watcher = f"while [ ! -e {os.environ['FOLDER']}/raised ]; do sleep 0.1; done; kill -CONT {os.getpid()}"
            subprocess.Popen(["sh", "-c", watcher])
        started = time.monotonic()
        try:
            F.cross_entropy(trained(x), y).backward()
            if rank == size - 1:
                hooked.register_full_backward_hook(lambda *_: os.kill(os.getpid(), signal.SIGSTOP))
            F.cross_entropy(trained(x), y).backward()
            dist.barrier()
        except RuntimeError as error:
            took = time.monotonic() - started
            tell("raised")
            assert took < 20 or rank == size - 1, took
            return str(error)
        return ""


@pytest.mark.parametrize("sharded", [False, True], ids=["DDP", "FSDP"])
def test_a_rank_stopped_during_backward_is_named_by_all(sharded: bool) -> None:
    for outcome in run(stop_during_training, sharded, world_size=3):
        assert not outcome.error
        assert "rank 2" in outcome.value
        assert "has not been heard of for 2" in outcome.value
