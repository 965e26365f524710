"""TensorFlow's tensors on a CUDA device, on every rank of a real job; ranks may share a device.

ADASUM_TEST_DEVICE=CPU runs the same on the host, to try the cases themselves.
"""

from __future__ import annotations

import os
import socket

import keras
import numpy as np
import pytest
import tensorflow as tf

import adasum_hvd.tensorflow as hvd
import adasum_hvd.tensorflow.keras as keras_hvd
from adasum_hvd import reference

DEVICE = os.environ.get("ADASUM_TEST_DEVICE", "GPU")
HOSTS: list[str] = []
TOLERANCE = {"float16": 2**-10, "float32": 1e-6, "float64": 1e-9}


def start() -> None:
    devices = tf.config.list_physical_devices("GPU")
    for device in devices:
        tf.config.experimental.set_memory_growth(device, True)
    if devices:
        mine = devices[hvd.local_rank() % len(devices)]
        tf.config.set_visible_devices(mine, "GPU")
    HOSTS[:] = hvd.allgather_object(
        os.environ.get("HOROVOD_HOSTNAME", socket.gethostname())
    )


def align() -> None:
    hvd.allreduce(tf.zeros(1), op=hvd.Sum, name="align")


def array_of(rank: int, size: int, dtype: str) -> np.ndarray:
    return np.random.default_rng([rank, size]).standard_normal(size).astype(dtype)


def case_every_dtype_and_size() -> None:
    for dtype, tolerance in TOLERANCE.items():
        for size in (1, 4097, 100_003):
            inputs = [array_of(rank, size, dtype) for rank in range(hvd.size())]
            with tf.device(f"/{DEVICE}:0"):
                mine = tf.identity(tf.constant(inputs[hvd.rank()]))
                result = hvd.allreduce(mine, op=hvd.Adasum, name=f"one.{dtype}.{size}")
            assert f"device:{DEVICE}" in result.device
            wide = np.float64 if dtype == "float64" else np.float32
            expected = reference.adasum([a.astype(wide) for a in inputs], HOSTS)
            error = np.abs(result.numpy().astype(np.float64) - expected).max()
            assert error <= tolerance * max(np.abs(expected).max(), 0.3)


@pytest.mark.parametrize("op_name", ["AdasumGrad", "AdasumDelta"])
def case_training_keeps_replicas_together(op_name: str) -> None:
    op = getattr(hvd, op_name)
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [keras.layers.Input((20,)), keras.layers.Dense(64), keras.layers.Dense(1)]
    )
    optimizer = keras_hvd.DistributedOptimizer(keras.optimizers.Adam(0.01), op=op)
    keras_hvd.compile(model, optimizer, loss="mse")
    rng = np.random.default_rng(hvd.rank())
    features = rng.standard_normal((64, 20)).astype("float32")
    targets = rng.standard_normal((64, 1)).astype("float32")
    broadcast = keras_hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    model.fit(features, targets, epochs=2, verbose=0, callbacks=[broadcast])
    weights = np.concatenate([v.numpy().ravel() for v in model.trainable_variables])
    everywhere = hvd.allgather(weights[None], name=f"weights.{op}").numpy()
    assert (everywhere == everywhere[0]).all()
