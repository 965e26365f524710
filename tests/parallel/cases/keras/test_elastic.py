"""States, callbacks and refusals of elastic jobs, where the ranks stay the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import keras
import numpy as np
import pytest
import tensorflow as tf
from horovod.common.exceptions import HostsUpdatedInterrupt
from horovod.runner.elastic.worker import HostUpdateResult

import adasum_hvd.tensorflow.keras as hvd
from adasum_hvd.tensorflow import elastic as elastics
from adasum_hvd.tensorflow.optimizer.slots import inner
from adasum_hvd.tensorflow.reduction import Reduction
from tests.parallel.cases.keras.test_optimizer import (
    VARIANTS,
    check_same_everywhere,
    compiled,
    digest_of,
    fit,
    model_of,
    momentum,
)
from tests.parallel.harness import numpy_training as numerics


@contextmanager
def elastic() -> Iterator[None]:
    """Let the ranks of this job take it for an elastic one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOROVOD_ELASTIC", "1")
        yield


def velocities(model: keras.Model) -> np.ndarray:
    slots = inner(model.optimizer).momentums
    return np.concatenate([np.ravel(slot) for slot in slots])


def everywhere(array: np.ndarray) -> list[np.ndarray]:
    return hvd.allgather_object(array)


@pytest.mark.parametrize("op", VARIANTS)
def case_elastic_survivors_and_newcomers(op: str) -> None:
    survivor = hvd.size() - 1
    model = compiled(hvd.DistributedOptimizer(momentum(), op=op))
    fit(model)
    model.set_weights([w + hvd.rank() for w in model.get_weights()])
    for slot in inner(model.optimizer).momentums:
        slot.assign(slot + hvd.rank())
    state = hvd.elastic.KerasState(model, epoch=hvd.rank())
    mine = velocities(model)
    state._commits = int(hvd.rank() == survivor)
    of_survivor = everywhere(mine)[survivor]
    state.sync()
    check_same_everywhere(model)
    assert state.epoch == survivor
    assert np.array_equal(velocities(model), of_survivor)
    # All have survived now: the delta variant's state is a rank's own.
    for slot in inner(model.optimizer).momentums:
        slot.assign(slot + hvd.rank())
    mine = velocities(model)
    first = everywhere(mine)[0]
    state.sync()
    expected = mine if op == "adasum-delta" else first
    assert np.array_equal(velocities(model), expected), op
    fit(model)
    check_same_everywhere(model)


def case_elastic_nadam_inside_a_loss_scale() -> None:
    """Keras lists no product of momenta there, and ranks that join would have another one."""
    nadam = keras.optimizers.Nadam(0.1)
    model = compiled(keras.optimizers.LossScaleOptimizer(nadam))
    state = hvd.elastic.KerasState(model)
    nadam._u_product.assign(0.5 + hvd.rank())
    state.sync()
    assert float(nadam._u_product) == 0.5
    nadam._u_product.assign(7.0)
    state.restore()
    assert float(nadam._u_product) == 0.5


def case_elastic_newest_commit() -> None:
    """A rank that dies in the moment of a commit leaves some with it, and some without."""
    model = compiled(hvd.DistributedOptimizer(momentum(), op="adasum-grad"))
    fit(model)
    state = hvd.elastic.KerasState(model, step=0)
    for ahead in (hvd.size() - 1, 0):
        state.sync()
        fit(model)
        if hvd.rank() == ahead:
            model.set_weights([w + 1 for w in model.get_weights()])
            state.step = 10 + ahead
            state.save()
        newest = everywhere(digest_of(model))[ahead]
        state.restore()
        state.sync()
        assert state.step == 10 + ahead and digest_of(model) == newest
        check_same_everywhere(model)


