"""The ranks of the Keras tests, on the backend KERAS_BACKEND: each function is one test, named on the command line."""

from __future__ import annotations

import copy
import functools
import importlib
import itertools
import json
import logging
import os
import pickle
import signal
import sys
import zipfile
from collections.abc import Collection

import disagreeing
import keras
import numpy as np
import pytest
from outer_rule import SHAPES, Rule, change, weights
from sklearn.datasets import load_digits
from workers import run, worker

import multiring as mr
import multiring.keras as mrk
from multiring import recipes
from multiring.training import shared as shared_module

mr.init()
RANK, SIZE = mr.rank(), mr.world_size()
keras.config.set_floatx("float64")
if keras.backend.backend() == "jax":
    importlib.import_module("jax").config.update("jax_enable_x64", True)
X, LABELS = load_digits(return_X_y=True)
X, Y = X / 16, np.eye(10)[LABELS]


def network(seed: int) -> keras.Model:
    """Its layers have the seed: `keras.utils.set_random_seed` would import TensorFlow on any backend."""
    first, last = (keras.initializers.GlorotUniform(2 * seed + layer) for layer in range(2))
    layers = keras.layers.Dense(32, "tanh", kernel_initializer=first), keras.layers.Dense(10, kernel_initializer=last)
    return keras.Sequential([keras.Input((64,)), *layers])


def fit(model: keras.Model, x, y, optimizer=None, callbacks=(), epochs=10, batch=None, **compile) -> dict:
    if optimizer is not None:
        model.compile(optimizer, "mse", metrics=["mae"], **compile)
    how = {"batch_size": batch or len(x), "epochs": epochs, "shuffle": False, "verbose": 0}
    return model.fit(x, y, callbacks=list(callbacks), **how).history


