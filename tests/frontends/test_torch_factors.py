"""Large linear layers get their gradients from the factors of all ranks: which, how, and what is refused."""

from __future__ import annotations

import contextlib
import copy
import io
import signal
from collections.abc import Callable, Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import losing  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.algorithms.join import Join  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch_helpers import caught, group, same  # noqa: E402
from torch_ranks import run, values  # noqa: E402

import multiring as mr  # noqa: E402
import multiring.torch  # noqa: E402
from multiring.torch import DistributedOptimizer, Factors, factors  # noqa: E402

pytestmark = pytest.mark.timeout(300)

IN, HIDDEN, OUT = 5, 48, 11


def net(bias: bool = True, dtype: Any = torch.float64) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(IN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, OUT, bias=bias)).to(dtype)


def rows(rank: int, step: int, count: int) -> Any:
    """Samples that depend on rank, step and index."""
    return torch.randn(count, IN, generator=torch.Generator().manual_seed(100 * step + rank), dtype=torch.float64)


def loss(model: nn.Module, x: Any) -> Any:
    return (model(x) * torch.arange(OUT).add(x.sum().detach())).sin().sum()


def means(steps: Sequence[Sequence[int]], weights: Sequence[float] | None, bias: bool) -> list[list[Any]]:
    """Gradients of each step as one process finds them, summed over the steps since the first."""
    model = net(bias)
    shares = [1 / len(steps[0])] * len(steps[0]) if weights is None else [w / sum(weights) for w in weights]
    found = []
    for step, counts in enumerate(steps):
        for rank, count in enumerate(counts):
            if shares[rank]:
                (loss(model, rows(rank, step, count)) * shares[rank]).backward()
        found.append([parameter.grad.clone() for parameter in model.parameters()])
    return found


STEPS = [[3, 2, 4], [3, 2, 4], [5, 1, 0], [0, 0, 9], [2, 2, 2]]
"""Rows of each rank: as before, more on one, none on some, fewer."""


def follows_one_process(worth: float, by: str, weights: Sequence[float] | None, bias: bool) -> tuple[bool, int]:
    factors.WORTH = worth
    with group() as (rank, _):
        if rank == 1:
            torch.manual_seed(7)
        model = net(bias)
        if rank == 1:
            nn.init.zeros_(model[2].weight)  # what rank 0 has counts
        averages = Factors(model, ["2"])
        assert averages.layers == ("2",)
        trained: nn.Module = model
        if by == "ddp":
            trained = DistributedDataParallel(model)
        else:
            optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1))
            optimizer.weight = None if weights is None else weights[rank]
        for step, expected in enumerate(means(STEPS, weights, bias)):
            x = rows(rank, step, STEPS[step][rank])
            if weights is not None and weights[rank] == 0:
                x = x * torch.nan
            if by == "optimizer" and step:  # it averages sums of passes; the layer has the sum of means as well
                for parameter in (*model[0].parameters(),):
                    parameter.grad = None
            loss(trained, x).backward()
            layer = [parameter.grad for parameter in model[2].parameters()]
            for mine, whole in zip(layer, expected[2:], strict=True):
                torch.testing.assert_close(mine, whole, rtol=1e-12, atol=1e-12)
            if by == "optimizer" and not step:
                for parameter, whole in zip(model.parameters(), expected, strict=True):
                    torch.testing.assert_close(parameter.grad, whole, rtol=1e-12, atol=1e-12)
        everyones = mr.init().all_gather_object([gradient.tolist() for gradient in layer])
        assert all(theirs == everyones[0] for theirs in everyones)
        if by == "optimizer":
            optimizer.step()
        state = averages._layers[0]
        return state.gathers, state.rows


BY = [("ddp", None), ("optimizer", None), ("optimizer", (2.0, 1.0, 4.5)), ("optimizer", (1.5, 0.0, 1.0))]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("by", "weights"), BY, ids=str)
@pytest.mark.parametrize("worth", [float("inf"), 0.0], ids=["gathers", "sums"])
def test_gradients_are_those_of_one_process(worth: float, by: str, weights: Sequence[float] | None, bias: bool) -> None:
    for found in values(follows_one_process, worth, by, weights, bias, world_size=3):
        assert found == (worth > 0, 2)


