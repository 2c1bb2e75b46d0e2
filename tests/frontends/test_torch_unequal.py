"""Groups of unequal speed: they exchange after unequal numbers of steps, whoever ends first, is resumed or lost."""

from __future__ import annotations

import io
import os
import signal
import time
from typing import Any, cast

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from outer_numbers import Numbers, elements, everyones, move, nesterov  # noqa: E402
from outer_rule import SHAPES, Rule, change  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch_helpers import Net, batch, caught, group, kill_after_others, same, until_lost  # noqa: E402
from torch_ranks import run, values  # noqa: E402

import multiring as mr  # noqa: E402
import multiring.torch  # noqa: E402
import multiring.torch.outer as outer_module  # noqa: E402
from multiring.torch import DistributedOptimizer, Outer  # noqa: E402
from multiring.training.apart import UnequalRounds  # noqa: E402

pytestmark = pytest.mark.timeout(300)

GROUPS = [[0, 3], [1], [2]]
Array = np.ndarray[Any, Any]


def place_of(rank: int) -> int:
    return next(place for place, ranks in enumerate(GROUPS) if rank in ranks)


def nanoseconds(rank: int, step: int) -> int:
    """Nanoseconds of a step: rank 1 is the slowest at first, ranks 0 and 3 from their step 20 on."""
    if rank in (0, 3):
        return [1000, 9000][step > 20] + rank * 10
    return {1: 3000, 2: 1700}[rank]


def samples_of(rank: int, step: int) -> int:
    return [3, 2, 4, step % 2 * 5][rank]


class Clock:
    """Time of a rank, by which a step takes what the test says, and a wait as long as thousands of steps."""

    def __init__(self, *outers: Outer) -> None:
        self.now = 17
        self.serve(*outers)
        wait = outer_module._FragmentExchange.wait

        def long(exchange: Any) -> None:
            self.now += 10**9
            wait(exchange)

        outer_module._FragmentExchange.wait = long  # type: ignore[method-assign]
        self.restore = lambda: setattr(outer_module._FragmentExchange, "wait", wait)

    def serve(self, *outers: Outer) -> None:
        for outer in outers:
            assert outer._pace is not None
            outer._pace.clock = lambda: self.now


# --- the rule ---

CASES = [
    (2, [[0, 1, 2, 3, 4]], 0, 0.5),
    (4, [[0], [1, 2], [3, 4]], 0, 0.5),
    (5, [[0, 1], [2, 3, 4]], 3, 0.25),
    (1, [[0, 1, 2, 3, 4]], 0, 0.5),
    (2, [[0, 1, 2, 3, 4]], 7, 0.25),
    (3, [[0], [1, 2], [3, 4]], 5, 0.0),
]


def follows_the_rule(rank: int, every: int, fragments: list[list[int]], delay: int, keep: float) -> list[int]:
    rounds, place = 6, place_of(rank)
    rule = Rule(every, fragments, delay, keep, GROUPS, nanoseconds, samples_of)
    for _ in range(rounds * len(fragments) + 1):
        rule.turn()
    for one in rule.groups:
        one.close()
    net = Numbers(first=rank)
    outer = Outer(
        net,
        every,
        groups=GROUPS,
        fragments=len(fragments),
        delay=delay,
        keep=keep,
        optimizer=nesterov,
        unequal=True,
    )
    clock = Clock(outer)
    periods = [outer.period]
    while outer.rounds < rounds:
        step = outer.steps + 1
        clock.now += nanoseconds(rank, step)
        move(net, step, place)
        outer.step(samples_of(rank, step))
        there, period, turns = rule.seen[place][step - 1]
        expected = torch.cat([torch.from_numpy(np.asarray(weight).reshape(-1)) for weight in there])
        torch.testing.assert_close(elements(net), expected, rtol=0, atol=1e-11, msg=lambda m: f"step {step}: {m}")  # noqa: B023
        assert (outer.period, outer._turn) == (period, turns), step
        if turns % len(fragments) == 0 and outer.period != periods[-1]:
            periods.append(outer.period)
        if not delay:
            counted = [sum(rule.counted[part : turns : len(fragments)]) for part in range(len(fragments))]
            assert outer.samples == min(counted)
    outer.finish()
    for other in everyones(elements(net)):
        same(other, elements(net))
    steps = mr.init().all_gather_object(outer.steps)
    assert steps[0] == steps[3]
    assert len({steps[0], steps[1], steps[2]}) > 1
    again = elements(net)
    outer.finish()  # nobody has trained since
    same(elements(net), again)
    clock.restore()
    return periods


