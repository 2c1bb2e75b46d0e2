"""The ranks of the Chainer tests: each function is one test, named on the command line."""

from __future__ import annotations

import sys
import time

import chainer
import chainer.functions as F
import chainer.links as L
import losing
import numpy as np
import pytest
from chainer.serializers import DictionarySerializer
from sklearn.datasets import load_digits
from workers import run, worker

import multiring as mr
from multiring.chainer import broadcast, create_multi_node_evaluator, create_multi_node_optimizer

mr.init()
RANK, SIZE = mr.rank(), mr.world_size()
chainer.global_config.dtype = np.float64


def digits() -> tuple[np.ndarray, np.ndarray]:
    images, labels = load_digits(return_X_y=True)
    return images / 16, labels


def network(seed: int, inputs: int | None = 64) -> chainer.Chain:
    """With ``inputs`` None the first layer gets its shape from the first batch."""
    np.random.seed(seed)
    return chainer.Sequential(L.Linear(inputs, 32), F.tanh, L.Linear(32, 10))


def state(target: object) -> dict[str, np.ndarray]:
    saved = DictionarySerializer()
    saved.save(target)
    return saved.target


def assert_equal(found: object, expected: object, tolerance: float = 1e-9) -> None:
    found, expected = state(found), state(expected)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=tolerance, err_msg=name)


def train(optimizer: chainer.GradientMethod, images: np.ndarray, labels: np.ndarray, steps: int) -> None:
    net = optimizer.target
    for _ in range(steps):
        optimizer.update(lambda: F.softmax_cross_entropy(net(images), labels))


@worker
def training() -> None:
    """Ranks with uneven parts of 1,797 images end where one process with all of them ends."""
    images, labels = digits()
    mine = mr.shard(len(images))
    for inputs, bucket_bytes in ((64, 4096), (None, 1 << 20)):
        single = chainer.optimizers.MomentumSGD(0.5).setup(network(0, inputs))
        train(single, images, labels, 25)
        parts = create_multi_node_optimizer(
            chainer.optimizers.MomentumSGD(0.5), weight=len(mine), bucket_bytes=bucket_bytes
        ).setup(network(RANK, inputs))
        train(parts, images[mine], labels[mine], 25)
        assert_equal(parts.target, single.target)
        assert_equal(parts, single)


@worker
def without_a_loss_function() -> None:
    """The first call makes the models equal; a gradient that only one rank has counts as zeros on the others."""
    net = chainer.Sequential(L.Linear(3, 2), L.Linear(2, 1))
    optimizer = create_multi_node_optimizer(chainer.optimizers.SGD(1.0), mr.init()).setup(net)
    optimizer.add_hook(chainer.optimizer_hooks.WeightDecay(0.0))
    net[0].W.data[...] = RANK
    net.cleargrads()
    net[0].W.grad = np.full((2, 3), 1.0)
    optimizer.update()
    assert (net[0].W.data == 0).all()
    assert optimizer.t == 0
    net.cleargrads()
    net[0].W.grad = np.arange(6.0).reshape(2, 3) + RANK
    if RANK == SIZE - 1:
        net[1].b.grad = np.array([6.0])
    optimizer.update()
    np.testing.assert_allclose(net[0].W.data, -(np.arange(6.0).reshape(2, 3) + (SIZE - 1) / 2))
    np.testing.assert_allclose(net[1].b.data, [-6.0 / SIZE])


@worker
def resuming() -> None:
    """A snapshot that rank 0 alone has loaded, optimizer state and running means included, goes to all."""
    images, labels = digits()
    ahead = chainer.optimizers.Adam().setup(chainer.Sequential(network(0), L.BatchNormalization(10)))
    train(ahead, images[:100], labels[:100], 3)
    if RANK == 0:
        optimizer = ahead
    else:
        optimizer = chainer.optimizers.Adam().setup(chainer.Sequential(network(9), L.BatchNormalization(10)))
        train(optimizer, images[:100], labels[:100], RANK)
    broadcast(optimizer.target)
    broadcast(optimizer)
    assert_equal(optimizer.target, ahead.target, 0)
    assert_equal(optimizer, ahead, 0)
    assert optimizer.t == 3


@worker
def evaluating() -> None:
    """The mean over uneven parts, each evaluated as one batch, is that over all images."""
    images, labels = digits()
    mine = mr.shard(len(images))
    net = L.Classifier(network(0))
    part = chainer.datasets.TupleDataset(images[mine], labels[mine])
    batches = chainer.iterators.SerialIterator(part, len(part), repeat=False)
    evaluator = chainer.training.extensions.Evaluator(batches, net)
    found = create_multi_node_evaluator(evaluator, weight=len(part))()
    logits = net.predictor(images)
    assert found["main/loss"] == pytest.approx(float(F.softmax_cross_entropy(logits, labels).array), rel=1e-12)
    assert found["main/accuracy"] == pytest.approx((logits.array.argmax(1) == labels).mean(), rel=1e-12)


@worker
def mistakes() -> None:
    with pytest.raises(TypeError, match=r"builtins\.object is no gradient method"):
        create_multi_node_optimizer(object())
    with pytest.raises(TypeError, match=r"communicator is a builtins\.str: give what multiring\.init\(\) returns"):
        create_multi_node_optimizer(chainer.optimizers.SGD(), "hierarchical")
    with pytest.raises(ValueError, match="this SGD averages over the ranks already"):
        create_multi_node_optimizer(create_multi_node_optimizer(chainer.optimizers.SGD()))


@worker
def loss_of_a_rank() -> None:
    """The highest rank is killed in a step; prints what the others are told."""
    images, labels = digits()
    optimizer = create_multi_node_optimizer(chainer.optimizers.SGD()).setup(network(0))
    train(optimizer, images[:10], labels[:10], 2)
    started = time.monotonic()
    with pytest.raises(mr.PeerLost) as caught:
        losing.the_last_between(lambda: train(optimizer, images[:10], labels[:10], 1))
    assert time.monotonic() - started < 10
    print("lost rank", caught.value.rank)


run(sys.argv[1:])
