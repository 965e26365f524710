"""Every optimizer of Keras in both variants, and those that do not fit, on real ranks."""

from __future__ import annotations

import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf

import adasum_hvd.tensorflow.keras as hvd
from tests.parallel.cases.keras.test_optimizer import (
    STEPS,
    VARIANTS,
    check_same_everywhere,
    compiled,
    fit,
    model_of,
    momentum,
)
from tests.parallel.harness import numpy_training as numerics

AROUND = ("Optimizer", "LossScaleOptimizer", "MultiOptimizer")
NAMES = sorted(
    name
    for name, value in vars(keras.optimizers).items()
    if inspect.isclass(value) and name not in AROUND
    if issubclass(value, keras.optimizers.Optimizer)
)
# Keras before 3.13 has no schedule-free optimizer.
UNFIT = [name for name in ("Ftrl", "ScheduleFreeAdamW") if name in NAMES]


class Replica:
    """The variables of a rank, and its optimizer."""

    def __init__(self, optimizer: keras.optimizers.Optimizer):
        self.variables = [keras.Variable(w) for w in numerics.initial_weights()]
        self.optimizer = optimizer
        optimizer.build(self.variables)

    @property
    def weights(self) -> numerics.Weights:
        return [variable.numpy() for variable in self.variables]

    def gradients(self, rank: int, step: int) -> numerics.Weights:
        batch = numerics.batch_of(rank, step, STEPS)
        return numerics.gradients(self.weights, *batch)

    def apply(self, gradients: numerics.Weights) -> numerics.Weights:
        """Take a step and return the change of the weights."""
        before = self.weights
        tensors = [tf.constant(g.astype(np.float32)) for g in gradients]
        self.optimizer.apply(tensors, self.variables)
        return [new - old for new, old in zip(self.weights, before, strict=True)]


def simulated(name: str, op: str) -> numerics.Weights:
    """Return the weights of plain optimizers of all ranks, joined in this process."""
    make = getattr(keras.optimizers, name)
    replicas = [Replica(make()) for _ in range(hvd.size())]
    for step in range(STEPS):
        before = replicas[0].weights
        each = [replica.gradients(r, step) for r, replica in enumerate(replicas)]
        if op == "adasum-grad":
            joined = [numerics.reduce(g, op) for g in zip(*each, strict=True)]
            each = [joined] * hvd.size()
        pairs = zip(replicas, each, strict=True)
        each = [replica.apply(gradients) for replica, gradients in pairs]
        changes = [numerics.reduce(c, op) for c in zip(*each, strict=True)]
        for replica in replicas if op == "adasum-delta" else ():
            new = zip(replica.variables, before, changes, strict=True)
            for variable, old, change in new:
                variable.assign(old + change)
    return replicas[0].weights


@pytest.mark.parametrize("op", VARIANTS)
def case_keras_every_optimizer(op: str) -> None:
    refused = UNFIT if op == "adasum-delta" and hvd.size() > 1 else []
    for name in refused:
        plain = getattr(keras.optimizers, name)()
        with pytest.raises(ValueError, match=f"but got {name} with AdasumDelta"):
            hvd.DistributedOptimizer(plain, op=op)
    fit = [name for name in NAMES if name not in refused]
    # Each rank simulates some of them.
    own = {name: simulated(name, op) for name in fit[hvd.rank() :: hvd.size()]}
    expected = {k: v for each in hvd.allgather_object(own) for k, v in each.items()}
    for name in fit:
        check(name, op, expected[name])


def check(name: str, op: str, weights: numerics.Weights) -> None:
    plain = getattr(keras.optimizers, name)()
    replica = Replica(hvd.DistributedOptimizer(plain, op=op))
    first = replica.weights
    for step in range(STEPS):
        replica.apply(replica.gradients(hvd.rank(), step))
    for start_, actual, expected in zip(first, replica.weights, weights, strict=True):
        limit = 1e-3 * np.abs(expected - start_).max() + 1e-6
        assert np.abs(actual - expected).max() <= limit, name


