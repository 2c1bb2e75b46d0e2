"""Errors of gradients on narrow wires: DistributedOptimizer and the hook of DistributedDataParallel send them later."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch_helpers import caught, group, kill_after_others, same
from torch_ranks import run, values

import multiring as mr
import multiring.torch
from multiring.torch import DistributedOptimizer, Feedback, Outer, Weighted, comm_hook
from multiring.torch.feedback import NamedSlot
from multiring.training.buckets import Buckets, GradientSpec

SMALL = 5000  # bytes in a bucket: several of them even here


@contextmanager
def apart(wire: str) -> Iterator[tuple[int, int]]:
    """A group whose ranks are on hosts of their own, with a narrow wire between them."""
    os.environ["MULTIRING_HOST"] = f"host{os.environ['RANK']}"
    os.environ["MULTIRING_WIRE"] = f"host={wire}"
    with group() as place:
        yield place


class Sums(nn.Module):
    """Its gradients are constants, which differ by rank and index; ``seldom`` has one on some ranks, ``never`` none."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(40, 50))
        self.bias = nn.Parameter(torch.zeros(50))
        self.seldom = nn.Parameter(torch.zeros(70))
        self.never = nn.Parameter(torch.zeros(30))

    def forward(self, rank: int, seldom: bool = False) -> Tensor:
        parts = [(parameter * gradient(name, parameter, rank)).sum() for name, parameter in self.named_parameters()]
        return parts[0] + parts[1] + (parts[2] if seldom else 0)


def gradient(name: str, parameter: Tensor, rank: int) -> Tensor:
    """Values of sizes that int8 cannot hold side by side."""
    index = torch.arange(parameter.numel()).reshape(parameter.shape)
    return torch.sin(index * (rank + 1.0) + len(name)) * (1 + index % 13) * (0.01 if name == "bias" else 1)


def mean(net: Sums, name: str, ranks: list[int], size: int) -> Tensor:
    parameter = getattr(net, name)
    return sum(gradient(name, parameter, rank).double() for rank in ranks) / size


def distributed(net: nn.Module, **options: Any) -> DistributedOptimizer:
    plain = torch.optim.SGD(net.parameters(), 1.0)
    return DistributedOptimizer(plain, net.named_parameters(), bucket_bytes=SMALL, **options)


def train(net: Sums, optimizer: Any, rank: int, steps: range) -> None:
    """Rank 0 alone has a gradient of ``seldom``, in every third step; in the others nobody has."""
    for step in steps:
        optimizer.zero_grad()
        net(rank, seldom=step % 3 == 0 and rank == 0).backward()
        optimizer.step()
        assert net.never.grad is None
        assert (net.seldom.grad is None) == (step % 3 != 0)


def off(net: Sums, steps: int, size: int) -> dict[str, float]:
    """Mean distance of each parameter from where exact means would have led it."""
    ranks = list(range(size))
    own = {name: parameter.detach().double() for name, parameter in net.named_parameters()}
    turns = len(range(0, steps, 3))
    return {
        "weight": float((own["weight"] + steps * mean(net, "weight", ranks, size)).abs().mean()),
        "bias": float((own["bias"] + steps * mean(net, "bias", ranks, size)).abs().mean()),
        "seldom": float((own["seldom"] + turns * mean(net, "seldom", [0], size)).abs().mean()),
    }


def bits(parameter: Tensor) -> str:
    return hashlib.sha256(parameter.detach().numpy().tobytes()).hexdigest()


def optimizer_feeds_back(wire: str) -> list[str]:
    with apart(wire) as (rank, size):
        found = {}
        for kept in (False, True):
            net = Sums()
            optimizer = distributed(net, wire_feedback=kept)
            assert isinstance(optimizer.wire_feedback, Feedback) == kept
            train(net, optimizer, rank, range(1))
            after_one = off(net, 1, size)
            train(net, optimizer, rank, range(1, 30))
            found[kept] = off(net, 30, size)
            if kept:
                for name, most in after_one.items():
                    assert found[True][name] < 3 * most + 1e-4, (name, found, after_one)  # it has not grown
                    assert found[True][name] < 0.5 * found[False][name], (name, found)
        return [bits(parameter) for parameter in net.parameters()]


@pytest.mark.parametrize("wire", ["bfloat16", "int8"])
def test_errors_of_the_optimizer_do_not_add_up(wire: str) -> None:
    first, second = values(optimizer_feeds_back, wire)
    assert first == second


