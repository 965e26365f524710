"""Horovod's signatures: the same order, and what has no effect says so."""

from __future__ import annotations

import inspect

import horovod.tensorflow as horovods
import horovod.tensorflow.keras as horovods_keras
import keras
import numpy as np
import pytest
import tensorflow as tf

import adasum_hvd.tensorflow as hvd
import adasum_hvd.tensorflow.keras as hvd_keras
from adasum_hvd.tensorflow import tape
from adasum_hvd.tensorflow.keras import collectives


def by_position(function) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]


@pytest.fixture(autouse=True, scope="module")
def started():
    hvd.init()
    yield
    hvd.shutdown()


def test_the_order_is_horovods():
    for name in ("DistributedOptimizer", "DistributedGradientTape", "allreduce"):
        theirs = by_position(getattr(horovods, name))
        assert by_position(getattr(hvd, name))[: len(theirs)] == theirs
    for name in ("allreduce", "allgather", "broadcast", "reducescatter", "load_model"):
        theirs = by_position(getattr(horovods_keras, name))
        assert by_position(getattr(hvd_keras, name)) == theirs
    theirs = by_position(horovods.broadcast_variables)
    assert by_position(hvd.broadcast_variables) == theirs
    optimizer, *rest = by_position(horovods_keras.DistributedOptimizer)
    assert (optimizer, tuple(rest)) == ("optimizer", collectives.OPTIMIZER_ORDER)
    gradtape, *rest = by_position(horovods.PartialDistributedGradientTape)
    assert (gradtape, tuple(rest)) == ("gradtape", tape._PARTIAL_ORDER)


def sgd() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.1)


@pytest.mark.parametrize(
    "given",
    [
        {"name": "mine"},
        {"use_locking": True},
        {"device_dense": "/gpu:0"},
        {"device_sparse": "/cpu:0"},
        {"scale_local_gradients": True},
    ],
    ids=str,
)
def test_what_has_no_effect_warns(given):
    (name,) = given
    message = f"DistributedOptimizer: {name}=.* has no effect: "
    with pytest.warns(UserWarning, match=message):
        hvd.DistributedOptimizer(sgd(), **given)
    if name.startswith(("device", "scale")):
        with pytest.warns(UserWarning, match=f"Tape: {name}=.* has no effect"):
            hvd.DistributedGradientTape(tf.GradientTape(), **given)


@pytest.mark.filterwarnings("error")
def test_arguments_by_position():
    fp16, whole = hvd.Compression.fp16, hvd.global_process_set
    last = (False, 0, 3, whole, False)
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
    with pytest.raises(TypeError, match="required name once, got it twice"):
        hvd_keras.DistributedOptimizer(sgd(), "a", name="a")
    layer = keras.layers.Dense(1)
    layer.build((None, 2))
    partial = hvd.PartialDistributedGradientTape(
        tf.GradientTape(), "", "", fp16, True, hvd.Sum, 1.0, 0, None, whole, layer
    )
    assert partial._adasum_options.compression is fp16
    assert partial._adasum_local == {id(v) for v in layer.trainable_weights}


def test_num_groups_is_groups():
    with pytest.warns(DeprecationWarning, match="pass groups=2"):
        optimizer = hvd.DistributedOptimizer(sgd(), num_groups=2)
    assert optimizer._adasum.options.groups == 2
    with pytest.warns(DeprecationWarning, match="pass groups=2"):
        found = hvd.DistributedGradientTape(tf.GradientTape(), num_groups=2)
    assert found._adasum_options.groups == 2


def test_average_aggregated_gradients():
    for op in (hvd.Adasum, hvd.AdasumGrad, hvd.AdasumDelta):
        with pytest.raises(ValueError, match="required op=Average or op=Sum, got op="):
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


def test_values_of_keras_collectives():
    value = np.array([[1.0, 2.0]], np.float32)
    for result in (
        hvd_keras.allreduce(value=value, name="a", op=hvd.Sum),
        hvd_keras.allreduce(value, "b", None, 2.0, 0.5, "adasum"),
        hvd_keras.allreduce([[1.0, 2.0]], process_set=hvd.global_process_set),
        hvd_keras.allgather(value=value, name="c"),
        hvd_keras.broadcast(value=value, root_rank=0, name="d"),
        hvd_keras.broadcast(value, 0, "e"),
        hvd_keras.reducescatter(value=value, name="f", op=hvd.Average),
        hvd_keras.reducescatter(value, "g", "sum"),
    ):
        assert result.numpy().tolist() == [[1.0, 2.0]]
    with pytest.raises(ValueError, match="required average or sum, got Adasum"):
        hvd_keras.reducescatter(value, op=hvd.Adasum)


def test_inplace_broadcast():
    variable = tf.Variable([1.0])
    with pytest.warns(UserWarning, match="broadcast_variables: inplace=True has no"):
        hvd.broadcast_variables([variable], 0, inplace=True)


def test_load_model(tmp_path):
    class Mine(keras.optimizers.SGD):
        pass

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(Mine(0.1), "mse")
    path = str(tmp_path / "model.keras")
    model.save(path)
    fp16 = hvd.Compression.fp16
    loaded = hvd_keras.load_model(path, [Mine], None, fp16, op=hvd.AdasumDelta)
    assert isinstance(loaded.optimizer, Mine)
    assert loaded.optimizer._adasum.options.compression is fp16
    with pytest.raises(TypeError, match="custom_optimizers: required classes"):
        hvd_keras.load_model(path, {"Mine": Mine})
    with pytest.warns(UserWarning, match="legacy_opts=True has no effect"):
        hvd_keras.load_model(path, [Mine], legacy_opts=True)
