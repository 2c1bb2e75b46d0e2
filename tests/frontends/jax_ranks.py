"""The ranks of the JAX tests: each function is one test, named on the command line."""

from __future__ import annotations

import functools
import os
import pickle
import re
import sys
import time
from typing import Any

import disagreeing
import jax
import jax.numpy as jnp
import losing
import numpy as np
import optax
import pytest
from contributions import everyone, own
from outer_rule import SHAPES, Rule, change, weights
from sklearn.datasets import load_digits
from workers import run, worker

import multiring as mr
import multiring.jax as mrj
from multiring import recipes
from multiring.training import shared as shared_module

jax.config.update("jax_enable_x64", True)
mr.init()
RANK, SIZE = mr.rank(), mr.world_size()


def same(actual, expected) -> None:
    np.testing.assert_array_equal(np.asarray(actual, np.asarray(expected).dtype), expected)


@worker
def collectives() -> None:
    for wrap in (lambda f: f, jax.jit):
        for dtype in ("float32", "float64", "bfloat16", "float16", "int8", "uint32", "int64", "complex64"):
            for count in (0, 1, 1000) if dtype == "float32" else (1000,):
                mine, all_of_them = jnp.asarray(own(RANK, count, dtype)), everyone(SIZE, count, dtype)
                same(wrap(mrj.all_reduce)(mine), all_of_them.sum(0))
                same(mine, own(RANK, count, dtype))  # it may be used further
                same(wrap(lambda x: mrj.broadcast(x, SIZE - 1))(mine), all_of_them[-1])
                same(wrap(mrj.all_gather)(mine), all_of_them)
        same(wrap(lambda x: mrj.all_reduce(x, "max"))(own(RANK, 99)), everyone(SIZE, 99).max(0))
        same(
            wrap(lambda x: mrj.all_reduce(x, "bor"))(own(RANK, 99, "int64")),
            np.bitwise_or.reduce(everyone(SIZE, 99, "int64")),
        )
        same(wrap(mrj.reduce_scatter)(own(RANK, 4 * SIZE)), everyone(SIZE, 4 * SIZE).sum(0).reshape(SIZE, 4)[RANK])
        same(
            wrap(mrj.all_to_all)(own(RANK, 4 * SIZE)), everyone(SIZE, 4 * SIZE).reshape(SIZE, SIZE, 4)[:, RANK].ravel()
        )
        same(wrap(mrj.broadcast)(np.uint32([7, 2**32 - 1 - RANK])), np.uint32([7, 2**32 - 1]))
        same(jax.vmap(wrap(mrj.all_reduce))(own(RANK, 12).reshape(3, 4)), everyone(SIZE, 12).sum(0).reshape(3, 4))
    donating = jax.jit(mrj.all_reduce, donate_argnums=0)
    same(donating(jnp.asarray(own(RANK, 1000))), everyone(SIZE, 1000).sum(0))
    mrj.barrier()


@worker
def groups() -> None:
    group = mr.new_group([SIZE - 1, 0])
    if group is not None:
        reduce = jax.jit(lambda x: mrj.all_reduce(x, group=group))
        same(reduce(own(RANK, 10)), own(0, 10) + own(SIZE - 1, 10))
        group.close()
        with pytest.raises(jax.errors.JaxRuntimeError, match="is closed"):
            jax.block_until_ready(reduce(own(RANK, 10)))


@worker
def joined_again() -> None:
    """A compiled function keeps the communicator that it was compiled with, until JAX's caches are cleared."""
    reduce = jax.jit(lambda x: mrj.all_reduce(x))
    same(reduce(own(RANK, 10)), everyone(SIZE, 10).sum(0))
    mr.shutdown()
    mr.init()
    with pytest.raises(jax.errors.JaxRuntimeError, match="multiring is not initialised"):
        jax.block_until_ready(reduce(own(RANK, 10)))
    jax.clear_caches()
    same(reduce(own(RANK, 10)), everyone(SIZE, 10).sum(0))


@worker
def left_with_steps_on_their_way() -> None:
    """``shutdown`` waits for what was dispatched, here behind a computation that takes rank 0 some time."""
    step = jax.jit(lambda x: mrj.all_reduce(x) + 0 * jnp.linalg.matrix_power(jnp.eye(300), 2 if RANK else 99).sum())
    x = jnp.asarray(own(RANK, 10))
    for _ in range(4):
        x = step(x)
    mr.shutdown()
    same(x, everyone(SIZE, 10).sum(0) * SIZE**3)
    mr.init()
    jax.clear_caches()


