"""The Keras optimizer with averages, custom loops, sparse rows and errors."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import adasum_hvd.tensorflow.keras as hvd
from tests.parallel.cases.keras.test_optimizer import (
    EXECUTIONS,
    STEPS,
    VARIANTS,
    check_equal,
    check_same_everywhere,
    compiled,
    fit,
    model_of,
    momentum,
    trained,
)
from tests.parallel.harness import numpy_training as numerics


@pytest.mark.parametrize("op", ["adasum-grad", "adasum-delta"])
def case_keras_averages_schedules_and_constraints(op: str) -> None:
    optimizer = hvd.DistributedOptimizer(
        momentum(use_ema=True, ema_momentum=0.5), op=op
    )
    model = compiled(optimizer)
    images, targets = numerics.data_of(hvd.rank(), STEPS)
    for step in range(STEPS):
        part = slice(step * numerics.BATCH, (step + 1) * numerics.BATCH)
        model.train_on_batch(images[part], targets[part])
    check_equal(model, trained(op))
    # The average is of the weights that all ranks share.
    average = [np.asarray(w, np.float64) for w in trained_prefix(op, 1)]
    for step in range(2, STEPS + 1):
        weights = trained_prefix(op, step)
        average = [(a + w) / 2 for a, w in zip(average, weights, strict=True)]
    optimizer.finalize_variable_values(model.trainable_variables)
    check_equal(model, average)
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
    optimizer = keras.optimizers.SGD(schedule)
    model = compiled(hvd.DistributedOptimizer(optimizer, op=op))
    fit(model)
    check_equal(model, numerics.train(Halving, op, hvd.size(), STEPS))
    model = keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(3, kernel_constraint="non_neg")]
    )
    hvd.compile(model, hvd.DistributedOptimizer(momentum(), op=op), loss="mse")
    hvd.broadcast_variables(model.weights)
    fit(model)
    check_same_everywhere(model)
    assert model.get_weights()[0].min() >= 0


class Halving(numerics.Sgd):
    def __init__(self) -> None:
        super().__init__(0.1)

    def __call__(self, weights, grads):
        new = super().__call__(weights, grads)
        self.lr /= 2
        return new


def trained_prefix(op: str, steps: int) -> numerics.Weights:
    whole = numerics.batch_of
    try:
        numerics.batch_of = lambda rank, step, _: whole(rank, step, STEPS)
        return trained(op, steps)
    finally:
        numerics.batch_of = whole


def case_keras_weight_decay_is_part_of_the_change() -> None:
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.1, weight_decay=0.1), op="adasum-delta"
    )
    model = compiled(optimizer)
    fit(model)

    class Decaying(numerics.Sgd):
        def __call__(self, weights, grads):
            return super().__call__([w - 0.01 * w for w in weights], grads)

    expected = numerics.train(lambda: Decaying(0.1), "adasum", hvd.size(), STEPS)
    check_equal(model, expected)


def case_keras_delta_options() -> None:
    for limit in (1e-3, 1e3):
        optimizer = hvd.DistributedOptimizer(
            momentum(), op="adasum-delta", clip_delta_norm=limit
        )
        model = compiled(optimizer)
        before = model.get_weights()
        images, targets = numerics.batch_of(hvd.rank(), 0, STEPS)
        model.train_on_batch(images, targets)
        check_same_everywhere(model)
        change = [a - b for a, b in zip(model.get_weights(), before, strict=True)]
        norm = np.sqrt(sum(float(np.sum(np.square(c))) for c in change))
        assert (abs(norm - limit) < 1e-6) == (limit == 1e-3)
    assert "AdasumDelta (delta variant)" in hvd.banner(optimizer)
    assert optimizer.extra_bytes() == {"device": 0, "host": 0}
    assert "AdasumGrad (grad" in hvd.banner(
        hvd.DistributedOptimizer(scaled(momentum()), op="adasum-grad")
    )
    short = hvd.DistributedOptimizer(
        momentum(), op="adasum-grad", compression=hvd.Compression.fp16, groups=2
    )
    model = compiled(short)
    fit(model)
    check_equal(model, trained("adasum-grad"), 2e-3)


def case_keras_custom_loops() -> None:
    """Eagerly and in a function; variables hold weights whenever one looks."""
    for op in VARIANTS:
        for eager in (True, False):
            model = model_of()
            optimizer = hvd.DistributedOptimizer(momentum(), op=op)

            def step(images, targets, model=model, optimizer=optimizer):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean((model(images) - targets) ** 2)
                variables = model.trainable_variables
                gradients = tape.gradient(loss, variables)
                optimizer.apply_gradients(zip(gradients, variables, strict=True))
                return loss

            run = step if eager else tf.function(step)
            for index in range(STEPS):
                run(*map(tf.constant, numerics.batch_of(hvd.rank(), index, STEPS)))
                check_equal(model, trained_prefix(op, index + 1))
        model = compiled(
            hvd.DistributedOptimizer(momentum(), op=op), steps_per_execution=2
        )
        fit(model)
        check_equal(model, trained(op))
    model = compiled(hvd.DistributedOptimizer(momentum()), run_eagerly=True)
    fit(model)
    check_equal(model, trained("average"))
    # TensorFlow's own variables, accumulated.
    variables = [tf.Variable(w) for w in numerics.initial_weights()]
    optimizer = hvd.DistributedOptimizer(
        momentum(), op="adasum-delta", backward_passes_per_step=2, local_steps=2
    )
    for index in range(STEPS):
        weights = [v.numpy() for v in variables]
        batch = numerics.batch_of(hvd.rank(), index, STEPS)
        grads = [g.astype(np.float32) for g in numerics.gradients(weights, *batch)]
        optimizer.apply_gradients(zip(map(tf.constant, grads), variables, strict=True))
    expected = trained("adasum-delta", passes=2, local_steps=2)
    for variable, value in zip(variables, expected, strict=True):
        assert np.abs(variable.numpy() - value).max() < 1e-6


def case_keras_executions_that_do_not_divide_the_data() -> None:
    """Before 3.7 the end of the data cancels steps, other ones on each rank."""
    model, optimizer = model_of(), hvd.DistributedOptimizer(momentum())
    hvd.compile(model, optimizer, "mse", steps_per_execution=STEPS - 1)
    if EXECUTIONS:
        fit(model)
        check_equal(model, trained("average"))
        assert int(optimizer.iterations) == STEPS
    else:
        with pytest.raises(NotImplementedError, match=r"install Keras 3\.7 or newer"):
            fit(model)


@pytest.mark.parametrize("op", ("average", "adasum-delta"))
def case_keras_names_do_not_depend_on_the_graph(op: str) -> None:
    """Rank 0 has built other models before and computes more in the same step."""
    metrics = []
    if hvd.rank() == 0:
        fit(compiled(momentum()), 2)
        metrics = ["mae", keras.metrics.MeanSquaredError(), "cosine_similarity"]
    scaled = keras.optimizers.LossScaleOptimizer(momentum(), initial_scale=4.0)
    optimizer = hvd.DistributedOptimizer(scaled, op=op, bucket_bytes=100)
    model = compiled(optimizer, metrics=metrics, steps_per_execution=2)
    fit(model)
    check_equal(model, trained(op))


def clipped_adam() -> keras.optimizers.Optimizer:
    return keras.optimizers.Adam(0.02, global_clipnorm=1)


def scaled(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    return keras.optimizers.LossScaleOptimizer(optimizer)


def case_keras_embeddings() -> None:
    def fitted(optimizer: keras.optimizers.Optimizer, **kwargs: object) -> np.ndarray:
        model = keras.Sequential(
            [
                keras.Input((2,), dtype="int32"),
                keras.layers.Embedding(7, 3, embeddings_initializer="ones"),
            ]
        )
        compiled(hvd.DistributedOptimizer(optimizer, **kwargs), model)
        model.fit(batches, verbose=0)
        check_same_everywhere(model)
        (table,) = model.get_weights()
        rows = [*range(hvd.size()), 5]
        assert (np.abs(table[rows] - 1) > 1e-3).all() and (table[6] == 1).all()
        return table

    words = np.array([[hvd.rank(), 5]] * 4)
    targets = np.full((4, 2, 3), 3.0 + hvd.rank(), np.float32)
    batches = tf.data.Dataset.from_tensor_slices((words, targets)).batch(2)
    for kwargs in (
        {"op": "adasum-grad", "sparse_as_dense": True},
        {"op": "adasum-delta"},
        {"op": "adasum-delta", "backward_passes_per_step": 2},
    ):
        fitted(momentum(), **kwargs)
    # Rows that are gathered give the step of dense gradients, repeated rows included.
    for op, make in (
        ("average", momentum),
        ("average", lambda: scaled(clipped_adam())),
        ("sum", lambda: scaled(momentum())),
        ("sum", clipped_adam),
    ):
        tables = [
            fitted(make(), op=op, sparse_as_dense=dense) for dense in (False, True)
        ]
        np.testing.assert_allclose(*tables, atol=1e-6)
    with pytest.raises(ValueError, match=r"gradient of .*sparse_as_dense=True"):
        fitted(momentum(), op="adasum-grad")


def case_keras_modes_that_cannot_work() -> None:
    model = model_of()
    model.compile(hvd.DistributedOptimizer(momentum()), "mse", jit_compile=True)
    with pytest.raises(NotImplementedError, match=r"compile\(jit_compile=False\)"):
        fit(model)
    with pytest.raises(ValueError, match="expected jit_compile=False"):
        compiled(hvd.DistributedOptimizer(momentum()), jit_compile=True)
    model = model_of()
    optimizer = hvd.DistributedOptimizer(scaled(momentum()))
    model.compile(optimizer, "mse", jit_compile=True)
    with pytest.raises(NotImplementedError, match=r"compile\(jit_compile=False\)"):
        fit(model)

    class Loner(keras.optimizers.SGD):
        def _backend_apply_gradients(self, grads, trainable_variables):
            for grad, variable in zip(grads, trainable_variables, strict=True):
                variable.assign_sub(grad)

    class Unnamed(keras.optimizers.SGD):
        def get_config(self):
            raise OSError("no configuration")

    model = compiled(hvd.DistributedOptimizer(Unnamed(0.1)))
    fit(model)
    check_same_everywhere(model)
    for op in ("average", "adasum-delta"):
        with pytest.raises(RuntimeError, match="that reduced nothing"):
            fit(compiled(hvd.DistributedOptimizer(Loner(), op=op)))
        model = compiled(hvd.DistributedOptimizer(momentum(), op=op))
        hvd.mark_worker_local(*model.trainable_variables)
        with pytest.raises(RuntimeError, match="that reduced nothing"):
            fit(model)
    model = compiled(hvd.DistributedOptimizer(momentum(global_clipnorm=1.0)))
    hvd.mark_worker_local(model.trainable_variables[0])
    with pytest.raises(ValueError, match="global_clipnorm: expected variables that"):
        fit(model)
    optimizer = hvd.DistributedOptimizer(momentum())
    with pytest.raises(ValueError, match="built"):
        optimizer.apply([tf.ones(3)])
    with pytest.raises(ValueError, match="got one that is distributed already"):
        hvd.DistributedOptimizer(optimizer)
    with pytest.raises(ValueError, match="use_ema: expected local_steps=1"):
        hvd.DistributedOptimizer(momentum(use_ema=True), op="adasum", local_steps=2)
    with pytest.raises(TypeError, match="expected a Keras 3 optimizer"):
        hvd.DistributedOptimizer("sgd")
    layer = keras.layers.Dense(2 + (hvd.rank() == 0))
    model = keras.Sequential([keras.Input((6,)), layer])
    hvd.compile(model, hvd.DistributedOptimizer(momentum()), loss="mse")
    with pytest.raises(ValueError, match="expected the same parameters in the same"):
        model.fit(np.ones((4, 6)), np.ones((4, layer.units)), verbose=0)


@pytest.mark.parametrize("op", VARIANTS)
def case_keras_worker_local_variables(op: str) -> None:
    model = compiled(hvd.DistributedOptimizer(momentum(), op=op))
    mine = model.trainable_variables[0]
    hvd.mark_worker_local(mine)
    fit(model)
    everyone = hvd.allgather_object([w.tobytes() for w in model.get_weights()])
    assert len({weights[0] for weights in everyone}) == hvd.size()
    for index in range(1, 4):
        assert len({weights[index] for weights in everyone}) == 1


def case_keras_partial_optimizer() -> None:
    for op in VARIANTS:
        model = model_of()
        mine, shared = model.layers
        optimizer = hvd.PartialDistributedOptimizer(
            momentum(), op=op, local_layers=mine
        )
        hvd.compile(model, optimizer, loss="mse")
        fit(model)
        everyone = hvd.allgather_object([w.tobytes() for w in mine.get_weights()])
        for weights in zip(*everyone, strict=True):
            assert len(set(weights)) == hvd.size()
        everyone = hvd.allgather_object([w.tobytes() for w in shared.get_weights()])
        for weights in zip(*everyone, strict=True):
            assert len(set(weights)) == 1
    # Horovod's order, and no layer at all: a plain distributed one.
    fp16 = hvd.Compression.fp16
    model = model_of()
    given = (None, "", "", fp16, False, 1.0, hvd.Sum, None, hvd.global_process_set, [])
    optimizer = hvd.PartialDistributedOptimizer(momentum(), *given)
    assert optimizer._adasum.options.compression is fp16
    hvd.compile(model, optimizer, loss="mse")
    fit(model)
    check_equal(model, trained("sum"), 2e-3)
    with pytest.raises(
        ValueError, match="layers that have their weights, but got later"
    ):
        later = keras.layers.Dense(2, name="later")
        hvd.PartialDistributedOptimizer(momentum(), local_layers=[later])
    with pytest.raises(
        ValueError, match="local_layers: expected Keras layers, but got a "
    ):
        hvd.PartialDistributedOptimizer(momentum(), local_layers=mine.weights)


class TwoOptimizers(keras.Model):
    """As a GAN's: its `compile` has arguments of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = keras.layers.Dense(numerics.OUTPUTS)
        self.layer.build((None, numerics.INPUTS))
        self.built = True

    def compile(self, first, second) -> None:
        super().compile()
        self.both = first, second

    def train_step(self, data):
        images, targets = data
        weights = self.layer.trainable_variables
        for optimizer, weight in zip(self.both, weights, strict=True):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(self.layer(images) - targets))
            optimizer.apply([tape.gradient(loss, weight)], [weight])
        return {"loss": loss}


def case_keras_model_with_a_compile_of_its_own() -> None:
    model = TwoOptimizers()
    hvd.broadcast_variables(model.layer.weights)
    optimizers = [hvd.DistributedOptimizer(momentum(), op=op) for op in VARIANTS]
    hvd.compile(model, optimizers[0], second=optimizers[1])
    assert model.both == tuple(optimizers)
    assert model.jit_compile is False
    fit(model)
    check_same_everywhere(model)