def close(model: keras.Model, expected: keras.Model) -> None:
    """On JAX and torch Keras forms losses and rates in float32, whatever floatx is: some 1e-7 of an update of 0.01."""
    tolerance = 1e-12 if keras.backend.backend() == "tensorflow" else 1e-6
    for found, single in zip(model.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(found, single, rtol=0, atol=tolerance)


def same_everywhere(model: keras.Model) -> None:
    flat = np.concatenate([weight.ravel() for weight in model.get_weights()])
    np.testing.assert_array_equal(mr.all_gather(flat), np.tile(flat, (SIZE, 1)))


@worker
def training() -> None:
    """Ranks with uneven parts of 1,797 images end where one process with all of them ends; compiled and not."""
    mine = mr.shard(len(X))
    expected = network(0)
    history = fit(expected, X, Y, keras.optimizers.Adam(0.01))
    for compile in {}, {"run_eagerly": True}:
        model = network(RANK)
        optimizer = mrk.DistributedOptimizer(keras.optimizers.Adam(0.01), weight=len(mine), bucket_bytes=4096)
        callbacks = [mrk.BroadcastGlobalVariablesCallback(0), mrk.MetricAverageCallback(weight=len(mine))]
        found = fit(model, X[mine], Y[mine], optimizer, callbacks, **compile)
        close(model, expected)
        for name in "loss", "mae":  # metrics of Keras are in float32
            np.testing.assert_allclose(found[name], history[name], rtol=1e-5)


@worker
def saving() -> None:
    """A saved model is plain Keras; loaded and wrapped again, it goes on where it was."""
    name = f"{os.environ['FOLDER']}/model{RANK}.keras"
    part = slice(RANK, 100 * SIZE, SIZE)
    model, whole = network(0), network(0)
    fit(model, X[part], Y[part], mrk.DistributedOptimizer(keras.optimizers.Adam(0.01)), epochs=5)
    model.save(name)
    loaded = keras.models.load_model(name)
    assert mrk.DistributedOptimizer(loaded.optimizer) is loaded.optimizer
    with pytest.raises(ValueError, match="already"):
        mrk.DistributedOptimizer(loaded.optimizer)
    fit(loaded, X[part], Y[part], epochs=5)
    fit(whole, X[: 100 * SIZE], Y[: 100 * SIZE], keras.optimizers.Adam(0.01))
    close(loaded, whole)


@keras.saving.register_keras_serializable("ours")
class Registered(keras.optimizers.SGD):
    """An optimizer that a user has registered."""


@worker
def saving_what_is_registered() -> None:
    name = f"{os.environ['FOLDER']}/registered{RANK}.keras"
    model = network(0)
    fit(model, X[:50], Y[:50], mrk.DistributedOptimizer(Registered(0.1)), epochs=1)
    model.save(name)
    saved = json.loads(zipfile.ZipFile(name).read("config.json"))["compile_config"]["optimizer"]
    assert (saved["class_name"], saved["registered_name"]) == ("Registered", "ours>Registered")
    assert type(keras.models.load_model(name).optimizer) is Registered


@worker
def copies() -> None:
    """A copy of the optimizer averages as the first one does."""
    part = slice(RANK, 100 * SIZE, SIZE)
    expected = network(0)
    fit(expected, X[: 100 * SIZE], Y[: 100 * SIZE], keras.optimizers.SGD(0.1), epochs=1)
    inner = keras.optimizers.LossScaleOptimizer(Registered(0.1), initial_scale=2.0)
    for plain, copied in (Registered(0.1), lambda one: pickle.loads(pickle.dumps(one))), (inner, copy.deepcopy):
        first = mrk.DistributedOptimizer(plain, weight=100, bucket_bytes=4096)
        model, optimizer = network(0), copied(first)
        fit(model, X[part], Y[part], optimizer, epochs=1)
        close(model, expected)
        assert optimizer.get_config() == {**first.get_config(), "name": optimizer.name}


@worker
def compiled_by_torch() -> None:
    """One rank compiles its step, and averages with those that do not."""
    if keras.backend.backend() == "torch":
        torch = importlib.import_module("torch")
        start = keras.initializers.GlorotUniform(3)
        model, expected = (
            keras.Sequential([keras.Input((64,)), keras.layers.Dense(10, kernel_initializer=start)]) for _ in range(2)
        )
        part = slice(RANK, 100 * SIZE, SIZE)
        optimizer = mrk.DistributedOptimizer(keras.optimizers.SGD(0.1))
        with pytest.MonkeyPatch.context() as patch:
            # Its default would then have a C++ compiler make the kernels of the graphs, for half a minute.
            patch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
            fit(model, X[part], Y[part], optimizer, epochs=2, jit_compile=RANK == 0)
        fit(expected, X[: 100 * SIZE], Y[: 100 * SIZE], keras.optimizers.SGD(0.1), epochs=2)
        close(model, expected)


@worker
def trained_before() -> None:
    """A step that was compiled with the plain optimizer is told apart; compiled again, training goes on with ranks."""
    part = slice(RANK, 100 * SIZE, SIZE)
    model = network(0)
    fit(model, X[:100], Y[:100], keras.optimizers.Adam(0.01), epochs=2)
    optimizer, callbacks = mrk.DistributedOptimizer(model.optimizer), [mrk.BroadcastGlobalVariablesCallback(0)]
    if keras.backend.backend() != "torch":  # which compiles nothing
        with pytest.raises(mr.MultiringError, match=r"call model.compile\(\) with that optimizer once more"):
            fit(model, X[part], Y[part], callbacks=callbacks)
    taken = int(optimizer.iterations)
    fit(model, X[part], Y[part], optimizer, callbacks, epochs=3)
    assert int(optimizer.iterations) == taken + 3
    same_everywhere(model)
    fit(model, X[part], Y[part], callbacks=callbacks, epochs=1)


@worker
def warm_up() -> None:
    class Rates(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if hasattr(self.model, "jax_state_sync"):
                self.model.jax_state_sync()
            seen.append(float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate)))

    seen: list[float] = []
    optimizer = mrk.DistributedOptimizer(keras.optimizers.SGD(1.0))
    model, whole = network(0), network(0)
    rates = [0.1 * (1 + (SIZE - 1) * min((i + 1) / 6, 1)) for i in range(9)]
    part = slice(RANK, 30 * SIZE, SIZE)
    callbacks = [mrk.LearningRateWarmupCallback(0.1 * SIZE, warmup_epochs=2), Rates()]
    fit(model, X[part], Y[part], optimizer, callbacks, epochs=3, batch=10)
    np.testing.assert_allclose(seen, rates, rtol=1e-6)
    # The rates are those that the steps were taken with.
    whole.compile(keras.optimizers.SGD(1.0), "mse")
    for i, rate in enumerate(rates):
        whole.optimizer.learning_rate = rate
        rows = slice((i % 3) * 10 * SIZE, (i % 3 + 1) * 10 * SIZE)
        whole.train_on_batch(X[rows], Y[rows])
    close(model, whole)
    seen.clear()
    fit(model, X[part], Y[part], callbacks=[mrk.LearningRateWarmupCallback(0.05, warmup_epochs=0), Rates()], epochs=2)
    np.testing.assert_allclose(seen, [0.05, 0.05], rtol=1e-6)


