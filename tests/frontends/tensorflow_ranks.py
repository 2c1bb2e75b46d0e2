"""The ranks of the TensorFlow tests: each function is one test, named on the command line."""

from __future__ import annotations

import sys
import time

import disagreeing
import losing
import numpy as np
import pytest
import tensorflow as tf
from contributions import everyone, own
from sklearn.datasets import load_digits
from workers import run, worker

import multiring as mr
import multiring.tensorflow as mrt

mr.init()
RANK, SIZE = mr.rank(), mr.world_size()
WEIGHTS = np.arange(1.0, SIZE + 1)


@worker
def averages() -> None:
    mean, weighted = everyone(SIZE, 700, "float64").mean(0), np.average(everyone(SIZE, 700, "float64"), 0, WEIGHTS)
    nest = {"a": tf.constant(own(RANK, 700, "float64").reshape(7, 100)), "b": [None, tf.constant(own(RANK, 5))]}
    half = tf.cast(tf.constant(own(RANK, 9)) * SIZE, tf.bfloat16)
    slices = tf.IndexedSlices(tf.constant([[1.0 + RANK]]), tf.constant([RANK]), tf.constant([SIZE, 1]))
    for wrap in (lambda f: f, tf.function):
        for bucket_bytes in (1, 1 << 20):
            found = wrap(lambda size=bucket_bytes: mrt.average(nest, bucket_bytes=size))()
            np.testing.assert_allclose(tf.reshape(found["a"], [-1]), mean, rtol=1e-12)
            np.testing.assert_allclose(found["b"][1], everyone(SIZE, 5).mean(0), rtol=1e-6)
            assert found["b"][0] is None
            found = wrap(lambda w, size=bucket_bytes: mrt.average(nest, weight=w, bucket_bytes=size))(WEIGHTS[RANK])
            np.testing.assert_allclose(tf.reshape(found["a"], [-1]), weighted, rtol=1e-12)
        assert (tf.cast(wrap(lambda: mrt.average(half))(), tf.float32).numpy() == everyone(SIZE, 9).sum(0)).all()
        dense = wrap(lambda: mrt.average([slices]))()[0]
        np.testing.assert_allclose(dense, [[(1 + rank) / SIZE] for rank in range(SIZE)], rtol=1e-6)
        alone = tf.constant([7.5 if RANK == 1 else np.nan])
        found = wrap(lambda w, x=alone: mrt.average(x, weight=w))(tf.constant(3.0 * (RANK == 1)))
        assert found.numpy() == 7.5  # ranks of weight 0 only listen
        assert (wrap(mrt.all_reduce)(own(RANK, 9)).numpy() == everyone(SIZE, 9).sum(0)).all()
        assert (wrap(lambda x: mrt.all_reduce(x, "max"))(own(RANK, 9)).numpy() == everyone(SIZE, 9).max(0)).all()
    with pytest.raises(ValueError, match="no fixed shape"):
        tf.function(mrt.average, input_signature=[tf.TensorSpec([None])])(own(RANK, 3))


@worker
def mistakes() -> None:
    with pytest.raises(TypeError, match="group='all': a communicator is needed"):
        mrt.average(tf.constant(own(RANK, 3)), group="all")
    for wrong, name in ((tf.constant(4), "int32"), (tf.constant([True]), "bool"), (tf.constant("x"), "string")):
        for wrap in (lambda f: f, tf.function):
            for weight in None, 2.0:
                with pytest.raises(ValueError, match=f"avg is not defined for {name}"):
                    wrap(lambda n=wrong, weight=weight: mrt.average({"n": n, "x": 3.0}, weight=weight))()


@worker
def nothing_is_written_to() -> None:
    """Constant gradients, gradients shared by variables, results that are kept: none changes."""
    expected = everyone(SIZE, 4).mean(0)
    x, y = tf.Variable(tf.zeros(4)), tf.Variable(tf.zeros(4))
    constant = tf.constant(own(RANK, 4))

    @tf.function
    def step():
        with mrt.DistributedGradientTape() as tape:
            loss = tf.reduce_sum(constant * (x + y))
        first, second = tape.gradient(loss, [x, y])
        return first, second, constant + 0

    kept = []
    for _ in range(4):
        kept.append(step())
        tf.random.normal([1000])
    for first, second, same in kept:
        np.testing.assert_allclose(first, expected, rtol=1e-6)
        np.testing.assert_allclose(second, expected, rtol=1e-6)
        assert (same.numpy() == own(RANK, 4)).all()
    given = tf.constant(own(RANK, 4))
    mrt.average([given, given])
    assert (given.numpy() == own(RANK, 4)).all()


@worker
def variables() -> None:
    mine = [tf.Variable(own(RANK, 4)), tf.Variable(RANK, dtype=tf.int64), tf.Variable([RANK > 0])]
    mrt.broadcast_variables(mine, root=SIZE - 1)
    assert (mine[0].numpy() == own(SIZE - 1, 4)).all()
    assert mine[1].numpy() == SIZE - 1
    assert mine[2].numpy() == [SIZE > 1]


