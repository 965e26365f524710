"""Internals of Horovod, Keras and TensorFlow on which the TensorFlow part relies."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import horovod.keras
import horovod.tensorflow
import horovod.tensorflow.keras
import keras
import pytest
import tensorflow as tf
from horovod.tensorflow import mpi_ops

import adasum_hvd.tensorflow as hvd
import adasum_hvd.tensorflow.keras as hvd_keras
from adasum_hvd.horovod import binding
from adasum_hvd.horovod.build import prerequisites, sources
from adasum_hvd.tensorflow import ops as tf_ops
from adasum_hvd.tensorflow.horovod_arguments import by_name
from adasum_hvd.tensorflow.replicas import digest


def test_the_op_answers():
    assert binding.has_op(tf_ops.LIBRARY)
    assert binding.settings(tf_ops.LIBRARY)["op"] == "on"


def test_operations_and_reductions_of_horovod():
    parameters = inspect.signature(mpi_ops._allreduce).parameters
    assert {"name", "op", "prescale_factor", "postscale_factor", "process_set"} <= set(
        parameters
    )
    assert hasattr(mpi_ops.MPI_LIB, "horovod_grouped_allreduce")
    assert hasattr(mpi_ops.MPI_LIB, "horovod_allgather")
    for name in ("Average", "Sum", "Adasum", "Min", "Max", "Product"):
        assert getattr(mpi_ops, name) == getattr(hvd, name)


def test_everything_of_horovod_tensorflow_is_there():
    public = {
        name
        for name, value in vars(horovod.tensorflow).items()
        # Modules come to it when others import them.
        if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert public <= set(vars(hvd))
    assert hvd._executing_eagerly is horovod.tensorflow._executing_eagerly
    assert {"DistributedOptimizer", "compile", "callbacks"} <= set(vars(hvd_keras))


def by_position(function) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]


def test_arguments_have_the_order_of_horovod():
    for name in (
        "DistributedOptimizer",
        "DistributedGradientTape",
        "PartialDistributedGradientTape",
        "allreduce",
        "broadcast_variables",
    ):
        expected = by_position(getattr(horovod.tensorflow, name))
        assert by_position(getattr(hvd, name)) == expected
    for name in ("allreduce", "allgather", "broadcast", "reducescatter", "load_model"):
        expected = by_position(getattr(horovod.tensorflow.keras, name))
        assert by_position(getattr(hvd_keras, name)) == expected
    for name in ("BroadcastGlobalVariablesCallback", "MetricAverageCallback"):
        expected = by_position(getattr(horovod.tensorflow.keras.callbacks, name))
        assert by_position(getattr(hvd_keras.callbacks, name)) == expected


def test_arguments_in_the_order_of_horovod_become_named_ones():
    for function, args in (
        (horovod.tensorflow.keras.DistributedOptimizer, ("n", "d", "s", "c", True)),
        (horovod.keras.PartialDistributedOptimizer, ("n", "d", "s", "c", True)),
        (horovod.tensorflow.PartialDistributedGradientTape, ("d", "s", "c", True)),
    ):
        _, *order = by_position(function)
        named = by_name(function, args, {"local_steps": 2})
        assert named == dict(zip(order, args, strict=False), local_steps=2)
        assert named["sparse_as_dense"] is True
        count = len(order)
        with pytest.raises(TypeError, match=rf"{function.__name__}: .* most {count} "):
            by_name(function, range(count + 1), {})
        with pytest.raises(
            TypeError, match=f"expected {order[1]} once, but got it twice"
        ):
            by_name(function, args, {order[1]: "again"})


def test_the_order_of_a_keras_step():
    """Unscale and accumulate; clip, decay, step; then averages, constraints, the counter."""
    called: list[str] = []

    class Spy(keras.optimizers.SGD):
        def __getattribute__(self, name):
            if name in watched:
                called.append(name)
            return super().__getattribute__(name)

    watched = (
        "_backend_apply_gradients",
        "_clip_gradients",
        "_apply_weight_decay",
        "_backend_update_step",
        "_update_model_variables_moving_average",
    )
    variable = keras.Variable([1.0, 2.0])
    variable.constraint = lambda value: called.append("constraint") or value
    Spy(0.1, use_ema=True).apply([tf.constant([1.0, 1.0])], [variable])
    assert called == [*watched, "constraint"]


def test_what_a_keras_optimizer_knows_of_its_variables():
    variables = [keras.Variable([1.0]), keras.Variable([2.0])]
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(variables)
    assert [optimizer._get_variable_index(v) for v in variables[::-1]] == [1, 0]
    assert optimizer._get_variable_index(variables[1].value) == 1
    optimizer._check_variables_are_known(variables)
    with pytest.raises(ValueError, match="Unknown variable"):
        optimizer._check_variables_are_known([keras.Variable([1.0])])
    with pytest.warns(UserWarning, match="Gradients do not exist for variables"):
        optimizer._filter_empty_gradients([None, tf.ones(1)], variables)


def test_optimizers_around_build_the_ones_inside():
    class Inner(keras.optimizers.SGD):
        def build(self, variables):
            callers.append(sys._getframe(1).f_locals["self"])
            super().build(variables)

    callers: list = []
    scaled = keras.optimizers.LossScaleOptimizer(Inner())
    around = [scaled]
    if hasattr(keras.optimizers, "MultiOptimizer"):
        inside = Inner()
        around.append(keras.optimizers.MultiOptimizer(lambda variable: inside))
    for optimizer in around:
        optimizer.build([keras.Variable([1.0])])
    assert callers == around
    for name in (
        "check_finite",
        "_stateful_handle_finite_grads",
        "_stateful_handle_non_finite_grads",
    ):
        assert f"self.{name}" in inspect.getsource(type(scaled)._common_apply)


def test_xla_shows_while_tracing():
    seen: list[str] = []

    def body():
        try:
            tf_ops.refuse_xla("this")
            seen.append("fine")
        except NotImplementedError:
            seen.append("refused")
        return tf.constant(1)

    tf.function(body, autograph=False)()
    tf.function(body, autograph=False, jit_compile=True)()
    tf.function(lambda: tf.cond(tf.constant(True), body, body), jit_compile=True)()
    assert seen == ["fine", "refused", "refused", "refused"]


def test_the_stream_function_that_tensorflow_lacks(tmp_path):
    """Horovod's TensorFlow ops for CUDA need it in this form to load."""
    compiled = tmp_path / "stream.o"
    simulated = Path(__file__).parents[1] / "native" / "simulated_cuda"
    subprocess.run(
        [prerequisites.compiler(), "-std=c++17", "-c", "-o", str(compiled)]
        + [*tf.sysconfig.get_compile_flags(), f"-I{simulated}"]
        + [str(sources.NATIVE / "op" / "tensorflow_stream.cc")],
        check=True,
    )
    symbols = subprocess.run(
        ["nm", "--demangle", str(compiled)], capture_output=True, text=True, check=True
    ).stdout
    expected = "stream_executor::gpu::AsGpuStreamValue(stream_executor::Stream*)"
    assert f" T {expected}\n" in symbols


def test_equal_bits_of_other_shapes_or_dtypes_differ():
    zeros = tf.zeros((2, 3)), tf.zeros((3, 2)), tf.zeros((2, 3), tf.int32)
    assert len({*map(digest, zeros)}) == 3
