"""Your own TensorFlow 2 training loop with Horovod, one process per rank.

    horovodrun -np 4 --gloo python examples/tensorflow2_custom_loop.py --op adasum-grad
    horovodrun -np 4 --gloo python examples/tensorflow2_custom_loop.py --op adasum-grad --tape

Without `--tape` the optimizer reduces (gradients, or weight changes with adasum-delta); with
`--tape` the gradient tape does, around any optimizer.
"""

from __future__ import annotations

import argparse

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import adasum_hvd.tensorflow as hvd
from adasum_hvd import ops


def batches(batch_size: int) -> tf.data.Dataset:
    """Return this rank's batches of (images of 64 pixels, labels), for ever."""
    data = load_digits()
    images = data.data.astype(np.float32) / 16 - 0.5
    dataset = tf.data.Dataset.from_tensor_slices((images, data.target))
    mine = dataset.shard(hvd.size(), hvd.rank())
    return mine.shuffle(2000, seed=hvd.rank()).repeat().batch(batch_size)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--op", default="adasum-grad", choices=ops.names())
    parser.add_argument("--tape", action="store_true", help="reduce in the tape")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=32, help="per rank and step")
    parser.add_argument(
        "--lr", type=float, default=0.002, help="for one process; not scaled"
    )
    arguments = parser.parse_args()

    hvd.init()
    if gpus := tf.config.list_physical_devices("GPU"):
        tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")

    layers = [keras.layers.Dense(128, activation="relu"), keras.layers.Dense(10)]
    model = keras.Sequential([keras.Input((64,)), *layers])
    hvd.broadcast_variables(model.variables, root_rank=0)
    optimizer = keras.optimizers.Adam(arguments.lr)
    if not arguments.tape:
        optimizer = hvd.DistributedOptimizer(optimizer, op=arguments.op)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function
    def step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images, training=True))
        if arguments.tape:
            tape = hvd.DistributedGradientTape(tape, op=arguments.op)
        variables = model.trainable_variables
        gradients = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    for number, (images, labels) in enumerate(batches(arguments.batch_size)):
        loss = step(images, labels)
        if hvd.rank() == 0 and number % 50 == 0:
            print(f"step {number:4d} loss {float(loss):.3f}")
        if number + 1 == arguments.steps:
            break

    hvd.check_replicas(model)
    mean = float(hvd.allreduce(loss, op=hvd.Average, name="loss"))
    if hvd.rank() == 0:
        print(f"last loss, mean of the ranks: {mean:.3f}; replicas are identical")
    hvd.shutdown()


if __name__ == "__main__":
    main()
