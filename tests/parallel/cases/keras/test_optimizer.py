"""The Keras DistributedOptimizer under `model.fit` against NumPy, and Horovod's own."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf

import adasum_hvd.tensorflow.keras as hvd
from tests.parallel.cases.tensorflow.test_ops import align as align
from tests.parallel.cases.tensorflow.test_ops import start as start
from tests.parallel.harness import numpy_training as numerics

STEPS = 4
EXECUTIONS = tuple(map(int, keras.__version__.split(".")[:2])) >= (3, 7)
VARIANTS = ("adasum-grad", "adasum-delta")
OPTIMIZERS: dict[str, tuple[Callable, Callable]] = {
    "sgd": (lambda **k: keras.optimizers.SGD(0.1, **k), lambda: numerics.Sgd(0.1)),
    "momentum": (
        lambda **k: keras.optimizers.SGD(0.1, momentum=0.9, **k),
        lambda: numerics.Sgd(0.1, 0.9),
    ),
    "adam": (lambda **k: keras.optimizers.Adam(0.02, **k), lambda: numerics.Adam(0.02)),
}


def momentum(**kwargs: object) -> keras.optimizers.Optimizer:
    return OPTIMIZERS["momentum"][0](**kwargs)


def trained(op: str, steps: int = STEPS, **kwargs: object) -> numerics.Weights:
    return numerics.train(OPTIMIZERS["momentum"][1], op, hvd.size(), steps, **kwargs)


def model_of(**dense: object) -> keras.Model:
    model = keras.Sequential(
        [
            keras.Input((numerics.INPUTS,)),
            keras.layers.Dense(numerics.HIDDEN, activation="tanh", **dense),
            keras.layers.Dense(numerics.OUTPUTS, dtype=dense.get("dtype")),
        ]
    )
    model.set_weights(numerics.initial_weights())
    return model


def compiled(
    optimizer: keras.optimizers.Optimizer,
    model: keras.Model | None = None,
    **kwargs: object,
) -> keras.Model:
    """Return a model that is ready for its first batch, as after a broadcast."""
    if kwargs.get("steps_per_execution", 1) > 1 and not EXECUTIONS:
        pytest.skip("Keras before 3.7: steps_per_execution is refused")
    model = model or model_of()
    hvd.compile(model, optimizer, loss="mse", **kwargs)
    # TensorFlow traces a step that makes variables twice.
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    return model


def fit(model: keras.Model, steps: int = STEPS, **kwargs: object) -> None:
    data = tuple(d.astype(np.float32) for d in numerics.data_of(hvd.rank(), steps))
    # Keras would trace several functions for the batches of an array.
    batches = tf.data.Dataset.from_tensor_slices(data).batch(numerics.BATCH)
    model.fit(batches, verbose=0, **kwargs)


def digest_of(model: keras.Model) -> str:
    digest = hashlib.sha256()
    for weight in model.get_weights():
        digest.update(np.asarray(weight).tobytes())
    return digest.hexdigest()


def check_same_everywhere(model: keras.Model) -> None:
    assert len(set(hvd.allgather_object(digest_of(model)))) == 1, "replicas differ"


def check_equal(model: keras.Model, expected: numerics.Weights, tolerance=1e-6) -> None:
    check_same_everywhere(model)
    for actual, value in zip(model.get_weights(), expected, strict=True):
        difference = np.abs(actual - value).max()
        assert difference <= tolerance * max(1.0, np.abs(value).max()), difference


@pytest.mark.parametrize("op", VARIANTS)
def case_offloaded_adam_with_decoupled_decay(op: str) -> None:
    """Both variants; the changes of weights include the decay."""
    optimizer = hvd.AdamOffload(
        0.02, eps=1e-7, weight_decay=2.0, decoupled_weight_decay=True
    )
    model = compiled(hvd.DistributedOptimizer(optimizer, op=op))
    fit(model)
    adamw = partial(numerics.Adam, 0.02, decay=2.0)
    check_equal(model, numerics.train(adamw, op, hvd.size(), STEPS), 5e-6)


@pytest.mark.parametrize(
    ("name", "op"),
    [
        ("sgd", "adasum-grad"),
        ("sgd", "adasum-delta"),
        ("momentum", "average"),
        ("momentum", "sum"),
        ("momentum", "adasum"),
        ("momentum", "adasum-grad"),
        ("momentum", "adasum-delta"),
        ("adam", "adasum-grad"),
        ("adam", "adasum-delta"),
    ],
)
def case_keras_fit_every_op_and_optimizer(name: str, op: str) -> None:
    make, simulated = OPTIMIZERS[name]
    plain = make()
    optimizer = hvd.DistributedOptimizer(plain, op=op)
    assert isinstance(optimizer, type(plain))
    model = model_of()
    hvd.compile(model, optimizer, loss="mse")  # not built before its first step
    fit(model)
    check_equal(model, numerics.train(simulated, op, hvd.size(), STEPS))
    assert int(optimizer.iterations) == STEPS


def case_keras_optimizer_of_horovod_reduces_nothing() -> None:
    """Why this class exists: under Keras 3 fit finishes and the replicas have parted."""
    import horovod.tensorflow.keras as plain_horovod

    model = model_of()
    model.compile(plain_horovod.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    fit(model)
    with pytest.raises(AssertionError, match="replicas differ"):
        check_same_everywhere(model)


@pytest.mark.parametrize("op", ["average", "adasum-grad", "adasum-delta"])
def case_keras_accumulation(op: str) -> None:
    steps = 8
    make, simulated = OPTIMIZERS["momentum"]
    optimizer = hvd.DistributedOptimizer(make(), op=op, backward_passes_per_step=2)
    model = compiled(optimizer)
    fit(model, steps)
    expected = numerics.train(simulated, op, hvd.size(), steps, passes=2)
    check_equal(model, expected)
    assert int(optimizer.iterations) == steps // 2
    # Keras's own accumulation averages, and reduces as often.
    model = compiled(
        hvd.DistributedOptimizer(make(gradient_accumulation_steps=2), op=op)
    )
    fit(model, steps)
    half = lambda grads: [g / 2 for g in grads]
    expected = numerics.train(simulated, op, hvd.size(), steps, passes=2, clip=half)
    check_equal(model, expected)
    if op == "average":  # so does Horovod's argument
        optimizer = hvd.DistributedOptimizer(
            make(), backward_passes_per_step=2, average_aggregated_gradients=True
        )
        model = compiled(optimizer)
        fit(model, steps)
        check_equal(model, expected)


def case_keras_data_of_unknown_length() -> None:
    """`fit` learns by a step without data that they have ended: no part of it may run."""
    optimizer = hvd.DistributedOptimizer(
        momentum(), op="adasum-grad", backward_passes_per_step=2
    )
    model = compiled(optimizer)
    data = tuple(d.astype(np.float32) for d in numerics.data_of(hvd.rank(), 3))
    batches = tf.data.Dataset.from_tensor_slices(data).batch(numerics.BATCH)
    model.fit(batches.filter(lambda *_: True), verbose=0)
    assert int(optimizer.iterations) == optimizer._adasum.gradients.steps == 1
    check_equal(model, trained("adasum-grad", 3, passes=2))


def case_keras_gradients_that_need_no_data() -> None:
    """The last gradient is a regularizer's alone, whose step at the end of data may not run."""
    used, unused = (keras.layers.Dense(1, kernel_regularizer="l2") for _ in range(2))
    data = keras.Input((1,))
    model = keras.Model(data, [used(data), unused(data)])
    inner = keras.optimizers.SGD(0.1)
    optimizer = hvd.DistributedOptimizer(inner, op="adasum-grad")
    model.compile(optimizer, ["mse", None], jit_compile=False)
    ones = tf.data.Dataset.from_tensors(([[1.0]], [[1.0]])).repeat(2)
    model.fit(ones.filter(lambda *_: True), verbose=0)
    assert int(optimizer.iterations) == 2


