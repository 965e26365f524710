"""Keras's `AdamOffload` against the float64 definition and the torch one."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
import torch

from adasum_hvd.adam_offload import AdamOffload as TorchAdamOffload
from adasum_hvd.offload import adam
from adasum_hvd.offload.keras import AdamOffload, RateVector
from adasum_hvd.tensorflow.optimizer.slots import copy_of_weights

STEPS = 100
SETTINGS = {
    "plain": {},
    "nesterov": {"use_nesterov": True},
    "everything": {
        "use_nesterov": True,
        "weight_decay": 0.1,
        "loss_scale": 128.0,
        "use_locking": True,
    },
    "decoupled": {
        "use_nesterov": True,
        "weight_decay": 0.1,
        "loss_scale": 128.0,
        "decoupled_weight_decay": True,
    },
    "vector": {"lr": [0.01 * 0.98**i for i in range(STEPS)]},
}


def gradient(step: int, shape: tuple[int, ...]) -> np.ndarray:
    generator = np.random.default_rng(step)
    magnitude = 10.0 ** generator.integers(-6, 1, shape)
    return (generator.standard_normal(shape) * magnitude).astype(np.float32)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=list(SETTINGS))
def test_trajectory_is_the_reference_and_torch(settings):
    settings = {"lr": 0.01, **settings}
    start = np.random.default_rng(1).standard_normal((40, 30)).astype(np.float32)
    variable = keras.Variable(start, name="kernel")
    scalar = keras.Variable(2.0, dtype="float64", name="scalar")
    of_torch = torch.nn.Parameter(torch.from_numpy(start.copy()))
    keras_settings = {k: v for k, v in settings.items() if k != "lr"}
    optimizer = AdamOffload(settings["lr"], **keras_settings)
    torch_optimizer = TorchAdamOffload([of_torch], verbose=False, **settings)
    for _ in range(2):
        optimizer.build([variable, scalar])
    w, m, v = start.astype(np.float64), np.zeros(start.shape), np.zeros(start.shape)
    reference_settings = {k: v for k, v in settings.items() if k != "use_locking"}
    s, sm, sv = np.full(1, 2.0), np.zeros(1), np.zeros(1)
    step_in_graph = tf.function(
        lambda grads: optimizer.apply(grads, [variable, scalar])
    )
    for step in range(STEPS):
        g = gradient(step, start.shape) * np.float32(settings.get("loss_scale", 1))
        step_in_graph([tf.constant(g), tf.constant(1.0)])
        of_torch.grad = torch.from_numpy(g.copy())
        torch_optimizer.step()
        rate = (
            settings["lr"]
            if isinstance(settings["lr"], float)
            else settings["lr"][step]
        )
        for state in ((w, g.astype(np.float64), m, v), (s, np.ones(1), sm, sv)):
            adam.reference_step(*state, step + 1, **{**reference_settings, "lr": rate})
    here = variable.numpy()
    assert np.abs(here - w).max() <= 1e-6 * np.abs(w).max()
    tolerance = 1e-6
    if "decoupled_weight_decay" in settings:  # torch rounds 1 - lr * weight_decay
        tolerance += STEPS * 2**-25
    assert np.abs(here - of_torch.detach().numpy()).max() <= tolerance * np.abs(w).max()
    assert "CPU" in optimizer._moments[0][0].value.device
    assert [m.dtype for m, _ in optimizer._moments] == ["float32", "float64"]
    assert optimizer._masters == [None, None]
    assert scalar.numpy() == pytest.approx(s[0], rel=1e-6)


def test_bfloat16_variable_has_a_float32_master():
    start = np.ones(64, np.float32)
    variable = keras.Variable(start, dtype="bfloat16", name="kernel")
    optimizer = AdamOffload(1e-4)
    for _ in range(40):
        optimizer.apply([tf.ones(64, tf.bfloat16)], [variable])
    # 40 steps of 1e-4 are below bfloat16's spacing at 1: one by one they would be lost.
    assert float(variable.numpy()[0]) == pytest.approx(1 - 40e-4, abs=4e-3)
    assert float(variable.numpy()[0]) < 1
    variable.assign(np.full(64, 3.0))  # by somebody else: it counts
    optimizer.apply([tf.ones(64, tf.bfloat16)], [variable])
    assert float(variable.numpy()[0]) == pytest.approx(3.0, abs=1e-2)


def test_fit_save_and_resume(tmp_path):
    keras.utils.set_random_seed(0)
    x = np.random.default_rng(0).standard_normal((64, 8)).astype(np.float32)
    y = x @ np.arange(8, dtype=np.float32)
    model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(1)])
    model.compile(optimizer=AdamOffload(0.05, weight_decay=1e-4), loss="mse")
    first, last = model.fit(x, y, epochs=20, shuffle=False, verbose=0).history["loss"][
        ::19
    ]
    assert last < 0.7 * first
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    assert isinstance(again.optimizer, AdamOffload)
    assert again.optimizer.decay == 1e-4
    for which in (model, again):
        which.fit(x, y, epochs=2, shuffle=False, verbose=0)
    for a, b in zip(model.get_weights(), again.get_weights(), strict=True):
        assert np.array_equal(a, b)


def test_beta_and_gamma_are_not_decayed():
    names = ("kernel", "gamma", "beta")
    kernel, *others = (keras.Variable(np.ones(3), name=name) for name in names)
    optimizer = AdamOffload(0.1, weight_decay=0.5)
    optimizer.apply([tf.zeros(3)] * 3, [kernel, *others])
    assert (kernel.numpy() < 1).all()
    assert all((other.numpy() == 1).all() for other in others)


def test_vector_of_rates_ends():
    variable = keras.Variable(np.ones(3), name="kernel")
    optimizer = AdamOffload([0.1])
    assert RateVector.from_config(RateVector([0.1]).get_config()).rates == [0.1]
    optimizer.apply([tf.ones(3)], [variable])
    assert float(optimizer.learning_rate) == pytest.approx(0.1)  # as TensorBoard reads
    with pytest.raises(tf.errors.InvalidArgumentError, match="a vector of 1"):
        optimizer.apply([tf.ones(3)], [variable])


def test_fit_ends_with_the_last_rate_of_a_vector():
    """Keras learns by a step without data that data of unknown length has ended."""
    layer = keras.layers.Dense(1, kernel_initializer="ones")
    model = keras.Sequential([keras.Input((1,)), layer])
    optimizer = AdamOffload([0.1] * 2, weight_decay=0.5, decoupled_weight_decay=True)
    model.compile(optimizer, "mse", jit_compile=False)
    zeros = tf.data.Dataset.from_tensors(([[0.0]], [[0.0]])).repeat(2)
    model.fit(zeros.filter(lambda *_: True), verbose=0)
    assert int(optimizer.iterations) == 2
    assert np.isclose(layer.kernel[0, 0], 0.95**2)


def test_masters_follow_their_variables():
    """The delta variant may keep them, unless they hold bits below the variable's precision."""
    variable = keras.Variable(np.ones(3), dtype="bfloat16", name="kernel")
    optimizer = AdamOffload(0.1)
    optimizer.apply([tf.ones(3)], [variable])
    (master,) = optimizer._masters
    assert np.array_equal(tf.cast(master.value, tf.bfloat16), variable.value)
    assert copy_of_weights(optimizer) == "_masters"
    variable.assign(variable + 1)
    optimizer.apply([tf.zeros(3)], [variable])
    assert np.allclose(master, variable.numpy().astype("float32"), atol=0.1)
    assert float(master[0]) > 1.5
    variable = keras.Variable(np.ones(3), dtype="float32", name="kernel")
    optimizer = AdamOffload(0.1)
    optimizer.build([variable])
    optimizer._masters = [keras.Variable(np.ones(3), dtype="float32")]  # as on a GPU
    assert copy_of_weights(optimizer) == ""


