"""Train a Keras network on handwritten digits in an elastic job: ranks join, leave and fail.

    echo localhost:2 > hosts
    horovodrun -np 2 --min-np 1 --max-np 4 --network-interfaces lo --gloo \\
        --host-discovery-script "cat hosts" python examples/keras_elastic.py

Write `localhost:4` into the file `hosts` while it trains, or kill a rank: training continues
with the remaining ranks from the same weights. docs/elastic.md lists the steps that are lost.
"""

from __future__ import annotations

import argparse

import keras
import numpy as np
from keras_digits import digits, network

import adasum_hvd.tensorflow.keras as hvd


def parse() -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--op", default="adasum-grad")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch", type=int, default=32, help="images a rank and step")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--commit", type=int, default=5, help="steps between commits")
    return parser.parse_args()


class CountSamples(keras.callbacks.Callback):
    """Counts in `state.done` what all ranks have trained on in this epoch."""

    def __init__(self, state: hvd.elastic.KerasState, batch: int):
        super().__init__()
        self.state, self.samples = state, batch * hvd.size()

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        """Count the samples of a step."""
        self.state.done += self.samples


def main() -> None:
    """Train until the last epoch, with any number of ranks."""
    arguments = parse()
    hvd.init()
    images, labels, test_images, test_labels = digits()
    model = network()
    optimizer = keras.optimizers.SGD(arguments.lr, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, op=arguments.op)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    hvd.compile(model, optimizer, loss=loss, metrics=["accuracy"])
    state = hvd.elastic.KerasState(model, epoch=0, done=0)

    @hvd.elastic.run
    def train(state: hvd.elastic.KerasState) -> None:
        while state.epoch < arguments.epochs:
            order = np.random.RandomState(state.epoch).permutation(len(images))
            rest = order[
                state.done :
            ]  # images of this epoch that no rank has processed
            mine = rest[hvd.rank() : len(rest) - len(rest) % hvd.size() : hvd.size()]
            if hvd.rank() == 0:
                print(f"{hvd.size()} ranks, epoch {state.epoch}", flush=True)
            if len(mine):
                count = CountSamples(state, arguments.batch)
                commit = hvd.elastic.CommitStateCallback(state, arguments.commit)
                model.fit(
                    images[mine], labels[mine], arguments.batch, verbose=0,
                    shuffle=False, callbacks=[count, commit],
                )  # fmt: skip
            state.epoch, state.done = state.epoch + 1, 0
            state.commit()

    train(state)
    _, accuracy = model.evaluate(test_images, test_labels, verbose=0)
    identical = hvd.check_replicas(model)
    if hvd.rank() == 0:
        print(
            f"{hvd.size()} ranks: accuracy {100 * accuracy:.1f} %, replicas identical: {identical}"
        )


if __name__ == "__main__":
    main()