@worker
def overtaken() -> None:
    """A call of NumPy's in the place of one that JAX makes is a Mismatch, though both sum as many numbers."""
    reduce = jax.jit(lambda x: mrj.all_reduce(x))
    if RANK == 0:
        with pytest.raises(jax.errors.JaxRuntimeError) as error:
            jax.block_until_ready(reduce(own(RANK, 10)))
    else:
        with pytest.raises(mr.Mismatch) as error:
            mr.all_reduce(own(RANK, 10))
    assert "1 array: of a JAX program" in str(error.value)
    disagreeing.new_job()
    jax.clear_caches()


@worker
def ends_by_itself() -> None:
    """Rank 1 sums more numbers than the others, and each rank ends as JAX raises it."""
    try:
        jax.block_until_ready(jax.jit(mrj.all_reduce)(own(RANK, 10 + (RANK == 1))))
    except jax.errors.JaxRuntimeError:
        time.sleep(0.1 * RANK)
        os._exit(3)


@worker
def failed_before() -> None:
    """A call fails in a thread of XLA; the next job, begun in this process, knows nothing of it."""
    ones = np.ones((1500, 1500), np.float32)  # enough for XLA to work in a thread of its own

    @jax.jit
    def step(x, ones):
        return jax.lax.fori_loop(0, 3, lambda i, x: mrj.all_reduce(x) + (ones @ ones).max() * 0, x)

    for restart in range(2):
        result = step(own(RANK, 3 + RANK), ones)
        with pytest.raises(jax.errors.JaxRuntimeError, match="Mismatch"):
            jax.block_until_ready(result)
        with pytest.raises(jax.errors.JaxRuntimeError, match="Mismatch"):
            jax.effects_barrier()  # JAX keeps the failure
        mr.shutdown()
        mr.init()
        jax.clear_caches()
        if restart == 0:
            mrj.barrier()
        same(jax.jit(mrj.all_reduce)(own(RANK, 10)), everyone(SIZE, 10).sum(0))
        jax.effects_barrier()
    mrj.barrier()


@worker
def derivatives() -> None:
    """Against central differences of the sum of all ranks' functions."""
    weights = jnp.asarray(own(RANK, 2 * SIZE, "float64") + 1)
    functions = {
        "sum": lambda x: (mrj.all_reduce(jnp.sin(x)) ** 2 * weights).sum(),
        "avg": lambda x: (mrj.all_reduce(jnp.sin(x), "avg") ** 2 * weights).sum(),
        "broadcast": lambda x: (mrj.broadcast(x, 1) ** 2 * weights).sum(),
        "gather": lambda x: (mrj.all_gather(x) ** 2 * weights).sum(),
        "scatter": lambda x: (mrj.reduce_scatter(x) ** 2 * (1.0 + RANK)).sum(),
        "scatter avg": lambda x: (mrj.reduce_scatter(x, "avg") ** 2 * (1.0 + RANK)).sum(),
        "exchange": lambda x: (mrj.all_to_all(x) ** 2 * weights).sum(),
    }
    x = jnp.asarray(own(RANK, 2 * SIZE, "float64") / 3)
    direction = np.random.default_rng(RANK).normal(size=2 * SIZE)
    for name, function in functions.items():
        total = jax.jit(lambda x, function=function: mrj.all_reduce(function(x)))
        for gradient in (jax.grad(function), jax.jit(jax.grad(function)), jax.grad(jax.checkpoint(function))):
            found = gradient(x)
            for rank in range(SIZE):
                nudge = 1e-5 * direction * (rank == RANK)
                slope = (total(x + nudge) - total(x - nudge)) / 2e-5
                if rank == RANK:
                    np.testing.assert_allclose(found @ direction, slope, atol=1e-6, err_msg=name)
            if name != "sum":
                break
    with pytest.raises(NotImplementedError, match="max has no derivative"):
        jax.grad(lambda x: mrj.all_reduce(x, "max").sum())(x)


@worker
def without_jit() -> None:
    """A program that is looked into without jit makes the same calls, and has the same derivatives."""
    weights = jnp.asarray(own(RANK, 4 * SIZE) + 1)
    step = jax.jit(lambda x: (mrj.all_reduce(x) + mrj.broadcast(x, SIZE - 1), mrj.reduce_scatter(x), mrj.all_gather(x)))
    slope = jax.jit(jax.grad(lambda x: (mrj.all_reduce(x, "avg") ** 2 * weights).sum()))
    x = own(RANK, 4 * SIZE)
    expected, expected_slope = step(x), slope(x)
    with jax.disable_jit():
        total, block, gathered = step(x)
        same(total, everyone(SIZE, 4 * SIZE).sum(0) + own(SIZE - 1, 4 * SIZE))
        same(block, expected[1])
        same(gathered, everyone(SIZE, 4 * SIZE))
        np.testing.assert_allclose(slope(x), expected_slope, rtol=1e-6)
        same(jax.lax.fori_loop(0, 2, lambda i, x: mrj.all_reduce(x), jnp.ones(2)), np.full(2, float(SIZE) ** 2))
        same(mrj.broadcast_parameters({"w": x}, root=1)["w"], own(1, 4 * SIZE))
        mrj.barrier()


