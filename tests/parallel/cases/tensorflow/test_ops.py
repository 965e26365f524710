"""AdaSum of TensorFlow tensors, with the bits that torch gets; tape, objects."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import time

import horovod.tensorflow as plain_horovod
import numpy as np
import pytest
import tensorflow as tf

import adasum_hvd.tensorflow as hvd
from adasum_hvd import reference
from adasum_hvd.base import ops
from adasum_hvd.horovod import binding
from adasum_hvd.tensorflow import ops as tf_ops
from adasum_hvd.tensorflow.reduction import named

SIZES = (1, 7, 4096, 300, 4097, 100_003, 8)


def start() -> None:
    # Runs no operation: the usual lines that choose devices by rank still work.
    tf.config.threading.set_intra_op_parallelism_threads(1)


def align() -> None:
    hvd.allgather_object(None)


def library() -> ctypes.CDLL:
    return tf_ops.LIBRARY


def array_of(rank: int, size: int, dtype: type) -> np.ndarray:
    return np.random.default_rng([0, rank, size]).standard_normal(size).astype(dtype)


def arrays(size: int, dtype: type = np.float32) -> list[np.ndarray]:
    return [array_of(rank, size, dtype) for rank in range(hvd.size())]


def mine(size: int, dtype: type = np.float32) -> tf.Tensor:
    return tf.constant(array_of(hvd.rank(), size, dtype))


def check(result: tf.Tensor, expected: np.ndarray, tolerance: float = 1e-6) -> None:
    assert np.abs(np.asarray(result, np.float64) - expected).max() <= tolerance * max(
        0.3, np.abs(expected).max()
    )


def case_the_op_answers() -> None:
    binding.require_op(library())
    assert hvd.settings()["op"] == "on"


def case_every_dtype_and_size() -> dict[str, str]:
    digests = {}
    before = hvd.counters().calls
    for dtype in (np.float16, np.float32, np.float64):
        digest = hashlib.sha256()
        for size in SIZES:
            name = f"tf.{dtype.__name__}.{size}"
            result = hvd.allreduce(mine(size, dtype), op=hvd.Adasum, name=name).numpy()
            expected = reference.adasum(arrays(size, dtype))
            tolerance = {np.float16: 2**-10, np.float32: 1e-6, np.float64: 1e-9}[dtype]
            check(result, expected, tolerance)
            digest.update(result.tobytes())
            if hvd.size() == 2:  # Horovod's own function comes to the op too
                of_horovod = plain_horovod.allreduce(
                    mine(size, dtype), op=plain_horovod.Adasum, name=name
                )
                assert of_horovod.numpy().tobytes() == result.tobytes()
        digests[dtype.__name__] = digest.hexdigest()
    assert hvd.counters().calls >= before + 3 * len(SIZES)
    return digests


def case_functions_gradients_and_groups() -> None:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append
    tf.get_logger().addHandler(handler)

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> tuple:
        with tf.GradientTape() as tape:
            tape.watch(x)
            reduced = hvd.allreduce(x, op="adasum", name="function.x")
            total = tf.reduce_sum(reduced * y)
        pair = hvd.grouped_allreduce([x, tf.cast(y, tf.float64)], op=hvd.AdasumGrad)
        return reduced, tape.gradient(total, x), pair

    x, y = mine(50), mine(51)[:50]
    reduced, gradient, pair = step(x, y)
    check(reduced, reference.adasum(arrays(50)))
    ys = [array[:50] for array in arrays(51)]
    check(
        gradient, reference.adasum(ys)
    )  # the gradient of AdaSum is AdaSum of gradients
    check(pair[0], reference.adasum(arrays(50)))
    check(pair[1], reference.adasum(ys))
    assert pair[1].dtype == tf.float64
    tf.get_logger().removeHandler(handler)
    assert not [r for r in records if "AutoGraph" in r.getMessage()]


def case_other_arguments() -> None:
    x = mine(40)
    scaled = hvd.allreduce(x, op=hvd.Adasum, prescale_factor=0.5, postscale_factor=4.0)
    check(scaled, 2 * reference.adasum(arrays(40)))
    short = hvd.allreduce(x, op=hvd.Adasum, compression=hvd.Compression.fp16)
    assert short.dtype == tf.float32
    check(short, reference.adasum(arrays(40)), 4e-3)
    brain = hvd.allreduce(tf.cast(x, tf.bfloat16), op=hvd.Adasum)
    assert brain.dtype == tf.bfloat16
    check(tf.cast(brain, tf.float32), reference.adasum(arrays(40)), 2e-2)
    check(hvd.allreduce(x, op=hvd.Average), np.mean(arrays(40), axis=0))
    check(hvd.allreduce(x), np.mean(arrays(40), axis=0))
    assert hvd.grouped_allreduce([], op=hvd.Adasum) == []
    before = hvd.counters().delta_tensors
    tf.function(lambda t: hvd.allreduce(t, op=hvd.AdasumDelta, name="w"))(x)
    assert hvd.counters().delta_tensors == before + 1


def case_constants_in_a_function_are_reduced_in_every_call() -> None:
    """TensorFlow's graph optimizer would run the operation once, on this rank alone."""
    for op in (hvd.Adasum, hvd.Sum):
        total = tf.function(lambda n: hvd.allreduce(tf.cast(n, tf.float32), op=op))  # noqa: B023
        group = tf.function(
            lambda n: hvd.grouped_allreduce([tf.cast(n, tf.float64)], op=op)[0]  # noqa: B023
        )
        for epoch in range(3):
            # The first rank's function is traced once, the others' again in each epoch.
            given = [5 + epoch * bool(r) for r in range(hvd.size())]
            expected = np.float64(sum(given))
            if op is hvd.Adasum:
                expected = reference.adasum([np.full(1, float(n)) for n in given])[0]
            assert np.isclose(total(given[hvd.rank()]).numpy(), expected)
            assert np.isclose(group(given[hvd.rank()]).numpy(), expected)