def is_chosen_by_what_is_predicted() -> list[Any]:
    with group() as (rank, size):
        model = nn.Sequential(nn.Linear(1024, 1024, bias=False), nn.Flatten(0), nn.Unflatten(0, (-1, 1024)))
        averages = Factors(model)
        sent = []
        for count in (4, 4, 3000, 3000, 4, 4):
            before = mr.stats()["peers"]
            model(torch.full((count, 1024), rank + 1.0)).sum().backward()
            after = mr.stats()["peers"]
            sent.append(sum(after[peer]["bytes_sent"] - before[peer]["bytes_sent"] for peer in after))
            gradient = model[0].weight.grad
            assert gradient is not None
            same(gradient, torch.full((1024, 1024), count * (1 + size) / 2))
            model[0].weight.grad = None
        return [averages.layers, sent]


def test_what_is_sent_is_what_takes_less_time() -> None:
    for layers, sent in values(is_chosen_by_what_is_predicted, world_size=2):
        assert layers == ("0",)
        few, known, _, more, _, last = sent
        assert few <= 2 * known < 100_000
        assert known == last
        assert more > 1024 * 1024 * 4 / 2


def refuses() -> list[str]:
    with group() as (rank, _):
        model = net()
        tied = nn.ModuleDict({"one": nn.Linear(4, 4), "other": nn.Linear(4, 4)})
        tied["one"].weight = tied["other"].weight
        hooked = net()
        DistributedOptimizer(torch.optim.SGD(hooked.parameters(), 0.1))
        frozen = net().requires_grad_(False)
        told = [
            str(caught(error, make))
            for error, make in [
                (ValueError, lambda: Factors(model, ["none"])),
                (TypeError, lambda: Factors(model, ["1"])),
                (ValueError, lambda: Factors(tied, ["one"])),
                (ValueError, lambda: Factors(hooked, ["2"])),
                (ValueError, lambda: Factors(frozen, ["2"])),
                (ValueError, lambda: Factors(model.to("meta"), ["2"])),
                (ValueError, lambda: Factors(net(bias=rank == 0), ["2"])),
                (ValueError, lambda: Factors(DistributedDataParallel(net()))),
            ]
        ]
        model = net()
        averages = Factors(model, ["2"])
        loss(model, rows(rank, 0, 2)).backward()
        penalty = loss(model, rows(rank, 0, 2)) + model[2].weight.square().sum()
        told.append(str(caught(ValueError, penalty.backward)))
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), weight=2.0)
        assert averages.weight == optimizer.weight
        told.append(str(caught(ValueError, lambda: setattr(averages, "weight", 3.0))))
        return told


def test_what_cannot_be_averaged_is_refused() -> None:
    first, second = values(refuses, world_size=2)
    for told in (first, second):
        assert told[0] == "layer 'none': the model has none of this name"
        assert told[1] == "layer '1' is a Tanh: Factors knows torch.nn.Linear"
        assert told[2].startswith("layer 'one': module 'other' has the same weights")
        assert "have hooks, which would not be called: make Factors before DistributedOptimizer" in told[3]
        assert told[4] == "layer '2': its weights are frozen"
        assert "Parameter of torch.float64 on meta" in told[5]
        assert "Factors has the layers 2 (float64, (11, 48)" in told[6]
        assert ", without bias) " in told[6]
        assert told[7].endswith("make Factors first")
        assert told[8].startswith("the weights of layer 2 have a gradient from elsewhere")
        assert told[9].startswith("weight=3.0: these layers count by the weight of their DistributedOptimizer")


def pass_with(weights: Sequence[float | None]) -> str:
    with group() as (rank, _):
        model = net()
        Factors(model, ["2"]).weight = weights[rank]
        return str(caught(ValueError, loss(model, rows(rank, 0, 2)).backward))


@pytest.mark.parametrize("weights", [(1.0, -1.0), (None, 1.0), (0.0, 0.0), (float("inf"), 1.0)], ids=str)
def test_weights_that_make_no_mean_are_told_on_all_ranks(weights: Sequence[float | None]) -> None:
    shown = ", ".join("None" if weight is None else f"{weight:g}" for weight in weights)
    for told in values(pass_with, weights, world_size=2):
        assert told.startswith(f"Factors.weight of the ranks: {shown}: set it")


