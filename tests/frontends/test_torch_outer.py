"""Outer optimization: groups that train apart end with what the rule says, whoever is slow, uneven, resumed or lost."""

from __future__ import annotations

import dataclasses
import io
import os
import re
import signal
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from forking_launcher import TORCH  # noqa: E402
from framework_jobs import succeeds  # noqa: E402
from outer_numbers import Numbers, elements, everyones, move, nesterov  # noqa: E402
from outer_rule import SHAPES, change  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch_helpers import Net, batch, caught, group, kill_after_others, same, tell, until_lost, wait_for  # noqa: E402
from torch_ranks import run, values  # noqa: E402

import multiring as mr  # noqa: E402
import multiring.torch  # noqa: E402
import multiring.torch.outer as outer_module  # noqa: E402
from multiring.job.survivors import Agreement  # noqa: E402
from multiring.net.membership import Membership  # noqa: E402
from multiring.torch import DistributedOptimizer, Outer  # noqa: E402
from multiring.training.shared import Array, SharedParameters  # noqa: E402

pytestmark = pytest.mark.timeout(300)

PAIRS = [[0, 1], [2, 3]]

# --- the rule ---


def is_an_average() -> None:
    with group() as (rank, _):
        net = Numbers()
        outer = Outer(net, 1, groups=PAIRS)
        for step in range(5):
            before = elements(net)
            move(net, step, rank // 2)
            mine = elements(net)
            assert not torch.equal(before, mine)
            assert outer.step()
            expected = (everyones(mine)[0] + everyones(mine)[2]) / 2  # exact: multiples of 1/8
            same(elements(net), expected)


def test_every_step_is_an_average() -> None:
    values(is_an_average, world_size=4)


def by_hand() -> list[float]:
    with group() as (rank, _):
        weight = nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
        outer = Outer([weight], 2, groups="rank", optimizer=nesterov)
        seen = []
        for _ in range(4):
            with torch.no_grad():
                weight -= 0.5 * (rank + 1)
            seen.append((outer.step(), weight.item()))
        assert [applied for applied, _ in seen] == [False, True, False, True]
        return [value for _, value in seen]


def test_nesterov_momentum_by_hand() -> None:
    for rank, found in enumerate(values(by_hand, world_size=2)):
        # The mean change of two steps is 1.5: the velocities are 1.5 and 0.9 x 1.5 + 1.5 = 2.85.
        first = 1 - 0.7 * (1.5 + 0.9 * 1.5)
        second = first - 0.7 * (1.5 + 0.9 * 2.85)
        own = 0.5 * (rank + 1)
        np.testing.assert_allclose(found, [1 - own, first, first - own, second], rtol=0, atol=1e-15)


def modelled(
    places: int,
    samples: Callable[[int, int], float],
    every: int,
    fragments: list[list[int]],
    delay: int,
    keep: float,
    steps: int,
) -> Iterator[list[list[np.ndarray[Any, Any]]]]:
    """The rule, for all groups at once: what each has after each step, and at last after the end."""
    start = [np.asarray(weight.detach().numpy()) for weight in Numbers().weights]
    own = [[weight.copy() for weight in start] for _ in range(places)]
    shared, velocity = [weight.copy() for weight in start], [np.zeros(shape) for shape in SHAPES]
    trained = np.zeros((len(fragments), places))
    base = [[weight.copy() for weight in start] for _ in range(places)]  # from which changes count where they overlap
    own_changes: dict[int, list[dict[int, np.ndarray[Any, Any]]]] = {}
    sent: list[tuple[int, int, dict[int, np.ndarray[Any, Any]]]] = []

    def send(part: int) -> dict[int, np.ndarray[Any, Any]]:
        weights, trained[part] = trained[part] / trained[part].sum(), 0
        begins = base if delay >= every else [shared] * places
        changes = [{n: begins[place][n] - own[place][n] for n in fragments[part]} for place in range(places)]
        means = {n: sum(w * changes[place][n] for place, w in enumerate(weights)) for n in fragments[part]}
        for place in range(places):
            base[place] = [x.copy() if n in means else base[place][n] for n, x in enumerate(own[place])]
        own_changes[id(means)] = changes
        return means

    def receive(means: dict[int, np.ndarray[Any, Any]], kept: float) -> None:
        later = [own_changes[id(each)] for _, _, each in sent if each is not means]
        for number, mean in means.items():
            velocity[number] = 0.9 * velocity[number] + mean
            shared[number] = shared[number] - 0.7 * (mean + 0.9 * velocity[number])
            for place in range(places):
                if delay < every:
                    own[place][number] = kept * own[place][number] + (1 - kept) * shared[number]
                    continue
                apart = own[place][number] - base[place][number]
                wanted = shared[number] - sum(each[place].get(number, 0) for each in later)
                base[place][number] = kept * base[place][number] + (1 - kept) * wanted
                own[place][number] = base[place][number] + apart

    due = {(part + 1) * every // len(fragments): part for part in range(len(fragments))}
    for step in range(1, steps + 1):
        for place in range(places):
            trained[:, place] += samples(step, place)
            for number, weight in enumerate(own[place]):
                own[place][number] = weight + change(step, place, number, SHAPES[number])
        for at, part, means in list(sent):
            if at + delay == step:
                receive(means, keep if delay else 0)
                sent.remove((at, part, means))
        part = due.get((step - 1) % every + 1)
        if part is not None:
            means = send(part)
            if delay:
                sent.append((step, part, means))
            else:
                receive(means, 0)
        yield own
    while sent:
        receive(sent[0][2], keep)
        del sent[0]
    for part in range(len(fragments)):
        if trained[part].sum():
            receive(send(part), 0)
        for number in fragments[part]:
            for place in range(places):
                own[place][number] = shared[number]
    yield own


def samples_of(step: int, rank: int) -> int:
    """Rank 0 is a group, ranks 1 and 2 another; in some steps rank 2 has nothing."""
    return [3, 2, step % 2 * 4][rank]


CASES = [
    (4, [[0, 1, 2, 3, 4]], 0, 0.5),
    (6, [[0], [1, 2], [3, 4]], 2, 0.5),
    (5, [[0, 1], [2, 3, 4]], 4, 0.25),
    (5, [[0], [1], [2], [3], [4]], 0, 0.0),
    (3, [[0, 1, 2, 3, 4]], 2, 0.0),
    (3, [[0, 1, 2, 3, 4]], 3, 0.5),
    (2, [[0, 1], [2, 3, 4]], 7, 0.25),
    (1, [[0, 1, 2, 3, 4]], 3, 0.0),
]
"""Steps between exchanges, the parameters of each fragment, delay, and what is kept."""


def follows_the_rule(rank: int, every: int, fragments: list[list[int]], delay: int, keep: float) -> None:
    place = min(rank, 1)
    net = Numbers(first=rank)  # rank 0's are everybody's
    outer = Outer(
        net, every, groups=[[0], [1, 2]], fragments=len(fragments), delay=delay, keep=keep, optimizer=nesterov
    )
    assert [[int(entry.name.split(".")[1]) for entry in part] for part in outer._fragments] == fragments

    def both(step: int, place: int) -> float:
        return sum(samples_of(step, rank) for rank in ([0], [1, 2])[place])

    steps = 3 * every + 2
    expected = modelled(2, both, every, fragments, delay, keep, steps)

    def check(step: int) -> None:
        there = torch.cat([torch.from_numpy(np.asarray(x).reshape(-1)) for x in next(expected)[place]])
        torch.testing.assert_close(elements(net), there, rtol=0, atol=1e-12, msg=lambda m: f"after step {step}: {m}")

    for step in range(1, steps + 1):
        move(net, step, place)
        outer.step(samples_of(step, rank))
        check(step)
    outer.finish()
    check(steps)
    for other in everyones(elements(net)):
        same(other, elements(net))
    again = elements(net)
    outer.finish()  # nobody has trained since
    same(elements(net), again)


def follows_the_rule_in_each_case() -> None:
    with group() as (rank, _):
        for case in CASES:
            follows_the_rule(rank, *case)


def test_fragments_delays_and_uneven_groups() -> None:
    values(follows_the_rule_in_each_case, world_size=3)


# --- with a model, a loss and an optimizer inside ---


def train(
    net: nn.Module, optimizer: torch.optim.Optimizer, outer: Outer, first: int, last: int, rank: int, size: int
) -> None:
    for step in range(first, last):
        x, y = batch(step, rank, size)
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
        outer.step(len(x))


def hosts_are_groups() -> None:
    """DistributedDataParallel in a host, outer optimization between two."""
    os.environ["MULTIRING_HOST"] = f"host{int(os.environ['RANK']) // 2}"
    with group() as (rank, size):
        net = Net()
        outer = Outer(net, 3, optimizer=nesterov)
        assert outer.group.members == tuple(PAIRS[rank // 2])
        assert mr.init().ranks_by("host") == PAIRS
        assert outer.group.ranks_by("host") == [[0, 1]]
        assert dist.get_world_size(outer.process_group) == 2
        parallel = DistributedDataParallel(net, process_group=outer.process_group)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for step in range(1, 8):
            train(parallel, optimizer, outer, step, step + 1, rank, size)
            gradient = net.layers[4].bias.grad
            assert gradient is not None
            gradients = everyones(gradient)
            same(gradients[rank], gradients[rank ^ 1])
            assert not torch.equal(gradients[0], gradients[2])
            mine, other, far = (everyones(elements(net))[each] for each in (rank, rank ^ 1, (rank + 2) % 4))
            same(mine, other)
            assert torch.equal(mine, far) == (step % 3 == 0)


def test_ranks_of_a_host_train_together_and_hosts_apart() -> None:
    values(hosts_are_groups, world_size=4)


def resumes() -> None:
    with group() as (rank, size):

        def made() -> tuple[Net, DistributedOptimizer, Outer]:
            net = Net()
            outer = Outer(net, 4, groups=PAIRS, fragments=2, delay=3, optimizer=nesterov)
            inner = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
            return net, DistributedOptimizer(inner, net.named_parameters(), group=outer.group), outer

        net, optimizer, outer = made()
        train(net, optimizer, outer, 0, 7, rank, size)
        assert len(outer._in_flight) == 1
        file = io.BytesIO()
        torch.save([net.state_dict(), optimizer.state_dict(), outer.state_dict()], file)
        train(net, optimizer, outer, 7, 18, rank, size)
        outer.finish()
        expected = elements(net)

        net, optimizer, outer = made()
        file.seek(0)
        model_state, inner_state, outer_state = torch.load(file)
        net.load_state_dict(model_state)
        optimizer.load_state_dict(inner_state)
        outer.load_state_dict(outer_state)
        train(net, optimizer, outer, 7, 18, rank, size)
        outer.finish()
        same(elements(net), expected)
        for wrong in ([8, 2, 3, None], [4, 2, 3, "bfloat16"]):
            outer_state["arguments"] = wrong
            error = caught(ValueError, lambda: outer.load_state_dict(outer_state))
            assert f"delay, wire = {wrong}, and this Outer has [4, 2, 3, None]" in str(error)
        outer_state["arguments"] = [4, 2, 3, None]
        outer_state["shared"]["layers.0.bias"] = torch.zeros(7)
        error = caught(ValueError, lambda: outer.load_state_dict(outer_state))
        assert "layers.0.bias is float32 of shape (7,) in this state, and float64 of shape (32,)" in str(error)


def test_a_resumed_training_equals_one_that_went_on() -> None:
    values(resumes, world_size=4)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        self.frozen = nn.Parameter(torch.full((2,), 1.5), requires_grad=False)
        self.register_buffer("mean", torch.tensor([0.5, 1.5]))
        self.register_buffer("mask", torch.tensor([0.1, -torch.inf]))
        self.register_buffer("batches", torch.tensor(4))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


def buffers_and_frozen_parameters() -> None:
    with group() as (rank, _):
        net = Normed()
        with torch.no_grad():
            net.frozen += rank
            net.batches += rank
        outer = Outer(net, 2, groups="rank")
        same(net.frozen.detach(), torch.full((2,), 1.5))
        for _ in range(2):
            with torch.no_grad():
                net.weight -= 0.25 * (rank + 1)
                net.mean += torch.tensor([1.0, 2.0]) * rank
                net.batches += 1
                net.scratch += rank
            outer.step(samples=3 if rank else 1)
        # Rank 1 counts thrice: the means of 0.5 and 1.0, and of 0 and 2 times what a step adds.
        same(net.weight.detach(), torch.full((3,), 1 - (0.5 + 3 * 1.0) / 4, dtype=torch.bfloat16))
        same(net.mean, torch.tensor([0.5 + 1.5, 1.5 + 3.0]))
        same(net.mask, torch.tensor([0.1, -torch.inf]))
        assert net.batches == 6
        same(net.scratch, torch.full((2,), 2.0 * rank))
        with torch.no_grad():
            net.weight -= rank + 1
        with outer.shared():
            same(net.weight.detach(), torch.full((3,), 0.125, dtype=torch.bfloat16))
        same(net.weight.detach(), torch.full((3,), -0.875 - rank, dtype=torch.bfloat16))
        net.frozen.requires_grad_()
        error = caught(ValueError, outer.finish)
        assert "parameter frozen is trained now and was frozen when Outer was made" in str(error)


def test_buffers_are_averaged_and_what_is_frozen_stays() -> None:
    values(buffers_and_frozen_parameters)


def travels_narrow() -> list[float]:
    with group() as (rank, _):
        sent = []
        for wire in (None, "bfloat16"):
            weight = nn.Parameter(torch.zeros(50_000))
            outer = Outer([weight], 1, groups="rank", wire=wire)
            before = sum(link["bytes_sent"] for link in mr.stats()["links"].values())
            with torch.no_grad():
                weight += (torch.arange(50_000) % 251 + 1) * (rank + 1) / 1000
            outer.step()
            sent.append(sum(link["bytes_sent"] for link in mr.stats()["links"].values()) - before)
            expected = (torch.arange(50_000) % 251 + 1) * 1.5 / 1000
            torch.testing.assert_close(weight.detach(), expected, rtol=2**-7 if wire else 1e-6, atol=0)
            for other in everyones(weight.detach()):
                same(other, weight.detach())
        return sent


def test_a_narrow_wire_halves_the_bytes() -> None:
    for whole, narrow in values(travels_narrow):
        assert 0.45 < narrow / whole < 0.55


def parameters_of_now() -> None:
    with group() as (rank, _):
        net = nn.Linear(3, 2)
        nn.init.zeros_(net.weight)
        nn.init.zeros_(net.bias)
        outer = Outer(net, 1, groups=[[1, 0]] if rank else [[0, 1]])
        assert outer.group.members == (0, 1)  # whatever the order
        outer = Outer(net, 1, groups=[[1], [0]] if rank else [[0], [1]])
        new = (torch.arange(6.0).reshape(2, 3) + 1) * (rank + 1)
        net.load_state_dict({"weight": new.clone(), "bias": torch.tensor([2.0, 6.0]) * rank}, assign=True)
        outer.step()
        same(net.weight.detach(), new / (rank + 1) * 1.5)
        same(net.bias.detach(), torch.tensor([1.0, 3.0]))
        net.bias = nn.Parameter(torch.tensor([3.0, 1.0 + 4 * rank]))
        outer.step()
        same(net.bias.detach(), torch.tensor([3.0, 3.0]))

        bias = net.bias
        for words, wrong in (
            ("bias is frozen now and was trained when", nn.Parameter(torch.ones(2), requires_grad=False)),
            ("bias has shape (3,), and had (2,) when", nn.Parameter(torch.ones(3))),
            ("bias is gone, and was trained when", None),
        ):
            net.bias = wrong
            assert words in str(caught(ValueError, outer.finish))
        net.bias = bias
        net.extra = nn.Parameter(torch.ones(2))
        assert "extra is trained now and was frozen" in str(caught(ValueError, outer.finish))
        del net.extra
        outer.finish()
        same(net.bias.detach(), torch.tensor([3.0, 3.0]))  # nothing of these was sent


def test_replaced_parameters_are_exchanged_and_others_refused() -> None:
    values(parameters_of_now)


# --- what is refused ---


def refusals() -> None:
    with group() as (rank, size):
        net = Numbers()
        for words, make in (
            (
                "groups=[[0, 1]]: lists of ranks hold each of the ranks 0 to 2 once",
                lambda: Outer(net, 2, groups=[[0, 1]]),
            ),
            ("groups=[[0, 1, 2], [1]]: lists", lambda: Outer(net, 2, groups=[[0, 1, 2], [1]])),
            ("groups=[[0, 1, 2], []]: lists", lambda: Outer(net, 2, groups=[[0, 1, 2], []])),
            ("groups='rack': the topology has the levels rank, host", lambda: Outer(net, 2, groups="rack")),
            (  # on all ranks alike
                f"every is {2 + rank} here and {2 + bool(not rank)} on rank {int(not rank)}: give all",
                lambda: Outer(net, 2 + rank),
            ),
            (
                f"parameter 0 is weight (float32 of shape (1, {2 + rank})) here and weight (float32 of shape (1, "
                f"{2 + int(not rank)})) on rank {int(not rank)}: all ranks need the same model",
                lambda: Outer(nn.Linear(2 + rank, 1), 2),
            ),
        ):
            assert words in str(caught(ValueError, make))
        outer = Outer(net, 2)
        assert outer.group.size == 1  # on one host each rank is a group
        move(net, 1, rank)
        outer.step(samples=5 if rank else None)
        assert "give step() samples in every step, or in none" in str(
            caught(ValueError, lambda: outer.step(samples=None if rank else 5))
        )
        error = caught(ValueError, lambda: outer.step(samples=5 if rank else None))
        assert f"{size - 1} ranks gave the samples of a step and 1 did not" in str(error)


def refuses_wire(wire: str, why: str, words: str) -> None:
    """Other changes than those of float32 travel as they are, or in bfloat16."""
    os.environ["MULTIRING_HOST"] = f"host{os.environ['RANK']}"
    os.environ["MULTIRING_WIRE"] = f"host={wire}"
    with group() as (rank, _):
        error = str(caught(ValueError, lambda: Outer(nn.Linear(2, 1), 2)))
        assert error.startswith(f"MULTIRING_WIRE=host={wire}: changes of parameters are sent {why}")
        assert words in error
        shared = SharedParameters(mr.init(), 2, None)  # that of JAX and Keras
        error = str(caught(ValueError, lambda: shared.begin(["x"], [np.zeros(2, np.float32)], lambda _, mean: mean)))
        assert f"{wire} " in error
        shared.begin(["x"], [np.zeros(2)], lambda _, mean: mean)
        weight = nn.Parameter(torch.tensor([1.0 + rank, 2.0]))
        for outer in (Outer(Numbers(), 1), Outer([weight], 1, wire="bfloat16")):
            outer.step()
        same(weight.detach(), torch.tensor([1.0, 2.0]))  # all began with rank 0's


@pytest.mark.parametrize(
    ("wire", "why", "words"),
    [
        ("int2", "once, without a residual", "int2 would lose most of them: name another format, such as int4"),
        ("float16", "times their samples", "from 65,520 on: name another format, such as bfloat16"),
    ],
)
def test_a_wire_that_loses_most_of_a_change_is_refused_at_once(wire: str, why: str, words: str) -> None:
    values(refuses_wire, wire, why, words)


def buffers_keep_to_themselves() -> None:
    """Infinities of a buffer are in no block of a wire beside parameters."""
    os.environ["MULTIRING_HOST"] = f"host{os.environ['RANK']}"
    os.environ["MULTIRING_WIRE"] = "host=int8"
    with group() as (rank, _):
        net = nn.Linear(3, 1)
        net.register_buffer("most", torch.tensor([float("nan"), 1.0]))
        outer = Outer(net, 1)
        before = net.weight.detach().clone()
        with torch.no_grad():
            net.weight += 1 + rank
            if rank:
                net.most[1] = float("inf")
        outer.step()
        torch.testing.assert_close(net.weight.detach(), before + 1.5, rtol=0, atol=0.05)
        assert net.most[0].isnan()
        assert not net.most[1].isfinite()


def test_a_buffer_that_is_no_number_leaves_parameters_alone() -> None:
    values(buffers_keep_to_themselves)


def test_what_does_not_go_together_is_refused_on_all_ranks() -> None:
    values(refusals, world_size=3)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in list(os.environ):
        if name.startswith(("MULTIRING_", "OMPI_", "PMI_", "SLURM_")) or name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name)
    yield
    mr.shutdown()


@pytest.mark.usefixtures("alone")
def test_wrong_arguments() -> None:
    net = Numbers()
    complex_one = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    for error, words, make in (
        (ValueError, "every=0: a number of steps between exchanges is 1 or more", lambda: Outer(net, 0)),
        (TypeError, "every=2.5", lambda: Outer(net, 2.5)),  # type: ignore[arg-type]
        (
            ValueError,
            "fragments=3: one is sent in a step, so there are at most every=2",
            lambda: Outer(net, 2, fragments=3),
        ),
        (ValueError, "fragments=6: the model has 5 parameters to train", lambda: Outer(net, 9, fragments=6)),
        (
            ValueError,
            "delay=16: at most 4 exchanges of a fragment are under way, so it is less than 4 x every=4",
            lambda: Outer(net, 4, delay=16),
        ),
        (ValueError, "delay=-1", lambda: Outer(net, 4, delay=-1)),
        (ValueError, "keep=1.0: the part of own values", lambda: Outer(net, 4, keep=1.0)),
        (ValueError, "keep=None: the part of own values", lambda: Outer(net, 4, keep=None)),  # type: ignore[arg-type]
        (
            TypeError,
            "groups=[0]: give the name of a level (rank, host), or lists of ranks, one for each group, such as",
            lambda: Outer(net, 4, groups=[0]),  # type: ignore[list-item]
        ),
        (TypeError, "groups=['host']: give the name of", lambda: Outer(net, 4, groups=["host"])),  # type: ignore[list-item]
        (TypeError, "groups=0: give the name of a level", lambda: Outer(net, 4, groups=0)),  # type: ignore[arg-type]
        (
            TypeError,
            "optimizer is 'sgd': give a function that makes the outer one of the shared parameters, such as lambda",
            lambda: Outer(net, 4, optimizer=cast(Any, "sgd")),
        ),
        (
            TypeError,
            "optimizer is of type SGD: give a function",
            lambda: Outer(net, 4, optimizer=cast(Any, nesterov(list(net.weights)))),
        ),
        (ValueError, "wire='float16': changes travel as", lambda: Outer(net, 4, wire="float16")),
        (ValueError, "of 0 parameters none is to be trained", lambda: Outer([], 4)),
        (ValueError, "parameter 0 is complex64 of shape (2,): only real", lambda: Outer([complex_one], 4)),
        (ValueError, "parameter 1 is parameter 0 again", lambda: Outer([net.weights[1]] * 2, 4)),
        (TypeError, "parameter 0 is a int", lambda: Outer(3, 4)),  # type: ignore[arg-type]
        (TypeError, "optimizer makes a int", lambda: Outer(net, 4, optimizer=cast(Any, lambda _: 3))),
        (ValueError, "has 1 other parameters than the 5", lambda: Outer(net, 4, optimizer=lambda p: nesterov(p[:1]))),
    ):
        assert words in str(caught(error, make)), words
    outer = Outer(net, 2, optimizer=nesterov)
    assert "torch.distributed was not initialized" in str(caught(ValueError, lambda: outer.process_group))
    assert "samples=-1: a weight is 0 or more" in str(caught(ValueError, lambda: outer.step(-1)))
    empty = caught(ValueError, lambda: outer.load_state_dict({}))
    assert "this is no state of multiring.torch.Outer, since it has no arguments, groups, steps, turns" in str(empty)
    nothing = caught(TypeError, lambda: outer.rebuild(cast(Any, None)))
    assert "agreement=None: give rebuild() what multiring.torch.shrink() has returned" in str(nothing)
    mr.shutdown()
    mr.init()
    move(net, 1, 0)
    stale = caught(mr.MultiringError, outer.finish)
    assert "ranks were lost or admitted since Outer was made: call rebuild()" in str(stale)
    admitted = caught(ValueError, lambda: outer.rebuild(Agreement(1, (-1,), -1)))
    assert "rank 0 was admitted by grow(), and has no shared values: call finish() before grow()" in str(admitted)
    assert "this agreement is of 2 ranks, the job has 1, and Outer was made for 1" in str(
        caught(ValueError, lambda: outer.rebuild(Agreement(1, (0, 1), -1)))
    )
    now = mr.init()
    now.world = dataclasses.replace(now.world, membership=Membership(2, (0,), (1,)))  # admitted, then a loss
    assert "rank 0 was admitted by grow()" in str(caught(ValueError, lambda: outer.rebuild(Agreement(2, (0,), -1))))


@pytest.mark.usefixtures("alone")
def test_a_state_is_not_shared_with_the_optimizer() -> None:
    net = Numbers()
    outer = Outer(net, 1, optimizer=nesterov)
    move(net, 1, 0)
    outer.step()
    state = outer.state_dict()
    momentum = state["optimizer"]["state"][1]["momentum_buffer"]
    before = momentum.clone()
    assert before.any()
    outer.load_state_dict(state)
    move(net, 2, 0)
    outer.step()
    assert torch.equal(momentum, before)
    shared = outer.state_dict()["shared"]["weights.1"]
    state["optimizer"]["param_groups"] *= 2
    assert "different number of parameter groups" in str(caught(ValueError, lambda: outer.load_state_dict(state)))
    same(outer.state_dict()["shared"]["weights.1"], shared)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("keep", [0.5, 0.0])
def test_one_group_trains_as_without_exchanges_however_late_they_are(keep: float) -> None:
    net, plain = Numbers(), Numbers()
    net.register_buffer("mask", torch.tensor([-torch.inf, 1.0]))
    outer = Outer(net, 2, fragments=2, delay=7, keep=keep)
    for step in range(1, 20):
        move(net, step, 1)
        move(plain, step, 1)
        outer.step()
        torch.testing.assert_close(elements(net), elements(plain), rtol=0, atol=1e-12)
    outer.finish()
    torch.testing.assert_close(elements(net), elements(plain), rtol=0, atol=1e-12)
    same(net.mask, torch.tensor([-torch.inf, 1.0]))


@pytest.mark.usefixtures("alone")
def test_small_steps_of_float8_parameters_add_up() -> None:
    weight = nn.Parameter(torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn))
    outer = Outer([weight], 1, optimizer=lambda made: torch.optim.SGD(made, lr=1 / 8))
    for _ in range(4):
        with torch.no_grad():
            weight.copy_(weight.float() + torch.tensor([0.125, 0.25]))
        outer.step()
    # Alone a step of 1/64 would be rounded away, where neighbours are 1/8 apart.
    same(outer.state_dict()["shared"]["0"], torch.tensor([1.0625, 2.125]))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("delay", [2, 7])
@pytest.mark.parametrize("numpy", [False, True])
def test_what_overlapping_exchanges_round_is_no_change(delay: int, numpy: bool) -> None:
    """The shared values of bfloat16 parameters are those of float32 ones that change by as much, in 300 exchanges."""
    start = torch.linspace(0.5, 2, 31)
    steps = [(((torch.arange(31) * 7 + step * 5) % 13) - 6) / 128 for step in range(600)]
    half = start.bfloat16().clone()
    whole = half.float()
    if numpy:
        communicator = mr.init()

        def moved(shared: list[Array], mean: list[Array]) -> list[Array]:
            return [np.asarray(x - np.float32(0.75) * change) for x, change in zip(shared, mean, strict=True)]

        parameters = [SharedParameters(communicator, 2, "rank", delay=delay) for _ in range(2)]
        narrow = np.asarray(half.float().numpy()).astype(np.float16)
        wide = narrow.astype(np.float32)
        own = [[narrow], [wide]]
        for shared, mine in zip(parameters, own, strict=True):
            shared.begin(["x"], mine, moved)
        for step in steps:
            before = own[0][0].astype(np.float32)
            own[0] = [(before + step.numpy()).astype(np.float16)]
            own[1] = [own[1][0] + (own[0][0].astype(np.float32) - before)]
            for number, shared in enumerate(parameters):
                own[number] = shared.step(None, lambda number=number: own[number]) or own[number]
        found, expected = (shared.values[0] for shared in parameters)
    else:
        weights = [nn.Parameter(half), nn.Parameter(whole)]
        outers = [Outer([each], 2, delay=delay, optimizer=lambda p: torch.optim.SGD(p, lr=0.75)) for each in weights]
        for step in steps:
            with torch.no_grad():
                moves = weights[0].detach().float()
                weights[0].copy_(moves + step)
                weights[1].add_(weights[0].detach().float() - moves)
            for outer in outers:
                outer.step()
        found, expected = (outer.state_dict()["shared"]["0"].numpy() for outer in outers)
    assert np.ptp(expected) > 1
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


@pytest.mark.usefixtures("alone")
def test_an_error_in_putting_shared_values_in_restores_the_own(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Numbers()
    outer = Outer(net, 4, optimizer=nesterov)
    move(net, 1, 0)
    before = elements(net)
    last = outer._fragments[-1][-1]
    calls = iter([last.own, lambda: 3, last.own])  # saved, not put in, restored
    monkeypatch.setitem(last.__dict__, "own", lambda: next(calls)())

    def enter() -> None:
        with outer.shared():
            raise AssertionError("nothing was raised")

    caught(AttributeError, enter)
    same(elements(net), before)


# --- ranks that are lost ---


def dies_in_a_round() -> list[float]:
    """Rank 2, of the group of ranks 1 and 2, is killed two steps after an exchange."""
    with group() as (rank, _):
        net = Numbers()
        outer = Outer(net, 4, groups=[[0], [1, 2]])
        place = min(rank, 1)
        step = 0
        while step < 12:
            step += 1
            move(net, step, place)
            if step == (6 if rank == 2 else 5):
                kill_after_others("step 4 has ended", 2, [0, 1])
                until_lost()
            try:
                outer.step()
            except mr.PeerLost:
                assert step == outer.steps == 5  # three steps before the next exchange
                agreement = multiring.torch.shrink()
                stale = caught(mr.MultiringError, outer.finish)
                assert "call rebuild() with what shrink() has returned" in str(stale)
                outer.rebuild(agreement)
                assert "call rebuild() once" in str(caught(ValueError, lambda: outer.rebuild(agreement)))  # noqa: B023
        assert dist.get_world_size(outer.process_group) == outer.group.size == 1
        outer.finish()
        return elements(net).tolist()


def test_a_loss_in_a_round_costs_the_steps_of_the_lost_rank_alone() -> None:
    *survivors, killed = run(dies_in_a_round, world_size=3)
    assert killed.exitcode == -signal.SIGKILL
    assert not survivors[0].error + survivors[1].error
    assert survivors[0].value == survivors[1].value

    def summed(number: int, shape: tuple[int, ...], place: int, first: int, last: int) -> np.ndarray[Any, Any]:
        return sum(change(step, place, number, shape) for step in range(first, last))  # type: ignore[return-value]

    expected = []
    for number, (weight, shape) in enumerate(zip(Numbers().weights, SHAPES, strict=True)):
        x = np.asarray(weight.detach().numpy())
        moved = [[summed(number, shape, place, *span) for place in (0, 1)] for span in ((1, 5), (5, 9), (9, 13))]
        x = x + (moved[0][0] + 2 * moved[0][1]) / 3  # three ranks; then two, whose step 5 was not lost
        x = x + (moved[1][0] + moved[1][1]) / 2 + (moved[2][0] + moved[2][1]) / 2
        expected += x.reshape(-1).tolist()
    np.testing.assert_allclose(survivors[0].value, expected, rtol=0, atol=1e-12)


def dies_while_two_are_under_way() -> tuple[list[float], list[float]]:
    """Rank 2 is killed when its second exchange has come to all and is applied by nobody."""
    with group() as (rank, _):
        net = Numbers()
        outer = Outer(net, 2, groups="rank", delay=4, keep=0)
        after = []
        while outer.steps < 8:
            if outer.steps == 5:
                outer.state_dict()  # waits for what is on its way
                if rank == 2:
                    mr.barrier()
                    os.kill(os.getpid(), signal.SIGKILL)
                caught(mr.PeerLost, lambda: [mr.barrier() for _ in range(2)])
            move(net, outer.steps + 1, rank)
            try:
                outer.step()
            except mr.PeerLost:
                assert outer.steps == 6
                outer.rebuild(multiring.torch.shrink())
            if outer.steps == 7:
                after = elements(net).tolist()
        outer.finish()
        return after, elements(net).tolist()


def test_what_was_under_way_at_a_loss_is_sent_again_and_counts_once() -> None:
    *survivors, killed = run(dies_while_two_are_under_way, world_size=3)
    assert killed.exitcode == -signal.SIGKILL
    assert not survivors[0].error + survivors[1].error

    def moved(place: int, first: int, last: int) -> np.ndarray[Any, Any]:
        steps = [
            [change(step, place, number, shape).reshape(-1) for number, shape in enumerate(SHAPES)]
            for step in range(first, last + 1)
        ]
        return cast(np.ndarray[Any, Any], np.sum([np.concatenate(step) for step in steps], 0))

    first = elements(Numbers()).numpy() + sum(moved(place, 1, 2) for place in range(3)) / 3
    for rank, survivor in enumerate(survivors):
        after, end = survivor.value
        np.testing.assert_allclose(after, first + moved(rank, 3, 7), rtol=0, atol=1e-12)
        np.testing.assert_allclose(end, first + (moved(0, 3, 8) + moved(1, 3, 8)) / 2, rtol=0, atol=1e-12)


def goes_on_with_ddp() -> tuple[list[int], list[float]]:
    """Go on as documented: rank 3 is killed in its step 8, before its group's gradients are averaged."""
    with group() as (rank, size):
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
        outer = Outer(net, 3, groups=PAIRS, optimizer=nesterov)
        parallel = DistributedDataParallel(net, process_group=outer.process_group)
        while outer.steps < 14:
            try:
                if (rank, outer.steps) == (3, 7):
                    os.kill(os.getpid(), signal.SIGKILL)
                train(parallel, optimizer, outer, outer.steps, outer.steps + 1, rank, size)
            except RuntimeError:  # torch wraps PeerLost
                agreement = multiring.torch.shrink()
                outer.rebuild(agreement)
                multiring.torch.sync_state(net, optimizer, group=outer.group)
                parallel = DistributedDataParallel(net, process_group=outer.process_group)
        outer.finish()
        return list(outer.group.members), elements(net).tolist()


def test_a_group_goes_on_with_those_that_are_left() -> None:
    *survivors, killed = run(goes_on_with_ddp, world_size=4)
    assert killed.exitcode == -signal.SIGKILL
    assert not "".join(survivor.error for survivor in survivors)
    assert [survivor.value[0] for survivor in survivors] == [[0, 1], [0, 1], [2]]
    assert survivors[0].value[1] == survivors[1].value[1] == survivors[2].value[1]
    assert np.isfinite(survivors[0].value[1]).all()


def goes_on_after_two_losses() -> tuple[tuple[int, ...], list[float], int]:
    """Go on as documented: rank 4 is killed in its step 8, and rank 1 when the others begin to rebuild."""
    with group() as (rank, size):
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
        outer = Outer(net, 3, groups=[[0, 1], [2, 3, 4]], optimizer=nesterov)
        parallel = DistributedDataParallel(net, process_group=outer.process_group)
        agreement, losses = None, 0
        while True:
            try:
                if agreement is not None:
                    if rank == 1:
                        os.kill(os.getpid(), signal.SIGKILL)
                    outer.rebuild(agreement)
                    multiring.torch.sync_state(net, optimizer, group=outer.group)
                    parallel = DistributedDataParallel(net, process_group=outer.process_group)
                    agreement = None
                if outer.steps == 14:
                    outer.finish()
                    break
                if (rank, outer.steps) == (4, 7):
                    os.kill(os.getpid(), signal.SIGKILL)
                train(parallel, optimizer, outer, outer.steps, outer.steps + 1, rank, size)
            except RuntimeError:
                agreement = multiring.torch.shrink()
                losses += 1
        return outer.group.members, elements(net).tolist(), losses


def test_a_rank_is_lost_while_others_rebuild() -> None:
    first, second, *others, last = run(goes_on_after_two_losses, world_size=5)
    assert second.exitcode == last.exitcode == -signal.SIGKILL
    survivors = [first, *others]
    assert not "".join(survivor.error for survivor in survivors)
    assert [survivor.value[0] for survivor in survivors] == [(0,), (1, 2), (1, 2)]
    assert all(survivor.value[1] == first.value[1] for survivor in survivors)
    assert max(survivor.value[2] for survivor in survivors) == 2
    assert np.isfinite(first.value[1]).all()


def is_two_steps_behind(delay: int) -> list[float]:
    """Rank 0 waits for an average when rank 2 is lost, and rank 1 has not come to send its part."""
    with group() as (rank, _):
        net = Numbers()
        outer = Outer(net, 4, groups="rank", fragments=2, delay=delay, optimizer=nesterov)
        lost = False
        while outer.steps < 14:
            move(net, outer.steps + 1, rank)
            if (rank, outer.steps) == (1, 1) and not lost:
                wait_for("failed")
                caught(mr.PeerLost, mr.barrier)
                outer.rebuild(multiring.torch.shrink())
                lost = True
            elif rank == 2:
                wait_for("sent")
                os.kill(os.getpid(), signal.SIGKILL)
            if (rank, outer.steps) == (0, 1 + delay) and not lost:
                tell("sent")
                caught(mr.PeerLost, outer.step)
                tell("failed")
                outer.rebuild(multiring.torch.shrink())
                lost = True
            else:
                outer.step()
        assert (outer._turn, outer._applied) == (7, 7 - len(outer._in_flight))
        outer.finish()
        return elements(net).tolist()


@pytest.mark.parametrize("delay", [0, 1])
def test_ranks_at_different_steps_go_on_together(delay: int) -> None:
    *survivors, killed = run(is_two_steps_behind, delay, world_size=3)
    assert killed.exitcode == -signal.SIGKILL
    assert not "".join(survivor.error for survivor in survivors)
    assert survivors[0].value == survivors[1].value
    assert np.isfinite(survivors[0].value).all()


def hears_of_the_loss_before_the_average(delay: int) -> tuple[list[float], list[float]]:
    """Rank 1 has not applied an average that rank 0 has, when rank 3 is lost, and ranks 1 and 2 are one group."""
    with group() as (rank, _):
        net = Numbers()
        outer = Outer(net, 4, groups=[[0], [1, 2], [3]], delay=delay, optimizer=nesterov)
        place = [0, 1, 1, 2][rank]
        for step in range(1, 5 + delay):
            move(net, step, place)
            if rank == 1 and step == 4 + delay:

                def lost() -> None:
                    mr.barrier()  # all have sent and received
                    raise mr.PeerLost("rank 3 is lost", rank=3)

                if not delay:
                    received, outer._receive = outer._receive, lost  # type: ignore[method-assign]
                    caught(mr.PeerLost, outer.step)
                    outer._receive = received  # type: ignore[method-assign]
                else:
                    outer._steps += 1
                    outer._samples = [sum_so_far + 1 for sum_so_far in outer._samples]
                    caught(mr.PeerLost, lost)
            else:
                outer.step()
        if rank != 1:
            mr.barrier()
        kill_after_others("all have sent", 3, [0, 1, 2])
        caught(mr.PeerLost, mr.barrier)
        assert (outer._applied, len(outer._in_flight)) == ((0, 1) if rank == 1 else (1, 0))
        outer.rebuild(multiring.torch.shrink())
        assert outer.group.members == ((0,), (1, 2), (1, 2))[rank]
        after = elements(net).tolist()
        for step in range(5 + delay, 9 + delay):
            move(net, step, place)
            outer.step()
        outer.finish()
        return after, elements(net).tolist()


@pytest.mark.parametrize("delay", [0, 2])
def test_an_average_that_some_have_applied_reaches_all(delay: int) -> None:
    *survivors, killed = run(hears_of_the_loss_before_the_average, delay, world_size=4)
    assert killed.exitcode == -signal.SIGKILL
    assert not "".join(survivor.error for survivor in survivors)
    (after, end), (after_one, end_one), (after_two, end_two) = (survivor.value for survivor in survivors)
    assert after_one == after_two  # though rank 2 had applied it, and rank 1 had not
    assert (after == after_one) == (delay == 0)
    assert end == end_one == end_two
    start = elements(Numbers()).numpy()

    def total(place: int, last: int) -> np.ndarray[Any, Any]:
        """Return the sum of what a group's steps up to ``last`` have added."""
        steps = [
            [change(step, place, number, shape).reshape(-1) for number, shape in enumerate(SHAPES)]
            for step in range(1, last + 1)
        ]
        return np.sum([np.concatenate(step) for step in steps], 0)

    mean = -np.mean([total(place, 4) for place in (0, 1, 1, 2)], 0)  # rank 3's steps count, too
    shared = start - 0.7 * (mean + 0.9 * mean)
    keep = 0.5 if delay else 0.0
    expected = [keep * (start + total(place, 4 + delay)) + (1 - keep) * shared for place in (0, 1)]
    np.testing.assert_allclose([after, after_one], expected, rtol=0, atol=1e-12)


def loses_another(within: bool) -> tuple[tuple[int, ...], list[float], list[float]]:
    """Rank 2 alone has applied an average when rank 1 is lost, and is lost before or within the others' rebuild."""
    with group() as (rank, _):
        net = Numbers()
        outer = Outer(net, 1, groups=[[0, 2], [1], [3, 4]])
        move(net, 1, [0, 1, 0, 2, 2][rank])

        def lost() -> None:
            mr.barrier()  # rank 2 has received
            raise mr.PeerLost("rank 1 is lost", rank=1)

        def cut_off(tensors: dict[str, Tensor], root: int, *, group: mr.Communicator) -> None:
            assert root == 1  # that was rank 2
            if rank == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            for tensor in list(tensors.values())[::2]:
                tensor.fill_(7 + rank)
            group.barrier()

        if rank == 2:
            outer.step()
            mr.barrier()
        else:
            received, outer._receive = outer._receive, lost  # type: ignore[method-assign]
            caught(mr.PeerLost, outer.step)
            outer._receive = received  # type: ignore[method-assign]
        kill_after_others("rank 2 has received", 1, [0, 2, 3, 4])
        caught(mr.PeerLost, mr.barrier)
        agreement = multiring.torch.shrink()
        assert agreement.members == (0, 2, 3, 4)
        if within:
            whole, outer_module.broadcast_parameters = outer_module.broadcast_parameters, cut_off  # type: ignore[assignment]
            caught(mr.PeerLost, lambda: outer.rebuild(agreement))
            outer_module.broadcast_parameters = whole
        else:
            kill_after_others("all have shrunk", 2, [0, 3, 4])
            caught(mr.PeerLost, mr.barrier)
        agreement = multiring.torch.shrink()
        assert agreement.members == (0, 2, 3)
        outer.rebuild(agreement)
        with outer.shared():
            shared = elements(net).tolist()
        outer.finish()
        return outer.group.members, shared, elements(net).tolist()


@pytest.mark.parametrize("within", [False, True])
def test_a_second_loss_before_all_are_rebuilt(within: bool) -> None:
    first, lost, another, *others = run(loses_another, within, world_size=5)
    assert lost.exitcode == another.exitcode == -signal.SIGKILL
    survivors = [first, *others]
    assert not "".join(survivor.error for survivor in survivors)
    assert [survivor.value[0] for survivor in survivors] == [(0,), (1, 2), (1, 2)]
    start = elements(Numbers())
    moved = [
        np.concatenate([change(1, place, number, shape).reshape(-1) for number, shape in enumerate(SHAPES)])
        for place in (0, 2)
    ]
    for survivor in survivors:
        assert survivor.value[1] == start.tolist()  # nothing torn, for what rank 2 had went with it
        np.testing.assert_allclose(survivor.value[2], start.numpy() + (moved[0] + 2 * moved[1]) / 3, rtol=0, atol=1e-12)


def goes_on_to_the_end(dies_in: str, fragments: int, delay: int) -> tuple[list[float], int]:
    """Rank 3 is killed in the last step, after which an exchange is due, or in `finish`; go on as documented."""
    with group() as (rank, _):
        net = Net()
        outer = Outer(net, 3, groups=PAIRS, optimizer=nesterov, fragments=fragments, delay=delay)
        plain = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
        optimizer = DistributedOptimizer(plain, net.named_parameters(), group=outer.group)
        losses = 0

        def die() -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        if (rank, dies_in) == (3, "barrier"):
            outer._communicator.barrier = die  # type: ignore[method-assign]
        while True:
            try:
                if outer.steps == 6:
                    if (rank, dies_in) == (3, "finish"):
                        die()
                    outer.finish()
                    break
                if (rank, outer.steps, dies_in) == (3, 5, "step"):
                    die()
                x, y = batch(outer.steps, rank, 4)
                optimizer.zero_grad()
                F.cross_entropy(net(x), y).backward()
                optimizer.step()
                outer.step(len(x))
            except mr.PeerLost:
                losses += 1
                outer.rebuild(multiring.torch.shrink())
                multiring.torch.sync_state(net, plain, group=outer.group)
                optimizer = DistributedOptimizer(plain, net.named_parameters(), group=outer.group)
        mr.barrier()  # nobody waits in an exchange that others do not make
        return elements(net).tolist(), losses


@pytest.mark.parametrize(("fragments", "delay"), [(1, 0), (1, 2), (3, 1), (2, 7)])
@pytest.mark.parametrize("dies_in", ["step", "finish", "barrier"])
def test_a_loss_at_the_end_is_survived(dies_in: str, fragments: int, delay: int) -> None:
    *survivors, killed = run(goes_on_to_the_end, dies_in, fragments, delay, world_size=4)
    assert killed.exitcode == -signal.SIGKILL
    assert not "".join(survivor.error for survivor in survivors)
    assert survivors[0].value == survivors[1].value == survivors[2].value
    assert survivors[0].value[1] == 1
    assert np.isfinite(survivors[0].value[0]).all()


def is_through_before_others() -> list[float]:
    """Rank 0 has ended `finish`, and rank 1 has not, when rank 2 is lost."""
    with group() as (rank, _):
        net = Numbers()
        outer = Outer(net, 4, groups="rank", optimizer=nesterov)
        move(net, 1, rank)
        outer.step()
        if rank == 1:
            communicator = outer._communicator
            barrier = communicator.barrier

            def lost() -> None:
                barrier()
                raise mr.PeerLost("rank 2 is lost", rank=2)

            communicator.barrier = lost  # type: ignore[method-assign]
            caught(mr.PeerLost, outer.finish)
            communicator.barrier = barrier  # type: ignore[method-assign]
        else:
            outer.finish()
        end = elements(net).tolist()
        kill_after_others("finish has ended", 2, [0, 1])
        caught(mr.PeerLost, mr.barrier)
        outer.rebuild(multiring.torch.shrink())
        if rank == 1:
            outer.finish()  # again, as it has failed here alone
        mr.barrier()
        assert elements(net).tolist() == end
        move(net, 2, rank)
        outer.step()
        outer.finish()
        return elements(net).tolist()


def test_a_loss_after_some_are_through_the_end() -> None:
    first, second, killed = run(is_through_before_others, world_size=3)
    assert killed.exitcode == -signal.SIGKILL
    assert not first.error + second.error
    assert first.value == second.value


def test_the_example_sends_a_tenth_between_groups() -> None:
    printed = succeeds("../../examples/far_groups.py", "--seeds", "1", "--epochs", "2", ranks=4, imports=TORCH)
    rows = re.findall(r"^(\w.*?) +loss \S+   accuracy ([\d.]+)% .* ([\d.]+) MB$", printed, re.MULTILINE)
    found = {name: (float(accuracy), float(sent)) for name, accuracy, sent in rows}
    # 44 steps are as many exchanges, or 4 and the last one.
    whole = found["synchronous"][1]
    for name in ("every 10, momentum", "every 10, averaging"):
        assert abs(found[name][1] / whole - 5 / 44) < 0.02
        assert found[name][0] > 60
    assert found["every 50, averaging"][1] / whole < 0.06
