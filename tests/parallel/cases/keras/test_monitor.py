"""`AdasumMonitor` and its callback on Keras optimizers, against the reference."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import adasum_hvd.tensorflow.keras as hvd
from adasum_hvd.horovod import binding
from adasum_hvd.tensorflow import ops as tf_ops
from adasum_hvd.tensorflow.keras.callbacks import (
    AdasumMonitorCallback,
    BroadcastGlobalVariablesCallback,
)
from tests.parallel.cases.keras.test_optimizer import align as align
from tests.parallel.cases.keras.test_optimizer import digest_of, fit, model_of
from tests.parallel.harness import expected_records
from tests.parallel.harness import numpy_training as numerics

STEPS = 4


def vectors_of(weights: numerics.Weights, step: int) -> list[list[np.ndarray]]:
    """Return all ranks' gradients, by variable and rank."""
    return [
        list(of_ranks)
        for of_ranks in zip(
            *(
                numerics.gradients(weights, *numerics.batch_of(rank, step, STEPS))
                for rank in range(hvd.size())
            ),
            strict=True,
        )
    ]


def check(record: dict, names: list[str], weights: numerics.Weights, step: int) -> None:
    vectors = dict(zip(names, vectors_of(weights, step), strict=True))
    hosts, path = [0] * hvd.size(), binding.transport_description(tf_ops.LIBRARY)
    expected_records.check(record["tensors"], vectors, hosts, path, 1e-3)


@pytest.mark.parametrize("op", ["adasum-grad", "adasum-delta"])
def case_keras_monitor_records_both_variants(op: str) -> None:
    digests = []
    for watched in (False, True):
        model = model_of()
        optimizer = keras.optimizers.SGD(0.05)
        model.compile(
            hvd.DistributedOptimizer(optimizer, op=op), "mse", jit_compile=False
        )
        records: list = []
        weights = [model.get_weights()]
        keep = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs, m=model, w=weights: w.append(
                m.get_weights()
            )
        )
        monitor = [AdasumMonitorCallback(2, records.append)] if watched else []
        fit(model, STEPS, callbacks=[keep, *monitor])
        digests.append(digest_of(model))
    assert digests[0] == digests[1], "the monitor has changed a bit"
    if hvd.rank():
        assert not records
        return
    assert [record["step"] for record in records] == [2, 4]
    names = [variable.path for variable in model.trainable_variables]
    for record in records:
        step = record["step"] - 1
        check(record, names, weights[step], step)


def case_keras_monitor_counts_in_every_fit() -> None:
    """Also inside a loss scale, which Keras before 3.9 does not count, and after `evaluate`."""
    for scaled in (False, True):
        model, records, plain = model_of(), [], keras.optimizers.SGD(0.05)
        plain = keras.optimizers.LossScaleOptimizer(plain) if scaled else plain
        optimizer = hvd.DistributedOptimizer(plain, op="adasum-grad")
        hvd.compile(model, optimizer, "mse")
        callbacks = [
            BroadcastGlobalVariablesCallback(0),
            AdasumMonitorCallback(2, records.append),
        ]
        fit(model, STEPS, callbacks=callbacks)
        images, targets = numerics.data_of(hvd.rank(), STEPS)
        model.evaluate(images, targets, verbose=0, callbacks=callbacks)
        fit(model, STEPS, epochs=3, initial_epoch=1, callbacks=callbacks)
        steps = [] if hvd.rank() else [2, 4, 6, 8, 10, 12]
        assert [record["step"] for record in records] == steps, scaled
        assert len(set(hvd.allgather_object(digest_of(model)))) == 1


def case_keras_monitor_refuses() -> None:
    average = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05))
    with pytest.raises(ValueError, match="an AdaSum op, but got op=Average"):
        hvd.AdasumMonitor(average)
    with pytest.raises(TypeError, match=r"DistributedOptimizer, but got keras.*SGD"):
        hvd.AdasumMonitor(keras.optimizers.SGD(0.05))
    grad = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05), op=hvd.AdasumGrad)
    with pytest.raises(ValueError, match="every=2 on rank 1"):
        hvd.AdasumMonitor(grad, 1 + min(hvd.rank(), 1))
