"""DistributedOptimizer, the broadcasts and the weights: ranks together train what one process trains."""

from __future__ import annotations

import copy
import math
import re
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_helpers import Net, batch, caught, close, deadly, group, same, steps
from torch_ranks import run, the_killed_last_rank_is_named, values
from workers import worker, workers

import multiring as mr
from multiring.torch import (
    DistributedOptimizer,
    Weighted,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
    comm_hook,
)
from multiring.training.buckets import Buckets, GradientSpec
from multiring.training.weights import share

SMALL = 2000  # bytes in a bucket: several of them even here


def distributed(net: nn.Module, optimizer: torch.optim.Optimizer | None = None, **options: Any) -> DistributedOptimizer:
    return DistributedOptimizer(
        optimizer or torch.optim.Adam(net.parameters(), 0.01), net.named_parameters(), bucket_bytes=SMALL, **options
    )


def uneven(step: int, rank: int, size: int, idle: bool = True) -> tuple[Tensor, Tensor]:
    """Another number of the 12 rows for each rank; in odd steps the last one may have none."""
    x, y = batch(step, 0, 1)
    cuts = [0, *(12 - 5 * (size - r) for r in range(1, size)), 12]
    if idle and step % 2:
        cuts[-2] = 12
    mine = slice(cuts[rank], cuts[rank + 1])
    return x[mine], y[mine]


# --- the buckets themselves, without a framework ---


@worker
def buckets() -> None:
    with group() as (rank, size):
        for dtype, weighted in (("float64", False), ("float32", True)):
            gradients = [
                GradientSpec(5, dtype),
                GradientSpec(700, dtype),
                GradientSpec(0, dtype),
                GradientSpec(9, dtype),
            ]
            fused = Buckets(mr.init(), gradients, [3, 2, 1, 0], bucket_bytes=1000)
            for step in range(3):
                factor = fused.begin(rank + 1.0 if weighted else None)
                weights = [(r + 1) / sum(range(size + 1)) if weighted else 1 / size for r in range(size)]
                absent = {0} if rank == step % size else set()
                for index in range(3 if step == 2 else 4):  # in the last step nobody has gradient 3
                    if index not in absent:
                        values = np.arange(gradients[index].elements) + 10.0 * rank + step
                        fused.slot(index)[:] = values * factor
                        assert fused.slot(index).ctypes.data % 64 == 0
                        fused.ready(index)
                assert fused.finish() == ({0, 1, 2} if step == 2 else {0, 1, 2, 3})
                for index, gradient in enumerate(gradients):
                    having = [r for r in range(size) if not (index == 0 and r == step % size)]
                    expected = sum(weights[r] * (np.arange(gradient.elements) + 10.0 * r + step) for r in having) * (
                        index != 3 or step < 2
                    )
                    np.testing.assert_allclose(fused.slot(index), expected, rtol=1e-6, atol=1e-12)
            fused.begin()
            fused.ready(1)
            caught(ValueError, lambda: fused.ready(1))  # noqa: B023
            fused.finish()


# --- the optimizer ---


@worker
def equals_one_process() -> None:
    with group() as (rank, size):
        net = Net()
        optimizer = distributed(net)
        steps(net, optimizer, rank, size)
        close(net)
        assert len(optimizer.state_dict()["state"]) == len(list(net.parameters()))
        gradient = net.layers[0].weight.grad
        assert gradient is not None
        arena = mr.stats()
        assert arena["arena_allocated"] > 0


@worker
def equals_one_process_without_setting_gradients_to_none() -> None:
    with group() as (rank, size):
        net = Net()
        optimizer = distributed(net)
        for step in range(20):
            x, y = batch(step, rank, size)
            optimizer.zero_grad(set_to_none=False)
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
        close(net)


