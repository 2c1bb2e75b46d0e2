"""Outer optimization where ranks differ: in what they load, and in what moves the shared values."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from outer_numbers import Numbers, elements, everyones, move, nesterov  # noqa: E402
from outer_rule import SHAPES, change, weights  # noqa: E402
from torch_helpers import caught, group, kill_after_others, same, until_lost  # noqa: E402
from torch_ranks import run, values  # noqa: E402

import multiring as mr  # noqa: E402
import multiring.torch  # noqa: E402
from multiring.torch import Outer  # noqa: E402
from multiring.training.shared import Array, SharedParameters  # noqa: E402

pytestmark = pytest.mark.timeout(300)


def loads_what_others_do_not(delay: int) -> None:
    """Rank 1 gives other states than ranks 0 and 2."""
    with group() as (rank, _):
        net = Numbers()
        outer = Outer(net, 2, groups="rank", optimizer=nesterov, delay=delay)
        states = []
        for step in range(1, 8):
            move(net, step, rank)
            outer.step(samples=step + rank)
            states.append(outer.state_dict())
        before = outer.state_dict()["shared"]["weights.1"]

        def refused(words: str, change: Callable[[dict[str, Any]], object] = lambda state: None, at: int = 6) -> None:
            state = copy.deepcopy(states[at if rank == 1 else 6])
            if rank == 1:
                change(state)
            error = str(caught(ValueError, lambda: outer.load_state_dict(state)))
            assert error.startswith(words), error
            assert error.endswith("give load_state_dict() the states of one checkpoint on all ranks")
            same(outer.state_dict()["shared"]["weights.1"], before)

        broken = copy.deepcopy(states[6])
        if rank == 1:
            del broken["pace"]
        told = "this is no state of multiring.torch.Outer, since it has no pace: give what its state_dict() returned"
        error = str(caught(ValueError, lambda: outer.load_state_dict(broken)))
        assert error == (told if rank == 1 else f"rank 1 has raised: {told}")
        same(outer.state_dict()["shared"]["weights.1"], before)
        refused("number of exchanges sent: 3 on rank 0 and 2 on rank 1: ", at=4)
        refused("steps: 7 on rank 0 and 6 on rank 1: ", at=5)
        refused("samples given to step(): True on rank 0 and False on rank 1: ", lambda s: s.update(by_samples=False))
        shared, state = f"shared values after exchange {3 - len(outer._in_flight)}: ", "state of the outer optimizer"
        refused(shared, lambda s: s["shared"]["weights.1"][0, 1].add_(1 / 4))
        refused(state, lambda s: s["optimizer"]["state"][3]["momentum_buffer"][2, 0].add_(1 / 4))
        if delay:
            number, due = 3, 9
            refused(
                f"exchanges on their way and when they are due: [({number - 1}, {due})] on rank 0 and []",
                lambda s: s.update(in_flight=[]),
            )
            refused(f"sums of exchange {number}: ", lambda s: s["in_flight"][0][5][0][4].add_(9))
        outer.load_state_dict(states[6])
        move(net, 8, rank)
        outer.step(samples=8)
        outer.finish()
        for other in everyones(elements(net)):
            same(other, elements(net))


@pytest.mark.parametrize("delay", [0, 3])
def test_different_states_are_refused_on_all_ranks(delay: int) -> None:
    values(loads_what_others_do_not, delay, world_size=3)


def unequal_groups_load() -> None:
    """Groups that are at different steps, one of which has applied an exchange more, load what they have saved."""
    with group() as (rank, _):
        net = Numbers()
        outer = Outer(net, 2, groups="rank", optimizer=nesterov, delay=3, unequal=True)
        assert outer._pace is not None
        clock = iter(range(0, 10**9, 1000 * (1 + rank)))
        outer._pace.clock = lambda: next(clock)
        for step in range(1, 13 if rank else 14):
            move(net, step, rank)
            outer.step(samples=1)
            if outer.rounds == 4:
                break
        state = outer.state_dict()
        told = mr.init().all_gather_object((state["steps"], len(state["in_flight"])))
        assert told[0] != told[1]
        outer.load_state_dict(state)
        if rank:
            state["shared"]["weights.4"][1] += 1
            for number, exchange in enumerate(state["in_flight"]):
                exchange[5][0][number] += 1
        assert "of exchange" in str(caught(ValueError, lambda: outer.load_state_dict(state)))


def test_unequal_groups_may_load_different_steps() -> None:
    values(unequal_groups_load)


def loads_into_other_groups(unequal: bool, other: list[list[int]]) -> None:
    """Ranks of a group would have what several have trained, unless all have the same; groups' speeds are of groups."""
    with group() as (rank, _):
        given = [[0, 1], [2]]
        net = Numbers()
        outer = Outer(net, 4, groups=given, optimizer=nesterov, fragments=2, unequal=unequal)
        for step in range(1, 4):
            move(net, step, rank // 2)
            outer.step(samples=1)
        loaded = Outer(Numbers(), 4, groups=other, optimizer=nesterov, fragments=2, unequal=unequal)
        before = loaded.state_dict()["shared"]["weights.1"]
        told = (
            f"this state is of the groups {given}, and this Outer has {other}: the ranks of a group have to go on from "
        )
        error = str(caught(ValueError, lambda: loaded.load_state_dict(outer.state_dict())))
        assert error.startswith(told)
        assert error.endswith("so give the same groups" + ("" if unequal else ", or save the state after finish()"))
        same(loaded.state_dict()["shared"]["weights.1"], before)
        outer.finish()
        state = outer.state_dict()
        if unequal:
            assert told in str(caught(ValueError, lambda: loaded.load_state_dict(state)))
        else:
            loaded.load_state_dict(state)
            same(loaded.state_dict()["shared"]["weights.1"], dict(net.named_parameters())["weights.1"])
            assert loaded.steps == 3


@pytest.mark.parametrize("unequal", [False, True])
@pytest.mark.parametrize("other", [[[0, 1, 2]], [[0], [1, 2]], [[0], [1], [2]]])
def test_a_state_of_other_groups_is_refused_on_all_ranks(unequal: bool, other: list[list[int]]) -> None:
    values(loads_into_other_groups, unequal, other, world_size=3)


def differs_in_what_moves(fragments: int, delay: int) -> int:
    """Rank 2 sets another rate of the outer optimizer: the number of the step that tells it."""
    with group() as (rank, _):
        net = Numbers()
        outer = Outer(net, 2, groups=[[0, 1], [2]], optimizer=nesterov, fragments=fragments, delay=delay)
        if rank == 2:
            outer.optimizer.param_groups[0]["lr"] = 0.71
        for step in range(1, 20):
            move(net, step, rank // 2)
            try:
                outer.step()
            except ValueError as error:
                assert "ranks have different shared values, after an exchange that gave all the same" in str(error)  # noqa: PT017
                return step
        return 0


@pytest.mark.parametrize(
    ("fragments", "delay", "step"),
    # What the first exchange has moved is compared by the next one of the part, or by the first not sent before.
    [(1, 0, 4), (2, 0, 3), (1, 1, 5), (1, 3, 9), (2, 5, 12)],
)
def test_values_that_move_otherwise_are_told_on_all_ranks(fragments: int, delay: int, step: int) -> None:
    assert values(differs_in_what_moves, fragments, delay, world_size=3) == [step] * 3


def differs_beside_a_mask() -> int:
    """Rank 1 sets another rate; a buffer is so large that parameters are nothing beside it."""
    with group() as (rank, _):
        net = Numbers()
        net.register_buffer("mask", torch.full((64, 64), -1e9))
        net.register_buffer("huge", torch.full((3,), 1e200, dtype=torch.float64))
        outer = Outer(net, 2, groups="rank", optimizer=nesterov)
        if rank == 1:
            outer.optimizer.param_groups[0]["lr"] = 0.71
        for step in range(1, 20):
            move(net, step, rank)
            try:
                outer.step()
            except ValueError as error:
                assert "ranks have different shared values" in str(error)  # noqa: PT017
                return step
        return 0


def test_values_are_compared_beside_a_mask() -> None:
    assert values(differs_beside_a_mask) == [4, 4]


def loads_other_moments() -> None:
    """Rank 1 loads other moments of Adam, which are small beside its count of steps; then a buffer that differs."""
    with group() as (rank, _):
        net = Numbers()
        net.register_buffer("mean", torch.full((3,), 1e-6))
        outer = Outer(net, 2, groups="rank", optimizer=lambda parameters: torch.optim.Adam(parameters, 1e-3))
        for _ in range(5):
            with torch.no_grad():
                for weight in net.parameters():
                    weight.add_(1e-6 * (1 + rank))
            outer.step()
        state = outer.state_dict()
        for name in ("exp_avg", "exp_avg_sq", "step"):
            other = copy.deepcopy(state)
            if rank:
                other["optimizer"]["state"][2][name].mul_(3)
            error = str(caught(ValueError, lambda: outer.load_state_dict(other)))  # noqa: B023
            assert error.startswith(f"state of the outer optimizer after exchange 2, {name}: "), error
        other = copy.deepcopy(state)
        if rank:
            other["shared"]["mean"][1] = 2e-6
        error = str(caught(ValueError, lambda: outer.load_state_dict(other)))
        assert error.startswith("shared buffers after exchange 2: "), error
        outer.load_state_dict(state)


def test_other_moments_of_the_outer_optimizer_are_refused() -> None:
    values(loads_other_moments)


def rounds_otherwise() -> None:
    """Rank 1 rounds each outer step otherwise, as another kind of processor may."""
    with group() as (rank, _):
        net = Numbers().float()
        outer = Outer(net, 1, groups="rank", optimizer=nesterov)
        for step in range(1, 41):
            move(net, step % 7, rank)
            outer.step()
            if rank:
                for fragment in outer._fragments:
                    for entry in fragment:
                        entry.shared.mul_(1 + 2**-23)
        first, second = everyones(elements(net))
        assert not torch.equal(first, second)


def test_values_that_are_rounded_otherwise_are_not_refused() -> None:
    values(rounds_otherwise)


def of_other_front_ends() -> None:
    """`SharedParameters`, which JAX and Keras have: rank 1 loads another state, then moves otherwise."""
    with group() as (rank, _):
        rate = 1.0

        def moved(shared: list[Array], mean: list[Array]) -> list[Array]:
            return [np.asarray(value - rate * each) for value, each in zip(shared, mean, strict=True)]

        def made() -> tuple[SharedParameters, list[Array]]:
            parameters = SharedParameters(mr.init(), 2, "rank", delay=3)
            own = weights()
            parameters.begin([str(number) for number in range(len(own))], own, moved)
            return parameters, own

        def train(parameters: SharedParameters, own: list[Array], first: int, last: int) -> list[Array]:
            for step in range(first, last):
                own = [
                    x + change(step, rank, each, shape) for each, (x, shape) in enumerate(zip(own, SHAPES, strict=True))
                ]
                own = parameters.step(step, lambda: own) or own  # noqa: B023
            return own

        parameters, own = made()
        own = train(parameters, own, 1, 8)
        state = parameters.state()
        for name, index, words in (("1", (0, 2), "shared values after exchange 2: "), ("4", 3, "shared values after")):
            other = copy.deepcopy(state)
            if rank:
                other["shared"][name][index] += 1
            error = caught(ValueError, lambda: parameters.load(other))  # noqa: B023
            assert str(error).startswith(words)
        numbers = [("counts", np.array([1e9])), ("arrays", np.array([2.0, 3.0 + rank]))]
        assert "state of the outer optimizer after exchange 2, arrays: " in str(
            caught(ValueError, lambda: parameters.load(state, lambda: numbers))
        )
        other = copy.deepcopy(state)
        if rank:
            other["in_flight"][0][3][0][5] += 7
        assert "sums of exchange 3: " in str(caught(ValueError, lambda: parameters.load(other)))
        own = train(parameters, own, 8, 9)
        other = state if rank else parameters.state()
        assert "number of exchanges sent: 4 on rank 0 and 3 on rank 1" in str(
            caught(ValueError, lambda: parameters.load(other))
        )

        parameters, own = made()
        rate = 1 + rank / 64
        error = caught(ValueError, lambda: train(parameters, own, 1, 30))
        assert "ranks have different shared values" in str(error)
        assert parameters.steps == 9  # the third exchange, the first begun after the first one was applied, comes then


def test_other_front_ends_tell_it_too() -> None:
    values(of_other_front_ends)


def makes_other_optimizers() -> None:
    """Rank 1 has an outer optimizer that others have not; afterwards all agree."""
    with group() as (rank, _):
        net = Numbers()
        sgd = torch.optim.SGD
        for words, own, others in (
            ("class: torch.optim.sgd.SGD on rank 0 and torch.optim.adam.Adam on rank 1: ", torch.optim.Adam, sgd),
            ("lr of the outer optimizer's group 0: 0.5 on rank 0 and 0.7 on rank 1: ", nesterov, lambda p: sgd(p, 0.5)),
            (
                "momentum of the outer optimizer's group 0: 0 on rank 0 and 0.9 on rank 1",
                nesterov,
                lambda p: sgd(p, 0.7),
            ),
            ("lr of the outer optimizer's group 0: 1.0 on rank 0 and 0.7 on rank 1", nesterov, None),
            (
                "lr of the outer optimizer's group 0: 0.0625 on rank 0 and 0.125 on rank 1",
                lambda p: sgd(p, torch.tensor(0.125)),
                lambda p: sgd(p, torch.tensor(0.0625)),
            ),
            (
                "groups of the outer optimizer: 1 on rank 0 and 2 on rank 1",
                lambda p: sgd([{"params": p[:3]}, {"params": p[3:]}], 0.5),
                lambda p: sgd(p, 0.5),
            ),
        ):
            error = caught(ValueError, lambda: Outer(net, 2, optimizer=own if rank == 1 else others))  # noqa: B023
            assert words in str(error), error
            assert "give all ranks the same optimizer" in str(error)
        outer = Outer(net, 2, optimizer=nesterov)
        state = outer.state_dict()
        if rank == 1:
            state["optimizer"]["param_groups"][0]["lr"] = 0.75
        assert "lr of the outer optimizer's group 0 after exchange 0: 0.7 on rank 0 and 0.75 on rank 1" in str(
            caught(ValueError, lambda: outer.load_state_dict(state))
        )


def test_other_optimizers_are_refused_on_all_ranks() -> None:
    values(makes_other_optimizers, world_size=3)


def loads_what_a_loss_left_apart() -> int:
    """Rank 1 is lost when rank 2, a group of its own, is a step ahead: all save at once, load that, and go on."""
    with group() as (rank, _):
        net = Numbers()
        outer = Outer(net, 4, groups=[[0, 1], [2]], optimizer=nesterov)
        for step in range(1, 7 if rank == 2 else 6):
            move(net, step, rank // 2)
            outer.step()
        kill_after_others("rank 2 is ahead", 1, [0, 2])
        until_lost()
        agreement = multiring.torch.shrink()
        assert "call rebuild() with what shrink() has returned" in str(caught(mr.MultiringError, outer.step))
        outer.rebuild(agreement)
        steps = outer.steps
        assert steps == 5 + rank // 2  # the refused step was not counted
        state = outer.state_dict()
        move(net, 11, rank)
        outer.load_state_dict(state)
        while outer.steps < 12:
            move(net, outer.steps + 1, rank)
            outer.step()
        outer.load_state_dict(outer.state_dict())
        outer.finish()
        for other in everyones(elements(net)):
            same(other, elements(net))
        return steps


def test_states_that_a_loss_left_apart_are_loaded() -> None:
    zero, _, two = run(loads_what_a_loss_left_apart, world_size=3)
    assert not zero.error + two.error
    assert (zero.value, two.value) == (5, 6)
