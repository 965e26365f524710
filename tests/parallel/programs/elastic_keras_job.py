"""An elastic job of Keras as tests start it: elastic_plan.py.

Also in the plan: `loop`, how it trains: a "function" of TensorFlow, or by "fit".
"""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

import adasum_hvd.tensorflow.keras as hvd
from tests.parallel.programs.elastic_plan import BATCH, SAMPLES, Plan, digest

plan = Plan(hvd)
plan.arrive()
hvd.init()
tf.config.threading.set_intra_op_parallelism_threads(1)
keras.utils.set_random_seed(
    hvd.rank()
)  # the first synchronization makes replicas equal
features, labels = plan.data()
model = keras.Sequential(
    [
        keras.Input((6,)),
        keras.layers.Dense(plan.hidden, activation="tanh"),
        keras.layers.Dense(plan.hidden, activation="tanh"),
        keras.layers.Dense(3),
    ]
)
optimizer = hvd.DistributedOptimizer(
    keras.optimizers.SGD(0.02, momentum=0.9), **plan.options
)
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
hvd.compile(model, optimizer, loss_of)
state = hvd.elastic.KerasState(model, epoch=0, step=0, done=0)


def weights() -> str:
    return digest(model.get_weights())


def mine() -> list[int]:
    """Return what this rank trains on in the rest of the epoch."""
    rest = np.random.RandomState(state.epoch).permutation(SAMPLES)[state.done :]
    missing = -len(rest) % hvd.size()
    return np.resize(rest, len(rest) + missing)[hvd.rank() :: hvd.size()].tolist()


def note(chosen: list[int], loss: float) -> None:
    """Write down a step that was taken."""
    line = {"step": state.step, "epoch": state.epoch, "samples": chosen}
    plan.write(**line, weights=weights(), loss=loss)
    state.step += 1
    state.done += len(chosen) * hvd.size()


@tf.function
def train_step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    with tf.GradientTape() as tape:
        loss = loss_of(y, model(x, training=True))
    optimizer.apply(tape.gradient(loss, model.trainable_variables))
    return loss


def train_by_function(order: list[int]) -> None:
    for position in range(0, len(order), BATCH):
        chosen = order[position : position + BATCH]
        plan.come_upon(state, state.step)
        loss = train_step(features[chosen], labels[chosen])
        note(chosen, float(loss))
        if state.step % plan["commit"] == 0:
            state.commit()
        else:
            state.check_host_updates()


class Following(keras.callbacks.Callback):
    """Comes upon faults, and notes steps."""

    def __init__(self, order: list[int]):
        super().__init__()
        self.order = order

    def on_train_batch_begin(self, batch, logs=None):
        plan.come_upon(state, state.step)

    def on_train_batch_end(self, batch, logs=None):
        note(self.order[batch * BATCH : (batch + 1) * BATCH], logs["loss"])


def train_by_fit(order: list[int]) -> None:
    commit = hvd.elastic.CommitStateCallback(state, plan["commit"])
    model.fit(
        features[order], labels[order], BATCH, shuffle=False, verbose=0,
        callbacks=[Following(order), commit],
    )  # fmt: skip


@hvd.elastic.run
def train(state: hvd.elastic.KerasState) -> None:
    plan.begin(state.step, weights())
    by = {"function": train_by_function, "fit": train_by_fit}[plan["loop"]]
    while state.epoch < plan["epochs"]:
        if order := mine():
            by(order)
        state.epoch, state.done = state.epoch + 1, 0
        state.commit()
    plan.write(end=state.step, weights=weights())


train(state)