def case_elastic_steps_of_a_rank_that_lacks_a_commit() -> None:
    """All count as the root does: by `iterations` they reduce, and take their rate."""
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2)
    model = compiled(hvd.DistributedOptimizer(optimizer, op="adasum-delta"))
    fit(model)
    state = hvd.elastic.KerasState(model, step=0)
    state.sync()
    model.train_on_batch(*numerics.batch_of(hvd.rank(), 0, 3))
    mine = None
    if hvd.rank() == 0:  # the others have lost this commit
        state.save()
        mine = velocities(model)
    state.restore()
    mine = velocities(model) if mine is None else mine
    state.sync()
    counts = hvd.allgather_object(int(inner(model.optimizer)._iterations.numpy()))
    assert len(set(counts)) == 1, counts
    assert np.array_equal(velocities(model), mine)
    for step in range(3):
        model.train_on_batch(*numerics.batch_of(hvd.rank(), step, 3))
    check_same_everywhere(model)


@pytest.mark.parametrize("op", VARIANTS)
def case_elastic_mixed_float16(op: str) -> None:
    """The loss scale is committed, restored and given to newcomers with the weights."""
    survivor = hvd.size() - 1
    scaled = keras.optimizers.LossScaleOptimizer(momentum(), initial_scale=2.0**10)
    optimizer = hvd.DistributedOptimizer(scaled, op=op)
    model = model_of(dtype="mixed_float16")
    hvd.compile(model, optimizer, loss="mse")
    fit(model)
    state = hvd.elastic.KerasState(model)
    committed = digest_of(model)
    fit(model, 2)
    images, targets = numerics.batch_of(hvd.rank(), 0, 4)
    model.train_on_batch(images, np.full_like(targets, np.inf))
    assert float(optimizer.dynamic_scale) == 2.0**9
    state.restore()
    assert digest_of(model) == committed
    assert float(optimizer.dynamic_scale) == 2.0**10
    # As where one rank goes on and others have just come.
    optimizer.dynamic_scale.assign(2.0 ** (5 + hvd.rank()))
    model.set_weights([weight + hvd.rank() for weight in model.get_weights()])
    state._commits = int(hvd.rank() == survivor)
    state.sync()
    check_same_everywhere(model)
    assert float(optimizer.dynamic_scale) == 2.0 ** (5 + survivor)
    before = digest_of(model)
    fit(model)
    check_same_everywhere(model)
    assert digest_of(model) != before


@pytest.mark.parametrize("of_keras", [False, True])
def case_elastic_passes_of_a_rank_that_lacks_a_commit(of_keras: bool) -> None:
    """The root has taken the step of these passes: they are not in the next one."""
    options = {} if of_keras else {"backward_passes_per_step": 2}
    plain = momentum()
    plain.gradient_accumulation_steps = 2 if of_keras else None
    model = compiled(hvd.DistributedOptimizer(plain, op="adasum-grad", **options))
    state = hvd.elastic.KerasState(model)
    state.sync()
    digests = []
    for lost in (False, True):
        state.restore()
        for step in range(4):
            model.train_on_batch(*numerics.batch_of(hvd.rank(), step, 4))
            if step == 1 and lost:
                if hvd.rank():
                    state.restore()
                else:
                    state.save()
                state.sync()
            if step == 0 and lost:
                state.save()
        digests.append(digest_of(model))
    assert digests[0] == digests[1]
    check_same_everywhere(model)


@pytest.mark.parametrize(
    "options",
    ({"local_steps": 4}, {"backward_passes_per_step": 4}),
    ids=["local_steps", "passes"],
)
def case_elastic_commits_inside_windows(options: dict) -> None:
    optimizer = hvd.DistributedOptimizer(momentum(), op="adasum-delta", **options)
    model = compiled(optimizer)
    state = hvd.elastic.KerasState(model)
    state.sync()
    batches = [numerics.batch_of(hvd.rank(), step, 4) for step in range(4)]
    for batch in batches[:2]:
        model.train_on_batch(*batch)
    state.save()
    for batch in batches[2:]:
        model.train_on_batch(*batch)
    check_same_everywhere(model)
    expected = digest_of(model)
    model.train_on_batch(*batches[0])
    state.restore()  # to the middle of a window that has ended since
    for batch in batches[2:]:
        model.train_on_batch(*batch)
    assert digest_of(model) == expected
    state.restore()
    state.sync()  # a newcomer would get the window
    for batch in batches[2:]:
        model.train_on_batch(*batch)
    check_same_everywhere(model)