@worker
def recipe_as_schedule() -> None:
    """Keras' own callback takes a schedule of epochs as it is."""
    schedule = recipes.scaled(recipes.warm_up(recipes.cosine(8), 4, start=0.25), 0.2)
    seen = fit(
        network(0),
        X[:8],
        Y[:8],
        keras.optimizers.SGD(0.2),
        callbacks=[keras.callbacks.LearningRateScheduler(schedule)],
        epochs=6,
    )
    np.testing.assert_allclose(seen["learning_rate"], [schedule(epoch) for epoch in range(6)], rtol=1e-6)


@worker
def scaled_losses() -> None:
    """An overflow on one rank is a step that all of them skip, and after which all halve the scale."""
    keras.config.set_dtype_policy("mixed_float16")
    try:
        x, y = np.full((4, 64), 1.0 + RANK), np.zeros((4, 10))
        model = network(RANK)
        optimizer = mrk.DistributedOptimizer(
            keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01), initial_scale=64.0), weight=1 + RANK
        )
        fit(model, x, y, optimizer, [mrk.BroadcastGlobalVariablesCallback(0)], epochs=2)
        assert model.optimizer is optimizer
        assert int(optimizer.iterations) == 2
        same_everywhere(model)
        before = model.get_weights()
        fit(model, x, y + 1e6 * RANK, epochs=1)
        for found, kept in zip(model.get_weights(), before, strict=True):
            np.testing.assert_array_equal(found, kept)
        assert float(keras.ops.convert_to_numpy(optimizer.dynamic_scale)) == 32
        with pytest.raises(ValueError, match=r"give compile\(\) DistributedOptimizer\(LossScaleOptimizer\(SGD"):
            fit(model, x, y, mrk.DistributedOptimizer(keras.optimizers.SGD(0.1)))
        plain = mrk.DistributedOptimizer(keras.optimizers.SGD(0.1, loss_scale_factor=4.0))
        model.compile(plain, "mse", auto_scale_loss=False)
        plain.loss_scale_factor = 8.0
        assert plain.get_config()["loss_scale_factor"] == 8
    finally:
        keras.config.set_dtype_policy("float64")


@worker
def uneven_batches() -> None:
    """Batches of other sizes on each rank, the last ones smaller, train what one process trains on all.

    Compiled or not. The rank with the fewest has none in the end: what it is fed counts for nothing and may be NaN.
    """
    sizes = [[24 - 7 * rank, 24 - 7 * rank, 0 if rank == SIZE - 1 else 5] for rank in range(SIZE)]
    steps = np.array(sizes).sum(0)  # samples in each step of one process
    starts = np.concatenate([[0], np.cumsum(steps)])
    before = np.cumsum([[0] * 3, *sizes], axis=0)

    def batches():
        for _ in range(4):
            for step, size in enumerate(sizes[RANK]):
                first = starts[step] + before[RANK, step]
                rows = slice(first, first + size)
                yield (X[rows], Y[rows]) if size else (np.full((2, 64), np.nan), np.zeros((2, 10)))

    whole = network(0)
    whole.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    for step in [0, 1, 2] * 4:
        rows = slice(starts[step], starts[step + 1])
        whole.train_on_batch(X[rows], Y[rows])
    for compile in {}, {"run_eagerly": True}:
        model = network(0)
        optimizer = mrk.DistributedOptimizer(
            keras.optimizers.SGD(0.1, momentum=0.9), weight=lambda batch: sizes[RANK][batch % 3]
        )
        model.compile(optimizer, "mse", **compile)
        model.fit(batches(), steps_per_epoch=3, epochs=4, verbose=0)
        close(model, whole)
    with pytest.raises(ValueError, match="a weight cannot be a function of their number: give a number"):
        mrk.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()), weight=lambda batch: 1)