@worker
def uneven_shards() -> None:
    with group() as (rank, size):
        net, optimizer = Net(), None
        optimizer = distributed(net, weight=1)
        losses = []
        for step in range(20):
            x, y = uneven(step, rank, size)
            optimizer.weight = len(x)
            optimizer.zero_grad()
            loss = math.nan
            if len(x):
                value = F.cross_entropy(net(x), y)
                value.backward()
                loss = value.item()
            optimizer.step()  # also where there was nothing to do
            losses.append(mr.average({"loss": loss, "samples": len(x)}, weight=len(x))["loss"])
        close(net)
        reference, expected = Net(), []
        single = torch.optim.Adam(reference.parameters(), 0.01)
        for step in range(20):
            x, y = batch(step, 0, 1)
            single.zero_grad()
            value = F.cross_entropy(reference(x), y)
            value.backward()
            single.step()
            expected.append(value.item())
        np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-12)


@worker
def accumulation() -> None:
    with group() as (rank, size):
        net = Net()
        optimizer = distributed(net)
        for step in range(20):
            x, y = batch(step, rank, size)
            optimizer.zero_grad()
            halves = [slice(None, len(x) // 2), slice(len(x) // 2, None)]
            with optimizer.no_sync():
                for half in halves[: 1 + step % 2]:  # in odd steps all of them: step() reduces
                    (F.cross_entropy(net(x[half]), y[half]) / 2).backward()
                local = net.layers[0].bias.grad.clone()
                everyones = mr.all_gather(local.numpy())
                assert not np.array_equal(everyones[0], everyones[-1])
            if step % 2 == 0:
                (F.cross_entropy(net(x[halves[1]]), y[halves[1]]) / 2).backward()
            optimizer.step()
        close(net)


@worker
def two_losses() -> None:
    """Each backward pass averages; what an earlier one averaged stays."""
    with group() as (rank, size):
        net = Net()
        optimizer = distributed(net)
        for step in range(20):
            x, y = batch(step, rank, size)
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x), y)
            (loss / 4).backward(retain_graph=True)
            (loss * 3 / 4).backward()
            optimizer.step()
        close(net)


class Branches(nn.Module):
    """Each rank uses the common layer and one branch; the last branch is used by nobody."""

    def __init__(self, size: int) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.common = nn.Linear(6, 4)
        self.branches = nn.ModuleList(nn.Linear(4, 1) for _ in range(size + 1))
        self.double()

    def loss(self, x: Tensor, branch: int) -> Tensor:
        return self.branches[branch](self.common(x)).square().mean()


@worker
def unused_parameters() -> None:
    with group() as (rank, size):
        net, reference = Branches(size), Branches(size)
        # weight decay would change a parameter whose gradient is zero instead of None
        optimizer = distributed(net, torch.optim.AdamW(net.parameters(), 0.01, weight_decay=0.1))
        single = torch.optim.AdamW(reference.parameters(), 0.01, weight_decay=0.1)
        for step in range(10):
            x = [batch(step, r, size)[0] for r in range(size)]
            taken = [(r + step) % size if step else 0 for r in range(size)]  # in the first step all take one
            optimizer.zero_grad()
            net.loss(x[rank], taken[rank]).backward()
            optimizer.step()
            single.zero_grad()
            torch.stack([reference.loss(x[r], taken[r]) for r in range(size)]).mean().backward()
            single.step()
        for (name, actual), expected in zip(net.named_parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12, msg=lambda text: f"{name}: {text}")  # noqa: B023
        assert net.branches[size].weight.grad is None