def another_product() -> str:
    with group() as (rank, _):
        model = net()
        Factors(model, ["2"])
        take = factors._FactorExchange._add_product

        def wrong(use: Any, counts: Any, parts: Any, shares: Any) -> None:
            if rank == 1:
                next(use._factors(parts[-1][0], 2))[0, 0] += 1e-9
            take(use, counts, parts, shares)

        factors._FactorExchange._add_product = wrong
        factors.WORTH = float("inf")
        factors.CHECKED = 1
        loss(model, rows(rank, 0, 2)).backward()
        return str(caught(ValueError, loss(model, rows(rank, 1, 2)).backward))


def test_ranks_that_multiply_differently_are_told() -> None:
    for told in values(another_product, world_size=2):
        assert told.startswith("rank 1 has multiplied the factors of layer 2 to another gradient than rank 0")


def goes_on_after_an_error() -> str:
    with group() as (rank, _):
        model = nn.Sequential(net(), nn.Identity())
        Factors(model, ["0.2"])

        def broken(_: Any) -> None:
            raise RuntimeError("a user's fault")

        x = rows(rank, 0, 2)
        output = model[0][0](x)
        output.register_hook(broken)
        caught(RuntimeError, lambda: model[0][2](output.tanh()).sum().backward())
        return str(caught(ValueError, lambda: model(x)))


def test_a_pass_that_ended_in_an_error_is_told_in_the_next() -> None:
    for told in values(goes_on_after_an_error, world_size=2):
        assert told.startswith("the backward pass before this one ended before all gradients were there")


def passes_without_sending(by: str) -> None:
    """Rank 0 has two passes in each step, rank 1 has three and uses the layer in all, rank 2 has one."""
    with group() as (rank, size):
        model = net()
        averages = Factors(model, ["2"])
        parallel = DistributedDataParallel(model) if by == "ddp" else model
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1)) if by == "optimizer" else None
        for step in range(3):
            model.zero_grad()
            whole = net()
            for other in range(size):
                for number in range((2, 3, 1)[other]):
                    (loss(whole, rows(other, 10 * step + number, 2)) / size).backward()
            with contextlib.ExitStack() as waiting:
                for each in (averages, parallel) if optimizer is None else (optimizer,):
                    waiting.enter_context(each.no_sync())
                for number in range((1, 2, 0)[rank]):
                    loss(parallel, rows(rank, 10 * step + number, 2)).backward()
            if by == "optimizer" and step == 1:  # the sums are sent by the step
                with optimizer.no_sync():
                    loss(parallel, rows(rank, 10 * step + (1, 2, 0)[rank], 2)).backward()
                optimizer.synchronize()
            else:
                loss(parallel, rows(rank, 10 * step + (1, 2, 0)[rank], 2)).backward()
            for parameter, mean in zip(model.parameters(), whole.parameters(), strict=True):
                torch.testing.assert_close(parameter.grad, mean.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("by", ["ddp", "optimizer"])
def test_passes_without_sync_are_sent_by_the_next_one(by: str) -> None:
    values(passes_without_sending, by, world_size=3)


def steps_without_data(joins: bool) -> list[float]:
    """Each rank has fewer steps than the one before; the last of a rank that joins no `Join` are without data."""
    with group() as (rank, size):
        model = net()
        Factors(model, ["2"])
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.01))
        alone = net()
        other = torch.optim.SGD(alone.parameters(), 0.01)
        counts = [4, 3, 1]
        with Join([optimizer]) if joins else contextlib.nullcontext():
            for step in range(max(counts)):
                if step < counts[rank]:
                    optimizer.zero_grad()
                    if not joins:
                        optimizer.weight = 2.0
                    loss(model, rows(rank, step, 2)).backward()
                elif joins:
                    break
                else:
                    optimizer.zero_grad()
                    optimizer.weight = 0.0
                optimizer.step()
        for step in range(max(counts)):
            other.zero_grad()
            there = [each for each in range(size) if step < counts[each]]
            for each in there:
                (loss(alone, rows(each, step, 2)) / (size if joins else len(there))).backward()
            other.step()
        for mine, whole in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine, whole, rtol=1e-11, atol=1e-11)
        return [float(each) for each in model[2].weight.detach().view(-1)]