def goes_on_bit_for_bit(at: int) -> None:
    """From a step whose gradients are not those of the first, by which their order in buckets was found."""
    with apart("int8") as (rank, size):
        whole = Sums()
        optimizer = distributed(whole, wire_feedback=True)
        train(whole, optimizer, rank, range(at))
        feedback = optimizer.wire_feedback
        assert feedback is not None
        torch.save([whole.state_dict(), feedback.state_dict()], f"{os.environ['FOLDER']}/rank{rank}")
        train(whole, optimizer, rank, range(at, 12))
        model, state = torch.load(f"{os.environ['FOLDER']}/rank{rank}", weights_only=True)
        assert any(owed.any() for owed in state["owed"].values())
        ends = []
        for loads in ("before", "within", "never"):
            net, kept = Sums(), Feedback()
            if loads == "before":
                kept.load_state_dict(state)
            resumed = distributed(net, wire_feedback=kept)
            if loads == "within":  # buckets have been made, and something else is owed
                train(net, resumed, rank, range(2))
                kept.load_state_dict(state)
            net.load_state_dict(model)
            train(net, resumed, rank, range(at, 12))
            ends.append(torch.cat([parameter.detach().ravel() for parameter in net.parameters()]))
        expected = torch.cat([parameter.detach().ravel() for parameter in whole.parameters()])
        same(ends[0], expected)
        same(ends[1], expected)
        assert not torch.equal(ends[2], expected)

        theirs = Feedback()
        theirs.load_state_dict({**state, "of": (1 - rank, size)})
        for error in (
            caught(ValueError, lambda: distributed(Sums(), wire_feedback=theirs)),
            caught(ValueError, lambda: feedback.load_state_dict({**state, "of": (1 - rank, size)})),
        ):
            assert f"is of rank {1 - rank} of {size}, and this is rank {rank} of {size}: load what" in str(error)
        wrong = {**state, "owed": {"weight": torch.zeros(3)}}
        assert "3 elements of weight, and the parameter has 2000" in str(
            caught(ValueError, lambda: feedback.load_state_dict(wrong))
        )
        assert feedback.state_dict()["owed"]["weight"].any()
        part = mr.init().new_group([1, 0])
        distributed(whole, wire_feedback=feedback, group=part)  # other ranks, or in other places
        assert not any(owed.any() for owed in feedback.state_dict()["owed"].values())


@pytest.mark.parametrize("at", [6, 7])
def test_training_goes_on_bit_for_bit_and_only_where_it_was(at: int) -> None:
    values(goes_on_bit_for_bit, at)