@worker
def corrected_momentum() -> None:
    """SGD at a rate that changes ends where momentum without the rate in it ends, in compiled steps too."""
    rates = [1 / 64, 1 / 64, 3 / 64, 3 / 32, 3 / 256, 3 / 256]  # their ratios are exact in float32
    part = slice(RANK, 30 * SIZE, SIZE)
    for compile in {}, {"run_eagerly": True}:
        model, plain = network(0), network(0)
        fit(
            model,
            X[part],
            Y[part],
            mrk.DistributedOptimizer(keras.optimizers.SGD(1.0, momentum=0.875)),
            [
                keras.callbacks.LearningRateScheduler(lambda epoch: rates[epoch]),
                mrk.MomentumCorrectionCallback(),
            ],
            epochs=6,
            **compile,
        )
        seen: list[np.ndarray] = []

        # One batch of rate 1 is the gradient; the buffer without the rate, as torch has it, is kept here.
        plain.compile(keras.optimizers.SGD(1.0), "mse")
        past = [np.zeros_like(weight) for weight in plain.get_weights()]
        for rate in rates:
            seen = plain.get_weights()
            plain.train_on_batch(X[: 30 * SIZE], Y[: 30 * SIZE])
            gradients = [old - new for old, new in zip(seen, plain.get_weights(), strict=True)]
            past = [0.875 * kept + gradient for kept, gradient in zip(past, gradients, strict=True)]
            plain.set_weights([old - rate * kept for old, kept in zip(seen, past, strict=True)])
        close(model, plain)
    with pytest.raises(TypeError, match="Adam keeps no past updates"):
        fit(model, X[part], Y[part], keras.optimizers.Adam(), [mrk.MomentumCorrectionCallback()], epochs=1)


class Branches(keras.Model):
    """Two layers alike, one of which is used."""

    def __init__(self, used: int) -> None:
        super().__init__()
        self.branches = [keras.layers.Dense(10), keras.layers.Dense(10)]
        self.used = used
        for layer in self.branches:
            layer.build((None, 64))
        self.built = True

    def call(self, x):
        return self.branches[self.used](x)


@worker
def other_variables() -> None:
    """Layers that were counted differently are the same; gradients of other layers are not."""
    part = slice(RANK, 10 * SIZE, SIZE)
    counted = [keras.layers.Dense(3) for _ in range(RANK)]
    model = network(RANK)
    callbacks = [mrk.BroadcastGlobalVariablesCallback(0), mrk.MetricAverageCallback()]
    fit(model, X[part], Y[part], mrk.DistributedOptimizer(keras.optimizers.Adam(0.01)), callbacks, epochs=2)
    same_everywhere(model)
    assert len(counted) == RANK
    if keras.backend.backend() != "jax":  # which gives zeros for what is not used
        disagreeing.all_see(
            lambda: fit(Branches(RANK % 2), X[part], Y[part], mrk.DistributedOptimizer(keras.optimizers.SGD(0.1))),
            "2 gradients: dense/bias (10), dense/kernel (64, 10)",
            "2 gradients: dense_1/bias (10), dense_1/kernel (64, 10)",
        )
    layers = [keras.layers.Dense(64, name="first"), keras.layers.Dense(64, name="second")][:: 1 - 2 * (RANK % 2)]
    swapped = keras.Sequential([keras.Input((64,)), *layers, keras.layers.Dense(10, name="last")])
    disagreeing.all_see(
        lambda: fit(swapped, X[part], Y[part], mrk.DistributedOptimizer(keras.optimizers.SGD(0.1))),
        "first/kernel (64, 64), sequential/second/bias (64)",
        "second/kernel (64, 64), sequential/first/bias (64)",
    )
    if keras.backend.backend() == "jax":  # raises a failure again in the next steps of the process
        return
    disagreeing.all_see(
        lambda: fit(freezing(RANK % 2), X[part], Y[part], mrk.DistributedOptimizer(keras.optimizers.SGD(0.1))),
        "dense_1/bias (64)",
        "dense_2/bias (64)",
    )
    # The last two of three alike have the names of the first two: only the variables of the whole model tell.
    disagreeing.all_see(
        lambda: fit(
            freezing(2 * (RANK % 2)),
            X[part],
            Y[part],
            mrk.DistributedOptimizer(keras.optimizers.SGD(0.1)),
            callbacks[:1],
        ),
        "1 frozen variables: ",
        "1 variables: ",
    )