@pytest.mark.parametrize("joins", [False, True])
def test_a_rank_without_data_takes_part(joins: bool) -> None:
    first, *others = values(steps_without_data, joins, world_size=3)
    assert others == [first, first]


class Twice(nn.Module):
    """A layer that is used twice in a pass, whose outputs are changed in place."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layer = nn.Linear(6, 6).double()

    def forward(self, x: Any) -> Any:
        return torch.relu_(self.layer(torch.relu_(self.layer(x)) + 1)).square().sum()


def mean_of(model: Callable[[], nn.Module], size: int, of_rank: Callable[[int], Any]) -> list[Any]:
    one = model()
    for rank in range(size):
        (one(of_rank(rank)) / size).backward()
    return [parameter.grad for parameter in one.parameters()]


def is_used_twice_recomputed_and_copied() -> None:
    from torch.utils.checkpoint import checkpoint

    def of_rank(rank: int) -> Any:
        return torch.randn(3 + rank, 6, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)

    with group() as (rank, size):
        expected = mean_of(Twice, size, of_rank)
        ways: list[Callable[[nn.Module, Any], Any]] = [
            lambda model, x: model(x),
            lambda model, x: checkpoint(model, x.requires_grad_(), use_reentrant=True),
            lambda model, x: checkpoint(model, x, use_reentrant=False),
            lambda model, x: torch.compile(model, backend="eager")(x),
        ]
        for way in ways:
            model = Twice()
            averages = Factors(model, ["layer"])
            for _ in range(2):
                model.zero_grad()
                way(model, of_rank(rank)).backward()
                for parameter, mean in zip(model.parameters(), expected, strict=True):
                    torch.testing.assert_close(parameter.grad, mean, rtol=1e-12, atol=1e-12)
        copied = copy.deepcopy(model)
        saved = io.BytesIO()
        torch.save(model, saved)
        saved.seek(0)
        loaded = torch.load(saved, weights_only=False)
        averages.remove()
        assert averages.layers == ()
        assert type(model.layer) is nn.Linear
        for alone in (copied, loaded, model):  # each by itself: the others do not take part
            alone.zero_grad()
            if rank == 1:
                alone(of_rank(rank)).backward()
                assert not torch.equal(alone.layer.weight.grad, expected[0])
        model.zero_grad()
        parallel = DistributedDataParallel(model)  # has the layer again
        parallel(of_rank(rank)).backward()
        torch.testing.assert_close(model.layer.weight.grad, expected[0], rtol=1e-12, atol=1e-12)


def test_a_layer_may_be_used_twice_recomputed_and_copied() -> None:
    values(is_used_twice_recomputed_and_copied, world_size=2)


def trains_in_part_and_in_bfloat16() -> None:
    with group() as (rank, size):
        model = net(dtype=torch.float32)
        Factors(model, ["0", "2"])
        model[2].weight.requires_grad_(False)
        with torch.no_grad():
            if rank == 0:
                model(rows(rank, 0, 1).float())  # a pass without gradients is this rank's alone
        x = torch.ones(rank + 1, IN)
        with torch.autocast("cpu", torch.bfloat16):
            output = model(x)
        assert output.dtype == torch.bfloat16
        output.sum().backward()
        assert model[2].weight.grad is None
        same(model[2].bias.grad, torch.full((OUT,), (1 + size) / 2))
        alone = net(dtype=torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            alone(torch.ones(1, IN)).sum().backward()
        expected = alone[0].weight.grad * (1 + size) / 2
        torch.testing.assert_close(model[0].weight.grad, expected, rtol=0.02, atol=0.02)
        assert model[0].weight.grad.dtype == torch.float32


def test_parts_that_are_frozen_and_other_types() -> None:
    values(trains_in_part_and_in_bfloat16, world_size=2)


def is_alone() -> None:
    with group():
        model = net()
        averages = Factors(model, ["2"])
        assert averages.layers == ()
        loss(model, rows(0, 0, 3)).backward()
        same(model[2].weight.grad, means([[3]], None, True)[0][2])
        averages.remove()


def test_one_rank_gathers_nothing() -> None:
    values(is_alone, world_size=1)


class Varied(nn.Module):
    """Layers of the same shape, used in an order and as often as a caller says."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.layers = nn.ModuleDict({name: nn.Linear(6, 6) for name in "ab"}).double()

    def forward(self, x: Any, uses: str) -> Any:
        for number, name in enumerate(uses):
            x = (self.layers[name](x) + number).sin()
        return x.sum()