class Wide(nn.Module):
    """Gradients of more bytes than the first bucket of DistributedDataParallel has, which is 1 MB at least."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.zeros(3, 37)), nn.Parameter(torch.zeros(280_001))
        self.third = nn.Parameter(torch.zeros(280_003))

    def forward(self, rank: int) -> Tensor:
        return sum((p * gradient(name, p, rank)).sum() for name, p in self.named_parameters())


def hook_goes_on_bit_for_bit() -> None:
    """Through the first pass of a new DistributedDataParallel, whose buckets are others than those of later ones."""
    with apart("int8") as (rank, _):

        def wrapped(net: Wide, kept: Feedback) -> tuple[Any, Any]:
            parallel = DistributedDataParallel(net, bucket_cap_mb=0.0003)
            parallel.register_comm_hook(kept, comm_hook)
            return parallel, torch.optim.SGD(net.parameters(), 1.0)

        def steps(net: Wide, parallel: Any, optimizer: Any, count: int) -> Tensor:
            for _ in range(count):
                optimizer.zero_grad()
                parallel(rank).backward()
                optimizer.step()
            return torch.cat([parameter.detach().ravel() for parameter in net.parameters()])

        whole = Wide()
        kept = Feedback(whole.named_parameters())
        job = wrapped(whole, kept)
        steps(whole, *job, 5)
        state, model = kept.state_dict(), {name: value.clone() for name, value in whole.state_dict().items()}
        assert len(state["buckets"]) == 3
        torch.save(state, f"{os.environ['FOLDER']}/rank{rank}")
        expected = steps(whole, *job, 6)
        for loads in (True, False):
            net = Wide()
            net.load_state_dict(model)
            again = Feedback(net.named_parameters())
            if loads:
                again.load_state_dict(torch.load(f"{os.environ['FOLDER']}/rank{rank}", weights_only=True))
                assert again.state_dict()["buckets"] == state["buckets"]
            job = wrapped(net, again)
            after = steps(net, *job, 6)
            assert torch.equal(after, expected) == loads
        if rank:  # rank 0's buckets are those of all, whatever this one has loaded
            state = {**state, "buckets": []}
        net = Wide()
        net.load_state_dict(model)
        again = Feedback(net.named_parameters())
        again.load_state_dict(state)
        job = wrapped(net, again)
        same(steps(net, *job, 6), expected)


def test_the_hook_goes_on_bit_for_bit() -> None:
    values(hook_goes_on_bit_for_bit)


def weights_change_the_units() -> None:
    with apart("int8") as (rank, _):
        net, fresh = Sums(), Sums()
        optimizer = distributed(net, wire_feedback=True)
        train(net, optimizer, rank, range(3))
        assert optimizer.wire_feedback is not None
        assert optimizer.wire_feedback.state_dict()["owed"]["weight"].any()
        optimizer.weight = 1.0 + 2 * rank
        train(net, optimizer, rank, range(3, 4))
        train(fresh, distributed(fresh, wire_feedback=True, weight=1.0 + 2 * rank), rank, range(3, 4))
        for mine, other in zip(net.parameters(), fresh.parameters(), strict=True):
            if mine.grad is not None:
                same(mine.grad, other.grad)


def test_a_weight_that_is_set_later_flushes_what_was_owed() -> None:
    values(weights_change_the_units)


def hook_feeds_back(wire: str) -> list[str]:
    with apart(wire) as (rank, size):
        found, ends = {}, []
        for kept in ("none", "feedback", "weighted"):
            net = Sums()
            named = [(name, parameter) for name, parameter in net.named_parameters() if name in ("weight", "bias")]
            net.seldom.requires_grad_(False)
            net.never.requires_grad_(False)
            feedback = Feedback(named)
            state = {"none": None, "feedback": feedback, "weighted": Weighted(feedback=feedback)}[kept]
            wrapped = DistributedDataParallel(net, bucket_cap_mb=0.004)
            wrapped.register_comm_hook(state, comm_hook)
            optimizer = torch.optim.SGD(net.parameters(), 1.0)
            for step in range(30):
                optimizer.zero_grad()
                wrapped(rank).backward()
                optimizer.step()
                if step == 0:
                    after_one = off(net, 1, size)
            found[kept] = off(net, 30, size)
            ends.append(bits(net.weight))
            if kept != "none":
                for name in ("weight", "bias"):
                    assert found[kept][name] < 3 * after_one[name] + 1e-4, (name, found, after_one)
                    assert found[kept][name] < 0.5 * found["none"][name], (name, found)
                assert set(feedback.state_dict()["owed"]) == {"weight", "bias"}
        stranger = DistributedDataParallel(nn.Linear(2, 2))
        stranger.register_comm_hook(Feedback(), comm_hook)
        error = caught(Exception, lambda: stranger(torch.ones(1, 2)).sum().backward())
        assert "make it with the model's, Feedback(model.named_parameters())" in str(error)
        return ends


@pytest.mark.parametrize("wire", ["bfloat16", "int8"])
def test_errors_of_the_hook_do_not_add_up(wire: str) -> None:
    first, second = values(hook_feeds_back, wire)
    assert first == second


def hook_keeps_to_its_group() -> None:
    """Two groups of two ranks: each averages over its own ranks, and its errors do not add up."""
    with apart("int8") as (rank, _):
        net = Sums()
        net.seldom.requires_grad_(False)
        net.never.requires_grad_(False)
        outer = Outer(net, 1000, groups=[[0, 1], [2, 3]])
        mine = [rank // 2 * 2, rank // 2 * 2 + 1]
        for weighted in (False, True):
            with torch.no_grad():
                net.weight.zero_()
                net.bias.zero_()
            feedback = Feedback(net.named_parameters(), group=outer.group)
            wrapped = DistributedDataParallel(net, process_group=outer.process_group)
            wrapped.register_comm_hook(Weighted(feedback=feedback) if weighted else feedback, comm_hook)
            optimizer = torch.optim.SGD(net.parameters(), 1.0)
            for _ in range(30):
                optimizer.zero_grad()
                wrapped(rank).backward()
                optimizer.step()
            for name in ("weight", "bias"):
                parameter = net.get_parameter(name).detach()
                expected = -30 * sum(gradient(name, parameter, each) for each in mine) / 2
                everyones = -30 * sum(gradient(name, parameter, each) for each in range(4)) / 4
                assert (parameter - expected).abs().max() < 0.5
                assert name == "bias" or (parameter - everyones).abs().max() > 50
        error = caught(ValueError, lambda: distributed(net, wire_feedback=feedback))
        assert "of the group of 2 ranks that it was made with, and gradients are averaged over 4" in str(error)


def test_the_hook_averages_over_the_group_of_the_feedback() -> None:
    values(hook_keeps_to_its_group, world_size=4)


class Odd(nn.Module):
    """Its gradients leave gaps in a bucket, and are what `bad` says in one place on rank 1 in the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.zeros(3, 37)), nn.Parameter(torch.zeros(50))

    def forward(self, rank: int, bad: float | None) -> Tensor:
        return sum((p * self.gradient(name, rank, bad)).sum() for name, p in self.named_parameters())

    def gradient(self, name: str, rank: int, bad: float | None = None) -> Tensor:
        count = getattr(self, name).numel()
        found = torch.arange(count) * (rank + 1.0) / 64 + len(name)
        if bad is not None and (name, rank) == ("first", 1):
            found[7] = bad
        return found.view(getattr(self, name).shape)


