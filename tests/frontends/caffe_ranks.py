"""The ranks of the Caffe tests: each function is one test, named on the command line."""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import time
import weakref
from pathlib import Path
from types import SimpleNamespace

import caffe
import losing
import numpy as np
import pytest
from sklearn.datasets import load_digits
from workers import run, worker

import multiring as mr
from multiring.caffe import distribute

NET = """
layer {{ name: "input" type: "Input" top: "image" top: "label"
         input_param {{ shape {{ dim: {count} dim: 64 }} shape {{ dim: {count} }} }} }}
layer {{ name: "hidden" type: "InnerProduct" bottom: "image" top: "hidden"
         inner_product_param {{ num_output: 32 weight_filler {{ type: "xavier" }} }} }}
layer {{ name: "tanh" type: "TanH" bottom: "hidden" top: "active" }}
layer {{ name: "score" type: "InnerProduct" bottom: "active" top: "score"
         inner_product_param {{ num_output: 10 weight_filler {{ type: "xavier" }} }} }}
layer {{ name: "loss" type: "SoftmaxWithLoss" bottom: "score" bottom: "label" top: "loss" }}
"""
SOLVER = (
    'net: "{net}" base_lr: 0.1 lr_policy: "fixed" momentum: 0.9 snapshot_after_train: false snapshot_prefix: "{prefix}"'
)
WITH_IDS = """
layer {{ name: "samples" type: "Input" top: "id" input_param {{ shape {{ dim: {count} }} }} }}
"""
NORMAL = NET.replace(
    'layer {{ name: "tanh"',
    'layer {{ name: "normal" type: "BatchNorm" bottom: "hidden" top: "normal" }}\nlayer {{ name: "tanh"',
).replace('type: "TanH" bottom: "hidden"', 'type: "TanH" bottom: "normal"')
ALIKE = NET.replace('"hidden" type', '"dense" type').replace('"score" type', '"dense" type')

if "APART" in os.environ:  # each rank on a host of its own
    os.environ["MULTIRING_HOST"] = os.environ["MULTIRING_RANK"]
mr.init()
RANK, SIZE = mr.rank(), mr.world_size()
IMAGES, LABELS = load_digits(return_X_y=True)


def solver(indices: np.ndarray, seed: int, net: str = NET, prefix: str = "") -> caffe.SGDSolver:
    """A solver that has these images as its batch."""
    with tempfile.TemporaryDirectory() as directory:
        described, text = Path(directory, "net.prototxt"), Path(directory, "solver.prototxt")
        described.write_text(net.format(count=len(indices)))
        text.write_text(SOLVER.format(net=described, prefix=prefix or f"{directory}/none"))
        made = caffe.SGDSolver(str(text))
    random = np.random.default_rng(seed)
    for blob in parameters(made):
        blob.data[...] = random.uniform(-0.2, 0.2, blob.data.shape)
    give(made, indices)
    return made


def give(made: caffe.SGDSolver, indices: np.ndarray) -> None:
    """A batch of these images, of whatever size."""
    made.net.blobs["image"].reshape(len(indices), 64)
    made.net.blobs["label"].reshape(len(indices))
    made.net.blobs["image"].data[...] = IMAGES[indices] / 16
    made.net.blobs["label"].data[...] = LABELS[indices]


def parameters(made: caffe.SGDSolver) -> list:
    return [blob for layer in made.net.layers for blob in layer.blobs]


def assert_alike(made: caffe.SGDSolver, wanted: caffe.SGDSolver) -> None:
    """Rounding in float32 of few steps, as in `training`."""
    for part, one in zip(parameters(made), parameters(wanted), strict=True):
        np.testing.assert_allclose(part.data, one.data, rtol=0, atol=1e-5)