def case_keras_steps_keep_changes_of_the_weights() -> None:
    """A reduction is a change between two steps; an optimizer that undoes it does not fit."""
    undone = []
    for name in NAMES:
        plain, moved = (Replica(getattr(keras.optimizers, name)()) for _ in range(2))
        for step in range(STEPS):
            if step == STEPS - 1:
                for variable in moved.variables:
                    variable.assign(variable + 0.01)
            gradients = plain.gradients(hvd.rank(), step)
            plain.apply(gradients)
            moved.apply(gradients)
        pairs = zip(plain.weights, moved.weights, strict=True)
        kept = np.mean([float((new - old).mean()) / 0.01 for old, new in pairs])
        if kept < 0.9:
            undone.append(name)
    assert undone == UNFIT


class Copying(keras.optimizers.SGD):
    """Steps a copy of the weights, as optimizers with float32 masters do."""

    def build(self, variables):
        super().build(variables)
        self.copies = [keras.Variable(variable) for variable in variables]

    def update_step(self, gradient, variable, learning_rate):
        copy = self.copies[self._get_variable_index(variable)]
        copy.assign_sub(gradient * learning_rate)
        variable.assign(copy)


def case_keras_optimizers_that_hold_weights_or_others() -> None:
    """A copy of the weights in the state is what the delta variant cannot reduce."""
    for op, fits in (("adasum-grad", True), ("adasum-delta", False)):
        model = compiled(hvd.DistributedOptimizer(Copying(0.1), op=op))
        if hvd.rank() == 0 and not fits:  # from a file, say
            model.optimizer.build(model.trainable_variables)
            model.optimizer.copies[0].assign_add(
                tf.ones_like(model.trainable_variables[0])
            )
        if fits:
            fit(model)
            check_same_everywhere(model)
        else:
            with pytest.raises(
                ValueError, match="state holds no weights, but got copies"
            ):
                fit(model)


def case_keras_masters_hide_changes_of_weights() -> None:
    """Each rank's master has changes that its bfloat16 variable does not show."""
    for dtype, steps in (("float32", 2), ("bfloat16", 0)):
        variable = keras.Variable(np.ones(3), dtype=dtype)
        optimizer = hvd.DistributedOptimizer(hvd.AdamOffload(1e-4), op="adasum-delta")
        for _ in range(steps):
            optimizer.apply([tf.ones(3)], [variable])
        if not steps and hvd.size() > 1:
            with pytest.raises(ValueError, match="no weights, but got _masters"):
                optimizer.apply([tf.ones(3, dtype)], [variable])


def case_keras_sums_of_gradients_may_equal_the_weights() -> None:
    """The gradient of half a weight's square is the weight."""
    variable = keras.Variable(np.ones(3))
    optimizer = keras.optimizers.SGD(0.5, gradient_accumulation_steps=2)
    optimizer = hvd.DistributedOptimizer(optimizer, op="adasum-delta")
    for _ in range(2):
        optimizer.apply([tf.identity(variable.value)], [variable])
    assert np.array_equal(variable.numpy(), [0.5] * 3)


def case_keras_optimizers_around_are_refused() -> None:
    """Keras's own loss scale would let each rank decide alone whether to take a step."""
    policy = keras.dtype_policies.get("mixed_float16")
    for op in VARIANTS:
        model = model_of()
        model.dtype_policy = policy
        model.compile(
            hvd.DistributedOptimizer(momentum(), op=op), "mse", jit_compile=False
        )
        assert type(model.optimizer) is keras.optimizers.LossScaleOptimizer
        with pytest.raises(
            RuntimeError, match=r"Use DistributedOptimizer\(LossScaleOptimizer"
        ):
            fit(model)
    # Setting Keras's own factor is no sign of another optimizer.
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(loss_scale_factor=8.0))
    optimizer.loss_scale_factor = None
    fit(compiled(optimizer))
    several = getattr(keras.optimizers, "MultiOptimizer", None)
    if several is None:
        return
    map_of = lambda optimizer: lambda variable: optimizer
    with pytest.raises(RuntimeError, match="is inside a MultiOptimizer"):
        inside = several(map_of(hvd.DistributedOptimizer(momentum())))
        inside.build(model.trainable_variables)
    with pytest.raises(NotImplementedError, match="got Keras's MultiOptimizer"):
        hvd.DistributedOptimizer(several(map_of(momentum())))
