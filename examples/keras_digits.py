"""Train a small Keras network on scikit-learn's digits with Horovod, one process per rank.

    horovodrun -np 4 --gloo python examples/keras_digits.py --op adasum-grad

The learning rate is the one that is best for a single process. AdaSum of gradients needs no
other, but with 8 ranks and more 1.73 times it takes fewer steps (docs/choose.md).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import adasum_hvd.tensorflow.keras as hvd
from adasum_hvd import ops


def digits() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return train images, train labels, test images and test labels: 1437 and 360 digits."""
    data = load_digits()
    images = data.images[..., None].astype(np.float32) / 16 - 0.5
    order = np.random.default_rng(0).permutation(len(images))
    train, test = order[:1437], order[1437:]
    return images[train], data.target[train], images[test], data.target[test]


def network() -> keras.Model:
    """Return a convolutional network for 8 x 8 single-channel images; outputs are logits."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dense(10),
        ]
    )


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--op", default="adasum-grad", choices=ops.names())
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--lr", type=float, default=0.05, help="for one process")
    parser.add_argument("--output", type=Path, default=Path("build"))
    arguments = parser.parse_args()

    hvd.init()
    if gpus := tf.config.list_physical_devices("GPU"):
        tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")

    images, labels, test_images, test_labels = digits()
    # Each rank has a shard of the same length, because steps are collective.
    share = len(images) // hvd.size()
    mine = slice(hvd.rank() * share, (hvd.rank() + 1) * share)
    keras.utils.set_random_seed(42 + hvd.rank())  # the broadcast makes weights equal
    model = network()
    optimizer = keras.optimizers.SGD(arguments.lr, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, op=arguments.op)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    hvd.compile(model, optimizer, loss=loss, metrics=["accuracy"])

    arguments.output.mkdir(parents=True, exist_ok=True)
    best = arguments.output / "keras_digits.keras"
    model.fit(
        images[mine], labels[mine], epochs=arguments.epochs, verbose=0,
        validation_data=(test_images, test_labels),
        callbacks=[
            hvd.callbacks.BroadcastGlobalVariablesCallback(root_rank=0),
            hvd.callbacks.MetricAverageCallback(),
            hvd.callbacks.BestModelCheckpoint(str(best), monitor="val_accuracy"),
            hvd.callbacks.CheckReplicasCallback(every=50),
            hvd.callbacks.ProgressCallback(),
        ],
    )  # fmt: skip
    _, accuracy = model.evaluate(test_images, test_labels, verbose=0)
    if hvd.rank() == 0:
        print(hvd.banner(optimizer))
        print(f"test accuracy {accuracy:.3f}; best model: {best}")
    hvd.shutdown()


if __name__ == "__main__":
    main()