@pytest.mark.parametrize("op", ["adasum-grad", "average"])
def case_elastic_sums_of_keras(op: str) -> None:
    """Sums of `gradient_accumulation_steps` are each rank's own until they are reduced."""
    added = keras.optimizers.SGD(0.1, gradient_accumulation_steps=4)
    model = compiled(hvd.DistributedOptimizer(added, op=op))
    state = hvd.elastic.KerasState(model)
    batches = [numerics.batch_of(hvd.rank(), step, 4) for step in range(4)]
    state.sync()
    for batch in batches:
        model.train_on_batch(*batch)
    expected = digest_of(model)
    state.restore()
    for batch in batches[:2]:
        model.train_on_batch(*batch)
    state.save()
    state.sync()  # all have survived
    for batch in batches[2:]:
        model.train_on_batch(*batch)
    assert digest_of(model) == expected, op
    check_same_everywhere(model)


def case_elastic_variables_marked_local() -> None:
    common, own = tf.Variable([1.0 + hvd.rank()]), tf.Variable([5.0 + hvd.rank()])
    hvd.mark_worker_local(own)
    state = hvd.elastic.TensorFlowState([common, own], step=hvd.rank())
    state.sync()
    assert (float(common[0]), float(own[0]), state.step) == (1.0, 5.0, 0)
    own.assign([7.0 + hvd.rank()])
    state.step = 3
    state.sync()
    assert float(own[0]) == 7.0 + hvd.rank()
    common.assign([9.0])
    state.step = 4
    state.restore()
    assert (float(common[0]), state.step) == (1.0, 3)


def case_elastic_state_of_a_session() -> None:
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        start = [1.0 + hvd.rank()]
        variable = tf.compat.v1.get_variable("v", initializer=start, use_resource=True)
        session.run(variable.initializer)
        state = hvd.elastic.TensorFlowState(session=session)
        state.sync()
        assert session.run(variable).tolist() == [1.0]
        variable.load([2.0], session)
        state.commit()
        variable.load([3.0], session)
        state.restore()
        assert session.run(variable).tolist() == [2.0]


def case_elastic_states_that_differ() -> None:
    dense = [keras.Input((3,)), keras.layers.Dense(2 + hvd.rank())]
    model = keras.Sequential(dense)
    hvd.compile(model, hvd.DistributedOptimizer(momentum(), op="adasum-grad"), "mse")
    state = hvd.elastic.KerasState(model)
    with pytest.raises(ValueError, match="expected the same parameters"):
        state.sync()
    rate = 2 if hvd.rank() else 3
    optimizer = hvd.DistributedOptimizer(
        momentum(), op="adasum-delta", local_steps=rate
    )
    state = hvd.elastic.KerasState(compiled(optimizer))
    with pytest.raises(ValueError, match="local_steps"):
        state.sync()
    unbuilt = keras.Sequential([keras.layers.Dense(2)])
    with pytest.raises(ValueError, match="expected a model that is built"):
        hvd.elastic.KerasState(unbuilt, momentum())
    with pytest.raises(ValueError, match="expected an optimizer, but got none"):
        hvd.elastic.KerasState(model_of())
    with pytest.raises(ValueError, match="expected variables, but got none"):
        hvd.elastic.TensorFlowState()


def case_elastic_news_of_hosts() -> None:
    state = hvd.elastic.TensorFlowState([tf.Variable(1.0)])
    state.check_host_updates()
    if hvd.rank() == hvd.size() - 1:  # not the one that Horovod asks
        state.on_hosts_updated(0, HostUpdateResult.added)
    with pytest.raises(HostsUpdatedInterrupt):
        state.commit()
    state.commit()
    state.on_hosts_updated(0, HostUpdateResult.removed)
    state.on_reset()  # what has come meanwhile is kept
    with pytest.raises(HostsUpdatedInterrupt):
        state.commit()


def case_elastic_lists_have_names_of_their_own() -> None:
    """Newcomers have compared fewer lists, and traced functions are used again."""
    with elastic():
        for op in VARIANTS:
            optimizer = hvd.DistributedOptimizer(momentum(), op=op)
            if hvd.rank() == 0:
                others = [tf.Variable([1.0]), tf.Variable([2.0])]
                Reduction("Other", optimizer._adasum.options).agree(others, others)
            model = compiled(optimizer)
            fit(model)
            check_same_everywhere(model)


