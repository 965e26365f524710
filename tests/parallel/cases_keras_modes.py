"""What the Keras optimizer must get along with: scales, averages, saving, callbacks, errors."""

from __future__ import annotations

import tempfile
from pathlib import Path

import keras
import numpy as np
import numpy_training as numerics
import pytest
import tensorflow as tf
from cases_keras_optimizer import (
    OPTIMIZERS,
    STEPS,
    check_equal,
    check_same_everywhere,
    compiled,
    digest_of,
    fit,
    model_of,
)

import adasum_hvd.tensorflow.keras as hvd

VARIANTS = ("adasum-grad", "adasum-delta")


def momentum(**kwargs: object) -> keras.optimizers.Optimizer:
    return OPTIMIZERS["momentum"][0](**kwargs)


def trained(op: str, steps: int = STEPS, **kwargs: object) -> numerics.Weights:
    return numerics.train(OPTIMIZERS["momentum"][1], op, hvd.size(), steps, **kwargs)


def case_keras_loss_scale_counts_for_all_ranks() -> None:
    for op in VARIANTS:
        inside = keras.optimizers.LossScaleOptimizer(momentum(), initial_scale=2.0**10)
        optimizer = hvd.DistributedOptimizer(inside, op=op)
        assert isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        model = compiled(optimizer)
        fit(model)
        check_equal(model, trained(op))
        before = digest_of(model)
        images, targets = numerics.batch_of(hvd.rank(), 0, STEPS)
        if hvd.rank() == hvd.size() - 1:
            targets = np.full_like(targets, np.inf)
        model.train_on_batch(images, targets)
        assert digest_of(model) == before, "a step was taken with infinite gradients"
        assert float(optimizer.dynamic_scale) == 2.0**9
        fit(model)
        check_same_everywhere(model)
        assert digest_of(model) != before


def case_keras_overflow_of_the_change_restores_the_weights() -> None:
    """Gradients are finite and the change is not, on the wire or in one rank's step."""

    class Exploding(keras.optimizers.SGD):
        def update_step(self, gradient, variable, learning_rate):
            change = gradient * learning_rate
            variable.assign_sub(tf.where(explode.value, change * 1e30 * 1e30, change))

    last = hvd.rank() == hvd.size() - 1
    for eager in (False, True):
        for options in (
            {"compression": hvd.Compression.fp16},
            {"local_steps": 2},
            {"clip_delta_norm": 1e6},
        ):
            explode = keras.Variable(False, dtype="bool", trainable=False)
            wire = "compression" in options
            inside = keras.optimizers.SGD(1e6) if wire else Exploding(0.1)
            scaled = keras.optimizers.LossScaleOptimizer(
                inside, initial_scale=2.0**6, dynamic_growth_steps=3
            )
            optimizer = hvd.DistributedOptimizer(scaled, op="adasum-delta", **options)
            model = compiled(optimizer, run_eagerly=eager)
            before = digest_of(model)
            steps = options.get("local_steps", 1)
            explode.assign(last)
            fit(model, steps)
            assert digest_of(model) == before, f"{options}: other weights"
            assert float(optimizer.dynamic_scale) == 2.0**5
            assert int(optimizer.step_counter) == 0
            # The second of two local steps had no finite gradients.
            assert int(optimizer.iterations) == 1
            if wire:
                optimizer.learning_rate = 0.1
            explode.assign(False)
            fit(model, 6)
            check_same_everywhere(model)
            assert digest_of(model) != before
            assert float(optimizer.dynamic_scale) == 2.0**7
            # When the scale was about to grow, or in the last step of a window.
            fit(model, 2 if steps == 1 else 1)
            before = digest_of(model) if steps == 1 else None
            explode.assign(last)
            if wire:
                optimizer.learning_rate = 1e6
            fit(model, 1)
            assert before is None or digest_of(model) == before
            check_same_everywhere(model)
            assert float(optimizer.dynamic_scale) == 2.0**6
    # Without a scale, what is not finite shows.
    model = compiled(
        hvd.DistributedOptimizer(
            keras.optimizers.SGD(1e6),
            op="adasum-delta",
            compression=hvd.Compression.fp16,
        )
    )
    fit(model, 1)
    assert not all(np.isfinite(weight).all() for weight in model.get_weights())