@worker
def loops() -> None:
    def body(carry, number):
        total = mrj.all_reduce(carry + number * RANK, "avg")
        return total, mrj.all_gather(jnp.float64(RANK) + number)

    last, seen = jax.jit(lambda x: jax.lax.scan(body, x, jnp.arange(4.0)))(jnp.zeros(3))
    same(last, np.full(3, 6 * (SIZE - 1) / 2))
    same(seen, np.arange(4.0)[:, None] + np.arange(SIZE))
    slope = jax.jit(jax.grad(lambda x: jax.lax.scan(body, x, jnp.arange(4.0))[0].sum()))(jnp.zeros(3))
    np.testing.assert_allclose(slope, np.ones(3))
    same(jax.lax.fori_loop(0, 3, lambda i, x: mrj.all_reduce(x), jnp.ones(2)), np.full(2, float(SIZE) ** 3))


@worker
def order() -> None:
    """Independent collectives of one shape, ready at different times on different ranks, are not mixed up."""

    def slow(x, steps):
        for _ in range(steps):
            x = jnp.tanh(x @ x)
        return x.sum() * 0

    @jax.jit
    def both(x):
        first = slow(x, 8 * (RANK % 2)) + 1 + RANK
        second = slow(x + 1, 8 * (1 - RANK % 2)) + 10 * (1 + RANK)
        return [mrj.all_reduce(part + i) for i in range(3) for part in (first, second)]

    one = jax.jit(lambda x: mrj.all_reduce(slow(x, 8 * (RANK % 2)) + 1 + RANK))
    other = jax.jit(lambda x: mrj.all_reduce(slow(x, 8 * (1 - RANK % 2)) + 10 * (1 + RANK)))
    total, x = SIZE * (SIZE + 1) / 2, jnp.eye(200)
    for _ in range(10):
        same(jnp.stack(both(x)), [part + i * SIZE for i in range(3) for part in (total, 10 * total)])
        same(jnp.stack([one(x), other(x)]), [total, 10 * total])  # dispatched without waiting in between


@worker
def trees() -> None:
    tree = {"a": own(RANK, 3), "b": [own(RANK, 4, "float64").reshape(2, 2), RANK], "key": jax.random.PRNGKey(RANK)}
    received = mrj.broadcast_parameters(tree, root=1)
    same(received["a"], own(1, 3))
    same(received["b"][0], own(1, 4, "float64").reshape(2, 2))
    same(received["b"][1], 1)
    same(received["key"], jax.random.PRNGKey(1))
    weights = np.arange(1.0, SIZE + 1)
    gradients = {"a": own(RANK, 5), "b": own(RANK, 700, "float64").reshape(7, 100), "c": own(RANK, 1)[0]}
    for bucket_bytes in (1, 1 << 20):
        plain = jax.jit(lambda g, size=bucket_bytes: mrj.average(g, bucket_bytes=size))(gradients)
        np.testing.assert_allclose(plain["b"].ravel(), everyone(SIZE, 700, "float64").mean(0), rtol=1e-12)
        mean = jax.jit(lambda g, w, size=bucket_bytes: mrj.average(g, weight=w, bucket_bytes=size))(
            gradients, weights[RANK]
        )
        np.testing.assert_allclose(
            mean["b"].ravel(), np.average(everyone(SIZE, 700, "float64"), 0, weights), rtol=1e-12
        )
        np.testing.assert_allclose(mean["a"], np.average(everyone(SIZE, 5), 0, weights), rtol=1e-6)
        assert mean["c"].shape == ()
    alone = jnp.float32(7.5 if RANK == 1 else jnp.nan)
    for wrap in (lambda f: f, jax.jit):
        same(wrap(lambda x, w: mrj.average(x, weight=w))(alone, 3 * (RANK == 1)), 7.5)  # weight 0: only listens
        assert np.isnan(wrap(lambda x: mrj.average(x, weight=0))(jnp.ones(2))).all()


