"""The gradient reducer of TensorFlow tensors, dense and sparse."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import adasum_hvd.tensorflow as hvd
from adasum_hvd.tensorflow import mindspore as grad_reducer
from tests.parallel.cases.tensorflow.test_ops import arrays, check, mine


def case_gradient_reducer() -> None:
    variables = [tf.Variable(tf.zeros(3)), tf.Variable(tf.zeros((2, 2)))]
    reducer = hvd.DistributedGradReducer(variables, mean=True)
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
    sparse = hvd.DistributedGradReducer(variables[:1], mean=True)(slices)
    dense = np.zeros(3)
    for rank, values in enumerate(arrays(2)):
        np.add.at(dense, [0, rank], values / hvd.size())
    check(tf.convert_to_tensor(sparse), dense)
    for degree in (0, -1, 1.5):
        with pytest.raises(ValueError, match="degree: expected an integer >= 1"):
            hvd.DistributedGradReducer(variables, degree=degree)
    # MindSpore's example: 16 x 16 ones, weights 16 x 10 of ones, zero targets.
    weight = tf.Variable(tf.ones((16, 10)))
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((tf.ones((16, 16)) @ weight) ** 2)
    assert float(loss) == 256.0
    gradient = tape.gradient(loss, weight) * (hvd.rank() + 1.0)  # ranks differ
    (reduced,) = hvd.DistributedGradReducer([weight], mean=True)([gradient])
    check(reduced, np.full((16, 10), 3.2 * (hvd.size() + 1) / 2))


def case_gradient_reducer_without_a_mean_warns() -> None:
    with pytest.warns(UserWarning, match="summed by MindSpore's default"):
        reducer = hvd.DistributedGradReducer([tf.Variable(tf.zeros(3))])
    check(reducer([mine(3)])[0], np.mean(arrays(3), 0))


def case_gradient_reducer_settings() -> None:
    variables = [tf.Variable(tf.zeros(4)) for _ in range(4)]
    grads = [mine(4) * (index + 1.0) for index in range(4)]
    total = np.sum(arrays(4), 0)
    # Any divisor, whatever the number of ranks.
    for index, result in enumerate(
        hvd.DistributedGradReducer(variables, True, 8)(grads)
    ):
        check(result, total * (index + 1) / 8)
    # Summed and divided in float32: only a sum can be too large for float16.
    large = [tf.fill([2], tf.constant(60000, tf.float16))]
    (mean,) = hvd.DistributedGradReducer(variables[:1], mean=True)(large)
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
        reduce = reducer._reduce
        reducer._reduce = lambda name, some, seen=seen, reduce=reduce: (
            seen.append([round(float(g[0] / grads[0][0])) - 1 for g in some])
            or reduce(name, some)
        )
        reducer(grads)
        assert seen == groups, seen
    # Worker-local ones stay as they are.
    hvd.mark_worker_local(variables[2])
    results = hvd.DistributedGradReducer(variables, mean=True)(grads)
    check(results[2], grads[2].numpy())
    check(results[3], 4 * total / hvd.size())


def case_gradient_reducer_of_a_group() -> None:
    """The last ranks alone, dense and sparse; the first one has a group of its own."""
    members = list(range(1, hvd.size()))
    others, first = hvd.add_process_set(members), hvd.add_process_set([0])
    group = others if hvd.rank() else first
    ranks = members if hvd.rank() else [0]
    variables = [tf.Variable(tf.zeros(3)), tf.Variable(tf.zeros((4, 2)))]
    reducer = hvd.DistributedGradReducer(variables, True, group=group)
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
    expected = np.zeros((4, 2))
    expected[0] = np.mean([rank + 1 for rank in ranks])
    check(tf.convert_to_tensor(sparse), expected)
    hvd.remove_process_set(others)
    hvd.remove_process_set(first)


def case_gradient_reducer_of_empty_slices() -> None:
    """A rank whose batch has used no row contributes zeros."""
    count = 0 if hvd.rank() == 0 else 2
    rows = tf.IndexedSlices(
        tf.ones((count, 3)), tf.range(count, dtype=tf.int32), tf.constant([5, 3])
    )
    reducer = hvd.DistributedGradReducer([tf.Variable(tf.zeros((5, 3)))], mean=False)
    for call in (reducer, tf.function(lambda grads: reducer(grads))):
        (result,) = call([rows])
        expected = np.zeros((5, 3))
        expected[:2] = hvd.size() - 1
        check(tf.convert_to_tensor(result), expected)