def case_keras_overflow_of_the_reduced_gradient_skips_the_step() -> None:
    gradient = 40_000.0  # two of them are too much for float16
    for op, rows in (("sum", False), ("sum", True), ("adasum-grad", False)):
        for graph in (False, True):
            scaled = keras.optimizers.LossScaleOptimizer(
                momentum(weight_decay=0.1), initial_scale=2.0, dynamic_growth_steps=1
            )
            optimizer = hvd.DistributedOptimizer(
                scaled, op=op, compression=hvd.Compression.fp16
            )
            variables = [keras.Variable(np.ones((2, 3), np.float32)) for _ in range(2)]
            optimizer.build(variables)
            apply = tf.function(optimizer.apply) if graph else optimizer.apply

            def step(value: float, apply=apply, optimizer=optimizer, rows=rows) -> None:
                value *= float(optimizer.dynamic_scale)
                large = tf.fill((2, 3), value)
                if rows:
                    shape = tf.constant([2, 3])
                    large = tf.IndexedSlices(large, tf.constant([0, 1]), shape)
                apply([large, tf.fill((2, 3), float(optimizer.dynamic_scale))])

            # Rows are not summed on the wire, and AdaSum of equal gradients is one of them.
            step(gradient * (1 if op == "sum" and not rows else 2))
            assert float(optimizer.dynamic_scale) == 1.0
            for variable in variables:
                assert (variable.numpy() == 1).all(), "a step was taken"
            slots = optimizer.inner_optimizer.momentums
            assert all((slot.numpy() == 0).all() for slot in slots)
            step(1.0)
            assert float(optimizer.dynamic_scale) == 2.0
            assert all((variable.numpy() < 1).all() for variable in variables)


def case_keras_loss_scale_around_is_refused() -> None:
    optimizer = hvd.DistributedOptimizer(momentum(), op="adasum-delta")
    with pytest.raises(RuntimeError, match="required one inside the DistributedOpt"):
        keras.optimizers.LossScaleOptimizer(optimizer)


def case_keras_mixed_precision() -> None:
    for policy, tolerance in (("mixed_float16", 5e-3), ("mixed_bfloat16", 3e-2)):
        for op in VARIANTS:
            model = model_of(dtype=policy)
            model.dtype_policy = keras.dtype_policies.get(policy)
            hvd.compile(model, hvd.DistributedOptimizer(momentum(), op=op), loss="mse")
            scaled = isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
            assert scaled == (policy == "mixed_float16")
            fit(model)
            check_equal(model, trained(op), tolerance)
    model = model_of(dtype="bfloat16")
    hvd.compile(model, hvd.DistributedOptimizer(momentum(), op="adasum-delta"), "mse")
    fit(model)
    check_same_everywhere(model)


def case_keras_averages_schedules_and_constraints() -> None:
    for op in ("adasum-grad", "adasum-delta"):
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
    for variable, wanted in zip(variables, expected, strict=True):
        assert np.abs(variable.numpy() - wanted).max() < 1e-6


def case_keras_names_do_not_depend_on_the_graph() -> None:
    """Rank 0 has built other models before and computes more in the same step."""
    metrics = []
    if hvd.rank() == 0:
        fit(compiled(momentum()), 2)
        metrics = ["mae", keras.metrics.MeanSquaredError(), "cosine_similarity"]
    for op in ("average", "adasum-delta"):
        scaled = keras.optimizers.LossScaleOptimizer(momentum(), initial_scale=4.0)
        optimizer = hvd.DistributedOptimizer(scaled, op=op, bucket_bytes=100)
        model = compiled(optimizer, metrics=metrics, steps_per_execution=2)
        fit(model)
        check_equal(model, trained(op))