def recovers(wire: str, feedback: bool) -> None:
    """The result of one step has what is no number, and no later one has."""
    with apart(wire) as place:
        for hook, weight, bad in ((False, None, "nan"), (False, 2.0, "-inf"), (True, None, "inf"), (True, 2.0, "nan")):
            trains_on(*place, wire, feedback, hook, weight, float(bad))


def trains_on(rank: int, size: int, wire: str, feedback: bool, hook: bool, weight: float | None, bad: float) -> None:
    net = Odd()
    total = sum(1.0 if weight is None else weight + each for each in range(size))
    if hook:
        kept = Feedback(net.named_parameters()) if feedback else None
        wrapped: Any = DistributedDataParallel(net)
        state = kept if weight is None else Weighted(weight + rank, feedback=kept)
        wrapped.register_comm_hook(state, comm_hook)
        optimizer: Any = torch.optim.SGD(net.parameters(), 1.0)
    else:
        wrapped, optimizer = net, distributed(net, wire_feedback=feedback)
        optimizer.weight = None if weight is None else weight + rank
        kept = optimizer.wire_feedback
    for step in range(4):
        optimizer.zero_grad()
        wrapped(rank, bad if step == 1 else None).backward()
        optimizer.synchronize() if not hook else None
        for name, parameter in net.named_parameters():
            assert parameter.grad is not None
            shares = [1.0 if weight is None else weight + each for each in range(size)]
            exact = sum(net.gradient(name, each) * share for each, share in enumerate(shares)) / total
            if step == 1:
                assert name == "second" or not parameter.grad[0, 7].isfinite()
                continue
            # A step of the largest value that the block of any rank has, and what was owed.
            slack = {"bfloat16": 2**-7, "int8": 2 / 127, "float8": 2 / 14, "int4": 2 / 7, "int2": 4.0}[wire]
            largest = max(float(net.gradient(name, each).abs().max()) for each in range(size)) + 5
            assert float((parameter.grad - exact).abs().max()) <= 2 * slack * largest, (step, name)
        if kept is not None:
            assert all(owed.isfinite().all() for owed in kept.state_dict()["owed"].values())


@pytest.mark.parametrize(
    ("wire", "feedback"),
    [("bfloat16", True), ("int8", False), ("int8", True), ("float8", False), ("int4", True), ("int2", True)],
)
def test_what_is_no_number_does_not_stay_in_buckets(wire: str, feedback: bool) -> None:
    values(recovers, wire, feedback)


def buckets_recover() -> None:
    """Buckets as Caffe and Chainer have them, in memory of NumPy."""
    with apart("int8") as (rank, size):
        communicator = mr.init()
        gradients = [GradientSpec(37, "float32", "a"), GradientSpec(111, "float32", "b")]
        buckets = Buckets(communicator, gradients, [1, 0])
        for step in range(3):
            buckets.begin()
            for index, gradient in enumerate(gradients):
                slot = buckets.slot(index)
                slot[:] = np.arange(gradient.elements) + 10 * rank
                if (step, index, rank) == (0, 0, 0):
                    slot[3] = np.inf
                buckets.ready(index)
            assert buckets.finish() == {0, 1}
            for index, gradient in enumerate(gradients):
                expected = np.arange(gradient.elements) + 10 * (size - 1) / 2
                assert np.isfinite(buckets.slot(index)).all() == (step > 0)
                if step:
                    np.testing.assert_allclose(buckets.slot(index), expected, atol=2 * 130 / 127)


