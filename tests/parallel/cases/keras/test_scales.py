"""Loss scales and mixed precision: one rank's overflow counts for all ranks."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import adasum_hvd.tensorflow.keras as hvd
from tests.parallel.cases.keras.test_optimizer import (
    STEPS,
    VARIANTS,
    check_equal,
    check_same_everywhere,
    compiled,
    digest_of,
    fit,
    model_of,
    momentum,
    trained,
)
from tests.parallel.harness import numpy_training as numerics


@pytest.mark.parametrize("op", VARIANTS)
def case_keras_loss_scale_counts_for_all_ranks(op: str) -> None:
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


@pytest.mark.parametrize(
    "op, rows", (("sum", False), ("sum", True), ("adasum-grad", False))
)
def case_keras_overflow_of_the_reduced_gradient_skips_the_step(
    op: str, rows: bool
) -> None:
    gradient = 40_000.0  # two of them are too much for float16
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


def case_keras_mixed_precision() -> None:
    for policy, tolerance in (("mixed_float16", 5e-3), ("mixed_bfloat16", 3e-2)):
        for op in VARIANTS:
            model = model_of(dtype=policy)
            model.dtype_policy = keras.dtype_policies.get(policy)
            compiled(hvd.DistributedOptimizer(momentum(), op=op), model)
            scaled = isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
            assert scaled == (policy == "mixed_float16")
            fit(model)
            check_equal(model, trained(op), tolerance)
    model = model_of(dtype="bfloat16")
    hvd.compile(model, hvd.DistributedOptimizer(momentum(), op="adasum-delta"), "mse")
    fit(model)
    check_same_everywhere(model)