def case_keras_embeddings() -> None:
    def model_with(**kwargs: object) -> keras.Model:
        model = keras.Sequential(
            [
                keras.Input((2,), dtype="int32"),
                keras.layers.Embedding(7, 3, embeddings_initializer="ones"),
            ]
        )
        hvd.compile(model, hvd.DistributedOptimizer(momentum(), **kwargs), loss="mse")
        return model

    words = np.array([[hvd.rank(), 5]] * 4)
    targets = np.full((4, 2, 3), 3.0 + hvd.rank(), np.float32)
    for kwargs in (
        {"op": "adasum-grad", "sparse_as_dense": True},
        {"op": "average", "sparse_as_dense": True},
        {"op": "adasum-delta"},
        {"op": "adasum-delta", "backward_passes_per_step": 2},
    ):
        model = model_with(**kwargs)
        model.fit(words, targets, batch_size=2, verbose=0)
        check_same_everywhere(model)
        (table,) = model.get_weights()
        rows = [*range(hvd.size()), 5]
        assert (np.abs(table[rows] - 1) > 1e-3).all() and (table[6] == 1).all()
    # Rows that are gathered give the step of dense gradients, repeated rows included.
    for op in ("average", "sum"):
        for make in (momentum, lambda: keras.optimizers.Adam(0.02, global_clipnorm=1)):
            for wrapped in (False, True):
                tables = []
                for sparse_as_dense in (False, True):
                    optimizer = make()
                    if wrapped:
                        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
                    model = model_with()
                    optimizer = hvd.DistributedOptimizer(
                        optimizer, op=op, sparse_as_dense=sparse_as_dense
                    )
                    hvd.compile(model, optimizer, loss="mse")
                    model.fit(words, targets, batch_size=2, verbose=0)
                    check_same_everywhere(model)
                    tables.append(model.get_weights()[0])
                np.testing.assert_allclose(*tables, atol=1e-6)
                assert (np.abs(tables[0] - 1) > 1e-3).any()
    with pytest.raises(ValueError, match=r"gradient of .*sparse_as_dense=True"):
        model_with(op="adasum-grad").fit(words, targets, verbose=0)
    scaled = keras.optimizers.LossScaleOptimizer(momentum(), initial_scale=2.0)
    model = model_with()
    hvd.compile(model, hvd.DistributedOptimizer(scaled, sparse_as_dense=True), "mse")
    model.fit(words, targets, batch_size=2, verbose=0)
    check_same_everywhere(model)


def case_keras_saving() -> None:
    directory = Path(tempfile.mkdtemp())
    half = STEPS // 2
    for op, kwargs in (
        ("adasum-grad", {}),
        ("adasum-delta", {}),
        ("adasum-delta", {"local_steps": 4, "backward_passes_per_step": 2}),
    ):
        models = [
            compiled(hvd.DistributedOptimizer(momentum(), op=op, **kwargs))
            for _ in range(2)
        ]
        for part, model in ((0, models[0]), (0, models[1]), (1, models[0])):
            train_part(model, part, 3)
        path = str(directory / f"rank{hvd.rank()}.keras")
        models[1].save(path)  # inside a window, where there is one
        loaded = keras.models.load_model(path)
        assert type(loaded.optimizer) is type(models[0].optimizer)
        train_part(loaded, 1, 3)
        assert digest_of(loaded) == digest_of(models[0]), "resumed with other bits"
    plain = compiled(momentum())
    train_part(plain, 0, 1)
    plain.save(path)
    loaded = hvd.load_model(path, op="adasum-delta")
    hvd.broadcast_variables([*loaded.weights, *loaded.optimizer.variables])
    assert int(loaded.optimizer.iterations) == 1
    fit(loaded)
    check_same_everywhere(loaded)
    scaled = keras.optimizers.LossScaleOptimizer(momentum())
    model = compiled(hvd.DistributedOptimizer(scaled, op="adasum-delta"))
    fit(model, half)
    model.save(path)
    loaded = keras.models.load_model(path)
    assert type(loaded.optimizer) is type(model.optimizer)
    fit(loaded)
    check_same_everywhere(loaded)


def train_part(model: keras.Model, part: int, steps: int) -> None:
    for step in range(part * steps, (part + 1) * steps):
        model.train_on_batch(*numerics.batch_of(hvd.rank(), step, 2 * steps))