def case_a_tf1_graph() -> None:
    rank, size = float(hvd.rank()), hvd.size()
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        variable = tf.compat.v1.get_variable("v", initializer=rank, use_resource=True)
        copied = hvd.broadcast_variables([variable], 0)
        gradients = []
        for factor in (1.0, 2.0):
            with tf.GradientTape() as tape:
                loss = (variable + rank) * factor * rank
            tape = hvd.DistributedGradientTape(tape, op=hvd.Average)
            gradients += tape.gradient(loss, [variable])
        total, joined = hvd.allreduce(tf.constant(rank), op=hvd.Sum), hvd.join()
        session.run(tf.compat.v1.global_variables_initializer())
        session.run(copied)
        assert session.run(variable) == 0
        for _ in range(2):
            assert session.run(total) == size * (size - 1) / 2
            mean = (size - 1) / 2
            np.testing.assert_allclose(session.run(gradients), [mean, 2 * mean])
        assert 0 <= session.run(joined) < size


def case_join_waits_in_every_epoch() -> None:
    last = [int(hvd.join())]
    for epoch in range(2):
        if hvd.rank() == epoch % hvd.size():
            time.sleep(0.3)
        last.append(int(hvd.join()))
    assert last[1:] == [epoch % hvd.size() for epoch in range(2)]


def case_synchronized_batch_normalization_names_keras_3() -> None:
    with pytest.raises(NotImplementedError, match=r"expected Keras 2.*BatchNormalizat"):
        hvd.SyncBatchNormalization()


def case_errors_on_every_rank() -> None:
    with pytest.raises(tf.errors.InvalidArgumentError, match="expected dtype float16"):
        hvd.allreduce(tf.constant([1, 2]), op=hvd.Adasum)
    slices = tf.IndexedSlices(tf.ones((1, 2)), tf.constant([0]), tf.constant([3, 2]))
    with pytest.raises(ValueError, match=r"expected a dense tensor.*sparse_as_dense"):
        hvd.allreduce(slices, op=hvd.Adasum)
    compiled = tf.function(lambda x: hvd.allreduce(x, op="adasum"), jit_compile=True)
    with pytest.raises(NotImplementedError, match=r"compile\(jit_compile=False\)"):
        compiled(tf.ones(3))
    with pytest.raises(ValueError, match="reduction op: expected one of"):
        hvd.allreduce(tf.ones(3), op="adasumm")
    check(hvd.allreduce(mine(9), op=hvd.Adasum), reference.adasum(arrays(9)))


def case_process_set() -> None:
    members = list(range(1, hvd.size()))
    pair = hvd.add_process_set(members)
    if hvd.rank() in members:
        result = hvd.allreduce(mine(30), op=hvd.Adasum, process_set=pair)
        chosen = [arrays(30)[member] for member in members]
        check(result, reference.adasum(chosen))
        assert hvd.allgather_object(hvd.rank(), process_set=pair) == members
    align()
    hvd.remove_process_set(pair)
    for call in (
        lambda: hvd.allreduce(mine(3), op=hvd.Adasum, process_set=pair),
        lambda: hvd.grouped_allreduce([mine(3)], op=hvd.Sum, process_set=pair),
        lambda: hvd.broadcast_variables([tf.Variable(1.0)], 1, pair),
        lambda: named.reduce_named([mine(3)], "removed", ops.Adasum, pair),
        lambda: named.gather_named(mine(3), "removed", pair),
    ):
        with pytest.raises(ValueError, match="expected one that is registered"):
            call()
    alone = hvd.add_process_set([0])
    variable = tf.Variable(3.0)
    with tf.GradientTape() as tape:
        loss = variable**2
    if hvd.rank() == 0:
        tape = hvd.DistributedGradientTape(tape, process_set=alone)
        assert tape.gradient(loss, variable) == 6
    align()
    hvd.remove_process_set(alone)