@pytest.mark.parametrize("rate", [[0.1, 0.01], lambda step: [0.1, 0.01][step]])
def test_rates_are_of_steps_and_not_of_backward_passes(rate):
    variable = keras.Variable(np.ones(3, "float32"), name="kernel")
    optimizer = AdamOffload(rate, gradient_accumulation_steps=2)
    found = []
    for _ in range(4):
        optimizer.apply([tf.ones(3)], [variable])
        found.append(1 - float(variable.numpy()[0]))
    assert found == pytest.approx([0, 0.1, 0.1, 0.11], abs=1e-5)


def test_rate_from_a_function_of_the_step():
    """Plain Python, branches included, eagerly and in a graph; counted from 0."""
    rates = [0.1, 0.1, 0.01, 0.01]

    def rate(step):
        return rates[0] if step < 2 else tf.constant(rates[3])

    results = []
    for learning_rate in (rate, rates):
        for graph in (False, True):
            variable = keras.Variable(np.ones(3), name="kernel")
            optimizer = AdamOffload(learning_rate)
            optimizer.build([variable])
            apply = optimizer.apply
            run = tf.function(apply) if graph else apply
            for _ in rates:
                run([tf.ones(3)])
            results.append(variable.numpy())
    for result in results[1:]:
        assert np.array_equal(result, results[0])
    variable = keras.Variable(np.ones(3), name="kernel")
    AdamOffload(lambda: 0.1).apply([tf.ones(3)], [variable])  # as Keras calls it
    assert (variable.numpy() < 1).all()
    for wrong in (lambda step: -1.0, lambda step: "fast"):
        with pytest.raises(tf.errors.OpError, match="AdamOffload: lr: expected"):
            AdamOffload(wrong).apply([tf.ones(3)], [variable])