USES = [("ab", "ba", "ab"), ("aab", "b" + "a" * 5, "bab"), ("ab", "bbbba", "ab"), ("a", "aa", "aaa")]
"""Uses on each rank in one step after the other."""


def used_in_any_order(by: str) -> None:
    def of_rank(rank: int, step: int) -> Any:
        return torch.randn(2 + step, 6, generator=torch.Generator().manual_seed(9 * step + rank), dtype=torch.float64)

    with group() as (rank, size):
        model = Varied()
        Factors(model, ["layers.a", "layers.b"])
        if by == "optimizer":
            model.extra = nn.Linear(2, 2)
            DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1))
        for step, uses in enumerate(USES):
            model.zero_grad()
            model(of_rank(rank, step), uses[rank]).backward()
            whole = Varied()
            for other in range(size):
                (whole(of_rank(other, step), uses[other]) / size).backward()
            for name, parameter in whole.named_parameters():
                mine = model.get_parameter(name).grad
                assert (mine is None) == (parameter.grad is None)
                if mine is not None:
                    torch.testing.assert_close(mine, parameter.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("by", ["alone", "optimizer"])
def test_ranks_use_layers_in_any_order_and_as_often_as_they_like(by: str) -> None:
    values(used_in_any_order, by, world_size=3)


KEPT = [(("ab", "a"), ("b", "ab"), ("a", "b")), (("a", "b"), ("bba", "a"), ("a", "b")), (("ab", ""),) * 3]
"""Uses on each rank in a pass within `no_sync`, and in the one that sends."""


def keeps_more_layers_than_the_next_pass_uses(by: str) -> None:
    def of_rank(rank: int, step: int, rows: int) -> Any:
        return torch.randn(rows, 6, generator=torch.Generator().manual_seed(9 * step + rank), dtype=torch.float64)

    with group() as (rank, size):
        model = Varied()
        averages = Factors(model, ["layers.a", "layers.b"])
        averaging: Any = averages
        if by == "optimizer":
            model.extra = nn.Linear(2, 2)
            averaging = DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.0))
        for step, (kept, sent) in enumerate(zip(*uses, strict=True) for uses in KEPT):
            if by == "alone" and not any(sent):  # nothing tells it of such a pass
                continue
            model.zero_grad()
            with averaging.no_sync():
                model(of_rank(rank, step, 2 + rank), kept[rank]).backward()
            if sent[rank]:
                model(of_rank(rank, step + 5, 4), sent[rank]).backward()
            if by == "optimizer":
                averaging.step()
            whole = Varied()
            for other in range(size):
                (whole(of_rank(other, step, 2 + other), kept[other]) / size).backward()
                if sent[other]:
                    (whole(of_rank(other, step + 5, 4), sent[other]) / size).backward()
            for name, parameter in whole.named_parameters():
                torch.testing.assert_close(model.get_parameter(name).grad, parameter.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("by", ["alone", "optimizer"])
def test_layers_that_the_sending_pass_does_not_use_are_sent_too(by: str) -> None:
    values(keeps_more_layers_than_the_next_pass_uses, by, world_size=3)


def finds_other_gradients() -> list[str]:
    """Gradients of inputs leave those of weights alone; `backward` may be told what to find."""
    with group() as (rank, _):
        model = net()
        Factors(model, ["2"])
        x = rows(rank, 0, 2).requires_grad_()
        found = loss(model, x)
        (mine,) = torch.autograd.grad(found, x, retain_graph=True)
        (expected,) = torch.autograd.grad(loss(net(), x), x)
        same(mine, expected)
        found.backward(inputs=[x], retain_graph=True)
        assert model[2].weight.grad is None
        layer = [*model[2].parameters()]
        whole = means([[2, 2]], None, True)[0][2:]
        for passes in (1, 2):
            found.backward(inputs=layer, retain_graph=True)
            for parameter, mean in zip(layer, whole, strict=True):
                torch.testing.assert_close(parameter.grad, passes * mean, rtol=1e-12, atol=1e-12)
        assert model[0].weight.grad is None
        some = str(caught(ValueError, lambda: found.backward(inputs=layer[:1], retain_graph=True)))
        by_grad = str(caught(ValueError, lambda: torch.autograd.grad(found, [*model.parameters()], retain_graph=True)))
        return [some, by_grad]


def test_other_gradients_are_left_alone() -> None:
    for some, by_grad in values(finds_other_gradients, world_size=2):
        assert some.startswith("backward(inputs=...) is to find gradients of some weights of layer 2 only: give all")
        assert by_grad.startswith("torch.autograd.grad is to find gradients of the weights of layer 2, which")


def becomes_another() -> list[str]:
    from torch.nn.utils import parametrizations, prune, spectral_norm

    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = net()
            self.averages = Factors(self.inner, ["2"])

        def forward(self, x: Any) -> Any:
            return self.inner(x)

    def assign(model: nn.Sequential) -> None:
        model[2].weight = nn.Parameter(model[2].weight.detach().clone())

    ways: list[Callable[[nn.Sequential], object]] = [
        assign,
        lambda model: model.load_state_dict(net().state_dict(), assign=True),
        lambda model: prune.l1_unstructured(model[2], "weight", 0.5),
        lambda model: parametrizations.weight_norm(model[2]),
        lambda model: spectral_norm(model[2]),
        lambda model: model[2].weight.register_hook(lambda gradient: gradient * 2),
        lambda model: model[2].weight.register_post_accumulate_grad_hook(lambda _: None),
    ]
    with group() as (rank, _):
        told = []
        for change in ways:
            model = net()
            Factors(model, ["2"])
            change(model)
            told.append(str(caught(ValueError, lambda model=model: model(rows(rank, 0, 2)))))
        model = net()
        Factors(model, ["2"])
        others = {name: each.detach().requires_grad_() for name, each in net().named_parameters()}
        call = torch.func.functional_call
        told.append(str(caught(ValueError, lambda: call(model, others, (rows(rank, 0, 2),)))))
        for change in ways[2:]:
            model = net()
            change(model)
            told.append(str(caught((ValueError, TypeError), lambda model=model: Factors(model, ["2"]))))
        for unused in (False, True):
            parallel = DistributedDataParallel(Wrapper(), find_unused_parameters=unused)
            told.append(str(caught(ValueError, lambda parallel=parallel: parallel(rows(rank, 0, 2)))))
        parallel = DistributedDataParallel(net())
        Factors(parallel.module, ["2"])
        told.append(str(caught(ValueError, lambda: parallel(rows(rank, 0, 2)))))
        return told


def test_layers_whose_gradients_would_be_lost_are_refused() -> None:
    for told in values(becomes_another, world_size=2):
        replaced = "the weights of layer 2 are others than when Factors was made"
        hooked = "the weights of layer 2 have hooks, which Factors would not call"
        averaged = "the weights of layer 2 are averaged by DistributedDataParallel, too"
        expected = [
            *[replaced] * 5,
            *[hooked] * 2,
            replaced,
            "layer '2': its weights are made of bias, weight_orig in each forward pass",
            "layer '2' is a ParametrizedLinear",
            "layer '2': its weights are made of bias, weight_orig in each forward pass",
            *["layer '2': its weights have hooks, which would not be called"] * 2,
            *[averaged] * 3,
        ]
        for said, begin in zip(told, expected, strict=True):
            assert said.startswith(begin)


def copies_are_averaged_by_others() -> None:
    with group() as (rank, size):
        model = net()
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["own.weight"])
        Factors(model, ["0"])
        Factors(model, ["2"])
        saved = io.BytesIO()
        torch.save(model, saved)
        saved.seek(0)
        whole = means([[2] * size], None, True)[0]
        for one in (copy.deepcopy(model), torch.load(saved, weights_only=False), model):
            trained = one
            if one is not model:
                trained = DistributedDataParallel(one)
                assert trained.parameters_to_ignore == {"own.weight"}
            loss(trained, rows(rank, 0, 2)).backward()
            for parameter, mean in zip([*one[0].parameters(), *one[2].parameters()], whole, strict=True):
                torch.testing.assert_close(parameter.grad, mean, rtol=1e-12, atol=1e-12)


