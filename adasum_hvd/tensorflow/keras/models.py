"""Optimizers with the arguments of Horovod's Keras functions, and models compiled for them."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Sequence
from typing import Any

import horovod.keras
import horovod.tensorflow.keras
import keras
from horovod.tensorflow.compression import Compression

from adasum_hvd.base.marks import mark_worker_local
from adasum_hvd.tensorflow import optimizer as tf_optimizer
from adasum_hvd.tensorflow.horovod_arguments import (
    by_name,
    warn_without_effect,
    weights_of,
)
from adasum_hvd.tensorflow.optimizer import is_distributed, wrap


def DistributedOptimizer(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """Return `optimizer` as an instance of a subclass that reduces over the ranks.

    Args:
        optimizer: a Keras 3 optimizer.
        *args: by position in the order of `horovod.tensorflow.keras`, which is another one.
        **kwargs: as :func:`adasum_hvd.tensorflow.optimizer.DistributedOptimizer`, like the errors.
    """
    given = by_name(horovod.tensorflow.keras.DistributedOptimizer, args, kwargs)
    return tf_optimizer.DistributedOptimizer(optimizer, **given)


def PartialDistributedOptimizer(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """Return an optimizer that reduces all variables but those of `local_layers`.

    Their variables are marked as by `mark_worker_local`: each rank updates its own.

    Args:
        optimizer: a Keras 3 optimizer.
        *args: by position in the order of `horovod.keras.PartialDistributedOptimizer`.
        **kwargs: as :func:`DistributedOptimizer`, and `local_layers`: a built layer or several.

    Raises:
        ValueError: `local_layers` has another object, or a layer without variables; or as that
            function, with its other errors.
    """
    given = by_name(horovod.keras.PartialDistributedOptimizer, args, kwargs)
    local = weights_of(given.pop("local_layers", None), built=True)
    distributed = tf_optimizer.DistributedOptimizer(optimizer, **given)
    mark_worker_local(*local)
    return distributed


def compile(model: keras.Model, *args: Any, **kwargs: Any) -> None:
    """Call `model.compile(*args, **kwargs)` so that its optimizers can reduce.

    It turns XLA off, which Keras turns on if a GPU is visible. Under mixed_float16 it puts the loss
    scale inside the distributed `optimizer`; use `model.optimizer` then. A model whose own
    `compile` has other arguments must scale its losses itself: docs/tensorflow.md.

    Args:
        model: a Keras model; it may override `compile`.
        *args: as `model.compile`, like **kwargs; `optimizer` may be a distributed one.

    Raises:
        ValueError: `jit_compile=True`.
    """
    signature = inspect.signature(model.compile)
    given = signature.bind_partial(*args, **kwargs).arguments
    if kwargs.get("jit_compile", "auto") not in (False, "auto"):
        raise ValueError(
            f"compile: expected jit_compile=False, but got {kwargs['jit_compile']!r}; XLA cannot "
            "compile a reduction"
        )
    parameters = signature.parameters.values()
    if "jit_compile" in signature.parameters or any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in parameters
    ):
        kwargs["jit_compile"] = False
    optimizer: Any = given.get("optimizer")
    scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    scales = kwargs.get("auto_scale_loss", True)
    needs_scale = scales and model.dtype_policy.name == "mixed_float16"
    if is_distributed(optimizer) and needs_scale and not scaled:
        inside = keras.optimizers.LossScaleOptimizer(optimizer._plain())
        new = wrap(inside, optimizer._adasum.options)
        args = tuple(new if value is optimizer else value for value in args)
        kwargs = {k: new if v is optimizer else v for k, v in kwargs.items()}
    model.compile(*args, **kwargs)
    model.jit_compile = False  # for a `compile` without that argument
    if not scales and hasattr(model, "_compile_config"):
        # Keras does not save this argument, and would load the model with a loss scale.
        model._compile_config.config["auto_scale_loss"] = False


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: Any = None,
    compression: Any = Compression.none,
    legacy_opts: bool = False,
    **options: Any,
) -> Any:
    """Load a model that was saved with a plain or a distributed optimizer, to continue training.

    Args:
        filepath: as `keras.models.load_model`.
        custom_optimizers: optimizer classes in the file that Keras does not know.
        custom_objects: as `keras.models.load_model`.
        compression: as `DistributedOptimizer`, like `options`.
        legacy_opts: without effect, for Horovod's scripts.
        **options: arguments of `DistributedOptimizer`, for a model with a plain optimizer. A
            saved distributed optimizer keeps its own.

    Returns:
        The model; its optimizer is distributed. A model that was saved without one has none.

    Raises:
        TypeError: `custom_optimizers` is not a list of classes.
    """
    warn_without_effect("load_model", legacy_opts=legacy_opts)
    classes = list(custom_optimizers or ())
    if not all(isinstance(found, type) for found in classes):
        raise TypeError(
            f"load_model: custom_optimizers: expected classes, but got {classes!r}; pass a "
            "dictionary of objects as custom_objects="
        )
    known = {found.__name__: found for found in classes}
    model = keras.models.load_model(
        filepath, custom_objects={**known, **(custom_objects or {})}
    )
    optimizer = getattr(model, "optimizer", None)
    if options and (optimizer is None or is_distributed(optimizer)):
        warnings.warn(
            f"load_model: {', '.join(options)} has no effect: the model was saved without an "
            "optimizer, or with a distributed one, which keeps its own options",
            stacklevel=2,
        )
    if optimizer is not None:
        if not is_distributed(optimizer):
            model.optimizer = tf_optimizer.DistributedOptimizer(
                optimizer, compression=compression, **options
            )
        model.jit_compile = False
    return model