def freezing(layer: int) -> keras.Model:
    model = keras.Sequential(
        [keras.Input((64,)), *(keras.layers.Dense(64) for _ in range(3)), keras.layers.Dense(10, name="last")]
    )
    model.layers[layer].trainable = False
    return model


OUTER_GROUPS = [[1], [0, 2]]
OUTER_STEPS, EVERY = 5, 2


def linear() -> keras.Model:
    return keras.Sequential([keras.Input((64,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")])


def as_one_process(
    parts: list[tuple[np.ndarray, np.ndarray]],
    outer_rate: float,
    momentum: float,
    steps: int = OUTER_STEPS,
    exchanges: Collection[int] = (2, 4, OUTER_STEPS),
) -> np.ndarray:
    """Weights after all steps of all ranks, each with its part of the data, and the exchanges after some of them."""
    shared, speed = np.ones((64, 1)), np.zeros((64, 1))
    own, samples = [shared] * SIZE, np.zeros(SIZE)
    for step in range(1, steps + 1):
        gradients = [2 / len(x) * x.T @ (x @ weights - y) for (x, y), weights in zip(parts, own, strict=True)]
        for ranks in OUTER_GROUPS:
            mean = sum(gradients[rank] for rank in ranks) / len(ranks)
            for rank in ranks:
                own[rank] = own[rank] - 0.05 * mean
        samples += [len(x) for x, _ in parts]
        if step in exchanges:
            change = sum(samples[rank] * (shared - own[rank]) for rank in range(SIZE)) / samples.sum()
            speed = momentum * speed + outer_rate * change
            shared = shared - speed
            own, samples = [shared] * SIZE, np.zeros(SIZE)
    return shared


@worker
def trains_apart_in_several_steps_at_once() -> None:
    """Keras makes 3, 3 and 1 of 7 batches at once: what is due after 4, 8, ... comes at the end of these."""
    sizes = [20, 30, 40]
    ends = np.cumsum([0, *sizes])
    parts = [(X[begin:end], Y[begin:end, :1]) for begin, end in itertools.pairwise(ends)]
    x, y = parts[RANK]
    if keras.backend.backend() == "torch":  # which has no such steps
        return
    model = linear()
    outer = mrk.Outer(4, groups=OUTER_GROUPS, optimizer=keras.optimizers.SGD(0.5, momentum=0.5), samples=len(x))
    seen: list[tuple[int, int, float]] = []
    note = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append((outer.steps, outer.rounds, outer.samples))
    )
    inner = mrk.DistributedOptimizer(keras.optimizers.SGD(0.05), group=outer.group)
    repeated = np.tile(x, (7, 1)), np.tile(y, (7, 1))
    fit(model, *repeated, inner, [outer, note], epochs=3, batch=len(x), steps_per_execution=3)
    made = [3, 6, 7, 10, 13, 14, 17, 20, 21]
    rounds = [0, 1, 1, 2, 3, 3, 4, 5, 5]
    counted = [0, 6, 6, 10, 13, 13, 17, 20, 20]
    assert seen == [(a, b, c * sum(sizes)) for a, b, c in zip(made, rounds, counted, strict=True)]
    expected = as_one_process(parts, 0.5, 0.5, 21, (6, 10, 13, 17, 20, 21))
    np.testing.assert_allclose(model.get_weights()[0], expected, rtol=0, atol=1e-6)
    same_everywhere(model)
    model.compile(inner, "mse", steps_per_execution=5)
    with pytest.raises(ValueError, match=r"every=4, and compile\(\) was given steps_per_execution=5: .* every=5"):
        fit(model, *repeated, None, [outer])


class Slow(keras.Model):
    """Its steps take long, and say nothing for which a callback would wait."""

    def train_step(self, state, data):
        import jax

        trained, rest, inner, metrics = state
        ran = jax.lax.fori_loop(0, 20, lambda _, w: w + 0.0 * jax.lax.dot(w, w), trained[0])
        return {}, ([ran, *trained[1:]], rest, inner, metrics)


@worker
def waits_for_steps_that_are_timed() -> None:
    if keras.backend.backend() != "jax":  # others return when a step is done
        return
    inputs = keras.Input((1000,))
    model = Slow(inputs, keras.layers.Dense(1000, use_bias=False)(inputs))
    outer = mrk.Outer(2, groups="rank", unequal=True, samples=1)
    ready: list[bool] = []
    step = outer._exchange.step

    def timed(*arguments):
        ready.append(all(array.is_ready() for part in model._jax_state.values() for array in part))
        return step(*arguments)

    outer._exchange.step = timed
    stop = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: setattr(model, "stop_training", outer.rounds == 3)
    )
    model.compile(keras.optimizers.SGD(0.1), "mse")
    zeros = np.zeros((4, 1000))
    model.fit(zeros, zeros, batch_size=1, epochs=100, verbose=0, callbacks=[outer, stop])
    assert len(ready) >= 4
    assert all(ready)


class Scale(keras.layers.Layer):
    """Multiplies by a parameter without axes."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(), initializer="ones", name="scale")

    def call(self, x):
        return x * self.scale


@worker
def trains_apart() -> None:
    ends = np.cumsum([0, 20, 30, 40])
    parts = [(X[begin:end], Y[begin:end, :1]) for begin, end in itertools.pairwise(ends)]
    x, y = parts[RANK]
    for optimizer, rate, momentum in ((None, 1.0, 0.0), (keras.optimizers.SGD(0.5, momentum=0.5), 0.5, 0.5)):
        model = linear()
        model.set_weights([model.get_weights()[0] + RANK])  # all begin with what rank 0 has
        outer = mrk.Outer(EVERY, groups=OUTER_GROUPS, optimizer=optimizer, samples=len(x))
        assert outer.group.size == (1 if RANK == 1 else 2)
        inner = mrk.DistributedOptimizer(keras.optimizers.SGD(0.05), group=outer.group)
        fit(model, x, y, inner, [outer], epochs=OUTER_STEPS)
        np.testing.assert_allclose(model.get_weights()[0], as_one_process(parts, rate, momentum), rtol=0, atol=1e-6)
        same_everywhere(model)
    layers = [keras.layers.Dense(4), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)]
    model = keras.Sequential(layers)  # built by the first batch
    outer = mrk.Outer(2, groups="rank")
    fit(model, x, y.repeat(4, 1), mrk.DistributedOptimizer(keras.optimizers.SGD(0.05), group=outer.group), [outer])
    flat = np.concatenate([np.ravel(each.numpy()) for each in model.variables if "float" in each.dtype])
    np.testing.assert_array_equal(mr.all_gather(flat), np.tile(flat, (SIZE, 1)))
    assert (layers[1].moving_mean.numpy() != 0).all()
    with pytest.raises(ValueError, match="exchanges the parameters of another model: make one for each model"):
        fit(linear(), x, y, keras.optimizers.SGD(0.05), [outer])
    scaled = keras.Sequential([keras.layers.Input((x.shape[1],)), Scale(), keras.layers.Dense(1)])
    outer = mrk.Outer(2, groups="rank")
    fit(scaled, x, y, mrk.DistributedOptimizer(keras.optimizers.SGD(0.05), group=outer.group), [outer])
    assert scaled.layers[0].scale.shape == ()
    assert float(scaled.layers[0].scale.numpy()) != 1
    same_everywhere(scaled)
    model = keras.Sequential([keras.layers.Dense(4)])  # without a batch TensorFlow leaves it without parameters
    fit(model, x, y.repeat(4, 1), keras.optimizers.SGD(0.05), [mrk.Outer(2, groups="rank")], epochs=0)


class Numbers(keras.layers.Layer):
    """Parameters of several shapes, which a callback moves, and a mask that nobody trains."""

    def build(self, shape):
        self.moved = [
            self.add_weight(shape=weight.shape, initializer="zeros", name=f"weight{number}")
            for number, weight in enumerate(weights())
        ]
        self.mask = self.add_weight(shape=(2,), initializer="zeros", name="mask", trainable=False)
        for variable, weight in zip(self.moved, weights(RANK), strict=True):
            variable.assign(weight)
        self.mask.assign([-np.inf, np.nan])

    def call(self, x):
        return x + sum(keras.ops.sum(variable) for variable in self.moved)


def duration(rank: int, step: int) -> int:
    """Nanoseconds of a batch: rank 1 is slower at first, and faster from its third batch on."""
    return [1000, [2600, 300][step > 2], 1020][rank]


def samples_of(rank: int, step: int = 0) -> int:
    return [3, 2, 4][rank]


def follows_the_rule(every: int, delay: int, keep: float, unequal: bool) -> None:
    """Train by the rule for some rounds."""
    rounds = 6
    place = next(number for number, ranks in enumerate(sorted(OUTER_GROUPS)) if RANK in ranks)
    lasts = duration if unequal else lambda rank, step: 1000
    rule = Rule(every, [[0, 1, 2, 3, 4]], delay, keep, sorted(OUTER_GROUPS), lasts, samples_of, 0.5, 0.5)
    for _ in range(rounds + 1):
        rule.turn()
    layer = Numbers()
    model = keras.Sequential([keras.Input((3,)), layer])
    optimizer = keras.optimizers.SGD(0.5, momentum=0.5, nesterov=True)  # Keras has rates in float32
    given = {"delay": delay, "keep": keep, "unequal": unequal, "samples": samples_of(RANK)}
    outer = mrk.Outer(every, groups=OUTER_GROUPS, optimizer=optimizer, **given)
    now = 17
    if unequal:
        outer._exchange._pace.clock = lambda: now

    class Mover(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            nonlocal now
            step = outer.steps + 1
            now += lasts(RANK, step)
            if hasattr(model, "jax_state_sync"):
                model.jax_state_sync()
            for number, (variable, shape) in enumerate(zip(layer.moved, SHAPES, strict=True)):
                variable.assign_add(change(step, place, number, shape))

    class Checker(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            there, period, turns = rule.seen[place][outer.steps - 1]
            for variable, expected in zip(layer.moved, there, strict=True):
                found = keras.ops.convert_to_numpy(variable.value)
                np.testing.assert_allclose(found, expected, rtol=0, atol=1e-11, err_msg=f"step {outer.steps}")
            assert (outer.period, outer.rounds) == (period, turns), outer.steps
            model.stop_training = outer.rounds == rounds

    wait = shared_module._ParameterExchange.wait

    def long(exchange) -> None:
        nonlocal now
        now += 10**9
        wait(exchange)

    inner = mrk.DistributedOptimizer(keras.optimizers.SGD(0.0), group=outer.group)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(shared_module._ParameterExchange, "wait", long)
        fit(model, np.zeros((2, 3)), np.zeros((2, 3)), inner, [Mover(), outer, Checker()], epochs=1000)
    same_everywhere(model)
    mask = keras.ops.convert_to_numpy(layer.mask.value)
    np.testing.assert_array_equal(mask, [-np.inf, np.nan])
    steps = mr.init().all_gather_object(outer.steps)
    assert outer.samples == sum(number * samples_of(rank) for rank, number in enumerate(steps))
    assert (steps[0] != steps[1]) == unequal
    assert steps[0] == steps[2]
    assert unequal or outer.steps == rounds * every


@worker
def trains_apart_late_and_unequally() -> None:
    follows_the_rule(2, 1, 0.25, unequal=False)
    follows_the_rule(2, 7, 0.25, unequal=False)
    follows_the_rule(2, 0, 0.5, unequal=True)
    follows_the_rule(3, 4, 0.0, unequal=True)
    model = keras.Sequential([keras.layers.Dense(4), keras.layers.BatchNormalization()])
    outer = mrk.Outer(3, groups=OUTER_GROUPS, delay=2, unequal=True, samples=10)

    class Stopper(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            model.stop_training = outer.samples >= 400

    inner = mrk.DistributedOptimizer(keras.optimizers.SGD(0.05), group=outer.group)
    fit(model, X[:50], Y[:50, :4] + RANK, inner, [outer, Stopper()], epochs=1000, batch=10)
    same_everywhere(model)
    assert outer.samples == 10 * sum(mr.init().all_gather_object(outer.steps)) >= 400


@worker
def mistakes() -> None:
    with pytest.raises(TypeError, match="no optimizer of Keras"):
        mrk.DistributedOptimizer("adam")
    with pytest.raises(TypeError, match="group='all': a communicator is needed"):
        mrk.DistributedOptimizer(keras.optimizers.SGD(), group="all")
    with pytest.raises(ValueError, match="warmup_epochs=-1: 0 or more"):
        mrk.LearningRateWarmupCallback(0.1, warmup_epochs=-1)
    with pytest.raises(TypeError, match="no optimizer of Keras"):
        mrk.Outer(2, optimizer="sgd")
    with pytest.raises(ValueError, match="every=0: a number of steps between exchanges is 1 or more"):
        mrk.Outer(0)
    with pytest.raises(ValueError, match=f"every is {2 + RANK} here and"):
        mrk.Outer(2 + RANK)
    with pytest.raises(ValueError, match=f"delay is {RANK} here and"):
        mrk.Outer(2, delay=RANK)
    sgd = keras.optimizers.SGD
    for make, words in (
        (
            lambda: sgd(0.5 + RANK / 4),
            "learning_rate of the outer optimizer: 0.5 on rank 0 and 0.75 on rank 1: give all",
        ),
        (
            lambda: sgd(0.5, momentum=RANK / 4),
            "momentum of the outer optimizer: 0.0 on rank 0 and 0.25 on rank 1: give",
        ),
        (
            lambda: None if RANK == 1 else sgd(0.5),
            "the outer optimizer's class: SGD on rank 0 and NoneType on rank 1: ",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            mrk.Outer(2, optimizer=make())
    rate = keras.optimizers.schedules.CosineDecay(0.5, 100, name=f"rate_{RANK}")
    mrk.Outer(2, optimizer=sgd(rate, name=f"own_{RANK}"))  # names may differ
    for optimizer, words in (
        (
            keras.optimizers.LossScaleOptimizer(sgd(0.5)),
            "this LossScaleOptimizer divides gradients by a scale of losse",
        ),
        (
            sgd(0.5, loss_scale_factor=8.0),
            "this SGD divides gradients by a scale of losses, and a change of parameters",
        ),
        (mrk.DistributedOptimizer(sgd(0.5)), "this SGD averages over the ranks, which Outer has done: give it a plain"),
    ):
        with pytest.raises(ValueError, match=words):
            mrk.Outer(2, optimizer=optimizer)
    with pytest.raises(ValueError, match="samples=None: with unequal=True groups count by their samples: give Outer"):
        mrk.Outer(2, unequal=True)


@worker
def plain_optimizer() -> None:
    """It trains each rank for itself, and the callback that makes them equal at first says so."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("multiring").addHandler(handler)
    callbacks = [mrk.BroadcastGlobalVariablesCallback()]
    for optimizer in keras.optimizers.SGD(0.1), mrk.DistributedOptimizer(keras.optimizers.SGD(0.1)):
        fit(network(0), X[:10], Y[:10], optimizer, callbacks, epochs=1)
    assert len([line for line in lines if line.startswith("the model's SGD averages nothing over the ranks")]) == 1
    logging.getLogger("multiring").removeHandler(handler)


@worker
def loss_of_a_rank() -> None:
    """The highest rank is killed in an epoch; prints what the others are told."""

    class Killer(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if RANK == SIZE - 1 and batch == 3:
                os.kill(os.getpid(), signal.SIGKILL)

    model = network(0)
    with pytest.raises(Exception, match=r"PeerLost|closed its connection") as caught:
        fit(model, X, Y, mrk.DistributedOptimizer(keras.optimizers.SGD(0.1)), [Killer()], batch=10)
    with pytest.raises(mr.PeerLost) as named:
        mr.barrier()
    print(type(caught.value).__name__, "and rank", named.value.rank)


run(sys.argv[1:])
