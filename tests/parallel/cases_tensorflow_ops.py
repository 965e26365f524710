"""AdaSum of TensorFlow tensors, with the bits that torch gets; tape, reducer, objects."""

from __future__ import annotations

import ctypes
import hashlib
import logging

import horovod.tensorflow as horovods
import numpy as np
import pytest
import tensorflow as tf

import adasum_hvd.tensorflow as hvd
from adasum_hvd import binding, reference
from adasum_hvd.tensorflow import mindspore as grad_reducer
from adasum_hvd.tensorflow import ops as tf_ops

SIZES = (1, 7, 4096, 300, 4097, 100_003, 8)


def start() -> None:
    hvd.init()
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


def check(result: tf.Tensor, wanted: np.ndarray, tolerance: float = 1e-6) -> None:
    assert np.abs(np.asarray(result, np.float64) - wanted).max() <= tolerance * max(
        0.3, np.abs(wanted).max()
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
            wanted = reference.adasum(arrays(size, dtype))
            tolerance = {np.float16: 2**-10, np.float32: 1e-6, np.float64: 1e-9}[dtype]
            check(result, wanted, tolerance)
            digest.update(result.tobytes())
            if hvd.size() == 2:  # Horovod's own function comes to the op too
                theirs = horovods.allreduce(
                    mine(size, dtype), op=horovods.Adasum, name=name
                )
                assert theirs.numpy().tobytes() == result.tobytes()
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


def case_errors_on_every_rank() -> None:
    with pytest.raises(tf.errors.InvalidArgumentError, match="required dtype float16"):
        hvd.allreduce(tf.constant([1, 2]), op=hvd.Adasum)
    slices = tf.IndexedSlices(tf.ones((1, 2)), tf.constant([0]), tf.constant([3, 2]))
    with pytest.raises(ValueError, match=r"required a dense tensor.*sparse_as_dense"):
        hvd.allreduce(slices, op=hvd.Adasum)
    compiled = tf.function(lambda x: hvd.allreduce(x, op="adasum"), jit_compile=True)
    with pytest.raises(NotImplementedError, match=r"compile\(jit_compile=False\)"):
        compiled(tf.ones(3))
    with pytest.raises(ValueError, match="reduction op: required one of"):
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
    with pytest.raises(ValueError, match="required a reduction of gradients"):
        hvd.DistributedGradientTape(tf.GradientTape(), op=hvd.AdasumDelta)
    # Ranks whose gradients differ hear of it at once.
    size = 2 + (hvd.rank() == hvd.size() - 1)
    odd = tf.Variable(tf.ones(size))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(odd**2)
    with pytest.raises(ValueError, match="required the same parameters in the same"):
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
    for op, wanted in (("average", np.mean(expected, 0)), ("sum", np.sum(expected, 0))):
        function = tf.function(lambda op=op: gradient(op=op))
        for result in (gradient(op=op), function(), function()):
            assert isinstance(result, tf.IndexedSlices)
            rows = result.indices.numpy().tolist()
            assert len(set(rows)) == len(rows) == hvd.size()
            check(tf.convert_to_tensor(result), wanted)
            everyone = hvd.allgather_object(result.values.numpy().tobytes())
            assert len(set(everyone)) == 1
    short = gradient(op="sum", compression=hvd.Compression.fp16)
    check(tf.convert_to_tensor(short), np.sum(expected, 0))


def case_gradient_reducer() -> None:
    variables = [tf.Variable(tf.zeros(3)), tf.Variable(tf.zeros((2, 2)))]
    reducer = hvd.DistributedGradReducer(variables)
    totals = hvd.DistributedGradReducer(variables, mean=False)
    grads = (tf.cast(mine(3), tf.float16), tf.reshape(mine(4), (2, 2)))
    for call in (reducer, tf.function(lambda *g: reducer(g))):
        result = call(grads) if call is reducer else call(*grads)
        assert [r.dtype for r in result] == [tf.float16, tf.float32]
        check(result[0], np.mean([a.astype(np.float16) for a in arrays(3)], 0), 2e-3)
        check(result[1], np.mean(arrays(4), 0).reshape(2, 2))
    check(totals(grads)[1], np.sum(arrays(4), 0).reshape(2, 2))
    variables[1].layerwise_parallel = True
    check(reducer(grads)[1], grads[1].numpy())
    slices = tf.IndexedSlices(mine(2), tf.constant([0, hvd.rank()]), tf.constant([3]))
    sparse = hvd.DistributedGradReducer(variables[:1])(slices)
    dense = np.zeros(3)
    for rank, values in enumerate(arrays(2)):
        np.add.at(dense, [0, rank], values / hvd.size())
    check(tf.convert_to_tensor(sparse), dense)
    for degree in (0, -1, 1.5):
        with pytest.raises(ValueError, match="degree must be larger than 0 and int"):
            hvd.DistributedGradReducer(variables, degree=degree)
    # The seed's example: 16 x 16 ones, weights 16 x 10 of ones, zero targets.
    weight = tf.Variable(tf.ones((16, 10)))
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((tf.ones((16, 16)) @ weight) ** 2)
    assert float(loss) == 256.0
    (reduced,) = hvd.DistributedGradReducer([weight])([tape.gradient(loss, weight)])
    check(reduced, np.full((16, 10), 3.2))


def case_gradient_reducer_settings() -> None:
    variables = [tf.Variable(tf.zeros(4)) for _ in range(4)]
    grads = [mine(4) * (index + 1.0) for index in range(4)]
    total = np.sum(arrays(4), 0)
    # Any divisor, whatever the number of ranks.
    for index, result in enumerate(
        hvd.DistributedGradReducer(variables, degree=8)(grads)
    ):
        check(result, total * (index + 1) / 8)
    # Summed and divided in float32: only a sum can be too large for float16.
    large = [tf.fill([2], tf.constant(60000, tf.float16))]
    (mean,) = hvd.DistributedGradReducer(variables[:1])(large)
    assert mean.numpy().tolist() == [60000.0] * 2
    (overflow,) = hvd.DistributedGradReducer(variables[:1], mean=False)(large)
    assert np.isinf(overflow.numpy()).all() and overflow.dtype == tf.float16
    # What is reduced together, by the op's own count.
    variables[1].comm_fusion = variables[3].comm_fusion = 7
    by_number = hvd.DistributedGradReducer(variables, mean=False)
    for variable in (variables[1], variables[3]):
        del variable.comm_fusion
    split = hvd.DistributedGradReducer(variables, mean=False, split_indices=[0, 2])
    for reducer, groups in ((by_number, [[0, 2], [1, 3]]), (split, [[0], [1, 2], [3]])):
        function = tf.function(lambda *g, reducer=reducer: reducer(g))
        for results in (reducer(grads), function(*grads)):
            for index, result in enumerate(results):
                check(result, total * (index + 1))
        seen: list[list[float]] = []
        start = reducer._start
        reducer._start = lambda name, some, seen=seen, start=start: (
            seen.append([round(float(g[0] / grads[0][0])) - 1 for g in some])
            or start(name, some)
        )
        reducer(grads)
        assert seen == groups, seen
    # Worker-local ones stay as they are.
    hvd.mark_worker_local(variables[2])
    results = hvd.DistributedGradReducer(variables)(grads)
    check(results[2], grads[2].numpy())
    check(results[3], 4 * total / hvd.size())


def case_gradient_reducer_of_a_group() -> None:
    """The last ranks alone, dense and sparse; the first one has a group of its own."""
    members = list(range(1, hvd.size()))
    others, first = hvd.add_process_set(members), hvd.add_process_set([0])
    group = others if hvd.rank() else first
    ranks = members if hvd.rank() else [0]
    variables = [tf.Variable(tf.zeros(3)), tf.Variable(tf.zeros((4, 2)))]
    reducer = hvd.DistributedGradReducer(variables, group=group)
    rows = tf.IndexedSlices(
        tf.ones((1, 2)) * (hvd.rank() + 1.0), tf.constant([0]), tf.constant([4, 2])
    )
    reduce_named = grad_reducer.reduce_named

    def checked(*args: object) -> list[tf.Tensor]:
        """Raise where ranks of other groups would be waited for."""
        assert args[-1] is group
        return reduce_named(*args)

    grad_reducer.reduce_named = checked
    try:
        dense, sparse = reducer([mine(3), rows])
    finally:
        grad_reducer.reduce_named = reduce_named
    check(dense, np.mean([arrays(3)[rank] for rank in ranks], 0))
    wanted = np.zeros((4, 2))
    wanted[0] = np.mean([rank + 1 for rank in ranks])
    check(tf.convert_to_tensor(sparse), wanted)
    hvd.remove_process_set(others)
    hvd.remove_process_set(first)


def case_gradient_reducer_of_empty_slices() -> None:
    """A rank whose batch has used no row takes part all the same."""
    count = 0 if hvd.rank() == 0 else 2
    rows = tf.IndexedSlices(
        tf.ones((count, 3)), tf.range(count, dtype=tf.int32), tf.constant([5, 3])
    )
    reducer = hvd.DistributedGradReducer([tf.Variable(tf.zeros((5, 3)))], mean=False)
    for call in (reducer, tf.function(lambda grads: reducer(grads))):
        (result,) = call([rows])
        wanted = np.zeros((5, 3))
        wanted[:2] = hvd.size() - 1
        check(tf.convert_to_tensor(result), wanted)


def case_broadcast_variables_goes_by_order() -> None:
    dtypes = (tf.float32, tf.bfloat16, tf.int64, tf.uint32, tf.bool)
    variables = [
        tf.Variable(tf.cast([hvd.rank() + 1, 0], dtype), name=f"of_rank_{hvd.rank()}")
        for dtype in dtypes
    ]
    hvd.broadcast_variables(variables, root_rank=hvd.size() - 1)
    for variable in variables:
        wanted = tf.cast([hvd.size(), 0], variable.dtype)
        assert variable.numpy().tolist() == wanted.numpy().tolist()


def case_tf1_optimizer_in_a_session() -> None:
    starts = [np.ones(5), np.ones((2, 2))]
    for op, make, resource in (
        ("average", lambda: tf.compat.v1.train.GradientDescentOptimizer(0.5), True),
        ("adasum-grad", lambda: tf.compat.v1.train.MomentumOptimizer(0.5, 0.9), False),
        ("adasum-delta", lambda: tf.compat.v1.train.MomentumOptimizer(0.5, 0.9), True),
        ("adasum-delta", lambda: tf.compat.v1.train.MomentumOptimizer(0.5, 0.9), False),
    ):
        momentum = 0.0 if op == "average" else 0.9
        with tf.Graph().as_default():
            variables = [
                tf.compat.v1.get_variable(
                    f"v{index}",
                    initializer=start.astype(np.float32),
                    use_resource=resource,
                )
                for index, start in enumerate(starts)
            ]
            inputs = [mine(5), tf.reshape(mine(4), (2, 2))]
            loss = tf.add_n(
                [
                    tf.reduce_sum((v - x) ** 2) / 8
                    for v, x in zip(variables, inputs, strict=True)
                ]
            )
            plain = make()
            optimizer = hvd.DistributedOptimizer(plain, op=op)
            assert optimizer._optimizer is plain  # what Horovod's calls it
            train = optimizer.minimize(loss)
            with tf.compat.v1.Session() as session:
                session.run(tf.compat.v1.global_variables_initializer())
                for _ in range(3):
                    session.run(train)
                results = session.run(variables)
        targets = [arrays(5), [a.reshape(2, 2) for a in arrays(4)]]
        for result, start, target in zip(results, starts, targets, strict=True):
            weights, velocities = start, [0.0] * hvd.size()
            for _ in range(3):
                grads = [(weights - t) / 4 for t in target]
                if op == "average":
                    grads = [np.mean(grads, 0)] * hvd.size()
                elif op == "adasum-grad":
                    grads = [reference.adasum(grads)] * hvd.size()
                velocities = [
                    momentum * v + g for v, g in zip(velocities, grads, strict=True)
                ]
                changes = [-0.5 * v for v in velocities]
                delta = op == "adasum-delta"
                weights = weights + (reference.adasum(changes) if delta else changes[0])
            check(result, weights)
    with pytest.raises(NotImplementedError, match="local_steps: required 1"):
        hvd.DistributedOptimizer(make(), op="adasum-delta", local_steps=2)


def case_tf1_optimizer_accumulates() -> None:
    """Two windows of two passes, then half of one, which changes nothing."""
    v1 = tf.compat.v1.train
    ranks = range(hvd.size())

    def gradients(rank: int, step: int) -> np.ndarray:
        return arrays(5)[rank] * (step + 1)

    for op, average, graph in (
        ("average", False, True),
        ("average", True, False),
        ("adasum-grad", False, True),
        ("adasum-delta", False, True),
        ("adasum-delta", False, False),
    ):
        optimizer = hvd.DistributedOptimizer(
            v1.MomentumOptimizer(0.5, 0.9),
            op=op,
            backward_passes_per_step=2,
            average_aggregated_gradients=average,
        )
        if graph:
            with tf.Graph().as_default():
                variable = tf.compat.v1.get_variable(
                    "v", initializer=np.ones(5, np.float32), use_resource=True
                )
                factor = tf.compat.v1.placeholder(tf.float32, ())
                loss = tf.reduce_sum(variable * mine(5)) * factor
                steps = tf.compat.v1.train.get_or_create_global_step()
                train = optimizer.minimize(loss, global_step=steps)
                with tf.compat.v1.Session() as session:
                    session.run(tf.compat.v1.global_variables_initializer())
                    found = []
                    for step in range(5):
                        session.run(train, {factor: step + 1.0})
                        found.append(session.run(variable))
                    assert session.run(steps) == 2
        else:
            variable, found = tf.Variable(np.ones(5, np.float32)), []
            for step in range(5):
                optimizer.minimize(
                    lambda step=step, variable=variable: (
                        tf.reduce_sum(variable * mine(5)) * (step + 1.0)
                    ),
                    var_list=[variable],
                )
                found.append(variable.numpy())
        weights, velocities = np.ones(5), [np.zeros(5) for _ in ranks]
        for step in range(5):
            if step % 2 and step < 4:
                sums = [gradients(r, step - 1) + gradients(r, step) for r in ranks]
                if op == "average":
                    sums = [np.mean(sums, 0) / (1 + average)] * hvd.size()
                elif op == "adasum-grad":
                    sums = [reference.adasum(sums)] * hvd.size()
                velocities = [
                    0.9 * v + g for v, g in zip(velocities, sums, strict=True)
                ]
                changes = [-0.5 * v for v in velocities]
                delta = op == "adasum-delta"
                weights = weights + (reference.adasum(changes) if delta else changes[0])
            check(found[step], weights, 1e-5)
    with tf.Graph().as_default():
        variable = tf.compat.v1.get_variable("v", shape=(3,), use_resource=False)
        for op in ("average", "adasum-delta"):
            optimizer = hvd.DistributedOptimizer(
                v1.GradientDescentOptimizer(0.5), op=op, backward_passes_per_step=2
            )
            with pytest.raises(NotImplementedError, match="required resource variabl"):
                optimizer.minimize(tf.reduce_sum(variable))
    optimizer = hvd.DistributedOptimizer(
        v1.GradientDescentOptimizer(0.5), backward_passes_per_step=2
    )
    with pytest.raises(RuntimeError, match=r"required gradients of compute_gradients"):
        optimizer.apply_gradients([(tf.ones(3), tf.Variable(tf.ones(3)))])