@worker
def sparse_gradients() -> None:
    with group() as (rank, size):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2)).double()
        torch.manual_seed(0)
        reference = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2)).double()
        optimizer = distributed(net, torch.optim.SGD(net.parameters(), 0.5), weight=1.0)
        single = torch.optim.SGD(reference.parameters(), 0.5)
        for step in range(5):
            words = [
                torch.tensor([r, 5, step]) if r or step % 2 else torch.tensor([], dtype=torch.int64)
                for r in range(size)
            ]
            optimizer.weight = len(words[rank])
            optimizer.zero_grad()
            if len(words[rank]):
                net(words[rank]).square().mean().backward()
            optimizer.step()
            single.zero_grad()
            reference(torch.cat(words)).square().mean().backward()
            single.step()
            assert net[0].weight.grad.is_sparse
        for actual, expected in zip(net.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


@worker
def number_formats() -> None:
    with group() as (rank, size):
        torch.manual_seed(0)
        net = nn.ModuleList(nn.Conv2d(2, 3, 2).to(dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32))
        net.to(memory_format=torch.channels_last)
        optimizer = distributed(net, torch.optim.SGD(net.parameters(), 1.0))
        before = [p.detach().clone() for p in net.parameters()]
        for _ in range(2):
            optimizer.zero_grad()
            for layer in net:
                x = torch.full((1, 2, 2, 2), rank + 1.0, dtype=layer.weight.dtype)
                layer(x).sum().backward()
        mean = sum(range(1, size + 1)) / size
        for parameter, was in zip(net.parameters(), before, strict=True):
            expected = torch.full_like(was, mean if was.dim() == 4 else 1.0)
            torch.testing.assert_close(parameter.grad, expected)
            assert parameter.grad.stride() == parameter.stride()


@worker
def compiled() -> None:
    with group() as (rank, size):
        net = Net()
        optimizer = distributed(net)
        steps(torch.compile(net, backend="aot_eager"), optimizer, rank, size)
        close(net)


@worker
def compiled_with_its_backward_pass() -> None:
    """It trains by SGD: a compiled Adam corrects its bias in float32."""
    with group() as (rank, size):
        net, reference = Net(), Net()
        optimizer = distributed(net, torch.optim.SGD(net.parameters(), 0.1))

        @torch.compile(backend="eager")
        def step(x: Tensor, y: Tensor) -> None:
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()

        @torch.compile(backend="eager")
        def step_by_closure(x: Tensor, y: Tensor) -> None:
            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = F.cross_entropy(net(x), y)
                loss.backward()
                return loss

            optimizer.step(closure)

        for number in range(20):
            (step_by_closure if number % 2 else step)(*batch(number, rank, size))
        steps(reference, torch.optim.SGD(reference.parameters(), 0.1), 0, 1)
        for actual, expected in zip(net.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


@worker
def reentrant_checkpoints() -> None:
    """A backward pass within a backward pass: the same parameters become ready several times."""
    from torch.utils.checkpoint import checkpoint

    def loss(net: nn.Module, x: Tensor) -> Tensor:
        once = checkpoint(net, x.requires_grad_(), use_reentrant=True)
        return checkpoint(net, once, use_reentrant=True).square().mean()

    with group() as (rank, size):
        torch.manual_seed(0)
        net = nn.Linear(6, 6).double()
        reference = nn.Linear(6, 6).double()
        reference.load_state_dict(net.state_dict())
        optimizer = distributed(net, torch.optim.SGD(net.parameters(), 0.1))
        single = torch.optim.SGD(reference.parameters(), 0.1)
        for step in range(3):
            for model, one, x in ((net, optimizer, batch(step, rank, size)), (reference, single, batch(step, 0, 1))):
                one.zero_grad()
                loss(model, x[0]).backward()
                one.step()
        for actual, expected in zip(net.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


@worker
def scheduler_clipping_and_closures() -> None:
    with group() as (rank, size):
        net, reference = Net(), Net()
        optimizer = distributed(net, torch.optim.SGD(net.parameters(), 0.1))
        single = torch.optim.SGD(reference.parameters(), 0.1)
        schedules = [torch.optim.lr_scheduler.StepLR(one, 2, 0.5) for one in (optimizer, single)]
        for step in range(6):
            for model, one, (x, y) in (
                (net, optimizer, batch(step, rank, size)),
                (reference, single, batch(step, 0, 1)),
            ):

                def closure(model: nn.Module = model, one: Any = one, x: Tensor = x, y: Tensor = y) -> Tensor:
                    one.zero_grad()
                    loss = F.cross_entropy(model(x), y)
                    loss.backward()
                    nn.utils.clip_grad_norm_(model.parameters(), 0.05)  # clips the averaged gradients
                    return loss

                one.step(closure)
            for schedule in schedules:
                schedule.step()
        assert optimizer.param_groups[0]["lr"] == single.param_groups[0]["lr"] == 0.1 / 8
        for actual, expected in zip(net.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


@worker
def scaled_losses() -> None:
    """A step in which one rank overflows is skipped by all; fused optimizers would unscale by themselves."""
    with group() as (rank, size):
        for fused in False, True:
            net, reference = Net(), Net()
            optimizer = distributed(net, torch.optim.SGD(net.parameters(), 0.1, fused=fused))
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
            for step in range(4):
                x, y = batch(step, rank, size)
                optimizer.zero_grad()
                overflow = float("inf") if step == 1 and rank == size - 1 else 1.0
                scaler.scale(F.cross_entropy(net(x), y) * overflow).backward()
                scaler.step(optimizer)
                scaler.update()
            single = torch.optim.SGD(reference.parameters(), 0.1)
            for step in 0, 2, 3:
                x, y = batch(step, 0, 1)
                single.zero_grad()
                F.cross_entropy(reference(x), y).backward()
                single.step()
            assert scaler.get_scale() == 512
            for actual, expected in zip(net.parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


@worker
def line_searches() -> None:
    """L-BFGS tries steps until the loss, that of all ranks, is small enough: all ranks take the same one."""
    with group() as (rank, size):
        for weighted in (True, False):
            net, reference = Net(), Net()

            def lbfgs(model: nn.Module) -> torch.optim.Optimizer:
                return torch.optim.LBFGS(model.parameters(), max_iter=5, line_search_fn="strong_wolfe")

            optimizer, single = distributed(net, lbfgs(net), weight=1.0 if weighted else None), lbfgs(reference)
            for step in range(3):
                losses = []
                mine = uneven(step, rank, size) if weighted else batch(step, rank, size)
                optimizer.weight = len(mine[0]) if weighted else None
                for model, one, (x, y) in ((net, optimizer, mine), (reference, single, batch(step, 0, 1))):

                    def closure(model: nn.Module = model, one: Any = one, x: Tensor = x, y: Tensor = y) -> Tensor:
                        one.zero_grad()
                        loss = F.cross_entropy(model(x), y)  # NaN without rows
                        loss.backward()
                        return loss

                    losses.append(one.step(closure))
                torch.testing.assert_close(losses[0], losses[1].detach(), rtol=0, atol=1e-9)
            for actual, expected in zip(net.parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(actual, expected, rtol=0, atol=1e-9)


@worker
def what_is_set_anew() -> None:
    """Rates and state that are assigned as a whole are those by which steps are made."""
    with group() as (rank, size):
        net, reference = Net(), Net()
        optimizer = distributed(net, torch.optim.SGD(net.parameters(), 0.1, momentum=0.9))
        single = torch.optim.SGD(reference.parameters(), 0.1, momentum=0.9)
        for one, model, mine in (optimizer, net, (rank, size)), (single, reference, (0, 1)):
            steps(model, one, *mine, count=2)
            one.state = defaultdict(dict)
            one.param_groups = [{**one.param_groups[0], "lr": 0.01}]
            steps(model, one, *mine, count=2)
        for actual, expected in zip(net.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
        others = [{**optimizer.param_groups[0], "params": list(reference.parameters())}]
        error = caught(ValueError, lambda: setattr(optimizer, "param_groups", others))
        assert "call add_param_group on all ranks" in str(error)
        assert "a DistributedOptimizer is not copied" in str(caught(TypeError, lambda: copy.deepcopy(optimizer)))


@worker
def added_parameters() -> None:
    with group() as (rank, size):
        net = Net()
        layers = list(net.layers.children())
        optimizer = distributed(net, torch.optim.Adam(layers[4].parameters(), 0.01))
        optimizer.add_param_group({"params": [*layers[0].parameters(), *layers[2].parameters()]})
        steps(net, optimizer, rank, size, 10)
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3, dtype=torch.float64))], "lr": 0.5})
        steps(net, optimizer, rank, size, 10, first=10)
        close(net)


@worker
def join() -> None:
    """Rank r has 2 + r batches; the mean is over those that still have one, and all ranks stay equal."""
    from torch.distributed.algorithms.join import Join

    with group() as (rank, size):
        net, reference = Net(), Net()
        optimizer = distributed(net, weight=1.0)
        with Join([optimizer]):
            for step in range(2 + rank):
                x, y = batch(step, rank, size)
                optimizer.weight = len(x)
                optimizer.zero_grad()
                F.cross_entropy(net(x), y).backward()
                optimizer.step()
        single = torch.optim.Adam(reference.parameters(), 0.01)
        for step in range(1 + size):
            parts = [batch(step, r, size) for r in range(size) if step < 2 + r]
            single.zero_grad()
            x, y = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
            F.cross_entropy(reference(x), y).backward()
            single.step()
        for actual, expected in zip(net.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


@worker
def join_of_several_passes() -> None:
    """A step after every second pass; rank r has 3 + 2 r passes, so that all run out between two steps."""
    from torch.distributed.algorithms.join import Join

    with group() as (rank, size):
        for weighted in (True, False):
            net, reference = Net(), Net()
            optimizer = distributed(net, weight=1.0 if weighted else None)
            with Join([optimizer]):
                for turn in range(3 + 2 * rank):
                    x, y = batch(turn, rank, size)
                    if weighted:
                        optimizer.weight = len(x)
                    if turn % 2 == 0:
                        optimizer.zero_grad()
                    F.cross_entropy(net(x), y).backward()
                    if turn % 2:
                        optimizer.step()
            single = torch.optim.Adam(reference.parameters(), 0.01)
            for turn in range(1 + 2 * size):
                parts = [batch(turn, r, size) for r in range(size) if turn < 3 + 2 * r]
                if turn % 2 == 0:
                    single.zero_grad()
                if weighted:
                    x, y = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
                    F.cross_entropy(reference(x), y).backward()
                else:
                    sum(F.cross_entropy(reference(x), y) / size for x, y in parts).backward()
                if turn % 2:
                    single.step()
            for actual, expected in zip(net.parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


@worker
def made_again() -> None:
    """A second DistributedOptimizer around the same model replaces the first, whose gradients nobody reduces."""
    with group() as (rank, size):
        net = Net()
        first = distributed(net, torch.optim.SGD(net.parameters(), 0.0))
        steps(net, first, rank, size, 3)
        second = distributed(net)
        for step in range(20):
            x, y = batch(step, rank, size)
            second.zero_grad()
            F.cross_entropy(net(x), y).backward()
            second.step()
        close(net)
        name = next(name for name, _ in net.named_parameters())
        for call in (first.step, first.synchronize, lambda: first.step(lambda: 0.0)):
            said = caught(ValueError, call)
            assert f"another DistributedOptimizer was made for parameter {name} since: use that one" in str(said)


@worker
def weighted_hook() -> None:
    """DistributedDataParallel with another number of samples on each rank."""
    from torch.nn.parallel import DistributedDataParallel

    with group() as (rank, size):
        net = DistributedDataParallel(Net(), bucket_cap_mb=0.002)
        state = Weighted()
        net.register_comm_hook(state, comm_hook)
        optimizer = torch.optim.Adam(net.parameters(), 0.01)
        for step in range(20):
            x, y = uneven(step, rank, size, idle=False)
            state.weight = len(x)
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
        close(net)
        state.weight = rank  # rank 0 counts for nothing, and has no numbers
        net.zero_grad()
        net(torch.full((1, 6), rank or math.nan, dtype=torch.float64)).sum().backward()
        assert all(parameter.grad.isfinite().all() for parameter in net.parameters())


# --- beginning with the same ---


@worker
def broadcasts() -> None:
    with group() as (rank, size):
        root = size - 1
        net = Net()
        optimizer = torch.optim.Adam(net.parameters(), 0.01)
        if rank == root:
            steps(net, optimizer, 0, 1, 5)
            optimizer.param_groups[0]["lr"] = 0.003
        assert broadcast_object({"epoch": rank}, root) == {"epoch": root}
        broadcast_parameters(net.state_dict(), root)
        broadcast_optimizer_state(optimizer, root)
        expected = Net()
        single = torch.optim.Adam(expected.parameters(), 0.01)
        steps(expected, single, 0, 1, 5)
        for actual, parameter in zip(net.parameters(), expected.parameters(), strict=True):
            same(actual.detach(), parameter.detach())
            for key, value in single.state[parameter].items():
                same(optimizer.state[actual][key], value)
        assert optimizer.param_groups[0]["lr"] == 0.003


@worker
def frozen_for_a_while() -> None:
    """A layer that is frozen at first is trained later, and another one is frozen then, as in fine-tuning."""
    with group() as (rank, size):
        net, reference = Net(), Net()
        for model in (net, reference):
            model.layers[0].requires_grad_(False)
        alone = torch.optim.Adam(reference.parameters(), 0.01)
        for model, optimizer, part in ((net, distributed(net), (rank, size)), (reference, alone, (0, 1))):
            for step in range(12):
                model.layers[0].requires_grad_(step >= 4)
                model.layers[4].requires_grad_(step < 8)
                x, y = batch(step, *part)
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
        for actual, expected in zip(net.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


@worker
def complex_parameters() -> None:
    with group() as (rank, size):
        net = nn.ParameterList([torch.arange(3) * (1 + 2j)])
        later = nn.Parameter(torch.ones(2, dtype=torch.complex64), requires_grad=False)
        net.append(later)
        distributed(net, torch.optim.SGD(net.parameters(), 0.1))
        for trained in (False, True):
            net.zero_grad()
            later.requires_grad_(trained)
            ((net[0] * (rank + 1)).imag.sum() + (later * rank).real.sum()).backward()
            same(net[0].grad, torch.full((3,), 1j * (size + 1) / 2))
        same(later.grad, torch.full((2,), (size - 1) / 2 + 0j))


@worker
def weights_of_any_type() -> None:
    with group() as (rank, size):
        weights = [np.uint8(200), torch.tensor(100, dtype=torch.int8), True][:size]
        total = sum(map(float, weights))
        assert share(mr.init(), weights[rank]) == float(weights[rank]) / total
        mean = sum(r * float(weight) for r, weight in enumerate(weights)) / total
        assert mr.average(rank, weight=weights[rank]) == mean


@worker
def what_counts_for_nothing_may_be_nan() -> None:
    with group() as (rank, _):
        net = nn.Linear(3, 1)
        net.weight.data[:] = 1.0
        net.bias.data[:] = 0.0
        optimizer = distributed(net, torch.optim.SGD(net.parameters(), 0.1), weight=0.0 if rank else 2.0)
        for _ in range(3):
            optimizer.zero_grad(set_to_none=False)
            net(torch.full((1, 3), math.nan if rank else 5.0)).sum().backward()
            same(net.weight.grad, torch.full((1, 3), 5.0))
        table = nn.Embedding(4, 2, sparse=True)
        table.weight.data[:] = 1.0
        optimizer = distributed(table, torch.optim.SGD(table.parameters(), 0.1), weight=0.0 if rank else 2.0)
        for _ in range(3):
            optimizer.zero_grad()
            (table(torch.tensor([rank + 1])).sum() * (math.nan if rank else 5.0)).backward()
            same(table.weight.grad.to_dense(), torch.tensor([[0.0] * 2, [5.0] * 2, [0.0] * 2, [0.0] * 2]))


def a_pass_that_failed() -> list[str]:
    """One process goes on after a backward pass that ended in an error; several have lost each other."""
    with group() as (rank, size):
        net = Net()
        optimizer = distributed(net)
        for when in (0, 3) if size == 1 else (3,):
            steps(net, optimizer, rank, size, when)
            weight = net.layers[2].weight
            hook = weight.register_hook(lambda gradient: gradient.new_empty(1))  # has a wrong shape
            x, y = batch(0, rank, size)
            caught(RuntimeError, lambda: F.cross_entropy(net(x), y).backward())  # noqa: B023
            hook.remove()
            if size > 1:
                return [str(caught(ValueError, lambda: F.cross_entropy(net(x), y).backward()))]  # noqa: B023
        steps(net, optimizer, rank, size)
        reference = Net()
        plain = torch.optim.Adam(reference.parameters(), 0.01)
        for count in (3, 20):
            steps(reference, plain, rank, size, count)
        for actual, expected in zip(net.parameters(), reference.parameters(), strict=True):
            same(actual, expected)
        return []


def different_orders_in_memory() -> list[str]:
    with group() as (rank, _):
        net = nn.Conv2d(2, 3, 4)
        if rank == 0:
            net.to(memory_format=torch.channels_last)
        said = [str(caught(ValueError, lambda: broadcast_parameters(net.named_parameters())))]
        optimizer = distributed(net, torch.optim.SGD(net.parameters(), 0.1))
        return [*said, str(caught(ValueError, optimizer.step))]


def different_models() -> list[str]:
    with group() as (rank, _):
        net = nn.Linear(2, 1 + rank)
        said = [str(caught(ValueError, lambda: broadcast_parameters(net.named_parameters())))]
        optimizer = distributed(net, torch.optim.SGD(net.parameters(), 0.1))
        said.append(str(caught(ValueError, lambda: net(torch.ones(1, 2)).sum().backward())))
        torch.manual_seed(rank)
        net = nn.Linear(2, 1)
        optimizer = distributed(net, torch.optim.SGD(net.parameters(), 0.1))
        said.append(str(caught(ValueError, optimizer.step)))
        caught(ValueError, lambda: mr.average(1.0, weight=0))
        caught(ValueError, lambda: mr.average(1.0, weight=-1))
        return said


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("worker", workers(__name__), ids=lambda worker: worker.__name__)
def test_optimizer(worker: Callable[[], None], world_size: int) -> None:
    values(worker, world_size=world_size)


def test_a_pass_that_failed() -> None:
    values(a_pass_that_failed, world_size=1)
    for said in values(a_pass_that_failed, world_size=2):
        assert "the backward pass before this one ended before all gradients were there" in said[0]


def test_different_orders_in_memory_are_refused() -> None:
    strides = "weight is float32 of shape (3, 2, 4, 4) with strides (32, 1, 8, 2) here and float32 of shape"
    parameters, optimizer = values(different_orders_in_memory)[0]
    assert parameters.startswith(strides)
    assert optimizer.startswith("parameter 0 of the optimizer is weight (float32 of shape (3, 2, 4, 4) with strides")


def test_what_is_no_optimizer_is_refused() -> None:
    plain = torch.optim.SGD(Net().parameters(), 0.1)
    for wrong in ("adam", Net()):
        with pytest.raises(TypeError, match="is no optimizer of torch"):
            DistributedOptimizer(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="bucket_bytes=-1: a number of bytes is needed"):
        DistributedOptimizer(plain, bucket_bytes=-1)
    net = Net()
    for wrong, said in ((list(net.parameters()), "Parameter"), (net, "Net"), (list(net.state_dict()), "str")):
        for takes in (lambda given: DistributedOptimizer(plain, given), broadcast_parameters):
            with pytest.raises(TypeError, match=rf"^{said} is no pair of a name and a tensor: give model.named_param"):
                takes(wrong)
    twice = [("weight", torch.ones(2)), ("weight", torch.ones(3))]
    with pytest.raises(ValueError, match="two tensors have the name weight: give each a name of its own"):
        broadcast_parameters(twice)


def test_different_models_are_refused_with_the_remedy() -> None:
    shapes, first, values_differ = values(different_models)[0]
    assert shapes == "weight is float32 of shape (1, 2) here and float32 of shape (2, 2) on rank 1"
    assert "parameter 0 of the optimizer is weight (float32 of shape (1, 2)) here and weight" in first
    assert "weight has other values here than on rank 1: call multiring.torch.broadcast_parameters" in values_differ


def die_during_backward() -> str:
    with group() as (rank, size):
        net = Net()
        optimizer = distributed(net)
        if rank == size - 1:
            net.layers[2].weight.register_hook(deadly(call=3))
        started = time.monotonic()
        error = caught(mr.PeerLost, lambda: steps(net, optimizer, rank, size, 3))
        assert time.monotonic() - started < 10
        assert "rank" in str(caught(mr.PeerLost, optimizer.step))
        return str(error)


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_killed_during_backward_is_named_by_the_others(world_size: int) -> None:
    the_killed_last_rank_is_named(run(die_during_backward, world_size=world_size))


def one_forgets_its_weight() -> None:
    with group() as (rank, size):
        net = Net()
        optimizer = distributed(net, weight=None if rank else 3.0)
        caught(mr.Mismatch, lambda: steps(net, optimizer, rank, size, 1))


def test_weights_on_some_ranks_only_are_a_mismatch() -> None:
    values(one_forgets_its_weight)


BECOMES: dict[str, Callable[[nn.Module], object]] = {
    "new data": lambda net: [setattr(p.grad, "data", p.grad.data.clamp(-1, 1)) for p in net.parameters()],
    "another type and back": lambda net: net.float().double(),
    "another storage": lambda net: [p.grad.set_(torch.zeros_like(p)) for p in net.parameters()],
    "shared memory": lambda net: net.share_memory(),
    "another layout": lambda net: net.to(memory_format=torch.channels_last),
    "a copy": lambda net: [setattr(p, "grad", p.grad.clone()) for p in net.parameters()],
}


@worker
def gradients_become(what: str, to_none: bool) -> None:
    """Whatever a program does to the tensors that it gets as gradients, the next ones are those of all ranks."""
    with group() as (rank, size):
        net = nn.Sequential(nn.Conv2d(4, 8, 3, bias=False), nn.Flatten(), nn.Linear(8, 1, bias=False)).double()
        with torch.no_grad():
            for p in net.parameters():
                p.copy_(torch.arange(p.numel()).view(p.shape) % 5 + 1.0)
        inputs = [torch.arange(36.0, dtype=torch.float64).view(1, 4, 3, 3) * (r + 1) for r in range(size)]
        optimizer = distributed(net, torch.optim.SGD(net.parameters(), 0.0))
        for step in range(4):
            alone = copy.deepcopy(net)
            alone.zero_grad()
            (sum(alone(x).sum() for x in inputs) * (step + 1) / size).backward()
            optimizer.zero_grad(set_to_none=to_none)
            (net(inputs[rank]).sum() * (step + 1)).backward()
            optimizer.synchronize()
            for mine, expected in zip(net.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(mine.grad, expected.grad, rtol=1e-12, atol=0, check_stride=False)
            if step < 3:
                BECOMES[what](net)


@pytest.mark.parametrize("to_none", [True, False], ids=["to none", "to zero"])
@pytest.mark.parametrize("what", BECOMES)
def test_gradients_are_averaged_whatever_becomes_of_the_last_ones(what: str, to_none: bool) -> None:
    values(gradients_become, what, to_none)


@worker
def swapped_gradients() -> str:
    with group():
        net = nn.ModuleList([nn.Linear(2, 2, bias=False) for _ in range(2)])
        optimizer = distributed(net)
        sum(layer(torch.ones(1, 2)).sum() for layer in net).backward()
        optimizer.synchronize()
        net[0].weight.grad, net[1].weight.grad = net[1].weight.grad, net[0].weight.grad
        return str(caught(ValueError, lambda: sum(layer(torch.ones(1, 2)).sum() for layer in net).backward()))


def test_gradients_in_the_places_of_others_are_refused() -> None:
    for said in values(swapped_gradients):
        assert re.match(r"the gradient of parameter [01].weight lies where gradients of others are reduced", said), said


@worker
def column() -> None:
    """A parameter that is no dense piece of memory."""
    with group() as (rank, size):
        parameter = nn.Parameter(torch.arange(6.0).view(3, 2)[:, 0])
        optimizer = DistributedOptimizer(torch.optim.SGD([parameter], 1.0))
        for _ in range(2):
            optimizer.zero_grad()
            (parameter * (rank + 1.0)).sum().backward()
            optimizer.step()
        same(parameter.detach(), torch.tensor([0.0, 2.0, 4.0]) - (size + 1))


def test_a_parameter_that_is_a_column() -> None:
    values(column)
