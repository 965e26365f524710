"""The Keras wrap cells: what is refused, and both variants on real ranks."""

from __future__ import annotations

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import adasum_hvd.tensorflow.keras as hvd
from adasum_hvd.parallel import ParallelContext, ParallelModeFinding
from adasum_hvd.tensorflow import mindspore as wrap_cells
from adasum_hvd.tensorflow.mindspore import (
    AdaSumByDeltaWeightWrapCell,
    AdaSumByGradWrapCell,
)
from tests.parallel.harness.cells import check_refusals, check_step

CELLS = {"grad": AdaSumByGradWrapCell, "delta": AdaSumByDeltaWeightWrapCell}


def start() -> None:
    warnings.filterwarnings("ignore", message="AdaSum: in parallel mode")


def align() -> None:
    hvd.allgather_object(None)


@pytest.mark.parametrize("variant", ["grad", "delta"])
def case_refusals(variant: str) -> None:
    check_refusals(CELLS[variant], hvd.size(), "Keras 3 optimizer")


@pytest.mark.parametrize("variant", ["grad", "delta"])
def case_steps(variant: str) -> None:
    variables = [keras.Variable([1.0, 2.0]), keras.Variable([[3.0]])]
    cell = CELLS[variant](keras.optimizers.SGD(0.5), variables, relaxed=True)
    random = np.random.default_rng(hvd.rank())
    gradients = [
        tf.constant(random.standard_normal(v.shape), tf.float32) for v in variables
    ]
    check_step(hvd, cell, gradients)
    assert float(cell.learning_rate) == 0.5
    with pytest.raises(AttributeError, match="nonsense"):
        _ = cell.nonsense


@pytest.mark.parametrize("variant", ["grad", "delta"])
@pytest.mark.parametrize("in_group", [False, True])
def case_order_of_the_variables(variant: str, in_group: bool) -> None:
    """Gradients come in the given order, not in that in which the optimizer was built."""
    first, second = (keras.Variable([0.0, 0.0], name=name) for name in "ab")
    hvd.mark_worker_local(second)
    optimizer = hvd.AdamOffload(0.1)
    optimizer.build([second, first])
    cell = CELLS[variant](
        optimizer,
        [first, second],
        relaxed=True,
        gradient_group=hvd.global_process_set if in_group else None,
    )
    sign = 1.0 if hvd.rank() == 0 else -1.0
    result = cell([tf.ones(2), tf.fill([2], sign)])
    if variant == "delta":
        assert result[0] is first and result[1] is second
    np.testing.assert_allclose(first.numpy(), [-0.1, -0.1], rtol=1e-6)
    np.testing.assert_allclose(second.numpy(), [-0.1 * sign] * 2, rtol=1e-6)


@pytest.mark.parametrize("variant", ["grad", "delta"])
def case_attributes_are_the_optimizers(variant: str) -> None:
    """Written ones too, as schedules and callbacks do."""
    variables = [keras.Variable([1.0, 2.0])]
    cell_class = CELLS[variant]
    cell = cell_class(keras.optimizers.SGD(0.5), variables, relaxed=True)
    cell.learning_rate = 0.25
    assert float(cell.optimizer.learning_rate) == 0.25
    cell.clipnorm = 1.0
    assert cell.optimizer.clipnorm == 1.0
    assert "learning_rate" not in vars(cell) and "clipnorm" not in vars(cell)


def case_wrong_gradients() -> None:
    variables = [keras.Variable([1.0, 2.0], name="bias"), keras.Variable([[3.0]])]
    good = [tf.ones(2), tf.ones((1, 1))]
    for cell_class in CELLS.values():
        cell = cell_class(keras.optimizers.SGD(0.5), variables, relaxed=True)
        before = [v.numpy() for v in variables]
        for call in (cell, tf.function(cell)):
            with pytest.raises(
                ValueError, match=r"Cell: .* shape \(2,\) for bias, but got .* \(3,\)"
            ):
                call([tf.ones(3), tf.ones((1, 1))])
            with pytest.raises(
                ValueError, match="gradient per parameter, 2, but got 1"
            ):
                call([tf.ones(2)])
            with pytest.raises(ValueError, match="for bias, but got None; pass zeros"):
                call([None, tf.ones((1, 1))])
        for variable, old in zip(variables, before, strict=True):
            assert np.array_equal(variable.numpy(), old)
        cell(good)  # nothing is left over of what was refused
    cell = CELLS["grad"](keras.optimizers.SGD(0.5), relaxed=True)
    with pytest.raises(
        ValueError, match="expected variables or a model, but got neither"
    ):
        cell(good)


@pytest.mark.parametrize("mean", (True, False))
def case_gradient_group_and_model(mean: bool) -> None:
    """Means over this rank's group first, then AdaSum over all ranks."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    hvd.broadcast_variables(model.weights)
    cell = AdaSumByGradWrapCell(
        keras.optimizers.SGD(0.5),
        relaxed=True,
        context=ParallelContext("data_parallel", hvd.size(), gradients_mean=mean),
        model=model,
        gradient_group=hvd.global_process_set,
    )
    before = [v.numpy() for v in model.trainable_variables]
    cell([tf.fill(v.shape, hvd.rank() + 1.0) for v in model.trainable_variables])
    total = sum(range(1, hvd.size() + 1))
    step = 0.5 * (total / hvd.size() if mean else total)
    for old, variable in zip(before, model.trainable_variables, strict=True):
        np.testing.assert_allclose(variable.numpy(), old - step, rtol=1e-6)


def case_modes_are_refused_unless_allowed() -> None:
    def found(variables: object) -> list[ParallelModeFinding]:
        assert list(variables) == [variable]
        last = hvd.rank() == hvd.size() - 1
        return (
            [ParallelModeFinding("tf_strategy", "a strategy of 2 replicas")]
            if last
            else []
        )

    variable = keras.Variable([1.0, 2.0])
    original, wrap_cells.detect = wrap_cells.detect, found
    try:
        with pytest.raises(RuntimeError, match="a strategy of 2 replicas"):
            CELLS["grad"](keras.optimizers.SGD(0.5), [variable], relaxed=True)
        CELLS["grad"](
            keras.optimizers.SGD(0.5),
            [variable],
            relaxed=True,
            allow_modes=("tf_strategy",),
        )
    finally:
        wrap_cells.detect = original