def case_elastic_gradients_that_differ() -> None:
    """Nobody has compared them before the step; it must fail on every rank, and not hang."""
    with elastic():
        table = keras.Variable(np.ones((4, 2), np.float32))
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), op=hvd.Average)
        rows = tf.IndexedSlices(
            tf.ones((1, 2)), tf.constant([1], tf.int64), tf.constant([4, 2], tf.int64)
        )
        mine = rows if hvd.rank() == 0 else tf.ones((4, 2))
        for _ in range(2):
            with pytest.raises(ValueError, match="gradients of the same list"):
                optimizer.apply([mine], [table])


def case_elastic_refusals() -> None:
    model = model_of()
    with elastic():
        some = hvd.ProcessSet([0])
        with pytest.raises(NotImplementedError, match="process_set: expected all"):
            hvd.DistributedOptimizer(momentum(), process_set=some)
        with pytest.raises(NotImplementedError, match="process_set: expected all"):
            hvd.DistributedGradientTape(tf.GradientTape(), process_set=some)
        for call in (
            hvd.callbacks.BroadcastGlobalVariablesCallback,
            lambda: hvd.DistributedGradReducer(model.weights),
            lambda: hvd.AdaSumByGradWrapCell(momentum(), model.weights, relaxed=True),
        ):
            with pytest.raises(NotImplementedError, match="got an elastic job"):
                call()
        optimizer = hvd.DistributedOptimizer(
            momentum(), op="adasum-delta", local_steps=2
        )
        grads = [tf.ones_like(weight) for weight in model.weights]
        with pytest.raises(
            RuntimeError, match="expected an optimizer in a TensorFlowKeras"
        ):
            optimizer.apply(grads, model.trainable_variables)


class Counting(hvd.elastic.TensorFlowState):
    """Notes what was committed."""

    def commit(self) -> None:
        self.commits = [*getattr(self, "commits", ()), (self.epoch, self.batch)]


def case_elastic_callbacks_of_keras() -> None:
    state = Counting([tf.Variable(1.0)], epoch=0, batch=0)

    def train(epochs: int, steps: int = 4, at_once: int = 1) -> None:
        optimizer = hvd.DistributedOptimizer(momentum(), op="adasum-grad")
        model = compiled(optimizer, steps_per_execution=at_once)
        callbacks = hvd.elastic
        fit(
            model,
            steps,
            epochs=epochs,
            callbacks=[
                callbacks.UpdateEpochStateCallback(state),
                callbacks.UpdateBatchStateCallback(state),
                callbacks.CommitStateCallback(state, 2),
            ],
        )

    train(2)
    assert state.commits == [(0, 2), (1, 0), (1, 2), (2, 0)]
    # One batch was done before: the first epoch is one shorter, the second is not.
    state.epoch, state.batch, state.commits = 3, 1, []
    train(2)
    assert state.commits == [(3, 3), (4, 0), (4, 2), (5, 0)]
    state.epoch, state.batch, state.commits = 0, 0, []
    train(1, 8, at_once=2)
    assert state.commits == [(0, 2), (0, 4), (0, 6), (1, 0)]


def case_elastic_executions_that_do_not_divide_an_epoch() -> None:
    """5 batches in executions of 2: Keras trains 6, and none twice where a host joins."""
    inputs = tf.zeros((4, numerics.INPUTS)), tf.zeros((4, numerics.OUTPUTS))
    data = tf.data.Dataset.from_tensors(inputs).repeat()
    optimizer = hvd.DistributedOptimizer(momentum(), op="adasum-grad")
    model = compiled(optimizer, steps_per_execution=2)
    expected = [(0, 2), (0, 4), (1, 0), (1, 2), (1, 4), (2, 0)]
    for joins_at in range(len(expected)):
        optimizer.iterations.assign(0)
        state = hvd.elastic.KerasState(model, epoch=0, batch=0)
        state.sync()
        commits: list[tuple[int, int]] = []

        def commit(state=state, commits=commits, joins_at=joins_at) -> None:
            commits.append((state.epoch, state.batch))
            if len(commits) == joins_at + 1:
                raise HostsUpdatedInterrupt(skip_sync=False)

        state.commit = commit
        callbacks = [
            hvd.elastic.UpdateEpochStateCallback(state),
            hvd.elastic.UpdateBatchStateCallback(state),
            hvd.elastic.CommitStateCallback(state, 2),
        ]
        for _ in range(2):
            epochs = {"epochs": 2, "initial_epoch": state.epoch, "verbose": 0}
            try:
                model.fit(data, steps_per_epoch=5, callbacks=callbacks, **epochs)
            except HostsUpdatedInterrupt:
                state.save()
                state.sync()
        assert commits == expected
        assert int(optimizer.iterations) == 12