def case_keras_modes_that_cannot_work() -> None:
    model = model_of()
    model.compile(hvd.DistributedOptimizer(momentum()), "mse", jit_compile=True)
    with pytest.raises(NotImplementedError, match=r"compile\(jit_compile=False\)"):
        fit(model)
    with pytest.raises(ValueError, match="required jit_compile=False"):
        compiled(hvd.DistributedOptimizer(momentum()), jit_compile=True)
    scaled = keras.optimizers.LossScaleOptimizer(momentum())
    model = model_of()
    model.compile(hvd.DistributedOptimizer(scaled), "mse", jit_compile=True)
    with pytest.raises(NotImplementedError, match=r"compile\(jit_compile=False\)"):
        fit(model)

    class Loner(keras.optimizers.SGD):
        def _backend_apply_gradients(self, grads, trainable_variables):
            for grad, variable in zip(grads, trainable_variables, strict=True):
                variable.assign_sub(grad)

    for op in ("average", "adasum-delta"):
        with pytest.raises(RuntimeError, match="that reduced nothing"):
            fit(compiled(hvd.DistributedOptimizer(Loner(), op=op)))
        model = compiled(hvd.DistributedOptimizer(momentum(), op=op))
        hvd.mark_worker_local(*model.trainable_variables)
        with pytest.raises(RuntimeError, match="that reduced nothing"):
            fit(model)
    model = compiled(hvd.DistributedOptimizer(momentum(global_clipnorm=1.0)))
    hvd.mark_worker_local(model.trainable_variables[0])
    with pytest.raises(ValueError, match="global_clipnorm: required variables that"):
        fit(model)
    optimizer = hvd.DistributedOptimizer(momentum())
    with pytest.raises(ValueError, match="got one that is distributed already"):
        hvd.DistributedOptimizer(optimizer)
    with pytest.raises(ValueError, match="use_ema: required local_steps=1"):
        hvd.DistributedOptimizer(momentum(use_ema=True), op="adasum", local_steps=2)
    with pytest.raises(TypeError, match="required a Keras 3 optimizer"):
        hvd.DistributedOptimizer("sgd")
    layer = keras.layers.Dense(2 + (hvd.rank() == 0))
    model = keras.Sequential([keras.Input((6,)), layer])
    hvd.compile(model, hvd.DistributedOptimizer(momentum()), loss="mse")
    with pytest.raises(ValueError, match="required the same parameters in the same"):
        model.fit(np.ones((4, 6)), np.ones((4, layer.units)), verbose=0)


def case_keras_worker_local_variables() -> None:
    for op in VARIANTS:
        model = compiled(hvd.DistributedOptimizer(momentum(), op=op))
        mine = model.trainable_variables[0]
        hvd.mark_worker_local(mine)
        fit(model)
        everyone = hvd.allgather_object([w.tobytes() for w in model.get_weights()])
        assert len({weights[0] for weights in everyone}) == hvd.size()
        for index in range(1, 4):
            assert len({weights[index] for weights in everyone}) == 1