@worker
def training() -> None:
    """Ranks with uneven parts of 1,797 images end where one process with all of them ends.

    20 steps in float32: each rounds parameters and momentum, both below 1, by at most 2**-24, and the sum of 1,797
    terms of a gradient by a few of its own; 20 x 8 x 2**-24 is 1e-5.
    """
    mine = mr.shard(len(IMAGES))
    for bucket_bytes in (1, 1 << 20):
        single, parts = solver(np.arange(len(IMAGES)), 0), solver(mine, RANK)
        distribute(parts, weight=len(mine), bucket_bytes=bucket_bytes)
        for _ in range(20):
            single.step(1)
            parts.step(1)
            losses = (float(made.net.blobs["loss"].data) for made in (parts, single))
            assert next(losses) == pytest.approx(next(losses), rel=1e-5)
        assert max(abs(one.data).max() for one in parameters(single)) < 1
        assert_alike(parts, single)


@worker
def reshaping() -> None:
    """A batch of another size moves the memory of blobs; without weights all ranks count the same."""
    made = solver(np.arange(10), RANK)
    distribute(made)
    made.step(1)
    give(made, np.arange(RANK, RANK + 3))
    gradients: list[np.ndarray] = []
    made.add_callback(lambda: None, lambda: gradients.extend(np.array(blob.diff) for blob in parameters(made)))
    made.net.clear_param_diffs()
    made.net.forward()
    made.net.backward()
    own = [np.array(blob.diff) for blob in parameters(made)]
    loss = np.array(float(made.net.blobs["loss"].data))
    made.step(1)
    for found, mine in zip(gradients, own, strict=True):
        mr.all_reduce(mine, "avg")
        np.testing.assert_allclose(found, mine, rtol=0, atol=1e-7)
    mr.all_reduce(loss, "avg")
    assert float(made.net.blobs["loss"].data) == pytest.approx(float(loss), rel=1e-6)


@worker
def gradients_in_int8() -> None:
    """They are rounded beside one another, and not beside the loss, which is far larger and arrives as it is."""
    made = solver(np.arange(20 * RANK, 20 * RANK + 20), 0)
    distribution = distribute(made)
    made.net.forward()
    made.net.backward()
    own = [np.array(blob.diff, np.float64) for blob in parameters(made)]
    largest = np.array([max(abs(one).max() for one in own)])
    loss = np.array(float(made.net.blobs["loss"].data))
    distribution.average()
    mr.all_reduce(loss, "avg")
    mr.all_reduce(largest, "avg")
    assert float(made.net.blobs["loss"].data) == pytest.approx(float(loss), rel=1e-7)
    assert loss > 5 * largest
    worst = 0.0
    for found, mine in zip(parameters(made), own, strict=True):
        mr.all_reduce(mine, "avg")
        worst = max(worst, abs(found.diff - mine).max())
    assert 1e-4 * largest < worst <= 0.008 * largest


@worker
def outputs_with_axes() -> None:
    """A top with a value for each sample is this rank's own: with one sample, several, and a growing batch."""
    first = 100 * (RANK + 1)
    for counts in ([1] * SIZE, [1 + rank for rank in range(SIZE)]):
        made = solver(np.arange(counts[RANK]), RANK, NET + WITH_IDS)
        distribute(made, weight=counts[RANK])
        for count in (counts[RANK], counts[RANK] + 1, 1):
            give(made, np.arange(count))
            made.net.blobs["id"].reshape(count)
            made.net.blobs["id"].data[...] = np.arange(first, first + count)
            made.step(1)
            assert made.net.blobs["id"].data.tolist() == list(range(first, first + count))
            loss = made.net.blobs["loss"].data
            assert (mr.all_gather(np.array(loss)) == loss).all()


@worker
def layers_of_one_name() -> None:
    """Both are broadcast, and both are averaged."""
    whole = np.arange(20 * SIZE)
    single, parts = solver(whole, 0, ALIKE), solver(whole[RANK::SIZE], RANK, ALIKE)
    assert len(parts.net.params) == 1
    distribute(parts)
    for _ in range(3):
        single.step(1)
        parts.step(1)
    assert_alike(parts, single)


