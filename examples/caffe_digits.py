"""Train on handwritten digits with Caffe, the batch divided among the ranks.

python examples/caffe_digits.py                         one process
multiring run -n 2 examples/caffe_digits.py             two, on this machine
multiring run -H a:2,b:2 examples/caffe_digits.py       four, on two hosts
"""

import tempfile
from pathlib import Path

import caffe
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import multiring as mr
from multiring.caffe import distribute

EPOCHS, BATCH = 10, 60
NET = """
layer { name: "input" type: "Input" top: "image" top: "label"
        input_param { shape { dim: 60 dim: 64 } shape { dim: 60 } } }
layer { name: "hidden" type: "InnerProduct" bottom: "image" top: "hidden"
        inner_product_param { num_output: 128 weight_filler { type: "xavier" } } }
layer { name: "tanh" type: "TanH" bottom: "hidden" top: "active" }
layer { name: "score" type: "InnerProduct" bottom: "active" top: "score"
        inner_product_param { num_output: 10 weight_filler { type: "xavier" } } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "score" bottom: "label" top: "loss" }
"""


def digits():
    images, labels = load_digits(return_X_y=True)
    return train_test_split(images / 16, labels, test_size=0.2, random_state=0)


def make_solver():
    with tempfile.TemporaryDirectory() as directory:
        net, solver = Path(directory, "net.prototxt"), Path(directory, "solver.prototxt")
        net.write_text(NET)
        solver.write_text(f'net: "{net}" base_lr: 0.1 lr_policy: "fixed" momentum: 0.9 snapshot_after_train: false')
        return caffe.SGDSolver(str(solver))


def give(net, images, labels):
    net.blobs["image"].reshape(*images.shape)
    net.blobs["label"].reshape(*labels.shape)
    net.blobs["image"].data[...] = images
    net.blobs["label"].data[...] = labels


def main():
    mr.init()
    caffe.set_mode_cpu()
    x, x_test, y, y_test = digits()
    solver = make_solver()
    distribution = distribute(solver)
    for epoch in range(EPOCHS):
        order = np.random.RandomState(epoch).permutation(len(x))  # the same on all ranks
        for start in range(0, len(order), BATCH):
            mine = np.array_split(order[start : start + BATCH], mr.world_size())[mr.rank()]
            give(solver.net, x[mine], y[mine])
            distribution.weight = len(mine)
            solver.step(1)
    loss = float(solver.net.blobs["loss"].data)  # loss of the last batch, averaged over the ranks
    give(solver.net, x_test, y_test)
    solver.net.forward()
    accuracy = (solver.net.blobs["score"].data.argmax(1) == y_test).mean()
    if mr.rank() == 0:
        print(f"loss {loss:.4f}, test accuracy {accuracy:.1%}, {mr.world_size()} ranks")


if __name__ == "__main__":
    main()