def follows_the_rule_in_each_case() -> list[list[int]]:
    with group() as (rank, _):
        return [follows_the_rule(rank, *case) for case in CASES]


def test_fast_groups_make_more_steps_in_a_round() -> None:
    found = values(follows_the_rule_in_each_case, world_size=4)
    # The slowest makes 2 steps: in 3000 ns each, then in 9015, where others take 1015, 3000 and 1700.
    assert [periods[0] for periods in found] == [[2, 6, 2], [2, 6], [2, 4, 11], [2, 6, 2]]


def moved(place: int, first: int, last: int) -> Array:
    """Return the sum of what a group's steps from ``first`` to ``last`` have added."""
    steps = [
        [change(step, place, number, shape).reshape(-1) for number, shape in enumerate(SHAPES)]
        for step in range(first, last + 1)
    ]
    return cast(Array, np.sum([np.concatenate(step) for step in steps], 0))


def ends_before_others() -> tuple[list[float], list[float]]:
    """Both groups make 12 steps, of which ranks 1 and 2 need twice as many in a round; then rank 0 alone makes two."""
    with group() as (rank, _):
        place = min(rank, 1)
        net = Numbers()
        outer = Outer(net, 3, groups=[[0], [1, 2]], unequal=True)
        clock = Clock(outer)

        def train(steps: int) -> None:
            for _ in range(steps):
                clock.now += [2000, 1000, 1000][rank]
                move(net, outer.steps + 1, place)
                outer.step([2, 1, 3][rank])

        train(12)
        assert outer.rounds == [4, 2, 2][rank]
        outer.finish()
        assert (outer.rounds, outer.samples) == (5, 72)
        first = elements(net).tolist()
        train([2, 0, 0][rank])
        outer.finish()
        assert outer.samples == 76
        return first, elements(net).tolist()


def test_a_group_that_has_ended_waits_for_others_and_counts_no_more() -> None:
    x = elements(Numbers()).numpy()
    x = x + (6 * moved(0, 1, 3) + 12 * moved(1, 1, 3)) / 18
    x = x + (6 * moved(0, 4, 6) + 24 * moved(1, 4, 9)) / 30
    x = x + (6 * moved(0, 7, 9) + 12 * moved(1, 10, 12)) / 18
    x = x + moved(0, 10, 12)
    for first, second in values(ends_before_others, world_size=3):
        np.testing.assert_allclose(first, x, rtol=0, atol=1e-12)
        np.testing.assert_allclose(second, x + moved(0, 13, 14), rtol=0, atol=1e-12)


def trains_by_samples() -> tuple[float, int, list[float]]:
    with group() as (rank, _):
        net = Numbers()
        outer = Outer(net, 4, groups=GROUPS, fragments=2, delay=3, unequal=True)
        while outer.samples < 300:
            time.sleep(0.002 * place_of(rank))
            move(net, outer.steps + 1, place_of(rank))
            outer.step(rank + 1)
        outer.finish()
        return outer.samples, outer.steps * (rank + 1), elements(net).tolist()


def test_a_training_ends_by_the_samples_of_all() -> None:
    found = values(trains_by_samples, world_size=4)
    for samples, _, end in found:
        assert samples == sum(mine for _, mine, _ in found) >= 300
        assert end == found[0][2]


# --- with a model, a loss and an optimizer inside ---

PAIRS = [[0, 1], [2, 3]]


