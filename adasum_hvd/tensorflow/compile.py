"""`model.compile` with the settings that a distributed optimizer needs."""

from __future__ import annotations

from typing import Any

import keras

from adasum_hvd.tensorflow.keras_optimizer import is_distributed, wrap


def compile(model: keras.Model, optimizer: Any, *args: Any, **kwargs: Any) -> None:
    """Call `model.compile(optimizer, *args, **kwargs)` so that the optimizer can reduce.

    XLA is off (Keras turns it on by itself where a GPU is visible), and under mixed_float16 the
    loss scale goes inside the distributed optimizer, so that all ranks skip the same steps.

    Args:
        model: a Keras model.
        optimizer: from `DistributedOptimizer`, or any other.
        *args: as `model.compile`.
        **kwargs: as `model.compile`.

    Raises:
        ValueError: `jit_compile` is given and not False.
    """
    if kwargs.setdefault("jit_compile", False) not in (False, "auto"):
        raise ValueError(
            f"compile: required jit_compile=False, got {kwargs['jit_compile']!r}; XLA cannot "
            "compile a reduction"
        )
    kwargs["jit_compile"] = False
    scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    if (
        is_distributed(optimizer)
        and not scaled
        and kwargs.get("auto_scale_loss", True)
        and model.dtype_policy.name == "mixed_float16"
    ):
        inside = keras.optimizers.LossScaleOptimizer(optimizer._plain())
        optimizer = wrap(inside, optimizer._adasum.options)
    model.compile(optimizer, *args, **kwargs)
