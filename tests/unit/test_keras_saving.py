"""A model saved with a distributed optimizer loads without this project."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import keras
import numpy as np
import pytest

import adasum_hvd.tensorflow.keras as hvd
from tests.parallel.harness.imported import run_script

# The lines in docs/tensorflow.md for programs without this project.
WITHOUT = """
import sys
import keras

class Plain:
    @staticmethod
    def from_config(config):
        return keras.saving.deserialize_keras_object(config["optimizer"])

model = keras.models.load_model(sys.argv[1], custom_objects={"DistributedOptimizer": Plain})
optimizer = model.optimizer
assert type(optimizer) is keras.optimizers.SGD
assert "adasum_hvd" not in sys.modules
print(float(optimizer.momentums[0].numpy().sum()), int(optimizer.iterations))
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[str, keras.Model]:
    hvd.init()
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    distributed = hvd.DistributedOptimizer(optimizer, op=hvd.AdasumDelta)
    hvd.compile(model, distributed, "mse")
    model.fit(np.ones((6, 2)), np.ones((6, 1)), batch_size=2, verbose=0)
    path = str(tmp_path_factory.mktemp("saved") / "model.keras")
    model.save(path)
    yield path, model
    if hvd.is_initialized():
        hvd.shutdown()


def test_without_the_project(saved):
    path, model = saved
    total, iterations = run_script(WITHOUT, path).split()
    assert float(total) == float(model.optimizer.momentums[0].numpy().sum())
    assert int(iterations) == 3


def test_with_the_project_and_horovod(saved):
    path, model = saved
    loaded = keras.models.load_model(path)
    assert type(loaded.optimizer) is type(model.optimizer)
    assert loaded.optimizer.get_config() == model.optimizer.get_config()
    assert "AdasumDelta (delta variant)" in hvd.banner(loaded.optimizer)


@pytest.mark.parametrize("distributed", [False, True])
def test_h5_files_do_not_resume(tmp_path, saved, distributed):
    """docs/tensorflow.md documents it; if Keras changes, both must change."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    optimizer = keras.optimizers.Adam()
    optimizer = hvd.DistributedOptimizer(optimizer) if distributed else optimizer
    model.compile(optimizer, keras.losses.MeanSquaredError(), jit_compile=False)
    one = np.ones((2, 2)), np.ones((2, 1))
    model.fit(*one, verbose=0)
    model.save(tmp_path / "model.h5")
    loaded = keras.models.load_model(tmp_path / "model.h5")
    # Keras 3.12 fails on the way to its message.
    expected = "Unknown variable|numpy\\(\\) is only available when eager"
    with pytest.raises((ValueError, NotImplementedError), match=expected):
        loaded.fit(*one, verbose=0)


def test_a_model_that_was_not_compiled(tmp_path, saved):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.save(tmp_path / "model.keras")
    loaded = hvd.load_model(tmp_path / "model.keras")
    assert not loaded.compiled
    assert np.array_equal(loaded.get_weights()[0], model.get_weights()[0])
    with pytest.warns(
        UserWarning, match="op has no effect: the model was saved without"
    ):
        hvd.load_model(tmp_path / "model.keras", op=hvd.AdasumGrad)


@pytest.fixture
def mixed_float16() -> Iterator[None]:
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    yield
    keras.config.set_dtype_policy(before)


@pytest.mark.parametrize("load", [hvd.load_model, keras.models.load_model])
def test_mixed_precision_without_a_loss_scale(tmp_path, saved, mixed_float16, load):
    """Keras does not save that a model has none; loaded, it must take the same steps."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    plain = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(plain, op=hvd.AdasumGrad)
    hvd.compile(model, optimizer, "mse", auto_scale_loss=False)
    data = np.ones((6, 2)), np.ones((6, 1))
    model.fit(*data, batch_size=2, verbose=0)
    model.save(tmp_path / "model.keras")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*optimizer")
        loaded = load(tmp_path / "model.keras")
    assert type(loaded.optimizer) is type(model.optimizer)
    for each in (model, loaded):
        each.fit(*data, batch_size=2, verbose=0)
    for mine, its in zip(
        [*loaded.weights, *loaded.optimizer.variables],
        [*model.weights, *model.optimizer.variables],
        strict=True,
    ):
        assert np.array_equal(np.array(mine), np.array(its))


def test_with_the_project_but_no_horovod(saved):
    path, _ = saved
    hvd.shutdown()
    with pytest.warns(UserWarning, match="a plain optimizer was loaded"):
        loaded = keras.models.load_model(path)
    assert type(loaded.optimizer) is keras.optimizers.SGD