def test_what_is_no_number_does_not_stay_in_buckets_of_numpy() -> None:
    values(buckets_recover)


def scaler_skips() -> list[str]:
    """An overflow under loss scaling skips one step on all ranks."""
    with apart("int8") as (rank, _):
        net = Odd()
        optimizer = distributed(net, wire_feedback=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=100)
        moved = []
        for step in range(4):
            optimizer.zero_grad()
            before = bits(net.first) + bits(net.second)
            scaler.scale(net(rank, float("inf") if step == 1 else None)).backward()
            scaler.step(optimizer)
            scaler.update()
            moved.append(before != bits(net.first) + bits(net.second))
        assert moved == [True, False, True, True]
        assert scaler.get_scale() == 4.0
        assert net.first.isfinite().all()
        return [bits(parameter) for parameter in net.parameters()]


def test_an_overflow_under_loss_scaling_skips_one_step() -> None:
    first, second = values(scaler_skips)
    assert first == second


def serves_one_model() -> None:
    with apart("int8") as (rank, _):
        net, other = Sums(), Sums()
        optimizer = distributed(net, wire_feedback=True)
        feedback = optimizer.wire_feedback
        named = Feedback(other.named_parameters())
        for make in (lambda: distributed(other, wire_feedback=feedback), lambda: distributed(net, wire_feedback=named)):
            words = str(caught(ValueError, make))
            assert "this Feedback keeps what another parameter called weight loses" in words
            assert "would add it to this one: make a Feedback for each model and each DistributedOptimizer" in words
        train(net, optimizer, rank, range(2))
        again = distributed(net, wire_feedback=feedback)  # in the place of the first, for the same parameters
        train(net, again, rank, range(2, 4))


def test_a_feedback_serves_one_model() -> None:
    values(serves_one_model)


def test_what_is_no_feedback_is_refused() -> None:
    with pytest.raises(TypeError, match=r"wire_feedback='int8': True, False or a multiring\.torch\.Feedback is needed"):
        distributed(Sums(), wire_feedback="int8")
    with pytest.raises(TypeError, match=r"is no pair of a name and a tensor: give model\.named_parameters\(\)"):
        Feedback(Sums().parameters())  # type: ignore[arg-type]


def weighted_goes_on() -> None:
    """A new optimizer goes on from the errors owed under weights, also when buckets are made anew."""
    with apart("int8") as (rank, _):
        weight = 1.0 + 2 * rank
        whole = Sums()
        first = distributed(whole, wire_feedback=True, weight=weight)
        train(whole, first, rank, range(6))
        assert first.wire_feedback is not None
        model = {name: value.clone() for name, value in whole.state_dict().items()}
        state = first.wire_feedback.state_dict()
        assert state["owed"]["weight"].any()
        train(whole, first, rank, range(6, 12))

        resumed, kept = Sums(), Feedback()
        resumed.load_state_dict(model)
        kept.load_state_dict(state)
        train(resumed, distributed(resumed, wire_feedback=kept, weight=weight), rank, range(6, 12))
        for mine, other in zip(resumed.parameters(), whole.parameters(), strict=True):
            same(mine.detach(), other.detach())

        unweighted, flushed = Sums(), Feedback()
        flushed.load_state_dict(state)
        train(unweighted, distributed(unweighted, wire_feedback=flushed), rank, range(1))
        fresh = Sums()
        train(fresh, distributed(fresh, wire_feedback=True), rank, range(1))
        same(unweighted.weight.detach(), fresh.weight.detach())

        owed = first.wire_feedback.state_dict()["owed"]["weight"].clone()
        whole.bias.requires_grad_(False)  # other buckets
        first.zero_grad()
        (whole.weight * 0).sum().backward()
        first.synchronize()
        total = torch.from_numpy(mr.init().all_gather(first.wire_feedback.state_dict()["owed"]["weight"].numpy()))
        before = torch.from_numpy(mr.init().all_gather(owed.numpy()))
        torch.testing.assert_close(total.sum(0) + whole.weight.grad.ravel(), before.sum(0), rtol=1e-5, atol=1e-6)