def test_copies_are_averaged_by_others() -> None:
    values(copies_are_averaged_by_others, world_size=2)


def drops_what_is_kept() -> list[str]:
    """Passes that `zero_grad` has dropped leave nothing behind, nor do inputs that are overwritten."""
    with group() as (rank, _):
        model = net()
        averages = Factors(model, ["0", "2"])
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        x = torch.zeros(2, IN, dtype=torch.float64)
        for step, to_none in enumerate((None, True, False, None)):
            model.zero_grad()
            x.copy_(rows(rank, 10 + step, 2))
            with averages.no_sync():
                loss(model, x).backward()
            if to_none is not None and rank == 1:  # the other one goes on with its sum
                optimizer.zero_grad(set_to_none=to_none)
            x.copy_(rows(rank, 20 + step, 2))
            loss(model, x).backward()
            whole = net()
            for other in range(2):
                for first in (10, 20):
                    if first == 20 or to_none is None or other == 0:
                        (loss(whole, rows(other, first + step, 2)) / 2).backward()
            for parameter, mean in zip(model.parameters(), whole.parameters(), strict=True):
                torch.testing.assert_close(parameter.grad, mean.grad, rtol=1e-12, atol=1e-12)
        return [scales_what_is_to_come(to_none, scale) for to_none in (None, True, False) for scale in (1e-3, 1.0)]


