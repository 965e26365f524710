"""The strict Keras wrap cells on fewer ranks than they ask for: the context is given.

The groups are real: these ranks are one group of eight, not full, which is averaged.
"""

from __future__ import annotations

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import adasum_hvd.tensorflow.keras as hvd
from adasum_hvd import boost
from adasum_hvd.parallel import ParallelContext
from tests.parallel.harness.cells import check_step

CELLS = {"grad": hvd.AdaSumByGradWrapCell, "delta": hvd.AdaSumByDeltaWeightWrapCell}
SIXTEEN = ParallelContext("data_parallel", 16, gradients_mean=True)


def init() -> None:
    hvd.init(group_op="average", group_size=8)


def align() -> None:
    hvd.allgather_object(None)


@pytest.mark.parametrize("variant", ["grad", "delta"])
def case_strict_cells(variant: str) -> None:
    variable = keras.Variable([1.0, 2.0])
    with pytest.warns(UserWarning, match="data_parallel"):
        cell = CELLS[variant](keras.optimizers.SGD(0.5), [variable], context=SIXTEEN)
    mine = tf.constant([1.0, -1.0]) * (hvd.rank() + 1)
    check_step(hvd, cell, [mine], group_op="average", group_size=8)


def case_boost_switch() -> None:
    """AdaSum of changes that the group averages, and plain averages of accumulated passes."""
    manual = {"mode": "manual", "less_bn": False, "grad_freeze": False, "adasum": True}
    accumulated = {
        "boost": {**manual, "adasum": False, "grad_accumulation": True},
        "grad_accumulation": {"grad_accumulation_step": 2},
    }
    mine = np.array([1.0, -1.0], np.float32) * (hvd.rank() + 1)
    mean = np.mean(hvd.allgather_object(mine), 0)
    for config, passes in (({"boost": manual}, 1), (accumulated, 2)):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="boost grad_accumulation")
            switch = boost.switch("O2", config, gradients_mean=True)
        assert switch.adasum == (passes == 1)
        optimizer = hvd.DistributedOptimizer(
            keras.optimizers.SGD(0.5), **switch.optimizer_arguments(hvd)
        )
        variable = keras.Variable([1.0, 2.0])
        for _ in range(passes):
            optimizer.apply([tf.constant(mine)], [variable])
        expected = np.array([1, 2]) - 0.5 * passes * mean
        np.testing.assert_allclose(variable.numpy(), expected, rtol=1e-6)
    other = boost.switch(
        "O2", {"boost": manual, "common": {"device_number": 2}}, gradients_mean=True
    )
    with pytest.raises(RuntimeError, match=r"hvd.init\(\*\*boost.init_arguments"):
        other.optimizer_arguments(hvd)