def case_keras_callbacks() -> None:
    directory = Path(tempfile.mkdtemp())
    model = compiled(hvd.DistributedOptimizer(momentum(), op="adasum-delta"))
    model.set_weights([w + hvd.rank() for w in model.get_weights()])
    images, targets = numerics.data_of(hvd.rank(), STEPS)
    callbacks = hvd.callbacks
    best = directory / "best.keras"
    history = model.fit(
        images,
        targets,
        batch_size=numerics.BATCH,
        shuffle=False,
        verbose=0,
        callbacks=[
            callbacks.BroadcastGlobalVariablesCallback(0),
            callbacks.MetricAverageCallback(),
            callbacks.BestModelCheckpoint(str(best), monitor="loss"),
            callbacks.ProgressCallback(),
        ],
    ).history
    check_equal(model, trained("adasum-delta"))
    assert len(set(hvd.allgather_object(history["loss"][0]))) == 1
    assert best.exists() == (hvd.rank() == 0)
    # A second fit goes on with every rank's own state, and does not broadcast again.
    again = callbacks.BroadcastGlobalVariablesCallback(0)
    fit(model, callbacks=[again])
    before = model.optimizer.momentums[0].numpy()

    class Unchanged(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            now = self.model.optimizer.momentums[0].numpy()
            assert batch or np.array_equal(before, now)

    fit(model, callbacks=[again, Unchanged()])
    check_same_everywhere(model)
    # The same model compiled again, without the wrapper: the callback looks again.
    model.compile(momentum(), "mse")
    with pytest.raises(RuntimeError, match="required first steps that leave"):
        fit(model, callbacks=[again])
    plain = model_of()
    plain.compile(momentum(), "mse")
    with pytest.raises(RuntimeError, match="required first steps that leave"):
        fit(plain, callbacks=[callbacks.BroadcastGlobalVariablesCallback(0)])
    import horovod.tensorflow.keras as horovods

    plain.compile(horovods.DistributedOptimizer(momentum()), "mse")
    with pytest.raises(RuntimeError, match="reduces nothing under Keras 3"):
        fit(plain, callbacks=[callbacks.BroadcastGlobalVariablesCallback(0)])


def case_keras_learning_rate_callbacks() -> None:
    model = compiled(hvd.DistributedOptimizer(momentum()))
    rates: list[float] = []

    class Watch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            rates.append(float(self.model.optimizer.learning_rate))

    warmup = hvd.callbacks.LearningRateWarmupCallback(0.1, warmup_epochs=2)
    later = hvd.callbacks.LearningRateScheduleCallback(0.1, 0.5, start_epoch=2)
    fit(model, callbacks=[warmup, later, Watch()], epochs=4)
    size = hvd.size()
    ramp = [
        0.1 * ((step + 1) / STEPS * (size - 1) / 2 + 1) / size
        for step in range(2 * STEPS)
    ]
    expected = ramp + [0.1] * STEPS + [0.05] * STEPS
    np.testing.assert_allclose(rates, expected, rtol=1e-6)
    check_same_everywhere(model)


def case_keras_learning_rate_callbacks_again() -> None:
    """Another `fit` has other epochs; a schedule cannot be set."""
    model = compiled(hvd.DistributedOptimizer(momentum()))
    ramp = hvd.callbacks.LearningRateScheduleCallback(
        0.1, lambda epoch: 1 + epoch, staircase=False
    )
    for steps in (STEPS, 2 * STEPS):
        fit(model, steps, callbacks=[ramp])
        rate = float(model.optimizer.learning_rate)
        assert rate == pytest.approx(0.1 * (1 + (steps - 1) / steps))
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
    model = compiled(hvd.DistributedOptimizer(keras.optimizers.SGD(schedule)))
    for callback in (hvd.callbacks.LearningRateWarmupCallback(0.1), ramp):
        with pytest.raises(ValueError, match="a number as learning rate, got Expo"):
            fit(model, callbacks=[callback])


def case_keras_metrics_with_a_value_per_class() -> None:
    logs = {"f1": np.array([1.0, hvd.rank()]), "loss": float(hvd.rank())}
    average = hvd.callbacks.MetricAverageCallback()
    average.on_epoch_end(0, logs)
    mean = (hvd.size() - 1) / 2
    np.testing.assert_allclose(logs["f1"], [1.0, mean])
    assert logs["loss"] == mean and isinstance(logs["loss"], float)
    with pytest.raises(ValueError, match="the same metrics on all ranks, got shapes"):
        average.on_epoch_end(0, {"f1": np.ones(2 + hvd.rank())})
    with pytest.raises(TypeError, match=r"required numbers or arrays .* for name"):
        average.on_epoch_end(0, {"name": "text"})
    model = model_of()
    optimizer = hvd.DistributedOptimizer(momentum())
    hvd.compile(model, optimizer, loss="mse", metrics=[keras.metrics.F1Score()])
    images, _ = numerics.data_of(hvd.rank(), 1)
    classes = np.eye(numerics.OUTPUTS, dtype=np.float32)
    targets = classes[np.arange(len(images)) % numerics.OUTPUTS]
    history = model.fit(images, targets, verbose=0, callbacks=[average]).history
    (found,) = history["f1_score"]
    assert found.shape == (numerics.OUTPUTS,)
    assert len({value.tobytes() for value in hvd.allgather_object(found)}) == 1


def case_keras_optimizers_that_hold_weights_or_others() -> None:
    """Schedule-free: the state is a copy of the weights, which the delta variant would part."""
    for op, fits in (("adasum-grad", True), ("adasum-delta", False)):
        plain = keras.optimizers.ScheduleFreeAdamW(0.1)
        model = compiled(hvd.DistributedOptimizer(plain, op=op))
        if hvd.rank() == 0 and not fits:  # from a file, say
            model.optimizer.build(model.trainable_variables)
            model.optimizer._momentums[0].assign_add(
                tf.ones_like(model.trainable_variables[0])
            )
        if fits:
            fit(model)
            check_same_everywhere(model)
        else:
            with pytest.raises(ValueError, match="state holds no weights, got _momen"):
                fit(model)
    several = keras.optimizers.MultiOptimizer
    map_of = lambda optimizer: lambda variable: optimizer
    with pytest.raises(RuntimeError, match="or MultiOptimizer around it"):
        inside = several(map_of(hvd.DistributedOptimizer(momentum())))
        inside.build(model.trainable_variables)
    with pytest.raises(NotImplementedError, match="got Keras's MultiOptimizer"):
        hvd.DistributedOptimizer(several(map_of(momentum())))


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
