"""Train on handwritten digits with a training loop of TensorFlow, the batch divided among the ranks.

python examples/tensorflow_digits.py                         one process
multiring run -n 2 examples/tensorflow_digits.py             two, on this machine
multiring run -H a:2,b:2 examples/tensorflow_digits.py       four, on two hosts
"""

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import multiring as mr
import multiring.tensorflow as mrt

EPOCHS, BATCH = 10, 60


def digits():
    images, labels = load_digits(return_X_y=True)
    return train_test_split((images / 16).astype(np.float32), labels, test_size=0.2, random_state=0)


def main():
    mr.init()
    x, x_test, y, y_test = digits()
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(128, "relu"), keras.layers.Dense(10)])
    optimizer = keras.optimizers.Adam(3e-3)
    optimizer.build(model.trainable_variables)
    mrt.broadcast_variables([*model.variables, *optimizer.variables])

    @tf.function(reduce_retracing=True)
    def step(x, y):
        count = tf.shape(x)[0]
        with mrt.DistributedGradientTape(weight=count) as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x, training=True))
            loss = tf.reduce_mean(losses)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return mrt.average(loss, weight=count)

    for epoch in range(EPOCHS):
        order = np.random.default_rng(epoch).permutation(len(x))  # the same on all ranks
        for start in range(0, len(x), BATCH):
            mine = np.array_split(order[start : start + BATCH], mr.world_size())[mr.rank()]
            loss = step(x[mine], y[mine])
    accuracy = (model(x_test).numpy().argmax(1) == y_test).mean()
    if mr.rank() == 0:
        print(f"loss {loss:.4f}, test accuracy {accuracy:.1%}, {mr.world_size()} ranks")


if __name__ == "__main__":
    main()