@keras.saving.register_keras_serializable(package="test")
def halving(step):
    return 0.1 * 0.5**step


def test_rate_function_is_saved_with_the_optimizer():
    optimizer = AdamOffload(halving)
    again = AdamOffload.from_config(optimizer.get_config())
    assert again._learning_rate.function is halving
    assert float(again.learning_rate) == pytest.approx(0.1)


@keras.saving.register_keras_serializable(package="test")
def growing(step):
    return 0.1 * step


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("graph", [False, True])
def test_weight_decay_of_the_step(graph, decoupled):
    """Counted from 0; also a Keras schedule, and after a configuration."""
    schedule = keras.optimizers.schedules.PolynomialDecay(
        0.0, 9, 0.9
    )  # growing's values
    results = []
    for decay in (growing, schedule):
        optimizer = AdamOffload(
            0.01, weight_decay=decay, decoupled_weight_decay=decoupled
        )
        optimizer = AdamOffload.from_config(optimizer.get_config())
        kernel = keras.Variable(np.linspace(-1, 1, 8), name="kernel")
        gamma = keras.Variable(np.linspace(-1, 1, 8), name="gamma")
        optimizer.build([kernel, gamma])
        run = tf.function(optimizer.apply) if graph else optimizer.apply
        (w, m, v), (x, n, u) = (
            [np.linspace(-1, 1, 8), np.zeros(8), np.zeros(8)] for _ in range(2)
        )
        for step in range(6):
            g = gradient(step, (8,)).astype(np.float64)
            run([tf.constant(g, tf.float32)] * 2)
            more = {"weight_decay": 0.1 * step, "decoupled_weight_decay": decoupled}
            adam.reference_step(w, g, m, v, step + 1, lr=0.01, **more)
            adam.reference_step(x, g, n, u, step + 1, lr=0.01)
        assert np.abs(kernel.numpy() - w).max() < 1e-6
        assert np.abs(gamma.numpy() - x).max() < 1e-6
        results.append(kernel.numpy())
    assert np.allclose(*results, atol=1e-6)
    for wrong in (lambda step: -1.0, lambda step: "much"):
        with pytest.raises(
            tf.errors.OpError, match="AdamOffload: weight_decay: expected"
        ):
            AdamOffload(0.1, weight_decay=wrong).apply([tf.ones(8)], [kernel])