def test_what_is_owed_under_weights_is_kept() -> None:
    values(weighted_goes_on)


def goes_on_without_a_rank() -> tuple[list[str], dict[str, float]]:
    """Nothing is owed to ranks that are no longer there, and errors do not add up among those that are left."""
    with apart("int8") as (rank, size):
        net, kept = Sums(), Feedback()
        plain = torch.optim.SGD(net.parameters(), 1.0)
        optimizer = DistributedOptimizer(plain, net.named_parameters(), bucket_bytes=SMALL, wire_feedback=kept)
        train(net, optimizer, rank, range(4))
        assert kept.state_dict()["owed"]["weight"].any()
        kill_after_others("step 4 has ended", 1, [0, 2])
        caught(mr.PeerLost, lambda: train(net, optimizer, rank, range(4, 6)))
        agreement = multiring.torch.shrink()
        assert agreement.members == (0, 2)
        multiring.torch.sync_state(net, plain)
        optimizer = DistributedOptimizer(plain, net.named_parameters(), bucket_bytes=SMALL, wire_feedback=kept)
        assert not any(owed.any() for owed in kept.state_dict()["owed"].values())
        assert kept.state_dict()["of"] == (mr.rank(), size - 1)
        found = {}
        before = {name: parameter.detach().double() for name, parameter in net.named_parameters()}
        for steps in (1, 30):
            train(net, optimizer, rank, range(7, 7 + steps))
            moved = {name: before[name] - parameter.detach().double() for name, parameter in net.named_parameters()}
            exact = {name: mean(net, name, [0, 2], 2) for name in ("weight", "bias")}
            found[steps] = {name: float((moved[name] - steps * exact[name]).abs().mean()) for name in exact}
            before = {name: parameter.detach().double() for name, parameter in net.named_parameters()}
        for name, most in found[1].items():
            assert found[30][name] < 3 * most + 1e-4, (name, found)
        return [bits(parameter) for parameter in net.parameters()], found[30]


def test_feedback_goes_on_after_a_loss() -> None:
    first, killed, last = run(goes_on_without_a_rank, world_size=3)
    assert killed.exitcode == -signal.SIGKILL
    assert not first.error + last.error
    assert first.value == last.value


def loaded_for_another_job() -> None:
    with apart("int8") as (rank, _):
        first = Feedback()
        net = Sums()
        train(net, distributed(net, wire_feedback=first), rank, range(2))
        state = first.state_dict()
        first.load_state_dict(state)
        same_ranks = mr.init().new_group([0, 1])
        distributed(net, wire_feedback=first, group=same_ranks)  # loaded since: it is owed
        assert first.state_dict()["owed"]["weight"].any()
        other = mr.init().new_group([1, 0])
        first.load_state_dict(state)
        assert "is of rank" in str(caught(ValueError, lambda: distributed(net, wire_feedback=first, group=other)))


def test_what_was_loaded_is_owed_to_the_ranks_that_it_is_of() -> None:
    values(loaded_for_another_job)


def test_two_parameters_of_one_name_are_refused() -> None:
    nets = [nn.Linear(2, 2), nn.Linear(2, 2)]
    twice = [named for net in nets for named in net.named_parameters()]
    plain = torch.optim.SGD([parameter for _, parameter in twice], 1.0)
    for make in (lambda: Feedback(twice), lambda: DistributedOptimizer(plain, twice, wire_feedback=True)):
        with pytest.raises(ValueError, match="two parameters are called bias: Feedback keeps what is lost by name"):
            make()
    mr.shutdown()


def test_what_is_no_state_is_refused() -> None:
    with pytest.raises(ValueError, match="this is no state of Feedback, since it has no of, units, owed: give what"):
        Feedback().load_state_dict({})
    with pytest.raises(ValueError, match="since it has no units: give what its state_dict"):
        Feedback().load_state_dict({"of": None, "owed": {}})


def test_a_state_of_another_model_stays_refused() -> None:
    feedback = Feedback()
    feedback.load_state_dict({"of": None, "units": "avg", "owed": {"weight": torch.ones(3)}})
    for _ in range(2):
        with pytest.raises(ValueError, match="3 elements of weight, and the parameter has 4"):
            feedback.of_bucket([NamedSlot("weight", 0, 4)], 4)
