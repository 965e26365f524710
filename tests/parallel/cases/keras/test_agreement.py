"""Agreement of the ranks in TensorFlow: passes, lists, options, windows, models, sets."""

from __future__ import annotations

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import adasum_hvd.tensorflow.keras as hvd
from adasum_hvd import reference
from adasum_hvd.base.options import Options
from adasum_hvd.tensorflow.reduction import Reduction
from tests.parallel.cases.keras.test_optimizer import (
    OPTIMIZERS,
    STEPS,
    VARIANTS,
    check_same_everywhere,
    compiled,
    digest_of,
    fit,
    model_of,
    momentum,
)
from tests.parallel.cases.keras.test_optimizer import align as align
from tests.parallel.cases.keras.test_optimizer import start as start
from tests.parallel.harness import numpy_training as numerics


def values_of(rank: int, seed: int) -> np.ndarray:
    return np.random.default_rng([seed, rank]).standard_normal(50).astype(np.float32)


def reduced_values(seed: int, op: str) -> np.ndarray:
    each = [values_of(rank, seed) for rank in range(hvd.size())]
    return np.mean(each, 0) if op == "average" else reference.adasum(each)


def case_keras_two_reductions_in_one_function() -> None:
    """Same shapes, no order between them: each must meet its own kind on the other ranks."""
    first, second = (tf.constant(values_of(hvd.rank(), seed)) for seed in (1, 2))
    for op in ("average", *VARIANTS):
        weight = tf.Variable(tf.zeros(50))
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), op=op)
        optimizer.build([weight])

        @tf.function
        def step(weight=weight, optimizer=optimizer) -> None:
            with tf.GradientTape(persistent=True) as tape:
                losses = [tf.reduce_sum(weight * x) for x in (first, second)]
            for loss in losses:
                optimizer.apply_gradients([(tape.gradient(loss, weight), weight)])

        for _ in range(3):
            step()
        expected = -3 * (reduced_values(1, op) + reduced_values(2, op))
        np.testing.assert_allclose(weight.numpy(), expected, atol=2e-5)
    reducer = hvd.DistributedGradReducer([weight], mean=True)
    twice = tf.function(lambda: (reducer([second]), reducer([first])))
    for _ in range(3):
        results = twice()
        for seed, (result,) in zip((2, 1), results, strict=True):
            expected = reduced_values(seed, "average")
            np.testing.assert_allclose(result, expected, atol=1e-6)


def case_keras_passes_and_gradients_must_be_complete() -> None:
    for in_function in (False, True):
        optimizer = hvd.DistributedOptimizer(momentum(), backward_passes_per_step=2)
        variables = [tf.Variable(tf.ones(3)) for _ in range(2)]
        optimizer.build(variables)

        def passes(indices, optimizer=optimizer, variables=variables) -> None:
            for index in indices:
                grads = [tf.ones(3) if i == index else None for i in range(2)]
                optimizer.apply(grads, variables)

        run = tf.function(passes) if in_function else passes
        if not in_function:
            run((0, 0))
            run((1, 1))  # another window may cover other variables
            run((0,))
            for variable in optimizer.window_variables:  # as a state that is restored
                variable.assign(tf.zeros_like(variable))
            run((1, 1))
        else:
            run((0, 0))
            assert optimizer.window_variables  # as a commit; traced passes stay
        with pytest.raises(
            ValueError, match="gradients of the same variables in every"
        ):
            run((1, 1) if in_function else (0, 1))
    for op, scaled in itertools.product(VARIANTS, (False, True)):
        inside = (
            keras.optimizers.LossScaleOptimizer(momentum()) if scaled else momentum()
        )
        optimizer = hvd.DistributedOptimizer(inside, op=op)
        variables = [tf.Variable(tf.ones(3)) for _ in range(2)]
        optimizer.build(variables)
        with pytest.raises(ValueError, match="one gradient per variable, 2, but got 1"):
            optimizer.apply([tf.ones(3)])