@pytest.mark.parametrize("locking", [False, True])
def test_use_locking_reaches_the_kernel(locking):
    variable = keras.Variable(np.ones(3), name="kernel")
    optimizer = AdamOffload(0.1, use_locking=locking)
    optimizer.build([variable])
    graph = (
        tf.function(lambda: optimizer.apply([tf.ones(3)], [variable]))
        .get_concrete_function()
        .graph
    )
    kernels = [op for op in graph.get_operations() if op.type == "ResourceApplyAdam"]
    assert [kernel.get_attr("use_locking") for kernel in kernels] == [locking]


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"beta1": 1}, TypeError),
        ({"eps": 0.0}, ValueError),
        ({"learning_rate": -1.0}, ValueError),
        ({"learning_rate": "fast"}, TypeError),
        ({"use_nesterov": 1}, TypeError),
        ({"loss_scale": 0}, ValueError),
        ({"weight_decay": -0.1}, ValueError),
    ],
    ids=str,
)
def test_refuses(wrong, error):
    with pytest.raises(error, match="AdamOffload: "):
        AdamOffload(**wrong)


def test_parameter_groups_are_torchs():
    variable = keras.Variable([1.0])
    for wrong in ([{"params": [variable], "lr": 0.1}], [variable]):
        with pytest.raises(
            TypeError, match=r"a learning rate first, as in Keras.*groups"
        ):
            AdamOffload(wrong)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_keras_run_is_that_of_keras_adamw(dtype):
    start = np.random.default_rng(0).standard_normal((30, 4)).astype(np.float32)
    schedule = keras.optimizers.schedules.ExponentialDecay(0.01, 1, 0.95)
    options = {"gradient_accumulation_steps": 2, "weight_decay": 0.5}
    ours, expected = keras.Variable(start, dtype=dtype), keras.Variable(start)
    expected.assign(ours)  # rounded alike
    offloaded = AdamOffload(schedule, decoupled_weight_decay=True, **options)
    adamw = keras.optimizers.AdamW(schedule, epsilon=1e-8, **options)
    # Keras's learning rate counts every pass, and its moments only every window.
    run = tf.function(lambda g: offloaded.apply([tf.cast(g, dtype)], [ours]))
    for step in range(20):
        gradient = tf.cast(tf.random.stateless_normal(start.shape, (step, 0)), dtype)
        run(gradient)
        adamw.apply([tf.cast(gradient, "float32")], [expected])
    actual = ours if dtype == "float32" else offloaded._masters[0]
    error = np.abs(actual.numpy() - expected.numpy()).max()
    assert error < (2e-6 if dtype == "float32" else 2e-3)
    again = AdamOffload.from_config(offloaded.get_config())
    assert again.decoupled_weight_decay


@pytest.mark.parametrize("optimizer", [TorchAdamOffload, AdamOffload])
@pytest.mark.parametrize(
    ("argument", "match"),
    [
        ({"amsgrad": True}, r"use Adam\(amsgrad=True\)"),
        ({"use_amsgrad": True}, r"use Adam\(amsgrad=True\)"),
        (
            {"use_lazy": True},
            "expected False, but got True; use torch.optim.SparseAdam",
        ),
        ({"use_offload": False}, "use Adam of torch.optim or keras.optimizers"),
        ({"use_lock": True}, "use_lock"),
    ],
    ids=str,
)
def test_arguments_of_other_adams(optimizer, argument, match):
    of_torch = optimizer is TorchAdamOffload
    first = [torch.nn.Parameter(torch.ones(3))] if of_torch else 0.1
    error = TypeError if "use_lock" in argument and of_torch else ValueError
    with pytest.raises(error, match=match):
        optimizer(first, **argument)
    optimizer(first, amsgrad=False, use_lazy=False, use_offload=True)
