"""What the ranks of the Caffe tests do: each function is one test, named on the command line."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import caffe
import losing
import numpy as np
import pytest
from sklearn.datasets import load_digits

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
SOLVER = 'net: "{net}" base_lr: 0.1 lr_policy: "fixed" momentum: 0.9 snapshot_after_train: false'

mr.init()
RANK, SIZE = mr.rank(), mr.world_size()
IMAGES, LABELS = load_digits(return_X_y=True)


def solver(indices: np.ndarray, seed: int) -> caffe.SGDSolver:
    """A solver that has these images as its batch."""
    with tempfile.TemporaryDirectory() as directory:
        net, text = Path(directory, "net.prototxt"), Path(directory, "solver.prototxt")
        net.write_text(NET.format(count=len(indices)))
        text.write_text(SOLVER.format(net=net))
        made = caffe.SGDSolver(str(text))
    random = np.random.default_rng(seed)
    for blob in parameters(made):
        blob.data[...] = random.uniform(-0.2, 0.2, blob.data.shape)
    made.net.blobs["image"].data[...] = IMAGES[indices] / 16
    made.net.blobs["label"].data[...] = LABELS[indices]
    return made


def parameters(made: caffe.SGDSolver) -> list:
    return [blob for blobs in made.net.params.values() for blob in blobs]


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
        for part, one in zip(parameters(parts), parameters(single), strict=True):
            assert abs(one.data).max() < 1
            np.testing.assert_allclose(part.data, one.data, rtol=0, atol=1e-5)


def reshaping() -> None:
    """A batch of another size moves the memory of blobs; without weights all ranks count the same."""
    made = solver(np.arange(10), RANK)
    distribute(made)
    made.step(1)
    made.net.blobs["image"].reshape(3, 64)
    made.net.blobs["label"].reshape(3)
    made.net.blobs["image"].data[...] = IMAGES[RANK : RANK + 3] / 16
    made.net.blobs["label"].data[...] = LABELS[RANK : RANK + 3]
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


def mistakes() -> None:
    with pytest.raises(ValueError, match="net has no parameters"):
        distribute(SimpleNamespace(net=SimpleNamespace(params={}), add_callback=None))
    with pytest.raises(TypeError, match=r"caffe\.\w*\.?Net is no solver of pycaffe"):
        distribute(solver(np.arange(2), 0).net)


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


for name in sys.argv[1:]:
    globals()[name]()
