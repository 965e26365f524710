"""A gradient that some ranks lack in a step: it contributes zeros, and no rank waits."""

from __future__ import annotations

import functools
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import adasum_hvd.tensorflow.keras as hvd
from adasum_hvd import reference

VARIANTS = ("average", "adasum-grad", "adasum-delta")


def reduced(op: str, values: list[np.ndarray]) -> np.ndarray:
    return np.mean(values, 0) if op == "average" else reference.adasum(values)


def gradient_of(rank: int, step: int, which: int) -> np.ndarray:
    generator = np.random.default_rng([rank, step, which])
    return generator.standard_normal(3 + which).astype(np.float32)


def has(rank: int, step: int, which: int) -> bool:
    """All; all but rank 0 the second; none the second; rank 0 none; rank 0 alone; all."""
    first = rank == 0
    table = (True, which == 0 or not first, which == 0, not first, first, True)
    return table[step]


def expected(op: str, steps: int) -> list[np.ndarray]:
    """Plain SGD at a rate of 1: change and gradient are the same but for the sign."""
    weights = [np.ones(3 + which) for which in range(2)]
    for step, which in itertools.product(range(steps), range(2)):
        found = [
            gradient_of(rank, step, which) * has(rank, step, which)
            for rank in range(hvd.size())
        ]
        weights[which] = weights[which] - reduced(op, found)
    return weights


def mine(step: int) -> list[tf.Tensor | None]:
    return [
        tf.constant(gradient_of(hvd.rank(), step, which))
        if has(hvd.rank(), step, which)
        else None
        for which in range(2)
    ]


def stepper(optimizer, variables, graph: bool, left_out: bool = False):
    """Return a function of all gradients; in a graph each set of them has a trace."""

    def apply(*gradients: tf.Tensor | None) -> None:
        pairs = zip(gradients, variables, strict=True)
        pairs = [pair for pair in pairs if pair[0] is not None or not left_out]
        optimizer.apply([pair[0] for pair in pairs], [pair[1] for pair in pairs])

    return tf.function(apply) if graph else apply


def case_gradients_that_some_ranks_lack() -> None:
    """As None, or left out of the list; in functions, which those ranks alone trace again."""
    for op, graph, left_out in itertools.product(
        VARIANTS, (False, True), (False, True)
    ):
        variables = [keras.Variable(np.ones(3 + which, np.float32)) for which in (0, 1)]
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), op=op)
        optimizer.build(variables)
        step = stepper(optimizer, variables, graph, left_out)
        for number in range(6):
            step(*mine(number))
        for variable, value in zip(variables, expected(op, 6), strict=True):
            np.testing.assert_allclose(variable.numpy(), value, atol=2e-5)
        assert int(optimizer.iterations) == 6
        everyone = hvd.allgather_object([v.numpy().tobytes() for v in variables])
        assert all(of_rank == everyone[0] for of_rank in everyone)


def case_no_step_where_no_rank_has_a_gradient() -> None:
    """Momentum and decay would move the variable, as they do where one rank has one."""
    for graph, lone in itertools.product((False, True), (False, True)):
        variables = [keras.Variable([1.0, 1.0]) for _ in range(2)]
        plain = keras.optimizers.SGD(0.1, momentum=0.9, weight_decay=0.1)
        optimizer = hvd.DistributedOptimizer(plain, op="average")
        optimizer.build(variables)
        step = stepper(optimizer, variables, graph)
        step(tf.ones(2), tf.ones(2))
        before = variables[1].numpy(), optimizer.momentums[1].numpy()
        with_gradient = lone and hvd.rank() == 0
        step(tf.ones(2), tf.ones(2) if with_gradient else None)
        after = variables[1].numpy(), optimizer.momentums[1].numpy()
        for old, new in zip(before, after, strict=True):
            assert np.array_equal(old, new) != lone
        everyone = hvd.allgather_object([array.tobytes() for array in after])
        assert all(of_rank == everyone[0] for of_rank in everyone)


@pytest.mark.parametrize("op", VARIANTS)
def case_no_gradient_on_any_rank(op: str) -> None:
    variables = [keras.Variable([1.0, 1.0])]
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), op=op)
    with pytest.raises(ValueError, match="expected the variables in the first step"):
        optimizer.apply([], [])
    with pytest.raises(ValueError, match="at least one variable on some rank"):
        optimizer.apply([None], variables)
    optimizer.apply([tf.ones(2)], variables)  # and goes on
    np.testing.assert_array_equal(variables[0], [0.0, 0.0])