def case_tape_at_the_end_of_the_data() -> None:
    """TensorFlow runs what needs no data; ranks would wait for one another."""
    weights = [tf.Variable(2.0), tf.Variable(2.0)]
    batches = iter(tf.data.Dataset.range(1, 2))

    @tf.function
    def step() -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = weights[0] * tf.cast(next(batches), tf.float32)
        tape, zero = hvd.DistributedGradientTape(tape), tf.UnconnectedGradients.ZERO
        return tf.stack(tape.gradient(loss, weights, unconnected_gradients=zero))

    assert step().numpy().tolist() == [1, 0]
    uses = [int(count) for count in named._order_variables.values()]
    with pytest.raises(tf.errors.OutOfRangeError):
        step()
    assert uses == [int(count) for count in named._order_variables.values()]


def case_tape() -> None:
    kernel, bias = tf.Variable(tf.ones((4, 2))), tf.Variable(tf.ones(2))
    local = tf.Variable(1.0)
    hvd.mark_worker_local(local)
    images = [array.reshape(5, 4) for array in arrays(20)]

    def gradients_of(rank: int, op: str | None = None, **kwargs: object) -> list:
        with tf.GradientTape() as tape:
            outputs = tf.tanh(images[rank] @ kernel + bias) * local
            loss = tf.reduce_mean(outputs**2)
        if op is not None:
            tape = hvd.DistributedGradientTape(tape, op=op, **kwargs)
        return tape.gradient(loss, [kernel, bias, local])

    everyone = [gradients_of(rank) for rank in range(hvd.size())]
    for op in ("average", "adasum", "adasum-grad"):
        function = tf.function(lambda op=op: gradients_of(hvd.rank(), op))
        for result in (gradients_of(hvd.rank(), op), function(), function()):
            for index in range(2):
                each = [grads[index].numpy() for grads in everyone]
                adasum = reference.adasum(each)
                check(result[index], np.mean(each, 0) if op == "average" else adasum)
            check(result[2], everyone[hvd.rank()][2].numpy())
    for groups in (1, [[bias]], [[bias, kernel]]):
        result = gradients_of(hvd.rank(), "adasum", groups=groups)
        for index in range(2):
            each = [grads[index].numpy() for grads in everyone]
            check(result[index], reference.adasum(each))
    with pytest.raises(ValueError, match="expected a reduction of gradients"):
        hvd.DistributedGradientTape(tf.GradientTape(), op=hvd.AdasumDelta)
    # Ranks whose gradients differ hear of it at once.
    size = 2 + (hvd.rank() == hvd.size() - 1)
    odd = tf.Variable(tf.ones(size))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(odd**2)
    reducing = hvd.DistributedGradientTape(tape)
    strategy = tf.distribute.OneDeviceStrategy("CPU:0")
    with strategy.scope(), pytest.raises(NotImplementedError, match="process per dev"):
        reducing.gradient(loss, [odd])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(odd**2)
    with pytest.raises(ValueError, match="expected the same parameters in the same"):
        hvd.DistributedGradientTape(tape).gradient(loss, [odd])


def case_sparse_gradients_of_a_tape() -> None:
    table = tf.Variable(tf.ones((6, 3)))

    def gradient(**kwargs: object) -> tf.Tensor:
        with tf.GradientTape() as tape:
            rows = tf.gather(table, [hvd.rank(), 0])
            loss = tf.reduce_sum(rows * (hvd.rank() + 1.0))
        return hvd.DistributedGradientTape(tape, **kwargs).gradient(loss, table)

    expected = []
    for rank in range(hvd.size()):
        each = np.zeros((6, 3))
        each[rank] += rank + 1
        each[0] += rank + 1
        expected.append(each)
    result = gradient(op="adasum-grad", sparse_as_dense=True)
    check(result, reference.adasum(expected))
    for op in ("adasum-grad", "max"):
        with pytest.raises(ValueError, match="pass sparse_as_dense=True"):
            gradient(op=op)
    # What a sum needs is every rank's rows; each comes back once.
    for op, reduced in (
        ("average", np.mean(expected, 0)),
        ("sum", np.sum(expected, 0)),
    ):
        function = tf.function(lambda op=op: gradient(op=op))
        for result in (gradient(op=op), function(), function()):
            assert isinstance(result, tf.IndexedSlices)
            rows = result.indices.numpy().tolist()
            assert len(set(rows)) == len(rows) == hvd.size()
            check(tf.convert_to_tensor(result), reduced)
            everyone = hvd.allgather_object(result.values.numpy().tobytes())
            assert len(set(everyone)) == 1
    short = gradient(op="sum", compression=hvd.Compression.fp16)
    check(tf.convert_to_tensor(short), np.sum(expected, 0))


def case_broadcast_variables_goes_by_order() -> None:
    dtypes = (tf.float32, tf.bfloat16, tf.int64, tf.uint32, tf.bool)
    variables = [
        tf.Variable(tf.cast([hvd.rank() + 1, 0], dtype), name=f"of_rank_{hvd.rank()}")
        for dtype in dtypes
    ]
    hvd.broadcast_variables(variables, root_rank=hvd.size() - 1)
    for variable in variables:
        expected = tf.cast([hvd.size(), 0], variable.dtype)
        assert variable.numpy().tolist() == expected.numpy().tolist()
