"""Horovod's arguments: by position, and what has no effect says so."""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import adasum_hvd.tensorflow as hvd
import adasum_hvd.tensorflow.keras as hvd_keras


def align() -> None:
    hvd.allgather_object(None)


def sgd() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.1)


def case_arguments_without_effect_warn() -> None:
    for given in (
        {"name": "mine"},
        {"use_locking": True},
        {"device_dense": "/gpu:0"},
        {"device_sparse": "/cpu:0"},
        {"scale_local_gradients": True},
    ):
        (name,) = given
        message = f"DistributedOptimizer: {name}=.* has no effect: "
        with pytest.warns(UserWarning, match=message):
            hvd.DistributedOptimizer(sgd(), **given)
        if name.startswith(("device", "scale")):
            with pytest.warns(UserWarning, match=f"Tape: {name}=.* has no effect"):
                hvd.DistributedGradientTape(tf.GradientTape(), **given)
    variable = tf.Variable([1.0 + hvd.rank()])
    with pytest.warns(UserWarning, match="broadcast_variables: inplace=True has no"):
        hvd.broadcast_variables([variable], 0, inplace=True)
    assert variable.numpy().tolist() == [1.0]


def case_arguments_by_position() -> None:
    fp16, whole = hvd.Compression.fp16, hvd.global_process_set
    last = (False, 0, 3, whole, False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours = hvd.DistributedOptimizer(
            sgd(), None, False, "", "", fp16, True, 2, hvd.Sum, 1.0, *last
        )
        kerass = hvd_keras.DistributedOptimizer(
            sgd(), None, "", "", fp16, True, 1.0, hvd.Sum, 2, *last
        )
    assert ours._adasum.options == kerass._adasum.options
    options = ours._adasum.options
    assert (options.compression, options.sparse_as_dense) == (fp16, True)
    assert (options.backward_passes_per_step, options.groups) == (2, 3)
    with pytest.raises(TypeError, match="at most 13 positional arguments"):
        hvd_keras.DistributedOptimizer(sgd(), *range(14))
    with pytest.raises(TypeError, match="expected name once, but got it twice"):
        hvd_keras.DistributedOptimizer(sgd(), "a", name="a")
    layer = keras.layers.Dense(1)
    layer.build((None, 2))
    partial = hvd.PartialDistributedGradientTape(
        tf.GradientTape(), "", "", fp16, True, hvd.Sum, 1.0, 0, None, whole, layer
    )
    assert partial._adasum_options.compression is fp16
    assert partial._adasum_local == {id(v) for v in layer.trainable_weights}


def case_num_groups_is_groups() -> None:
    with pytest.warns(DeprecationWarning, match="pass groups=2"):
        optimizer = hvd.DistributedOptimizer(sgd(), num_groups=2)
    assert optimizer._adasum.options.groups == 2
    with pytest.warns(DeprecationWarning, match="pass groups=2"):
        found = hvd.DistributedGradientTape(tf.GradientTape(), num_groups=2)
    assert found._adasum_options.groups == 2


def case_average_aggregated_gradients() -> None:
    for op in (hvd.Adasum, hvd.AdasumGrad, hvd.AdasumDelta):
        with pytest.raises(
            ValueError, match="expected op=Average or op=Sum, but got op="
        ):
            hvd.DistributedOptimizer(sgd(), op=op, average_aggregated_gradients=True)
    weights = []
    for average in (False, True):
        optimizer = hvd.DistributedOptimizer(
            sgd(), backward_passes_per_step=4, average_aggregated_gradients=average
        )
        again = type(optimizer).from_config(optimizer.get_config())
        assert again._adasum.options == optimizer._adasum.options
        variable = keras.Variable([0.0])
        for gradient in (1.0, 2.0, 3.0, 6.0):
            optimizer.apply([tf.constant([gradient])], [variable])
        weights.append(float(variable.numpy()[0]))
    assert weights == pytest.approx([-1.2, -0.3])


def case_values_of_keras_collectives() -> None:
    size = hvd.size()
    value = np.arange(2.0 * size, dtype=np.float32).reshape(size, 2)
    mine = value[hvd.rank() :][:1]
    for result, expected in (
        (hvd_keras.allreduce(value=value, name="a", op=hvd.Sum), size * value),
        (hvd_keras.allreduce(value, "b", None, 2.0, 1.0, "adasum"), 2 * value),
        (
            hvd_keras.allreduce(value.tolist(), process_set=hvd.global_process_set),
            value,
        ),
        (hvd_keras.allgather(value=mine, name="c"), value),
        (hvd_keras.allgather(mine, "d"), value),
        (hvd_keras.broadcast(value=mine, root_rank=size - 1, name="e"), value[-1:]),
        (hvd_keras.broadcast(mine, 0, "f"), value[:1]),
        (hvd_keras.reducescatter(value=value, name="g", op=hvd.Average), mine),
        (hvd_keras.reducescatter(value, "h", "sum"), size * mine),
    ):
        np.testing.assert_allclose(result.numpy(), expected, rtol=1e-6)
    with pytest.raises(ValueError, match="expected average or sum, but got Adasum"):
        hvd_keras.reducescatter(value, op=hvd.Adasum)


def case_load_model() -> None:
    class Mine(keras.optimizers.SGD):
        pass

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(Mine(0.1), "mse")
    path = str(Path(tempfile.mkdtemp()) / "model.keras")
    model.save(path)
    fp16 = hvd.Compression.fp16
    loaded = hvd_keras.load_model(path, [Mine], None, fp16, op=hvd.AdasumDelta)
    assert isinstance(loaded.optimizer, Mine)
    assert loaded.optimizer._adasum.options.compression is fp16
    with pytest.raises(TypeError, match="custom_optimizers: expected classes"):
        hvd_keras.load_model(path, {"Mine": Mine})
    with pytest.warns(UserWarning, match="legacy_opts=True has no effect"):
        hvd_keras.load_model(path, [Mine], legacy_opts=True)


def case_errors_of_horovod_classes_and_empty_lists() -> None:
    rows = tf.IndexedSlices(tf.ones((1, 2)), tf.constant([0]), tf.constant([3, 2]))
    for function in (hvd.allreduce, lambda t, op: hvd.grouped_allreduce([t], op=op)):
        for error in (
            NotImplementedError,
            ValueError,
        ):  # Horovod's, and what it was here
            with pytest.raises(
                error, match=r"expected a dense tensor, but got tf\.Indexed"
            ):
                function(rows, op=hvd.Adasum)
    for op in (None, hvd.Average, hvd.Adasum):
        assert hvd.grouped_allreduce([], op=op) == []


def case_other_optimizers_are_refused() -> None:
    old = tf.compat.v1.train.MomentumOptimizer(0.1, 0.9)
    with pytest.raises(
        TypeError, match=r"Keras 3 optimizer, but got .*DistributedGradientTape"
    ):
        hvd.DistributedOptimizer(old, op="adasum-delta")
    with pytest.raises(TypeError, match="from DistributedOptimizer, but got keras"):
        hvd.banner(sgd())