def case_keras_accumulates_what_one_pass_has() -> None:
    """The last rank has a gradient of a variable in the first of two passes only."""
    inner = keras.optimizers.SGD(1.0, gradient_accumulation_steps=2)
    optimizer = hvd.DistributedOptimizer(inner, op="average")
    variables = [keras.Variable([1.0]), keras.Variable([1.0])]
    optimizer.build(variables)
    ones, size = keras.ops.ones(1), hvd.size()
    for _ in range(2):
        optimizer.apply([ones, ones], variables)
        last = None if hvd.rank() == size - 1 else ones
        optimizer.apply([ones, last], variables)
    assert float(variables[0][0]) == 1 - 2
    assert np.isclose(float(variables[1][0]), 1 - 2 * (size - 0.5) / size)
    # The first pass may have been another process's, or a traced function's.
    optimizer.apply([ones, ones], variables)
    saved: dict[str, object] = {}
    optimizer.save_own_variables(saved)
    resumed = hvd.DistributedOptimizer(
        keras.optimizers.SGD(1.0, gradient_accumulation_steps=2), op="average"
    )
    variables = [keras.Variable([1.0]), keras.Variable([1.0])]
    resumed.build(variables)
    resumed.load_own_variables(saved)
    resumed.apply([ones, None], variables)
    assert [float(v[0]) for v in variables] == [0.0, 0.5]