def case_rows_that_some_ranks_lack() -> None:
    """An embedding that one rank does not use, or uses densely: no rows, or all rows."""
    rank, size = hvd.rank(), hvd.size()
    for op, graph in itertools.product(("average", "sum"), (False, True)):
        table = keras.Variable(np.zeros((4, 2), np.float32))
        other = keras.Variable([0.0])
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), op=op)
        optimizer.build([table, other])
        step = stepper(optimizer, [table, other], graph)
        rows = tf.IndexedSlices(tf.ones((1, 2)), tf.constant([1]), tf.constant([4, 2]))
        step(rows if rank else None, tf.ones(1))
        step(rows if rank else tf.ones((4, 2)), tf.ones(1))
        total = np.zeros((4, 2))
        total[1] = 2 * (size - 1)
        total += 1
        change = -total / (size if op == "average" else 1)
        np.testing.assert_allclose(table.numpy(), change, rtol=1e-6)


def case_sources_of_a_tape_that_some_ranks_lack() -> None:
    rank, size = hvd.rank(), hvd.size()
    sources = [tf.Variable([1.0, 1.0]) for _ in range(3)]

    def gradients(used, connect=tf.UnconnectedGradients.NONE, chosen=sources):
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(sources[k]) for k in used])
        tape = hvd.DistributedGradientTape(tape, op="sum")
        return tape.gradient(loss, chosen, unconnected_gradients=connect)

    gradients((0, 1))  # a list that the ranks know
    found = gradients((0,) if rank == 0 else (0, 1))
    assert found[2] is None
    assert [float(g[0]) for g in found[:2]] == [size, size - 1]
    traced = tf.function(gradients)
    assert traced((0, 1))[2] is None
    with pytest.raises(tf.errors.OpError, match="unconnected_gradients"):
        traced((0,) if rank == 0 else (0, 1))
    found = traced((0,) if rank == 0 else (0, 1), tf.UnconnectedGradients.ZERO)
    assert [float(g[0]) for g in found] == [size, size - 1, 0]
    # In a later list, a rank that has every gradient must wait for the checks, too.
    later = tf.function(functools.partial(gradients, chosen=sources[:2]))
    with pytest.raises(tf.errors.OpError, match="unconnected_gradients"):
        later((0,) if rank == 0 else (0, 1))


def case_other_sources_on_one_rank() -> None:
    """New on one rank and known on others, then known on all: an error everywhere."""
    sources = [tf.Variable([1.0, 1.0]) for _ in range(2)]

    def gradients(chosen):
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(source) for source in sources])
        tape = hvd.DistributedGradientTape(tape, op="adasum-grad")
        return tape.gradient(loss, chosen)

    first = hvd.rank() == 0
    gradients(sources)
    for _ in range(2):
        with pytest.raises(ValueError, match="the same list of variables on all"):
            gradients(sources[:1] if first else sources)
    gradients(sources)
    gradients(sources[:1])
    with pytest.raises(ValueError, match="the same list of variables on all ranks"):
        gradients(sources[:1] if first else sources)


@pytest.mark.parametrize("op", VARIANTS)
def case_a_function_that_one_rank_traces_again(op: str) -> None:
    """Its last batch is shorter; both functions are in one outer graph."""
    weight = tf.Variable([1.0, 1.0])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), op=op)
    optimizer.build([weight])
    reducer = hvd.DistributedGradReducer([weight], mean=True)

    @tf.function
    def inner(batch, weight=weight, optimizer=optimizer, reducer=reducer):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weight) * tf.reduce_mean(batch)
        tape = hvd.DistributedGradientTape(tape, op="sum")
        (gradient,) = reducer([tape.gradient(loss, weight)])
        optimizer.apply([gradient], [weight])

    @tf.function
    def outer(batches, inner=inner):
        for batch in batches:
            inner(batch)

    last = tf.ones(3 if hvd.rank() == 0 else 4)
    outer([tf.ones(4), tf.ones(4), last])
    np.testing.assert_allclose(weight.numpy(), 1.0 - 3 * hvd.size(), rtol=1e-6)
