"""Train on handwritten digits with Theano, Aesara or PyTensor, the batch divided among the ranks.

python examples/theano_digits.py                         one process; the library is the first that is installed
multiring run -n 2 examples/theano_digits.py aesara      two, on this machine
multiring run -H a:2,b:2 examples/theano_digits.py       four, on two hosts
"""

import importlib
import sys
from importlib.util import find_spec

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import multiring as mr
from multiring.theano import average, broadcast_variables

EPOCHS, BATCH, RATE = 20, 60, 0.2

name = sys.argv[1] if len(sys.argv) > 1 else next(filter(find_spec, ("theano", "aesara", "pytensor")))
library, T = importlib.import_module(name), importlib.import_module(f"{name}.tensor")


def digits():
    images, labels = load_digits(return_X_y=True)
    return train_test_split((images / 16).astype(np.float32), labels.astype(np.int64), test_size=0.2, random_state=0)


def network():
    """The parameters, and a function from images to logits."""
    shapes = (64, 128), (128,), (128, 10), (10,)
    parameters = [library.shared(np.random.normal(0, 0.1, shape).astype(np.float32)) for shape in shapes]
    w, b, v, c = parameters
    return parameters, lambda x: T.dot(T.tanh(T.dot(x, w) + b), v) + c


def main():
    mr.init()
    x_train, x_test, y_train, y_test = digits()
    parameters, logits = network()
    broadcast_variables(parameters)

    x, y, count = T.fmatrix("x"), T.lvector("y"), T.fscalar("count")
    scores = logits(x) - logits(x).max(axis=1, keepdims=True)
    loss = (T.log(T.exp(scores).sum(axis=1)) - scores[T.arange(y.shape[0]), y]).mean()
    gradients = library.gradient.grad(loss, parameters)
    loss, *gradients = average([loss, *gradients], weight=count)  # the only line for many ranks
    updates = [(p, p - np.float32(RATE) * gradient) for p, gradient in zip(parameters, gradients, strict=True)]
    step = library.function([x, y, count], loss, updates=updates)
    classify = library.function([x], T.argmax(logits(x), axis=1))

    for epoch in range(EPOCHS):
        order = np.random.RandomState(epoch).permutation(len(x_train))  # the same on all ranks
        for start in range(0, len(order), BATCH):
            mine = np.array_split(order[start : start + BATCH], mr.world_size())[mr.rank()]
            reached = step(x_train[mine], y_train[mine], len(mine))
    accuracy = (classify(x_test) == y_test).mean()
    if mr.rank() == 0:
        print(f"loss {float(reached):.4f}, test accuracy {accuracy:.1%}, {mr.world_size()} ranks")


if __name__ == "__main__":
    main()