@worker
def freed() -> None:
    """A distribution ends with its solver, though Caffe keeps the callback; a solver has only its last one."""
    made = solver(np.arange(10), RANK)
    first = weakref.ref(distribute(made, weight=1 + RANK))
    gc.collect()
    assert first() is not None
    distribute(made)
    gc.collect()
    assert first() is None
    own = solver(np.arange(5 * RANK, 5 * RANK + 5), 0)
    distribute(own, weight=1 + 9 * RANK)
    last = weakref.ref(distribute(own))
    own.step(1)
    single = solver(np.arange(5 * SIZE), 0)
    single.step(1)
    assert_alike(own, single)
    del own
    gc.collect()
    assert last() is None


@worker
def steps_before() -> None:
    """Own steps are refused on all ranks, as momentum cannot be seen; those of a common snapshot are not."""
    made = solver(np.arange(10), RANK)
    made.step(RANK)
    shown = ", ".join(f"{rank} on rank {rank}" for rank in range(SIZE))
    with pytest.raises(ValueError, match=rf"different numbers of steps, {shown}: distribute before the first step"):
        distribute(made)
    made.step(3 - RANK)
    with pytest.raises(ValueError, match=r"after 3 steps the parameters of rank 1 are not those of rank 0.* restore"):
        distribute(made)
    directory = mr.broadcast_object(tempfile.mkdtemp() if RANK == 0 else None)
    whole = np.arange(10 * SIZE)
    single = solver(whole, 0, prefix=f"{directory}/saved")
    single.step(2)
    if RANK == 0:
        single.snapshot()
    mr.barrier()
    parts = solver(whole[RANK::SIZE], RANK)
    parts.restore(f"{directory}/saved_iter_2.solverstate")
    distribute(parts)
    for _ in range(3):
        single.step(1)
        parts.step(1)
    assert_alike(parts, single)


@worker
def running_means() -> None:
    """They are each rank's own, and no reason to refuse a solver that is distributed once more, as after a loss."""
    made = solver(np.arange(10 * RANK, 10 * RANK + 10), RANK, NORMAL)
    means = made.net.params["normal"][0]
    distribute(made)
    made.step(2)
    seen = mr.all_gather(np.array(means.data))
    assert (seen[0] != seen[1]).any()
    distribute(made)
    np.testing.assert_array_equal(means.data, seen[0])
    made.step(1)
    for blob in parameters(made)[:2]:
        everybody = mr.all_gather(np.array(blob.data))
        assert (everybody == everybody[0]).all()


@worker
def by_hand() -> None:
    """A loop that updates by itself averages by itself; one without a sample gives any, which counts for nothing."""
    whole = np.arange(10)
    single = solver(whole, 0)
    mine = whole if RANK == 0 else whole[:0]
    parts = solver(mine if len(mine) else whole[:1], RANK)
    distribution = distribute(parts, weight=len(mine))
    for _ in range(3):
        single.step(1)
        if hasattr(parts, "apply_update"):  # releases of Caffe have no such method, its later source has
            parts.net.clear_param_diffs()
            parts.net.forward()
            parts.net.backward()
            distribution.average()
            parts.apply_update()
        else:
            parts.step(1)
    assert_alike(parts, single)


@worker
def mistakes() -> None:
    with pytest.raises(ValueError, match="net has no parameters"):
        distribute(SimpleNamespace(net=SimpleNamespace(_layer_names=[], layers=[]), add_callback=None))
    with pytest.raises(TypeError, match=r"caffe\.\w*\.?Net is no solver of pycaffe"):
        distribute(solver(np.arange(2), 0).net)


@worker
def loss_of_a_rank() -> None:
    """The highest rank is killed in a step; prints what the others are told."""
    made = solver(np.arange(10), RANK)
    distribute(made)
    made.step(2)
    started = time.monotonic()
    with pytest.raises(mr.PeerLost) as caught:
        losing.the_last_between(lambda: made.step(1))
    assert time.monotonic() - started < 10
    print("lost rank", caught.value.rank)


run(sys.argv[1:])