def case_keras_worker_local_variables_on_one_rank() -> None:
    """Every rank gets the error: none waits for a comparison that another never enters."""
    on_first = hvd.rank() == 0

    def variables_here() -> list[tf.Variable]:
        variables = [tf.Variable(tf.ones(3))]
        if on_first:
            hvd.mark_worker_local(variables[0])
        return variables

    options = [{"op": op} for op in ("average", *VARIANTS)]
    options.append({"op": "adasum-delta", "local_steps": 2})
    for kwargs in options:
        optimizer = hvd.DistributedOptimizer(momentum(), **kwargs)
        variables = variables_here()
        with pytest.raises(
            ValueError, match="expected the same parameters in the same"
        ):
            optimizer.apply([tf.ones(3)], variables)
    optimizer = hvd.DistributedOptimizer(momentum(global_clipnorm=1.0))
    extra = variables_here() if on_first else []
    variables = [tf.Variable(tf.ones(3)), *extra]
    with pytest.raises(ValueError, match="global_clipnorm: expected variables that"):
        optimizer.apply([tf.ones(3)] * len(variables), variables)


def case_keras_options_are_compared() -> None:
    different = {
        "bucket_bytes": 1000 + hvd.rank(),
        "op": "average" if hvd.rank() else "sum",
        "local_steps": 1 + (hvd.rank() == 0),
        "clip_delta_norm": 1.0 + hvd.rank(),
    }
    for name, value in different.items():
        optimizer = hvd.DistributedOptimizer(
            momentum(), **{"op": "adasum-delta", name: value}
        )
        with pytest.raises(ValueError, match=f"the same arguments of .* got {name}="):
            optimizer.apply([tf.ones(3)], [tf.Variable(tf.ones(3))])


def case_keras_optimizers_are_compared() -> None:
    """Classes and arguments, but not names, learning rates and values without an equality."""
    first = hvd.rank() == 0
    pairs = {
        "class=keras.*SGD": (keras.optimizers.Adam(), keras.optimizers.SGD()),
        "momentum=0.8": (momentum(), keras.optimizers.SGD(0.1, momentum=0.8)),
        "weight_decay=0.1": (momentum(), momentum(weight_decay=0.1)),
        "clipnorm=1.0": (momentum(), momentum(clipnorm=1.0)),
    }
    for (found, (here, there)), op in itertools.product(pairs.items(), VARIANTS):
        optimizer = hvd.DistributedOptimizer(here if first else there, op=op)
        with pytest.raises(ValueError, match=f"the same optimizer on .* got {found}"):
            optimizer.apply([tf.ones(3)], [tf.Variable(tf.ones(3))])

    class Odd(keras.optimizers.SGD):
        def get_config(self) -> dict:
            return {**super().get_config(), "limit": float("nan"), "hook": object()}

    rate = 0.1 * (hvd.rank() + 1)
    for here in (Odd(rate, name=f"sgd_{hvd.rank()}"), keras.optimizers.Adam(rate)):
        step = hvd.DistributedOptimizer(here, op="adasum-delta").apply
        step([tf.ones(3)], [tf.Variable(tf.ones(3))])