def resumes(delay: int) -> None:
    with group() as (rank, _):

        def made() -> tuple[Net, DistributedOptimizer, Outer]:
            net = Net()
            outer = Outer(net, 4, groups=PAIRS, fragments=2, delay=delay, optimizer=nesterov, unequal=True)
            inner = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
            return net, DistributedOptimizer(inner, net.named_parameters(), group=outer.group), outer

        def train(net: Net, optimizer: DistributedOptimizer, outer: Outer, turns: int) -> None:
            while outer._turn < turns or not outer._in_flight:
                x, y = batch(outer.steps, rank, 4)
                optimizer.zero_grad()
                F.cross_entropy(net(x), y).backward()
                optimizer.step()
                clock.now += [1000, 1000, 2500, 2500][rank]
                outer.step(len(x))

        net, optimizer, outer = made()
        clock = Clock(outer)
        train(net, optimizer, outer, 5)
        file = io.BytesIO()
        torch.save([net.state_dict(), optimizer.state_dict(), outer.state_dict()], file)
        train(net, optimizer, outer, 10)
        assert outer.period == [10, 10, 4, 4][rank]
        outer.finish()
        expected, steps, samples = elements(net), outer.steps, outer.samples

        net, optimizer, outer = made()
        clock.serve(outer)
        file.seek(0)
        states = torch.load(file)
        net.load_state_dict(states[0])
        optimizer.load_state_dict(states[1])
        outer.load_state_dict(states[2])
        assert len(outer._in_flight) >= max(1, delay - 5)
        train(net, optimizer, outer, 10)
        outer.finish()
        same(elements(net), expected)
        assert (outer.steps, outer.samples) == (steps, samples)
        equal = Outer(net, 4, groups=PAIRS, fragments=2, delay=delay, optimizer=nesterov)
        assert "this state is of unequal=True, and this Outer has unequal=False" in str(
            caught(ValueError, lambda: equal.load_state_dict(states[2]))
        )
        other = Outer(net, 4, groups=[[0], [1], [2, 3]], fragments=2, delay=delay, optimizer=nesterov, unequal=True)
        assert "this state is of the groups [[0, 1], [2, 3]], and this Outer has [[0], [1], [2, 3]]" in str(
            caught(ValueError, lambda: other.load_state_dict(states[2]))
        )


@pytest.mark.parametrize("delay", [3, 9])
def test_a_resumed_training_equals_one_that_went_on(delay: int) -> None:
    values(resumes, delay, world_size=4)


# --- ranks that are lost ---


def dies_in_a_round() -> list[float]:
    """Rank 2, of the group of ranks 1 and 2 that makes 6 steps while rank 0 makes 3, is killed before its step 7."""
    with group() as (rank, _):
        net = Numbers()
        place = min(rank, 1)
        outer = Outer(net, 3, groups=[[0], [1, 2]], unequal=True)
        clock = Clock(outer)
        while outer.rounds < 3:
            if outer.steps == (6 if rank == 2 else 3):
                kill_after_others("round 1 has ended", 2, [0, 1])
                until_lost()
            clock.now += [2000, 1000, 1000][rank]
            move(net, outer.steps + 1, place)
            try:
                outer.step([2, 1, 3][rank])
            except mr.PeerLost:
                assert outer.steps == 4  # at once, and not at the end of the round
                outer.rebuild(multiring.torch.shrink())
        assert outer.steps == [9, 15][rank]
        outer.finish()
        assert outer.samples == 9 * 2 + 15 + 3 * 3
        return elements(net).tolist()


def test_a_loss_in_a_round_costs_the_steps_of_the_lost_rank_alone() -> None:
    *survivors, killed = run(dies_in_a_round, world_size=3)
    assert killed.exitcode == -signal.SIGKILL
    assert not survivors[0].error + survivors[1].error
    x = elements(Numbers()).numpy()
    x = x + (6 * moved(0, 1, 3) + 12 * moved(1, 1, 3)) / 18
    x = x + (6 * moved(0, 4, 6) + 6 * moved(1, 4, 9)) / 12  # without what rank 2 has done since
    x = x + (6 * moved(0, 7, 9) + 6 * moved(1, 10, 15)) / 12
    for survivor in survivors:
        np.testing.assert_allclose(survivor.value, x, rtol=0, atol=1e-12)


def goes_on_as_documented(dies_in: str, fragments: int, delay: int) -> tuple[list[float], list[int], float]:
    """Rank 3 is killed while the other group is in `finish`, or in its own `finish`, or early."""
    with group() as (rank, _):
        net = Net()
        outer = Outer(net, 3, groups=PAIRS, optimizer=nesterov, fragments=fragments, delay=delay, unequal=True)
        plain = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
        optimizer = DistributedOptimizer(plain, net.named_parameters(), group=outer.group)
        steps = [5, 5, 17, 17][rank]

        def die() -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        if (rank, dies_in) == (3, "barrier"):
            outer._communicator.barrier = die  # type: ignore[method-assign]
        while True:
            try:
                if outer.steps >= steps:
                    if (rank, dies_in) == (3, "finish"):
                        die()
                    outer.finish()
                    break
                if (rank, outer.steps) == (3, {"early": 4, "late": 14}.get(dies_in)):
                    die()
                x, y = batch(outer.steps, rank, 4)
                optimizer.zero_grad()
                F.cross_entropy(net(x), y).backward()
                optimizer.step()
                outer.step(len(x))
            except mr.PeerLost:
                outer.rebuild(multiring.torch.shrink())
                multiring.torch.sync_state(net, plain, group=outer.group)
                optimizer = DistributedOptimizer(plain, net.named_parameters(), group=outer.group)
        mr.barrier()  # nobody waits in an exchange that others do not make
        assert outer.steps == steps
        outer.step(1)
        outer.finish()
        return elements(net).tolist(), list(outer.group.members), outer.samples