@pytest.mark.parametrize("passes", [1, 2])
def case_keras_local_steps(passes: int) -> None:
    steps = 8
    make, simulated = OPTIMIZERS["adam"]
    optimizer = hvd.DistributedOptimizer(
        make(),
        op=hvd.AdasumDelta,
        local_steps=2,
        backward_passes_per_step=passes,
    )
    model = compiled(optimizer)
    fit(model, steps)
    expected = numerics.train(
        simulated, "adasum-delta", hvd.size(), steps, passes, local_steps=2
    )
    check_equal(model, expected, 5e-6)  # rounding, after eight steps of Adam


@pytest.mark.parametrize("op", ["average", "adasum-grad", "adasum-delta"])
@pytest.mark.parametrize(
    ("name", "limit"),
    [("clipnorm", 0.2), ("global_clipnorm", 0.2), ("clipvalue", 0.05)],
)
def case_keras_clipping(name: str, limit: float, op: str) -> None:
    clips = {
        "clipnorm": numerics.clip_norm,
        "global_clipnorm": numerics.clip_global_norm,
        "clipvalue": numerics.clip_value,
    }
    make, simulated = OPTIMIZERS["momentum"]
    optimizer = hvd.DistributedOptimizer(make(**{name: limit}), op=op)
    model = compiled(optimizer)
    fit(model)
    clip = clips[name](limit)
    expected = numerics.train(simulated, op, hvd.size(), STEPS, clip=clip)
    check_equal(model, expected)
    unclipped = numerics.train(simulated, op, hvd.size(), STEPS)
    assert np.abs(unclipped[0] - expected[0]).max() > 1e-3


@pytest.mark.parametrize("op", ["average", "adasum-grad", "adasum-delta"])
def case_a_step_of_the_wrapped_optimizer(op: str) -> None:
    """It would reduce nothing, and replicas would diverge."""
    plain, model = momentum(), model_of()
    hvd.DistributedOptimizer(plain, op=op)
    model.compile(plain, loss="mse")
    before = model.get_weights()
    with pytest.raises(
        RuntimeError, match="expected steps of the optimizer that it ret"
    ):
        fit(model)
    for one, other in zip(model.get_weights(), before, strict=True):
        assert np.array_equal(one, other)
    model = compiled(hvd.DistributedOptimizer(plain, op=op))  # a second time
    fit(model)
