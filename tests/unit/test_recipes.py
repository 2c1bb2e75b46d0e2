"""Schedules as pure functions, and in torch's own scheduler."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from multiring import recipes
from multiring.torch import use_lars


def test_linear_scaling_and_warm_up_of_goyal_et_al() -> None:
    """ResNet-50, batch 8192 on ImageNet: 0.1 to 3.2 in 5 epochs, divided by 10 at epochs 30, 60, 80."""
    each = 1_281_167 // 8192
    rate = recipes.linear_scaling(0.1, 8192)
    assert rate == pytest.approx(3.2)
    factor = recipes.warm_up(recipes.steps([30 * each, 60 * each, 80 * each]), 5 * each, start=256 / 8192)
    schedule = recipes.scaled(factor, rate)
    values = [schedule(step) for step in range(5 * each + 1)]
    assert values[0] == pytest.approx(0.1)
    assert values[-1] == pytest.approx(3.2)
    np.testing.assert_allclose(np.diff(values), (3.2 - 0.1) / (5 * each))
    for epoch, expected in ((29, 3.2), (30, 0.32), (59, 0.32), (60, 0.032), (80, 0.0032), (89, 0.0032)):
        assert schedule(epoch * each) == pytest.approx(expected)


def test_decays() -> None:
    linear, square = recipes.polynomial(90), recipes.polynomial(10, power=2, end=0.1)
    assert [linear(0), linear(45), linear(90), linear(1000)] == [1, 0.5, 0, 0]
    assert [square(0), square(5), square(10)] == pytest.approx([1, 0.1 + 0.9 * 0.25, 0.1])
    cosine = recipes.cosine(8, end=0.2)
    assert [cosine(0), cosine(4), cosine(8), cosine(9)] == pytest.approx([1, 0.6, 0.2, 0.2])
    assert cosine(2) == pytest.approx(0.2 + 0.8 * (1 + math.sqrt(0.5)) / 2)
    assert recipes.constant(3)(7) == 3


def test_cycles_that_collapse() -> None:
    """Each cycle decays slowly and then collapses, as Codreanu et al. end theirs."""
    collapse = recipes.scaled(recipes.polynomial(5, power=2), 0.5)
    schedule = recipes.cycles(recipes.chain(recipes.polynomial(20, end=0.5), 15, collapse), 20)
    first = [schedule(step) for step in range(20)]
    assert first[:15] == [1 - 0.5 * step / 20 for step in range(15)]
    assert first[15:] == pytest.approx([0.5 * (1 - step / 5) ** 2 for step in range(5)])
    assert [schedule(step) for step in range(20, 40)] == first
    np.testing.assert_array_equal(recipes.table(schedule, 20), first)


def test_batch_growth_mirrors_steps() -> None:
    batch, rate = recipes.batch_growth(128, [30, 60]), recipes.steps([60, 30], 0.1)
    assert [batch(step) for step in (0, 29, 30, 59, 60, 90)] == [128, 128, 1280, 1280, 12800, 12800]
    assert all(batch(step) * rate(step) == pytest.approx(128) for step in range(90))


def test_momentum_correction_equals_a_buffer_without_the_rate() -> None:
    schedule = recipes.scaled(recipes.warm_up(recipes.steps([6]), 4, start=0.25), 0.4)
    momentum = recipes.momentum_correction(schedule, 0.9)
    plain = folded = 0.0
    for step, gradient in enumerate((1.0, -2.0, 3.0, 5.0, -1.0, 0.5, 2.0, 4.0)):
        plain = 0.9 * plain + gradient
        folded = momentum(step) * folded + schedule(step) * gradient
        assert folded == pytest.approx(schedule(step) * plain)
    assert recipes.momentum_correction(recipes.constant(0), 0.9)(5) == 0.9


def test_what_decays() -> None:
    net = torch.nn.Sequential(torch.nn.Conv2d(1, 8, 3), torch.nn.GroupNorm(4, 8), torch.nn.Linear(8, 2))
    assert [name for name, p in net.named_parameters() if recipes.decays(p.shape)] == ["0.weight", "2.weight"]
    assert not recipes.decays(())


def test_lars() -> None:
    assert recipes.lars(4, 2) == pytest.approx(0.002)
    assert recipes.lars(4, 2, decay=0.5, trust=0.01) == pytest.approx(0.01)
    assert recipes.lars(0, 2) == recipes.lars(4, 0) == 1


def test_in_torch() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.8)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, recipes.warm_up(recipes.cosine(10), 4, start=0.125))
    rates = []
    for _ in range(11):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates[0] == pytest.approx(0.1)
    assert rates[4:] == pytest.approx([0.4 * (1 + math.cos(math.pi * step / 10)) for step in range(4, 11)])


def test_lars_in_torch() -> None:
    """Weights follow the formula of the paper at a constant rate, decay and momentum included; biases plain SGD."""
    net = torch.nn.Linear(3, 2).double()
    weight, bias = (p.detach().numpy().copy() for p in net.parameters())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9, weight_decay=0.1)
    use_lars(optimizer, trust=0.01)
    momentum, momentum_of_bias = np.zeros_like(weight), np.zeros_like(bias)
    x = torch.arange(12.0, dtype=torch.float64).reshape(4, 3)

    def evaluated() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (net(x) ** 2).mean()
        loss.backward()
        return loss

    for step in range(4):
        evaluated()
        gradient = net.weight.grad.numpy().copy()
        trust = 0.01 * np.linalg.norm(weight) / (np.linalg.norm(gradient) + 0.1 * np.linalg.norm(weight))
        momentum = 0.9 * momentum + trust * (gradient + 0.1 * weight)
        momentum_of_bias = 0.9 * momentum_of_bias + net.bias.grad.numpy() + 0.1 * bias
        weight, bias = weight - 0.5 * momentum, bias - 0.5 * momentum_of_bias
        optimizer.step(evaluated if step % 2 else None)
        np.testing.assert_allclose(net.weight.detach().numpy(), weight, rtol=1e-12)
        np.testing.assert_allclose(net.bias.detach().numpy(), bias, rtol=1e-12)
    with pytest.raises(ValueError, match="trust=0: it is above 0"):
        use_lars(optimizer, trust=0)


WRONG: list[tuple[Callable[[], object], str]] = [
    (lambda: recipes.linear_scaling(0.1, 0), "batch=0"),
    (lambda: recipes.polynomial(0), "length=0: 1 or more"),
    (lambda: recipes.cycles(recipes.constant(), 0), "length=0: 1 or more"),
    (lambda: recipes.warm_up(recipes.constant(), -1), "length=-1: 0 or more"),
    (lambda: recipes.batch_growth(0, []), "batch=0: 1 or more"),
    (lambda: recipes.linear_scaling(0.1, 512, 0), "base_batch=0: 1 or more"),
    (lambda: recipes.polynomial(4, power=-1), "power=-1: a finite number above 0"),
    (lambda: recipes.steps([3, -1]), "boundary=-1: 0 or more"),
    (lambda: recipes.batch_growth(32, [2, -5]), "boundary=-5: 0 or more"),
    (lambda: recipes.batch_growth(32, [2], 0), "factor=0: a finite number above 0"),
    (lambda: recipes.batch_growth(32, [2], -2), "factor=-2: a finite number above 0"),
    (lambda: recipes.batch_growth(32, [2], 0.01), "factor=0.01: no sample is left at the last boundary"),
]


@pytest.mark.parametrize(("call", "message"), WRONG, ids=lambda value: str(value)[:20])
def test_wrong_arguments(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("number", [math.nan, math.inf, 4.0, True, "4"])
def test_numbers_of_steps_and_samples_are_whole(number: object) -> None:
    calls: dict[str, Callable[[], object]] = {
        "batch": lambda: recipes.linear_scaling(0.1, number),
        "base_batch": lambda: recipes.linear_scaling(0.1, 4, number),
        "length": lambda: recipes.warm_up(recipes.constant(), number),
        "boundary": lambda: recipes.steps([3, number]),
    }
    for name, call in calls.items():
        with pytest.raises(TypeError, match=f"{name}={number!r}: expected a whole number"):
            call()


def test_small_numbers_of_numpy_are_those_of_python() -> None:
    def values(kind: Callable[[int], int]) -> list[float]:
        schedules = (
            recipes.warm_up(recipes.cosine(kind(250)), kind(7), start=0.25),
            recipes.warm_up(recipes.constant(200), kind(200)),
            recipes.chain(recipes.polynomial(kind(9)), kind(5), recipes.cycles(recipes.polynomial(kind(3)), kind(3))),
            recipes.steps([kind(3), kind(200)]),
            recipes.momentum_correction(recipes.cosine(kind(30)), 0.9),
            recipes.batch_growth(kind(200), [kind(2), kind(9)]),
        )
        return [schedule(kind(step)) for schedule in schedules for step in (0, 3, 9, 201, 255)]

    assert values(np.uint8) == values(int)
    assert recipes.chain(recipes.constant(), np.uint8(5), recipes.cosine(400))(300) == recipes.cosine(400)(295)
    assert recipes.linear_scaling(2, np.uint8(200), np.uint8(100)) == 4
    assert recipes.table(recipes.cosine(9), np.uint8(200)).shape == (200,)
