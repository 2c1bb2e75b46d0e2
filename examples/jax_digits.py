"""Train on handwritten digits with JAX and Optax, the batch divided among the ranks.

python examples/jax_digits.py                         one process
multiring run -n 2 examples/jax_digits.py             two, on this machine
multiring run -H a:2,b:2 examples/jax_digits.py       four, on two hosts
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import multiring as mr
import multiring.jax as mrj

EPOCHS, BATCH = 10, 60


def digits():
    images, labels = load_digits(return_X_y=True)
    return train_test_split((images / 16).astype(np.float32), labels, test_size=0.2, random_state=0)


def network(key):
    sizes = [64, 128, 10]
    keys = jax.random.split(key, len(sizes))
    return [
        (jax.random.normal(k, (rows, columns)) / np.sqrt(rows), jnp.zeros(columns))
        for k, rows, columns in zip(keys, sizes, sizes[1:], strict=False)
    ]


def predict(parameters, x):
    *hidden, (last, bias) = parameters
    for weights, offset in hidden:
        x = jax.nn.relu(x @ weights + offset)
    return x @ last + bias


def loss(parameters, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(predict(parameters, x), y).mean()


optimizer = optax.chain(mrj.all_reduce_gradients(), optax.adam(3e-3))


@jax.jit
def step(parameters, state, x, y):
    value, gradients = jax.value_and_grad(loss)(parameters, x, y)
    updates, state = optimizer.update(gradients, state, parameters, weight=len(x))  # this rank has len(x) images
    return optax.apply_updates(parameters, updates), state, mrj.average(value, weight=len(x))


def main():
    mr.init()
    x, x_test, y, y_test = digits()
    parameters = mrj.broadcast_parameters(network(jax.random.key(mr.rank())))
    state = optimizer.init(parameters)
    for epoch in range(EPOCHS):
        order = np.random.default_rng(epoch).permutation(len(x))  # the same on all ranks
        for start in range(0, len(x), BATCH):
            mine = np.array_split(order[start : start + BATCH], mr.world_size())[mr.rank()]
            parameters, state, value = step(parameters, state, x[mine], y[mine])
    accuracy = (predict(parameters, x_test).argmax(1) == y_test).mean()
    if mr.rank() == 0:
        print(f"loss {value:.4f}, test accuracy {accuracy:.1%}, {mr.world_size()} ranks")


if __name__ == "__main__":
    main()