@worker
def optimizer_of_plain_variables() -> None:
    x, y = tf.Variable([1.0, 2.0]), tf.Variable(3.0)
    optimizer = mrt.DistributedOptimizer(tf.keras.optimizers.SGD(1.0))
    optimizer.apply_gradients([(tf.constant([RANK, 1.0]), x), (tf.constant(2.0 * RANK), y)])
    mean = (SIZE - 1) / 2
    np.testing.assert_allclose(x, [1 - mean, 1])
    np.testing.assert_allclose(y, 3 - 2 * mean)


@worker
def training() -> None:
    """Ranks with uneven parts of 1,797 images end where one process with all of them ends."""
    images, labels = load_digits(return_X_y=True)
    images = images / 16

    def start(seed):
        random = np.random.default_rng(seed)
        shapes = (64, 32), (32,), (32, 10)
        return [tf.Variable(random.normal(0, 0.1, shape)) for shape in shapes]

    def train(weights, x, y, tape_of):
        momenta = [tf.Variable(tf.zeros_like(w)) for w in weights]

        @tf.function
        def step():
            with tape_of() as tape:
                hidden = tf.tanh(x @ weights[0] + weights[1])
                loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, hidden @ weights[2]))
            for weight, momentum, gradient in zip(weights, momenta, tape.gradient(loss, weights), strict=True):
                momentum.assign(0.9 * momentum + gradient)
                weight.assign_sub(0.5 * momentum)
            return loss

        return [step() for _ in range(30)][-1]

    mine, parts, whole = mr.shard(len(images)), start(RANK), start(0)
    mrt.broadcast_variables(parts)
    loss = train(
        parts, images[mine], labels[mine], lambda: mrt.DistributedGradientTape(weight=len(mine), bucket_bytes=4096)
    )
    expected = train(whole, images, labels, tf.GradientTape)
    for found, single in zip(parts, whole, strict=True):
        np.testing.assert_allclose(found, single, rtol=0, atol=1e-9)
    np.testing.assert_allclose(mrt.average(loss, weight=len(mine)), expected, rtol=1e-9)


@worker
def other_gradients() -> None:
    """Gradients that are missing in other places, or in another order, are not averaged with each other."""
    first, second = tf.Variable(own(RANK, 4), name="first"), tf.Variable(own(RANK, 4), name="second")
    alike = [tf.Variable(own(RANK, 4)) for _ in range(2)]

    def gradients(variables, *used):
        with mrt.DistributedGradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(one * one) for one in used])
        return tape.gradient(loss, variables)

    for wrap in (lambda f: f, tf.function):
        disagreeing.all_see(
            wrap(lambda: gradients([first, second], (first, second)[RANK % 2])),
            ": 1 gradients: first (4)",
            ": 1 gradients: second (4)",
        )
    disagreeing.all_see(
        lambda: gradients([first, second][:: 1 - 2 * (RANK % 2)], first, second),
        ": 2 gradients: second (4), first (4)",
        ": 2 gradients: first (4), second (4)",
    )
    disagreeing.all_see(lambda: gradients(alike, alike[RANK % 2]), "Variable at 0 (4)", "Variable at 1 (4)")
    mine = [None, own(RANK, 3)][:: 1 - 2 * (RANK % 2)]
    disagreeing.all_see(lambda: mrt.average(mine), ": 1 gradients: 0 (3)", ": 1 gradients: 1 (3)")
    shape = (2, 3) if RANK else (3, 2)
    disagreeing.all_see(lambda: mrt.average([own(RANK, 6).reshape(shape)]), "0 (2, 3)", "0 (3, 2)")
    disagreeing.all_see(lambda: mrt.broadcast_variables([(first, second)[RANK % 2]]), "first (4)", "second (4)")
    disagreeing.all_see(lambda: mr.average({("loss", "rate")[RANK % 2]: 1.0}), "1 metrics: loss", "1 metrics: rate")


@worker
def retraced_alone() -> None:
    """A function traced again, or a variable made, by one rank alone is no difference between ranks."""

    @tf.function
    def step(x, flag):
        with mrt.DistributedGradientTape() as tape:
            loss = tf.reduce_sum(weights * x)
        return tape.gradient(loss, [weights])[0]

    others = [tf.Variable(0.0) for _ in range(RANK)]
    weights = tf.Variable(tf.zeros(3))
    for flag in (0, 1 if RANK else 0, 2):
        np.testing.assert_allclose(step(tf.constant(own(RANK, 3)), flag), everyone(SIZE, 3).mean(0), rtol=1e-6)
    assert len(others) == RANK


@worker
def loss_of_a_rank() -> None:
    """The highest rank is killed in a step; prints what the others are told."""
    x = tf.Variable(own(RANK, 1000))

    @tf.function
    def step():
        with mrt.DistributedGradientTape() as tape:
            loss = tf.reduce_sum(x * x)
        return tape.gradient(loss, x)

    step()
    started = time.monotonic()
    with pytest.raises(tf.errors.UnknownError) as caught:
        losing.the_last_between(step)
    assert time.monotonic() - started < 10
    with pytest.raises(mr.PeerLost) as named:
        mr.barrier()
    told = next(line for line in str(caught.value).splitlines() if "PeerLost: " in line)
    print(told.strip(), "and rank", named.value.rank)


run(sys.argv[1:])
