"""Saved models and callbacks: what goes on where another run, or another rank, has been."""

from __future__ import annotations

import tempfile
from pathlib import Path

import keras
import numpy as np
import pytest

import adasum_hvd.tensorflow.keras as hvd
from tests.parallel.cases.keras.test_optimizer import (
    STEPS,
    check_equal,
    check_same_everywhere,
    compiled,
    digest_of,
    fit,
    model_of,
    momentum,
    trained,
)
from tests.parallel.harness import numpy_training as numerics


def case_keras_saving() -> None:
    directory = Path(tempfile.mkdtemp())
    half = STEPS // 2
    for op, kwargs in (
        ("adasum-grad", {}),
        ("adasum-delta", {}),
        ("adasum-delta", {"local_steps": 4, "backward_passes_per_step": 2}),
    ):
        models = [
            compiled(hvd.DistributedOptimizer(momentum(), op=op, **kwargs))
            for _ in range(2)
        ]
        for part, model in ((0, models[0]), (0, models[1]), (1, models[0])):
            train_part(model, part, 3)
        path = str(directory / f"rank{hvd.rank()}.keras")
        models[1].save(path)  # inside a window, where there is one
        loaded = keras.models.load_model(path)
        assert type(loaded.optimizer) is type(models[0].optimizer)
        train_part(loaded, 1, 3)
        assert digest_of(loaded) == digest_of(models[0]), "resumed with other bits"
    plain = compiled(momentum())
    train_part(plain, 0, 1)
    plain.save(path)
    loaded = hvd.load_model(path, op="adasum-delta")
    hvd.broadcast_variables([*loaded.weights, *loaded.optimizer.variables])
    assert int(loaded.optimizer.iterations) == 1
    fit(loaded)
    check_same_everywhere(loaded)
    scaled = keras.optimizers.LossScaleOptimizer(momentum())
    model = compiled(hvd.DistributedOptimizer(scaled, op="adasum-delta"))
    fit(model, half)
    model.save(path)
    loaded = keras.models.load_model(path)
    assert type(loaded.optimizer) is type(model.optimizer)
    fit(loaded)
    check_same_everywhere(loaded)


def train_part(model: keras.Model, part: int, steps: int) -> None:
    for step in range(part * steps, (part + 1) * steps):
        model.train_on_batch(*numerics.batch_of(hvd.rank(), step, 2 * steps))