class Schedule:
    """Halves an optimizer's rate; keeps its count as torch's schedules do."""

    def __init__(self, optimizer: keras.optimizers.Optimizer):
        self.optimizer, self.count = optimizer, 0

    def step(self) -> None:
        self.count += 1
        self.optimizer.learning_rate.assign(0.5**self.count)

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def case_elastic_attributes() -> None:
    """An object with a state keeps its optimizer; others are restored inside; no copies."""
    optimizer = hvd.DistributedOptimizer(momentum(), op="adasum-grad")
    model = compiled(optimizer)
    fit(model, 1)
    schedule = Schedule(optimizer)
    for made, *trained in (
        (hvd.elastic.KerasState, model),
        (hvd.elastic.TensorFlowState, optimizer.variables),
    ):
        kept = {"log": [1], "array": np.zeros(2), "deep": {"set": {1}}}
        state = made(*trained, schedule=schedule, **kept)
        state.sync()
        assert state.schedule is schedule and schedule.optimizer is optimizer
        schedule.step()
        state.save()
        for _ in range(2):
            schedule.step()
            state.log.append(2)
            state.array += 1
            state.deep["set"].add(2)
            state.restore()
            assert (schedule.count, float(optimizer.learning_rate)) == (1, 0.5)
            assert state.log == [1] and state.deep == {"set": {1}}
            assert state.array.tolist() == [0, 0]
        schedule.count = 4 + hvd.rank()
        state._commits = int(hvd.rank() == 0)
        state.sync()
        assert schedule.count == 4 and state.schedule is schedule
        schedule.count = 0
        optimizer.learning_rate.assign(1.0)
    for copied in (
        [model],
        [optimizer],
        {"layer": model.layers[0]},
        [tf.Variable(1.0)],
        lambda: optimizer,
        [Schedule(optimizer)],
        keras.metrics.Mean(),
    ):
        with pytest.raises(TypeError, match=r"expected attr.*: it refers to a"):
            hvd.elastic.KerasState(model, copied=copied)


IN_GRAPH = """Graph execution error:

Detected at node {node} defined at (most recent call last):
  File "/home/me/gloo/AdaSum: train.py", line 47, in <module>

{text}
\t [[{{{{node {node}}}}}]] [Op:__inference_one_step_on_data_631]"""
SHUT_DOWN = (
    "Horovod has been shut down. This was caused by an exception on one of the ranks"
)
FAILURES = [  # as they were seen
    "{{function_node __wrapped__HorovodAllreduce}} " + SHUT_DOWN,
    IN_GRAPH.format(node="HorovodAllgather", text=SHUT_DOWN),
    IN_GRAPH.format(
        node="DistributedOptimizer.5183566.0",
        text="AdaSum: rank 1 did not respond for 30 s (rank 0 reported it)",
    ),
    IN_GRAPH.format(
        node="mine", text="[/tmp/gloo/transport/tcp/pair.cc:589] Read error [::1]:1"
    ),
]


def case_elastic_failures() -> None:
    for text in FAILURES:
        assert elastics.is_failure(tf.errors.UnknownError(None, None, text))
        disagreement = tf.errors.InvalidArgumentError(None, None, text)
        assert not elastics.is_failure(disagreement)
    own = IN_GRAPH.format(node="conv2d", text="cuDNN launch failure")
    assert not elastics.is_failure(tf.errors.InternalError(None, None, own))
    assert not elastics.is_failure(ValueError(SHUT_DOWN))
