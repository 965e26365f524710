"""Optimizers of `tf.compat.v1.train`, in a session and eagerly."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import adasum_hvd.tensorflow as hvd
from adasum_hvd import reference
from tests.parallel.cases.tensorflow.test_ops import arrays, check, mine


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
    with pytest.raises(NotImplementedError, match="local_steps: expected 1"):
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
            with pytest.raises(NotImplementedError, match="expected resource variabl"):
                optimizer.minimize(tf.reduce_sum(variable))
    optimizer = hvd.DistributedOptimizer(
        v1.GradientDescentOptimizer(0.5), backward_passes_per_step=2
    )
    with pytest.raises(RuntimeError, match=r"expected gradients of compute_gradients"):
        optimizer.apply_gradients([(tf.ones(3), tf.Variable(tf.ones(3)))])


def case_tf1_optimizers_that_undo_reductions() -> None:
    v1 = tf.compat.v1.train
    for make in (
        lambda: v1.FtrlOptimizer(0.1),
        lambda: v1.AdagradDAOptimizer(0.1, tf.Variable(0, dtype=tf.int64)),
    ):
        hvd.DistributedOptimizer(make(), op="adasum-grad")
        if hvd.size() > 1:
            with pytest.raises(ValueError, match="Optimizer with AdasumDelta"):
                hvd.DistributedOptimizer(make(), op="adasum-delta")
