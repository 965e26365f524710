"""Compiling and loading Keras models for a distributed optimizer."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import keras
from horovod.tensorflow.compression import Compression

from adasum_hvd.tensorflow.horovod_arguments import warn_without_effect
from adasum_hvd.tensorflow.keras_optimizer import is_distributed, wrap
from adasum_hvd.tensorflow.optimizer import DistributedOptimizer


def compile(model: keras.Model, optimizer: Any, *args: Any, **kwargs: Any) -> None:
    """Call `model.compile(optimizer, *args, **kwargs)` so that the optimizer can reduce.

    XLA is off (Keras turns it on by itself where a GPU is visible), and under mixed_float16 the
    loss scale goes inside the distributed optimizer, so that all ranks skip the same steps;
    `model.optimizer` is then the one to ask.

    Args:
        model: a Keras model.
        optimizer: from `DistributedOptimizer`, or any other.
        *args: as `model.compile`.
        **kwargs: as `model.compile`.

    Raises:
        ValueError: `jit_compile=True`.
    """
    if kwargs.get("jit_compile", "auto") not in (False, "auto"):
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


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: Any = None,
    compression: Any = Compression.none,
    legacy_opts: bool = False,
    **options: Any,
) -> Any:
    """Load a model that was saved with a plain or a distributed optimizer, ready to go on.

    Args:
        filepath: as `keras.models.load_model`.
        custom_optimizers: optimizer classes that the file names and Keras does not know.
        custom_objects: as `keras.models.load_model`.
        compression: as `DistributedOptimizer`, like `options`.
        legacy_opts: without effect, for Horovod's scripts.
        **options: arguments of `DistributedOptimizer`, for a model with a plain optimizer; one
            saved with a distributed optimizer has it back with its own.

    Returns:
        The model; its optimizer, if it has one, is distributed.

    Raises:
        TypeError: `custom_optimizers` is not a list of classes.
    """
    warn_without_effect("load_model", legacy_opts=legacy_opts)
    classes = list(custom_optimizers or ())
    if not all(isinstance(found, type) for found in classes):
        raise TypeError(
            f"load_model: custom_optimizers: required classes, got {classes!r}; a dictionary "
            "of objects is custom_objects="
        )
    known = {found.__name__: found for found in classes}
    model = keras.models.load_model(
        filepath, custom_objects={**known, **(custom_objects or {})}
    )
    if model.optimizer is not None:
        if is_distributed(model.optimizer) and options:
            warnings.warn(
                f"load_model: {', '.join(options)} has no effect: the optimizer was saved "
                "distributed, and has its own options back",
                stacklevel=2,
            )
        if not is_distributed(model.optimizer):
            model.optimizer = DistributedOptimizer(
                model.optimizer, compression=compression, **options
            )
        model.jit_compile = False
    return model