def scales_what_is_to_come(to_none: bool | None, scale: float) -> str:
    """The error where gradients, or the zeros that stand for them, are scaled before they are there."""
    model, x = net(), rows(0, 0, 2)
    averages = Factors(model, ["0", "2"])
    loss(model, x).backward()
    if to_none is not None:  # else gradients are those of the pass before
        model.zero_grad(set_to_none=to_none)
    with averages.no_sync():
        loss(model, x).backward()
        loss(model, x).backward()
    for parameter in model.parameters():
        parameter.grad.mul_(scale)
    told = str(caught(ValueError, loss(model, x).backward))
    averages.remove()
    return told


def leaves_zeros() -> None:
    with group():
        model = net()
        averages = Factors(model, ["0", "2"])
        with averages.no_sync():
            loss(model, rows(0, 0, 2)).backward()
        averages.remove()
        assert not model[2].weight.grad.any()


def test_nothing_but_zeros_stands_for_what_is_to_come() -> None:
    values(leaves_zeros, world_size=2)


def test_what_is_dropped_is_not_sent() -> None:
    for told in values(drops_what_is_kept, world_size=2):
        assert len(told) == 6
        for each in told:
            assert each.startswith("the gradients of layer 2 were changed between passes within no_sync()")


def is_all_of_a_model() -> None:
    with group() as (rank, size):
        torch.manual_seed(2)
        model = nn.Linear(IN, OUT).double()
        averages = Factors(model, [""])
        assert {"weight", "bias"} <= set(model._ddp_params_and_buffers_to_ignore)
        for x in (rows(rank, 0, 1)[0], rows(rank, 0, 6).view(2, 3, IN), rows(rank, 0, 0).view(0, 3, IN)):
            model.zero_grad()
            model(x).sum().backward()
            everyones = [rows(other, 0, max(1, x.numel() // IN)) for other in range(size)]
            expected = sum(each.sum(0) for each in everyones) / size if x.numel() else None
            if expected is None:
                assert model.weight.grad is None
            else:
                torch.testing.assert_close(model.weight.grad, expected.expand(OUT, IN), rtol=1e-12, atol=1e-12)
        averages.remove()
        assert not model._ddp_params_and_buffers_to_ignore


def test_inputs_of_any_shape_to_a_model_of_one_layer() -> None:
    values(is_all_of_a_model, world_size=2)


def compiles_a_step() -> None:
    with group() as (rank, size):
        model = net()
        Factors(model, ["0", "2"])
        optimizer = torch.optim.SGD(model.parameters(), 0.0)

        @torch.compile(backend="aot_eager")
        def step(x: Any) -> None:
            optimizer.zero_grad()
            loss(model, x).backward()
            optimizer.step()

        for number in range(3):
            step(rows(rank, number, 2))
            whole = net()
            for other in range(size):
                (loss(whole, rows(other, number, 2)) / size).backward()
            for parameter, mean in zip(model.parameters(), whole.parameters(), strict=True):
                torch.testing.assert_close(parameter.grad, mean.grad, rtol=1e-12, atol=1e-12)


def test_a_compiled_step() -> None:
    values(compiles_a_step, world_size=2)


def begins_without_data(worth: float) -> None:
    """The first pass is under autocast, and rank 0 has none."""
    factors.WORTH = worth
    with group() as (rank, size):
        model = net(dtype=torch.float32)
        Factors(model, ["2"])
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.0))
        for _ in range(3):
            optimizer.zero_grad()
            optimizer.weight = float(rank)
            if rank:
                with torch.autocast("cpu", torch.bfloat16):
                    (model(torch.ones(2, IN)) * rank).sum().backward()
            optimizer.step()
            expected = 2.0 * sum(other * other for other in range(size)) / sum(range(size))
            torch.testing.assert_close(model[2].bias.grad, torch.full((OUT,), expected), rtol=1e-6, atol=0)


@pytest.mark.parametrize("worth", [float("inf"), 0.0], ids=["gathers", "sums"])
def test_a_rank_without_data_in_the_first_pass_under_autocast(worth: float) -> None:
    values(begins_without_data, worth, world_size=3)


def waits_for_no_gradients_before_factors(frozen: bool) -> None:
    """The layer lies before one of the optimizer's own, whose gradients come first; rank 0 has no data at first."""
    factors.WORTH = float("inf")
    with group() as (rank, size):
        model = net()
        Factors(model, ["0"])
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.0))
        model[0].requires_grad_(not frozen)
        for step, counts in enumerate([(0, 2, 3), (1, 2, 2), (0, 4, 9)]):
            optimizer.zero_grad()
            optimizer.weight = float(counts[rank])
            if counts[rank]:
                loss(model, rows(rank, step, counts[rank])).backward()
            optimizer.step()
            whole = net()
            for other in range(size):
                if counts[other]:
                    share = counts[other] / sum(counts)
                    (loss(whole, rows(other, step, counts[other])) * share).backward()
            for number, (mine, mean) in enumerate(zip(model.parameters(), whole.parameters(), strict=True)):
                if frozen and number < 2:
                    assert mine.grad is None
                else:
                    torch.testing.assert_close(mine.grad, mean.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_rank_without_data_where_the_layer_is_not_the_last(frozen: bool) -> None:
    values(waits_for_no_gradients_before_factors, frozen, world_size=3)


def is_beyond_float16(worth: float, samples: int | None) -> None:
    factors.WORTH = worth
    with group() as (rank, _):
        model = nn.Linear(4, 3).half()
        averages = Factors(model, [""])
        averages.weight = samples and float(samples + rank)
        for _ in range(2):
            model.zero_grad()
            (model(torch.ones(1, 4).half() / 2) * 40_000).sum().backward()
            same(model.bias.grad, torch.full((3,), 40_000).half())
            same(model.weight.grad, torch.full((3, 4), 20_000).half())


@pytest.mark.parametrize("samples", [None, 9])
@pytest.mark.parametrize("worth", [float("inf"), 0.0], ids=["gathers", "sums"])
def test_a_sum_beyond_float16_has_a_mean(worth: float, samples: int | None) -> None:
    values(is_beyond_float16, worth, samples, world_size=4)


def goes_on_with_fewer() -> None:
    with group() as (rank, size):
        model = net()
        Factors(model, ["2"])
        loss(model, rows(rank, 0, 2)).backward()
        caught(mr.PeerLost, lambda: losing.the_last_between(lambda: dist.barrier()))
        multiring.torch.shrink()
        model.zero_grad()
        assert len(Factors(model, ["2"]).layers) == (size > 2)
        parallel = DistributedDataParallel(model)
        for step, expected in enumerate(means([[2] * (size - 1)] * 2, None, True)):
            loss(parallel, rows(rank, step, 2)).backward()
            for parameter, mean in zip(model.parameters(), expected, strict=True):
                torch.testing.assert_close(parameter.grad, mean, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [2, 3])
def test_survivors_make_it_anew(size: int) -> None:
    *survivors, killed = run(goes_on_with_fewer, world_size=size)
    assert killed.exitcode == -signal.SIGKILL
    assert [survivor.error for survivor in survivors] == [""] * (size - 1)