@worker
def recipe_as_schedule() -> None:
    """Optax takes the table of a schedule, inside jit."""
    schedule = recipes.scaled(recipes.warm_up(recipes.cosine(8), 4, start=0.25), 0.2)
    rates = jnp.asarray(recipes.table(schedule, 10))
    optimizer = optax.chain(mrj.all_reduce_gradients(), optax.sgd(lambda step: rates[step]))
    state = optimizer.init(jnp.zeros(3))
    update = jax.jit(optimizer.update)
    for step in range(10):
        change, state = update(jnp.arange(3.0) + RANK, state)
        np.testing.assert_allclose(change, -schedule(step) * (np.arange(3) + (SIZE - 1) / 2), rtol=1e-12)


OUTER_GROUPS = [[1], [0, *range(2, SIZE)]]
OUTER_STEPS, EVERY = 7, 3


def moved(rank: int, step: int, params: dict[str, Any]) -> dict[str, Any]:
    """A step of a rank's group: it hangs on the group, the step, the index and the values."""
    group = next(number for number, ranks in enumerate(OUTER_GROUPS) if rank in ranks)
    return {name: x * 0.5 + (group + 1) * step * np.arange(x.size).reshape(x.shape) for name, x in params.items()}


def as_one_process() -> dict[str, Any]:
    """Parameters after all steps and a last exchange, by the rule of DiLoCo with momentum 0.5 and rate 0.25."""
    shared = {"b": np.arange(2.0), "w": np.arange(6.0).reshape(2, 3)}
    momentum = {name: np.zeros_like(x) for name, x in shared.items()}
    own, samples = [shared] * SIZE, np.zeros(SIZE)
    for step in range(1, OUTER_STEPS + 1):
        own = [moved(rank, step, params) for rank, params in enumerate(own)]
        samples += np.arange(SIZE) + 1
        if step % EVERY == 0 or step == OUTER_STEPS:
            for name, x in shared.items():
                change = sum(samples[rank] * (x - own[rank][name]) for rank in range(SIZE)) / samples.sum()
                momentum[name] = 0.5 * momentum[name] + change
            shared = {name: x - 0.25 * momentum[name] for name, x in shared.items()}
            own, samples = [shared] * SIZE, np.zeros(SIZE)
    return shared


@worker
def trains_apart() -> None:
    own_start = {"b": jnp.arange(2.0) + RANK, "w": jnp.arange(6.0).reshape(2, 3) * (RANK + 1)}
    optimizer = optax.sgd(0.25, momentum=0.5)
    outer = mrj.Outer(own_start, EVERY, groups=OUTER_GROUPS, optimizer=optimizer)
    (mine,) = (sorted(ranks) for ranks in OUTER_GROUPS if RANK in ranks)
    assert (outer.group.size, outer.group.rank) == (len(mine), mine.index(RANK))
    params = outer.shared
    for step in range(1, OUTER_STEPS + 1):
        if step == 5:  # goes on from what was saved in the middle of a round
            saved = outer.state_dict()
            outer = mrj.Outer(own_start, EVERY, groups=OUTER_GROUPS, optimizer=optimizer)
            outer.load_state_dict(saved)
        before = moved(RANK, step, params)
        params = outer.step(before, samples=RANK + 1)
        if step % EVERY:
            assert params is before
        else:
            same(params["w"], outer.shared["w"])
    params = outer.finish(params)
    expected = as_one_process()
    for name, x in params.items():
        np.testing.assert_allclose(x, expected[name], rtol=1e-12)
        same(mrj.all_gather(x), np.stack([x] * SIZE))
    same(outer.finish(params)["w"], params["w"])  # nobody has trained since


LATE = [(2, 1, 0.25), (3, 3, 0.0), (2, 7, 0.25), (1, 0, 0.5)]
"""Steps between exchanges, the delay, and the part that is kept."""


def duration(rank: int, step: int) -> int:
    """Nanoseconds of a step: rank 1 is slower at first, and faster from its step 5 on."""
    return [1000, [2600, 300][step > 4], 1020][rank]


def samples_of(rank: int, step: int) -> int:
    return [3, 2, step % 2 * 5][rank]


