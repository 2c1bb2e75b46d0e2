"""Train on handwritten digits with Keras 3, on any of its backends, the images divided among the ranks.

python examples/keras_digits.py                         one process
multiring run -n 2 examples/keras_digits.py             two, on this machine
multiring run -H a:2,b:2 examples/keras_digits.py       four, on two hosts
"""

import keras
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import multiring as mr
import multiring.keras as mrk

EPOCHS, BATCH, RATE = 20, 60, 2e-3


def main():
    mr.init()
    images, labels = load_digits(return_X_y=True)
    x, x_test, y, y_test = train_test_split((images / 16).astype(np.float32), labels, test_size=0.2, random_state=0)
    mine = mr.shard(len(x), uneven="drop")  # ranks take equally many steps

    layers = keras.layers
    model = keras.Sequential([keras.Input((64,)), layers.Dense(128, "relu"), layers.Dense(10, "softmax")])
    model.compile(
        mrk.DistributedOptimizer(keras.optimizers.Adam(RATE)), "sparse_categorical_crossentropy", metrics=["accuracy"]
    )
    model.fit(
        x[mine],
        y[mine],
        batch_size=BATCH // mr.world_size(),
        epochs=EPOCHS,
        verbose=2 if mr.rank() == 0 else 0,
        callbacks=[
            mrk.BroadcastGlobalVariablesCallback(0),
            mrk.MetricAverageCallback(),
            mrk.LearningRateWarmupCallback(RATE, warmup_epochs=3),
        ],
    )
    if mr.rank() == 0:
        _, accuracy = model.evaluate(x_test, y_test, verbose=0)
        print(f"test accuracy {accuracy:.1%}, {mr.world_size()} ranks")


if __name__ == "__main__":
    main()