@pytest.mark.parametrize(("fragments", "delay"), [(1, 0), (3, 2), (2, 7)])
@pytest.mark.parametrize("dies_in", ["early", "late", "finish", "barrier"])
def test_a_loss_while_others_train_or_have_ended(dies_in: str, fragments: int, delay: int) -> None:
    *survivors, killed = run(goes_on_as_documented, dies_in, fragments, delay, world_size=4)
    assert killed.exitcode == -signal.SIGKILL
    assert not "".join(survivor.error for survivor in survivors)
    assert survivors[0].value[0] == survivors[1].value[0] == survivors[2].value[0]
    assert np.isfinite(survivors[0].value[0]).all()
    assert [survivor.value[1] for survivor in survivors] == [[0, 1], [0, 1], [2]]
    assert survivors[0].value[2] == survivors[1].value[2] == survivors[2].value[2]


# --- what is refused, and the pace by itself ---


def refusals() -> None:
    with group() as (rank, _):
        net = Numbers()
        words = f"unequal is {bool(rank)} here and {not rank} on rank {int(not rank)}: give all ranks the same"
        assert words in str(caught(ValueError, lambda: Outer(net, 2, unequal=bool(rank))))
        error = caught(TypeError, lambda: Outer(net, 2, unequal=cast(Any, 1)))
        assert "unequal=1: it is True where groups are to make unequal numbers of steps, or False" in str(error)
        outer = Outer(net, 2, unequal=True)
        assert "samples=None: with unequal=True groups count by their samples" in str(caught(ValueError, outer.step))
        assert (outer.steps, outer.rounds, outer.samples, outer.period) == (0, 0, 0, 2)
        outer.finish()


def test_what_does_not_go_together_is_refused() -> None:
    values(refusals, world_size=2)


def test_the_pace_of_groups() -> None:
    pace = UnequalRounds(10, 2, 3, 1)
    assert [pace.due(turn) for turn in range(3)] == [5, 10, 15]
    now = 0
    pace.clock = lambda: now
    pace.step()  # not measured, as nobody knows when it began
    pace.go_on()
    for lasted in (400, 90_000, 500, 450, 600):  # with a pause in one of them
        with pace.waiting():
            now += 7000
        now += lasted
        pace.step()
    assert pace.measured(0) == [0] * 6  # not yet the end of the round
    assert pace.measured(1) == [0, 0, 500, 1, 0, 0]
    assert pace.measured(1) == [0] * 6
    pace.sent(0)
    assert (pace.first, pace.begun) == (0, 0)
    pace.sent(1)
    assert (pace.first, pace.begun, pace.period) == (2, 10, 10)
    pace.learn([4000, 1, 4000, 2, 0, 0], 10)
    assert pace.period == 10  # nothing is known of the last group
    pace.learn([0, 0, 0, 0, 3001, 3], 10)
    assert (pace.speeds, pace.period) == ([4000, 2000, 1000], 20)
    assert [pace.due(turn) for turn in (1, 2, 3)] == [10, 20, 30]  # turn 1 if a loss takes it back
    pace.learn([13000, 1, 0, 0, 0, 0], 11)
    assert pace.period == 20  # a round that is being made goes on as it began
    pace.sent(3)
    assert (pace.first, pace.begun, pace.period) == (4, 30, 65)
    pace.survive([13000, 2000, 3000], [1, 2], 4, 31)
    assert (pace.first, pace.begun, pace.period) == (4, 30, 65)
    pace.survive([13000, 2000, 3000], [1, 2], 9, 35)  # others were brought on by `finish`
    assert (pace.first, pace.begun, pace.period) == (8, 35, 15)
    assert pace.due(9) == 50
    with pytest.raises(ValueError, match="has no speeds, round, measured"):
        pace.check({})
