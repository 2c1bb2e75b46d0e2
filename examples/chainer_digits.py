"""Train on handwritten digits with Chainer's trainer, each rank on its part of the images.

python examples/chainer_digits.py                         one process
multiring run -n 2 examples/chainer_digits.py             two, on this machine
multiring run -H a:2,b:2 examples/chainer_digits.py       four, on two hosts
"""

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
from chainer.training import StandardUpdater, Trainer, extensions
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import multiring as mr
from multiring.chainer import create_multi_node_evaluator, create_multi_node_optimizer

EPOCHS, BATCH = 10, 60


def digits():
    images, labels = load_digits(return_X_y=True)
    return train_test_split((images / 16).astype(np.float32), labels.astype(np.int32), test_size=0.2, random_state=0)


def main():
    mr.init()
    x, x_test, y, y_test = digits()
    mine, mine_test = mr.shard(len(x), uneven="drop"), mr.shard(len(x_test))  # ranks take equally many steps
    batches = chainer.iterators.SerialIterator(
        chainer.datasets.TupleDataset(x[mine], y[mine]), BATCH // mr.world_size(), shuffle=True
    )
    tests = chainer.iterators.SerialIterator(
        chainer.datasets.TupleDataset(x_test[mine_test], y_test[mine_test]), len(mine_test), repeat=False
    )

    model = L.Classifier(chainer.Sequential(L.Linear(None, 128), F.relu, L.Linear(128, 10)))
    optimizer = create_multi_node_optimizer(chainer.optimizers.Adam(3e-3)).setup(model)
    trainer = Trainer(StandardUpdater(batches, optimizer), (EPOCHS, "epoch"), out="build/chainer")
    evaluator = create_multi_node_evaluator(extensions.Evaluator(tests, model), weight=len(mine_test))
    trainer.extend(evaluator, trigger=(EPOCHS, "epoch"))
    trainer.run()
    if mr.rank() == 0:
        accuracy = trainer.observation["validation/main/accuracy"]
        print(f"test accuracy {accuracy:.1%}, {mr.world_size()} ranks")


if __name__ == "__main__":
    main()
