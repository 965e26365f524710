"""Arguments of Horovod's functions, so that its scripts run unchanged."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras

_REASONS = {
    "name": "tensors get names that all ranks share",
    "use_locking": "the wrapped optimizer's own setting is used",
    "device": "variables and metrics are exchanged where they are",
    "device_dense": "tensors are reduced where they are",
    "device_sparse": "tensors are reduced where they are",
    "scale_local_gradients": "worker-local gradients are not changed",
    "inplace": "every variable is assigned the received value",
    "backend": "Keras 3 on TensorFlow has no session",
    "legacy_opts": "Keras 3 has no legacy optimizers",
}


def warn_without_effect(what: str, **given: Any) -> None:
    """Warn of each argument of the function `what` that is set and has no effect."""
    for name, value in given.items():
        if value:
            warnings.warn(
                f"{what}: {name}={value!r} has no effect: {_REASONS[name]}",
                stacklevel=3,
            )


def by_name(
    horovod_function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments after the first of a Horovod function as keyword arguments."""
    what = horovod_function.__name__
    _, *order = inspect.signature(horovod_function).parameters
    if len(args) > len(order):
        raise TypeError(
            f"{what}: expected at most {len(order)} positional arguments after the first, "
            f"but got {len(args)}"
        )
    named = dict(zip(order, args, strict=False))
    twice = sorted(named.keys() & kwargs.keys())
    if twice:
        raise TypeError(f"{what}: expected {twice[0]} once, but got it twice")
    return {**named, **kwargs}


def weights_of(local_layers: Any, built: bool = False) -> list[Any]:
    """Return the trainable weights of a layer, several (`built`, if they must be) or None."""
    one = isinstance(local_layers, keras.layers.Layer)
    layers = [local_layers] if one else list(local_layers or ())
    for layer in layers:
        if not isinstance(layer, keras.layers.Layer):
            raise ValueError(
                f"local_layers: expected Keras layers, but got a {type(layer).__name__}; mark "
                "single variables with mark_worker_local()"
            )
        if built and not layer.built:
            raise ValueError(
                f"local_layers: expected layers that have their weights, but got {layer.name} "
                "before its first call; call the model once, or build it"
            )
    return [variable for layer in layers for variable in layer.trainable_weights]