def case_keras_callbacks() -> None:
    directory = Path(tempfile.mkdtemp())
    model = compiled(hvd.DistributedOptimizer(momentum(), op="adasum-delta"))
    model.set_weights([w + hvd.rank() for w in model.get_weights()])
    images, targets = numerics.data_of(hvd.rank(), STEPS)
    callbacks = hvd.callbacks
    best = directory / "best.keras"
    history = model.fit(
        images,
        targets,
        batch_size=numerics.BATCH,
        shuffle=False,
        verbose=0,
        callbacks=[
            callbacks.BroadcastGlobalVariablesCallback(0),
            callbacks.MetricAverageCallback(),
            callbacks.BestModelCheckpoint(str(best), monitor="loss"),
            callbacks.ProgressCallback(),
        ],
    ).history
    check_equal(model, trained("adasum-delta"))
    assert len(set(hvd.allgather_object(history["loss"][0]))) == 1
    assert best.exists() == (hvd.rank() == 0)
    # A second fit goes on with every rank's own state, and does not broadcast again.
    again = callbacks.BroadcastGlobalVariablesCallback(0)
    fit(model, callbacks=[again])
    before = model.optimizer.momentums[0].numpy()

    class Unchanged(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            now = self.model.optimizer.momentums[0].numpy()
            assert batch or np.array_equal(before, now)

    fit(model, callbacks=[again, Unchanged()])
    check_same_everywhere(model)
    # The same model compiled again, without the wrapper: the callback looks again.
    model.compile(momentum(), "mse")
    with pytest.raises(RuntimeError, match="expected first steps that leave"):
        fit(model, callbacks=[again])
    plain = model_of()
    plain.compile(momentum(), "mse")
    with pytest.raises(RuntimeError, match="expected first steps that leave"):
        fit(plain, callbacks=[callbacks.BroadcastGlobalVariablesCallback(0)])
    import horovod.tensorflow.keras as plain_horovod

    plain.compile(plain_horovod.DistributedOptimizer(momentum()), "mse")
    with pytest.raises(RuntimeError, match="reduces nothing under Keras 3"):
        fit(plain, callbacks=[callbacks.BroadcastGlobalVariablesCallback(0)])


def case_keras_callbacks_with_horovod_arguments() -> None:
    with pytest.warns(UserWarning, match="Callback: device='/gpu:0' has no effect"):
        hvd.callbacks.MetricAverageCallback("/gpu:0")
    for several in (False, True):
        model = compiled(hvd.DistributedOptimizer(momentum(), op="adasum-delta"))
        model.set_weights([w + hvd.rank() for w in model.get_weights()])
        mine, second, *_ = model.trainable_variables
        local = [mine, second] if several else mine
        with pytest.warns(UserWarning, match="Callback: device='/cpu:0' has no effect"):
            callback = hvd.callbacks.BroadcastGlobalVariablesCallback(
                0, "/cpu:0", local
            )
        fit(model, callbacks=[callback])
        everyone = hvd.allgather_object([w.tobytes() for w in model.get_weights()])
        ranks = [len(set(weights)) for weights in zip(*everyone, strict=True)]
        count = 1 + several
        assert ranks == [hvd.size()] * count + [1] * (4 - count)
    with pytest.raises(TypeError, match="expected parameters, variables or buffers"):
        hvd.callbacks.BroadcastGlobalVariablesCallback(0, "", [model])


def case_keras_learning_rate_callbacks() -> None:
    model = compiled(hvd.DistributedOptimizer(momentum()))
    rates: list[float] = []

    class Watch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            rates.append(float(self.model.optimizer.learning_rate))

    warmup = hvd.callbacks.LearningRateWarmupCallback(0.1, warmup_epochs=2, verbose=1)
    later = hvd.callbacks.LearningRateScheduleCallback(0.1, 0.5, start_epoch=2)
    fit(model, callbacks=[warmup, later, Watch()], epochs=4)
    size = hvd.size()
    ramp = [
        0.1 * ((step + 1) / STEPS * (size - 1) / 2 + 1) / size
        for step in range(2 * STEPS)
    ]
    expected = ramp + [0.1] * STEPS + [0.05] * STEPS
    np.testing.assert_allclose(rates, expected, rtol=1e-6)
    check_same_everywhere(model)
    # An epoch's last batches may set no rate: those of an execution, and after a fractional end.
    for epochs, batches in ((1, STEPS), (0.5, 1)):
        rates.clear()
        warmup = hvd.callbacks.LearningRateWarmupCallback(0.1, epochs)
        model = compiled(
            hvd.DistributedOptimizer(momentum()), steps_per_execution=batches
        )
        fit(model, callbacks=[warmup, Watch()])
        assert max(rates) <= np.float32(0.1) == model.optimizer.learning_rate


def case_keras_learning_rate_callbacks_again() -> None:
    """Another `fit` has other epochs; a schedule cannot be set."""
    model = compiled(hvd.DistributedOptimizer(momentum()))
    ramp = hvd.callbacks.LearningRateScheduleCallback(
        0.1, lambda epoch: 1 + epoch, staircase=False
    )
    for steps in (STEPS, 2 * STEPS):
        fit(model, steps, callbacks=[ramp])
        rate = float(model.optimizer.learning_rate)
        assert rate == pytest.approx(0.1 * (1 + (steps - 1) / steps))
    ramp.set_params({"steps": None})
    with pytest.raises(ValueError, match="steps_per_epoch for data of unknown length"):
        ramp.on_train_begin()
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
    model = compiled(hvd.DistributedOptimizer(keras.optimizers.SGD(schedule)))
    for callback in (hvd.callbacks.LearningRateWarmupCallback(0.1), ramp):
        with pytest.raises(ValueError, match="a number as learning rate, but got Expo"):
            fit(model, callbacks=[callback])


def case_keras_metrics_with_a_value_per_class() -> None:
    logs = {"f1": np.array([1.0, hvd.rank()]), "loss": float(hvd.rank())}
    average = hvd.callbacks.MetricAverageCallback()
    average.on_epoch_end(0, logs)
    mean = (hvd.size() - 1) / 2
    np.testing.assert_allclose(logs["f1"], [1.0, mean])
    assert logs["loss"] == mean and isinstance(logs["loss"], float)
    with pytest.raises(
        ValueError, match="the same metrics on all ranks, but got shapes"
    ):
        average.on_epoch_end(0, {"f1": np.ones(2 + hvd.rank())})
    with pytest.raises(TypeError, match=r"expected numbers or arrays .* for name"):
        average.on_epoch_end(0, {"name": "text"})
    model = model_of()
    optimizer = hvd.DistributedOptimizer(momentum())
    hvd.compile(model, optimizer, loss="mse", metrics=[keras.metrics.F1Score()])
    images, _ = numerics.data_of(hvd.rank(), 1)
    classes = np.eye(numerics.OUTPUTS, dtype=np.float32)
    targets = classes[np.arange(len(images)) % numerics.OUTPUTS]
    history = model.fit(images, targets, verbose=0, callbacks=[average]).history
    (found,) = history["f1_score"]
    assert found.shape == (numerics.OUTPUTS,)
    assert len({value.tobytes() for value in hvd.allgather_object(found)}) == 1


def case_keras_check_replicas() -> None:
    model = compiled(hvd.DistributedOptimizer(momentum(), op="adasum-grad"))
    callback = hvd.callbacks.CheckReplicasCallback(every=2)
    fit(model, callbacks=[callback])
    assert hvd.check_replicas(model, model.optimizer)
    calls = [hvd.check_replicas(model, every=3) for _ in range(4)]
    # The seventh, with those above.
    assert calls == [False, False, True, False]
    delta = compiled(hvd.DistributedOptimizer(momentum(), op="adasum-delta"))
    fit(delta, callbacks=[callback])
    assert hvd.check_replicas(
        delta, delta.optimizer
    )  # its state differs and is left out
    added = keras.optimizers.SGD(0.1, gradient_accumulation_steps=STEPS + 1)
    accumulating = compiled(hvd.DistributedOptimizer(added, op="adasum-grad"))
    fit(accumulating, callbacks=[callback])  # what is added up is each rank's own
    hvd.check_replicas(accumulating, accumulating.optimizer)
    last = hvd.size() - 1
    bias = model.layers[0].bias
    if hvd.rank() == last:
        bias.assign_add(np.full(bias.shape, 1e-7, "float32"))
    if last:
        with pytest.raises(hvd.ReplicaMismatch, match=rf"/bias on ranks \[{last}\]"):
            hvd.check_replicas(model)
        with pytest.raises(hvd.ReplicaMismatch, match="broadcast the parameters"):
            fit(model, callbacks=[hvd.callbacks.CheckReplicasCallback(every=1)])
    with pytest.raises(TypeError, match="expected a model, but got list"):
        hvd.check_replicas([bias])
    with pytest.raises(
        ValueError, match="CheckReplicasCallback: every: expected an integer"
    ):
        hvd.callbacks.CheckReplicasCallback(every=0)
