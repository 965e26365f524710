"""The Keras wrap cells: what is refused, and both variants on real ranks."""

from __future__ import annotations

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import adasum_hvd.tensorflow.keras as hvd
from adasum_hvd import reference
from adasum_hvd.parallel import ParallelContext
from adasum_hvd.tensorflow.wrap_cells import (
    AdaSumByDeltaWeightWrapCell,
    AdaSumByGradWrapCell,
)

CELLS = (AdaSumByGradWrapCell, AdaSumByDeltaWeightWrapCell)


def start() -> None:
    hvd.init()
    warnings.filterwarnings("ignore", message="AdaSum: in parallel mode")


def align() -> None:
    hvd.allgather_object(None)


def case_refusals() -> None:
    for cell in CELLS:
        with pytest.raises(
            RuntimeError, match="at least 16 devices and a power of two"
        ):
            cell("no optimizer")
        with pytest.raises(RuntimeError, match="required group_op='average'"):
            cell("no optimizer", context=ParallelContext("auto_parallel", 16))
        with pytest.raises(TypeError, match="required a Keras 3 optimizer, got str"):
            cell("no optimizer", relaxed=True)


def case_steps() -> None:
    for cell_class in CELLS:
        variables = [keras.Variable([1.0, 2.0]), keras.Variable([[3.0]])]
        before = [v.numpy().copy() for v in variables]
        cell = cell_class(keras.optimizers.SGD(0.5), variables, relaxed=True)
        random = np.random.default_rng(hvd.rank())
        gradients = [random.standard_normal(v.shape) for v in variables]
        result = cell([tf.constant(g, tf.float32) for g in gradients])
        if cell_class is AdaSumByDeltaWeightWrapCell:
            assert all(a is b for a, b in zip(result, variables, strict=True))
        for old, variable, gradient in zip(before, variables, gradients, strict=True):
            everyone = hvd.allgather_object(gradient)
            expected = old - 0.5 * reference.adasum(everyone)
            np.testing.assert_allclose(variable.numpy(), expected, atol=1e-6)
        assert float(cell.learning_rate) == 0.5
        with pytest.raises(AttributeError, match="nonsense"):
            _ = cell.nonsense