def case_keras_broadcast_holds_windows_and_leaves_local_slots() -> None:
    model = compiled(
        hvd.DistributedOptimizer(
            momentum(), op="adasum-delta", backward_passes_per_step=2, local_steps=2
        )
    )
    optimizer, variables = model.optimizer, model.trainable_variables
    optimizer.build(variables)
    hvd.mark_worker_local(variables[0])
    for slot in optimizer.momentums:
        slot.assign(tf.fill(slot.shape, float(hvd.rank() + 1)))
    if hvd.rank() == 0:  # alone, in the midst of a window
        optimizer.apply([tf.ones(v.shape) for v in variables], variables)
    counts = hvd.allgather_object(int(optimizer.window_variables[0]))
    assert counts == [1] + [0] * (hvd.size() - 1)
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    callback.set_model(model)
    with pytest.warns(UserWarning, match=r"they are at passes \[1, 0"):
        callback.on_train_begin()
    assert int(optimizer.window_variables[0]) == 1
    _, sums = optimizer.windows_of(optimizer._trainable_variables)
    assert all(np.all(total.numpy() == (hvd.rank() == 0)) for total in sums)
    assert len(optimizer.window_variables) == 1 + len(variables)
    ranks = [float(slot.numpy().flat[0]) for slot in optimizer.momentums]
    assert ranks == [hvd.rank() + 1.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("op", VARIANTS)
def case_keras_resume_inside_a_window_of_passes(op: str) -> None:
    """A file per rank goes on exactly, broadcast or not; another rank's file warns."""
    gradient = tf.constant(values_of(hvd.rank(), 1)[:3])
    weights, store = [], {}
    for resumed in (False, True):
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        optimizer = hvd.DistributedOptimizer(
            momentum(), op=op, backward_passes_per_step=2
        )
        hvd.compile(model, optimizer, "mse")
        model.set_weights([np.ones((3, 1)), np.ones(1)])
        optimizer.build(model.trainable_variables)
        grads = [tf.reshape(gradient, (3, 1)), gradient[:1]]
        if resumed:
            optimizer.load_own_variables(store)
            callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
            callback.set_model(model)
            callback.on_train_begin()
        else:
            optimizer.apply(grads)
            optimizer.save_own_variables(store)
        optimizer.apply([2 * grad for grad in grads])
        weights.append([weight.tobytes() for weight in model.get_weights()])
    assert weights[0] == weights[1]
    optimizer.load_own_variables(store)
    with pytest.raises(ValueError, match="of the same variables in every pass"):
        optimizer.apply([grads[0], None])  # the other variable's sum would be lost
    of_last_rank = hvd.allgather_object(store)[-1]
    if hvd.rank() != hvd.size() - 1:
        with pytest.warns(UserWarning, match=f"but rank {hvd.size() - 1} saved it"):
            optimizer.load_own_variables(of_last_rank)


def case_keras_broadcast_leaves_local_slots_of_adam_offload() -> None:
    """Its moments are a list of tuples."""
    optimizer = hvd.DistributedOptimizer(hvd.AdamOffload(0.1), op="adasum-delta")
    model = compiled(optimizer)
    hvd.mark_worker_local(model.trainable_variables[0])
    optimizer.build(model.trainable_variables)
    for pair in optimizer._moments:
        for moment in pair:
            moment.assign(tf.fill(moment.shape, float(hvd.rank() + 1)))
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    callback.set_model(model)
    callback.on_train_begin()
    found = [[float(m.numpy().flat[0]) for m in pair] for pair in optimizer._moments]
    assert found == [[hvd.rank() + 1.0] * 2, *[[1.0, 1.0]] * 3]


def case_keras_model_built_on_one_rank() -> None:
    for builder in (0, hvd.size() - 1):
        model = keras.Sequential(
            [keras.layers.Dense(numerics.HIDDEN), keras.layers.Dense(numerics.OUTPUTS)]
        )
        if hvd.rank() == builder:
            model.build((None, numerics.INPUTS))
        optimizer = hvd.DistributedOptimizer(momentum(), op="adasum-delta")
        hvd.compile(model, optimizer, loss="mse")
        fit(model, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
        check_same_everywhere(model)


def case_keras_check_sees_accumulated_steps() -> None:
    model = model_of()
    model.compile(momentum(gradient_accumulation_steps=STEPS), "mse")
    with pytest.raises(RuntimeError, match="expected first steps that leave"):
        fit(model, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])


def case_keras_process_set() -> None:
    """The last ranks train together, the first one alone."""
    members = list(range(1, hvd.size()))
    together = hvd.add_process_set(members)
    mine = members if hvd.rank() in members else [0]
    make, simulated = OPTIMIZERS["momentum"]
    for op in ("average", "adasum-grad", "adasum-delta"):
        model = compiled(hvd.DistributedOptimizer(make(), op=op, process_set=together))
        callbacks = [
            hvd.callbacks.BroadcastGlobalVariablesCallback(1, process_set=together),
            hvd.callbacks.MetricAverageCallback(process_set=together),
        ]
        fit(model, callbacks=callbacks)
        expected = numerics.train(simulated, op, len(mine), STEPS, first=mine[0])
        for actual, value in zip(model.get_weights(), expected, strict=True):
            np.testing.assert_allclose(actual, value, atol=2e-6)
        digests = hvd.allgather_object(digest_of(model))
        assert len(set(digests[1:])) == 1
        assert digests[0] != digests[1]
    hvd.remove_process_set(together)
    unknown = hvd.ProcessSet(members)
    needs = r"init\(process_sets=\[...\]\), or set HOROVOD_DYNAMIC_PROCESS_SETS=1"
    for reduces in (hvd.DistributedOptimizer, hvd.DistributedGradientTape):
        plain = momentum() if reduces is hvd.DistributedOptimizer else tf.GradientTape()
        with pytest.raises(ValueError, match=needs):
            reduces(plain, process_set=unknown)


def case_keras_variables_that_some_ranks_share() -> None:
    """docs/parallel.md: what `mark_replicated_over` does in torch takes one reduction."""
    holders = hvd.add_process_set([0, hvd.size() - 1])
    expert, shared = (tf.Variable(tf.zeros(50)) for _ in range(2))
    hvd.mark_worker_local(expert)
    optimizer = hvd.DistributedOptimizer(momentum(), op="adasum-grad")
    optimizer.build([expert, shared])
    gradient = tf.constant(values_of(hvd.rank(), 1))
    mine = gradient
    if holders.included():
        mine = hvd.allreduce(gradient, op=hvd.Adasum, process_set=holders)
    optimizer.apply([mine, gradient], [expert, shared])
    of_holders = [values_of(rank, 1) for rank in (0, hvd.size() - 1)]
    expected = reference.adasum(of_holders) if holders.included() else gradient
    np.testing.assert_allclose(expert, -0.1 * expected, atol=1e-6)
    expected = -0.1 * reduced_values(1, "adasum-grad")
    np.testing.assert_allclose(shared, expected, atol=1e-6)
    align()
    hvd.remove_process_set(holders)


def case_keras_options_that_differ_in_a_process_set() -> None:
    """The message counts ranks as the job does, not as the set."""
    members = list(range(1, hvd.size()))
    together = hvd.add_process_set(members)
    last = hvd.size() - 1
    if hvd.rank() in members:
        local_steps = 2 + (hvd.rank() == last)
        optimizer = hvd.DistributedOptimizer(
            momentum(), op="adasum-delta", local_steps=local_steps, process_set=together
        )
        got = f"got local_steps=3 on rank {last} and 2 on rank 1 .seen by rank {hvd.rank()}"
        with pytest.raises(ValueError, match=got):
            optimizer.apply([tf.ones(3)], [tf.Variable(tf.ones(3))])
    align()
    hvd.remove_process_set(together)


def case_keras_other_variables_of_the_same_shape() -> None:
    """Every rank uses a head of its own: they are never mixed."""
    if hvd.size() == 1:
        pytest.skip("needs 2 ranks")
    size = hvd.size()
    for op in ("average", "adasum-grad", "adasum-delta"):
        heads = [tf.Variable(tf.ones(2)) for _ in range(size)]
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), op=op)
        optimizer.build(heads)
        optimizer.apply_gradients([(tf.ones(2), heads[hvd.rank()])])
        expected = 1 - (1 / size if op == "average" else 1)
        for head in heads:
            np.testing.assert_allclose(head, [expected, expected], atol=1e-6)
    with hvd.DistributedGradientTape(tf.GradientTape(), op="adasum") as tape:
        loss = tf.reduce_sum(heads[hvd.rank()])
    for gradient in tape.gradient(loss, heads):
        np.testing.assert_allclose(gradient, [1, 1])
    # Sources that are other ones at the same place are an error, equal shapes or not.
    alone = [heads[hvd.rank()]] if hvd.rank() else [tf.Variable(tf.ones(3))]
    with hvd.DistributedGradientTape(tf.GradientTape(), op="adasum") as tape:
        loss = tf.reduce_sum(alone[0])
    with pytest.raises(ValueError, match=r"got \(.*\(3,\).* on the first rank and"):
        tape.gradient(loss, alone)


def case_keras_a_joined_rank_has_no_say_in_overflows() -> None:
    options = Options(hvd.Average, hvd.global_process_set, hvd.Compression.none)
    reduction = Reduction("join", options)
    assert reduction.all_of(tf.constant(True))
    assert not reduction.all_of(tf.constant(hvd.rank() > 0))
    if hvd.rank() == 0:
        assert reduction.all_of(tf.constant(True))
        assert not reduction.all_of(tf.constant(False))
    hvd.join()