class Clock:
    """Time of this rank, by which a step takes what the test says, and a wait as long as thousands of steps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 17
        wait = shared_module._ParameterExchange.wait

        def long(exchange: Any) -> None:
            self.now += 10**9
            wait(exchange)

        monkeypatch.setattr(shared_module._ParameterExchange, "wait", long)

    def serve(self, outer: mrj.Outer) -> None:
        if outer._exchange._pace is not None:
            outer._exchange._pace.clock = lambda: self.now


def follows_the_rule(clock: Clock, every: int, delay: int, keep: float, unequal: bool) -> list[int]:
    rounds = 9
    place = next(number for number, ranks in enumerate(OUTER_GROUPS) if RANK in ranks)
    lasts = duration if unequal else lambda rank, step: 1000
    rule = Rule(every, [[0, 1, 2, 3, 4]], delay, keep, OUTER_GROUPS, lasts, samples_of)
    for _ in range(rounds + 1):
        rule.turn()

    def made() -> mrj.Outer:
        optimizer = optax.sgd(0.7, momentum=0.9, nesterov=True)
        mine = [jnp.asarray(weight) for weight in weights(RANK)]
        given = {"optimizer": optimizer, "delay": delay, "keep": keep, "unequal": unequal}
        outer = mrj.Outer(mine, every, groups=OUTER_GROUPS, **given)
        clock.serve(outer)
        return outer

    outer = made()
    params, periods, resumed = outer.shared, [outer.period], False
    while outer.rounds < rounds:
        step = outer.steps + 1
        clock.now += lasts(RANK, step)
        params = [x + change(step, place, number, SHAPES[number]) for number, x in enumerate(params)]
        params = outer.step(params, samples_of(RANK, step))
        there, period, turns = rule.seen[place][step - 1]
        for x, expected in zip(params, there, strict=True):
            np.testing.assert_allclose(x, expected, rtol=0, atol=1e-11, err_msg=f"step {step}")
        assert (outer.period, outer.rounds) == (period, turns), step
        if not delay:
            assert outer.samples == sum(rule.counted[:turns])
        if outer.period != periods[-1]:
            periods.append(outer.period)
        if outer.rounds == 5 and not resumed:  # goes on from what was saved, with what is on its way
            saved, resumed = pickle.dumps(outer.state_dict()), True
            outer = made()
            outer.load_state_dict(pickle.loads(saved))
            if unequal:
                outer._exchange._pace.go_on()  # the step after a start is not measured, and the rule measures all
            assert len(outer._exchange._in_flight) >= (delay > 0)
    params = outer.finish(params)
    for x in params:
        same(mrj.all_gather(x), np.stack([x] * SIZE))
    steps = mr.init().all_gather_object(outer.steps)
    assert steps[0] == steps[2]
    assert (steps[0] != steps[1]) == unequal
    trained = [sum(samples_of(rank, step + 1) for step in range(steps[rank])) for rank in range(SIZE)]
    assert outer.samples == sum(trained)
    for x, y in zip(outer.finish(params), params, strict=True):  # nobody has trained since
        same(x, y)
    return periods


@worker
def trains_apart_late_and_unequally() -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        clock = Clock(monkeypatch)
        for case in LATE:
            assert follows_the_rule(clock, *case, unequal=False) == [case[0]]
        # At first rank 1 makes the fewest steps, in 2600 ns where others take 1010; then they do, and it takes 300.
        for every, delay, keep in LATE:
            assert len(follows_the_rule(clock, every, delay, keep, unequal=True)) > 1


@worker
def ends_before_others() -> None:
    """Ranks of unequal numbers of steps, in groups of unequal speed, end as all do: by `finish`."""
    outer = mrj.Outer(jnp.zeros(3), 2, groups="rank", delay=5, unequal=True)
    params = outer.shared
    for step in range(4 + 5 * RANK):
        params = outer.step(params + (RANK + 1) * (jnp.arange(3.0) + step), samples=RANK + 1)
    params = outer.finish(params)
    assert outer.samples == sum((4 + 5 * rank) * (rank + 1) for rank in range(SIZE))
    same(mrj.all_gather(params), np.stack([params] * SIZE))
    assert np.isfinite(params).all()
    assert np.ptp(params) > 1


@worker
def averages_apart_in_bfloat16() -> None:
    """The default averages parameters, and shares small formats in float32."""
    outer = mrj.Outer(jnp.zeros(4, jnp.bfloat16), 1, groups="rank")
    params = outer.step(jnp.asarray(own(RANK, 4), jnp.bfloat16))
    assert params.dtype == jnp.bfloat16
    assert outer.shared.dtype == jnp.float32
    rounded = np.stack([np.asarray(x, jnp.bfloat16).astype(np.float32) for x in everyone(SIZE, 4)])
    np.testing.assert_allclose(outer.shared, rounded.mean(0), rtol=1e-6)
    outer = mrj.Outer({"scale": jnp.asarray(2.0)}, 1, groups="rank")
    for step in range(2):
        params = outer.step({"scale": jnp.asarray(step + 1.0 + RANK)})
        assert params["scale"].shape == ()
        same(params["scale"], step + 1 + (SIZE - 1) / 2)


class Addressed:
    """A function that each rank prints otherwise, as JAX does with addresses."""

    def __call__(self) -> None: ...

    def __repr__(self) -> str:
        return f"<function at {RANK + 1:#x}>"


@worker
def wrong_ways_to_train_apart() -> None:
    named = optax.GradientTransformation(lambda params: jax.tree_util.Partial(Addressed(), params), print)
    mrj.Outer(jnp.ones(2), 2, optimizer=named)  # the address of a function in a state may differ
    for error, words, make in (
        (ValueError, "every=0: a number of steps between exchanges is 1 or more", lambda: mrj.Outer(jnp.ones(2), 0)),
        (ValueError, "is int64: only real numbers", lambda: mrj.Outer({"n": jnp.arange(3)}, 2)),
        (TypeError, "groups=[0, 1]: give the name of a level", lambda: mrj.Outer(jnp.ones(2), 2, groups=[0, 1])),
        (TypeError, "optimizer='sgd': give a transformation", lambda: mrj.Outer(jnp.ones(2), 2, optimizer="sgd")),
        (ValueError, "groups='row'", lambda: mrj.Outer(jnp.ones(2), 2, groups="row")),
        (ValueError, "delay=8: at most 4 exchanges", lambda: mrj.Outer(jnp.ones(2), 2, delay=8)),
        (ValueError, "keep=1: the part of own values", lambda: mrj.Outer(jnp.ones(2), 2, delay=1, keep=1)),
        (TypeError, "unequal=1: it is True where", lambda: mrj.Outer(jnp.ones(2), 2, unequal=1)),
        (ValueError, f"delay is {RANK} here and", lambda: mrj.Outer(jnp.ones(2), 2, delay=RANK)),
        (ValueError, f"unequal is {RANK == 1} here and", lambda: mrj.Outer(jnp.ones(2), 2, unequal=RANK == 1)),
        (ValueError, f"every is {2 + RANK} here and", lambda: mrj.Outer(jnp.ones(2), 2 + RANK)),
        (ValueError, f"of shape ({2 + RANK},) here; on rank", lambda: mrj.Outer(jnp.ones(2 + RANK), 2)),
        (
            ValueError,
            "structure of the outer optimizer's state: ",
            lambda: mrj.Outer(jnp.ones(2), 2, optimizer=optax.sgd(1.0, momentum=0.9 if RANK == 1 else None)),
        ),
        (
            ValueError,
            "the outer optimizer's state at the start, ",
            lambda: mrj.Outer(jnp.ones(2), 2, optimizer=optax.inject_hyperparams(optax.sgd)(0.5 + RANK / 64)),
        ),
    ):
        with pytest.raises(error, match=re.escape(words)):
            make()
    outer = mrj.Outer({"x": jnp.ones(2)}, 2)
    with pytest.raises(
        ValueError, match=r"this is no state of multiring\.jax\.Outer, since it has no outer: give what"
    ):
        outer.load_state_dict({})
    with pytest.raises(ValueError, match="this is no state of Outer, since it has no arguments, groups, shared, steps"):
        outer.load_state_dict({"outer": None})
    with pytest.raises(ValueError, match="and Outer was made for"):
        outer.finish([jnp.ones(2)])
    with pytest.raises(ValueError, match=r"parameter \['x'\] has shape \(3,\), and had \(2,\) at the start"):
        outer.finish({"x": jnp.ones(3)})
    outer = mrj.Outer({"x": jnp.ones(2)}, 2)
    outer.step({"x": jnp.ones(2)}, samples=2)
    with pytest.raises(ValueError, match=r"samples=None: give step\(\) samples in every step, or in none"):
        outer.step({"x": jnp.ones(2)})
    unequal = mrj.Outer({"x": jnp.ones(2)}, 2, unequal=True)
    with pytest.raises(ValueError, match="samples=None: with unequal=True groups count by their samples"):
        unequal.step({"x": jnp.ones(2)})
    with pytest.raises(ValueError, match="unequal=True, and this state is of unequal=False"):
        unequal.load_state_dict(outer.state_dict())
    with pytest.raises(ValueError, match="every=3, and this state is of every=2"):
        mrj.Outer({"x": jnp.ones(2)}, 3).load_state_dict(outer.state_dict())
    given, other = [[0, 1], [2]], [[0], [1, 2]]
    told = re.escape(f"this state is of the groups {given}, and this Outer has {other}: the ranks of a group have to")
    for unequal in (False, True):
        outer = mrj.Outer(jnp.ones(2), 2, groups=given, unequal=unequal)
        params = outer.step(outer.shared + RANK, samples=1)
        with pytest.raises(ValueError, match=told):
            mrj.Outer(jnp.ones(2), 2, groups=other, unequal=unequal).load_state_dict(outer.state_dict())
        params = outer.finish(params)
        loaded = mrj.Outer(jnp.ones(2), 2, groups=other, unequal=unequal)
        if unequal:
            with pytest.raises(ValueError, match=told):
                loaded.load_state_dict(outer.state_dict())
        else:  # all have the same parameters
            loaded.load_state_dict(outer.state_dict())
            same(loaded.shared, params)
    outer = mrj.Outer(jnp.ones(2), 1, optimizer=optax.sgd(0.5 + RANK / 64))
    params = outer.step(outer.shared + RANK)
    np.testing.assert_allclose(params, 1 + (0.5 + RANK / 64) * (SIZE - 1) / 2, rtol=1e-6)
    with pytest.raises(ValueError, match="ranks have different shared values, after an exchange that gave all the"):
        outer.step(params)
    outer = mrj.Outer(jnp.ones(2), 2, optimizer=optax.sgd(0.5, momentum=0.9))
    outer.step(outer.step(outer.shared + RANK))
    state = outer.state_dict()
    if RANK == 1:
        state["outer"] = jax.tree.map(lambda x: x + 1, state["outer"])
    with pytest.raises(ValueError, match=r"state of the outer optimizer after exchange 1, .* give load_state_dict"):
        outer.load_state_dict(state)
    outer = mrj.Outer({"x": jnp.ones(2)}, 1)
    with pytest.raises(ValueError, match=r"1 ranks gave the samples of a step and 2 did not"):
        outer.step({"x": jnp.ones(2)}, samples=1 if RANK == 0 else None)


@worker
def mistakes() -> None:
    with pytest.raises(TypeError, match="group='all': a communicator is needed"):
        mrj.average(own(RANK, 3), group="all")
    with pytest.raises(ValueError, match="root=9"):
        mrj.broadcast(own(RANK, 3), 9)
    for root in (1.5, 1.0, True, "1", None):
        for call in (mrj.broadcast, jax.jit(mrj.broadcast, static_argnums=1), mrj.broadcast_parameters):
            with pytest.raises(TypeError, match=f"root={root!r}: a rank is a whole number"):
                call(own(RANK, 3), root)
    with pytest.raises(TypeError, match=r"root=0\.5: a rank is a whole number"):
        jax.grad(lambda x: mrj.broadcast(x, 0.5).sum())(own(RANK, 3))
    same(mrj.broadcast(own(RANK, 3), np.uint8(1)), own(1, 3))
    same(jax.grad(lambda x: mrj.broadcast(x, np.uint8(1)).sum())(own(RANK, 3)), np.full(3, SIZE * (RANK == 1)))
    for traced in (jax.jit(lambda: mrj.barrier()), lambda: jax.lax.fori_loop(0, 2, lambda i, x: mrj.barrier() or x, 0)):
        with pytest.raises(mr.MultiringError, match="call it between them"):
            traced()
    with pytest.raises(ValueError, match="avg is not defined for int32"):
        jax.jit(lambda x: mrj.all_reduce(x, "avg"))(own(RANK, 3, "int32"))
    for leaf, name in ((3, "int64"), (np.arange(3, dtype="int8"), "int8"), (np.array([True]), "bool")):
        for weight in None, 1:
            with pytest.raises(ValueError, match=f"avg is not defined for {name}"):
                mrj.average({"n": leaf, "x": 3.0}, weight=weight)
    with pytest.raises(ValueError, match=r"weight=-1\.0: a weight is 0 or more"):
        mrj.average(own(RANK, 3), weight=-1.0)
    with pytest.raises(ValueError, match="cannot be cut"):
        mrj.reduce_scatter(own(RANK, SIZE + 1))
    with pytest.raises(TypeError, match="key_data"):
        mrj.broadcast(jax.random.key(0))
    with pytest.raises(jax.errors.JaxRuntimeError, match="Mismatch"):
        jax.block_until_ready(mrj.all_reduce(own(RANK, 3 + RANK)))


@worker
def other_trees() -> None:
    """Trees of other names, order or holes are not averaged with each other."""
    optimizer = optax.chain(mrj.all_reduce_gradients(), optax.sgd(0.1))
    odd = RANK % 2

    def update(tree, **more):
        return optimizer.update(tree, optimizer.init(tree), **more)[0]

    kernel, bias = own(RANK, 6).reshape(2, 3), own(RANK, 3)
    trees = [{"a": kernel, "b": bias}, {"a": bias, "b": kernel}]
    for wrap, weight in (lambda f: f, None), (jax.jit, 2.0):
        disagreeing.all_see(
            lambda wrap=wrap, weight=weight: jax.block_until_ready(
                wrap(lambda tree: update(tree, weight=weight))(trees[odd])
            ),
            "2 gradients: ['b'] (3), ['a'] (2, 3)",
            "2 gradients: ['b'] (2, 3), ['a'] (3)",
        )
        jax.clear_caches()
    disagreeing.all_see(
        lambda: jax.block_until_ready(update([bias, None][:: 1 - 2 * odd])),
        "1 gradients: [0] (3)",
        "1 gradients: [1] (3)",
    )
    jax.clear_caches()
    disagreeing.all_see(
        lambda: jax.block_until_ready(mrj.broadcast_parameters({("w", "v")[odd]: bias})),
        "1 parameters: ['w'] (3)",
        "1 parameters: ['v'] (3)",
    )
    jax.clear_caches()


@worker
def retraced_alone() -> None:
    """A function traced again by one rank alone is no difference between ranks."""

    @functools.partial(jax.jit, static_argnums=1)
    def mean(tree, flag):
        return mrj.average(tree)

    for flag in (0, RANK, 2):
        same(mean({"x": jnp.asarray(own(RANK, 3) * SIZE)}, flag)["x"], everyone(SIZE, 3).sum(0))


@worker
def training() -> None:
    """Ranks with uneven parts of 1,797 images end where one process with all of them ends."""
    images, labels = load_digits(return_X_y=True)
    images = images / 16

    def loss(parameters, x, y):
        hidden = jnp.tanh(x @ parameters["in"] + parameters["offset"])
        return optax.softmax_cross_entropy_with_integer_labels(hidden @ parameters["out"], y).mean()

    def start(seed):
        random = np.random.default_rng(seed)
        return {"in": random.normal(0, 0.1, (64, 32)), "offset": np.zeros(32), "out": random.normal(0, 0.1, (32, 10))}

    def train(parameters, optimizer, x, y, **extra):
        @jax.jit
        def step(parameters, state):
            value, gradients = jax.value_and_grad(loss)(parameters, x, y)
            updates, state = optimizer.update(gradients, state, parameters, **extra)
            return optax.apply_updates(parameters, updates), state, value

        state = optimizer.init(parameters)
        for _ in range(30):
            parameters, state, value = step(parameters, state)
        return parameters, value

    mine = mr.shard(len(images))
    assert SIZE == 1 or len(set(mr.all_gather_object(len(mine)))) == (2 if len(images) % SIZE else 1)
    together = optax.chain(mrj.all_reduce_gradients(bucket_bytes=4096), optax.adam(0.01))
    parameters, value = train(
        mrj.broadcast_parameters(start(RANK)), together, images[mine], labels[mine], weight=len(mine)
    )
    expected, expected_value = train(start(0), optax.with_extra_args_support(optax.adam(0.01)), images, labels)
    for name in expected:
        np.testing.assert_allclose(parameters[name], expected[name], rtol=0, atol=1e-9)
    np.testing.assert_allclose(mrj.average(value, weight=len(mine)), expected_value, rtol=1e-9)


def compute_alone(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


@worker
def late_between_compiled_steps() -> None:
    """Rank 1 computes before each step, whose call XLA makes in a thread of its own, until all know of it and where."""
    step = jax.jit(lambda wishes: mrj.all_reduce(wishes, "min"))
    began, slowest, ran, wall, ends, over = time.monotonic(), None, 0.0, 0.0, False, False
    while not ends:
        before = time.monotonic(), time.thread_time()
        compute_alone(0.01 + 0.1 * (RANK == 1))
        wall += time.monotonic() - before[0]
        ran += time.thread_time() - before[1]
        slowest = mr.stats()["slowest"] or slowest
        over = time.monotonic() - began > 100
        knows = slowest is not None and (RANK != 1 or bool(slowest["where"]))
        ends, in_time = (bool(each) for each in step(jnp.array([knows or over, not over], "int32")))
    assert in_time, f"not in time: {slowest}"
    assert slowest["ranks"] == [1]
    assert slowest["reason"] == "computes" or RANK != 1 or ran < 0.75 * wall  # other programs may have had its core
    assert RANK != 1 or " in compute_alone: " in slowest["where"]


@worker
def loss_of_a_rank() -> None:
    """The highest rank is killed in a step; prints what the others are told, and after how long."""
    step = jax.jit(lambda x: jax.lax.fori_loop(0, 3, lambda i, x: mrj.all_reduce(x, "avg"), x))
    x = jax.block_until_ready(step(own(RANK, 1000)))
    started = time.monotonic()
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        losing.the_last_between(lambda: jax.block_until_ready(step(x)))
    assert time.monotonic() - started < 10
    with pytest.raises(mr.PeerLost) as named:
        mr.barrier()
    print(caught.value, "and rank", named.value.rank)


run(sys.argv[1:])
