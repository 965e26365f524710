"""Arguments that Horovod's functions have, so that its scripts run unchanged.

What has no effect here is accepted, with a warning where it was set.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras

_REASONS = {
    "name": "tensors get names that all ranks share by themselves",
    "use_locking": "the wrapped optimizer's own setting counts",
    "device": "variables and metrics are exchanged where they are",
    "device_dense": "tensors are reduced where they are",
    "device_sparse": "tensors are reduced where they are",
    "scale_local_gradients": "worker-local gradients stay as they are",
    "inplace": "every variable is assigned what was received",
    "backend": "Keras 3 on TensorFlow has no session to take from it",
    "legacy_opts": "Keras 3 has no legacy optimizers",
}


def warn_without_effect(what: str, **given: Any) -> None:
    """Warn of each argument that was set and that changes nothing.

    Args:
        what: the function, for the message.
        **given: the arguments; one that is None, False or empty was not set.
    """
    for name, value in given.items():
        if value:
            warnings.warn(
                f"{what}: {name}={value!r} has no effect: {_REASONS[name]}",
                stacklevel=3,
            )


def by_name(
    horovods: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return positional and keyword arguments, those behind the first, as keyword arguments.

    Args:
        horovods: Horovod's function, whose order the positional ones have.
        args: given by position.
        kwargs: given by name.

    Raises:
        TypeError: too many by position, or one both by position and by name.
    """
    what = horovods.__name__
    _, *order = inspect.signature(horovods).parameters
    if len(args) > len(order):
        raise TypeError(
            f"{what}: required at most {len(order)} positional arguments behind the first, "
            f"got {len(args)}"
        )
    named = dict(zip(order, args, strict=False))
    twice = sorted(named.keys() & kwargs.keys())
    if twice:
        raise TypeError(f"{what}: required {twice[0]} once, got it twice")
    return {**named, **kwargs}


def weights_of(local_layers: Any, built: bool = False) -> list[Any]:
    """Return the trainable weights of `local_layers`: a Keras layer, several, or None.

    Args:
        local_layers: layers whose weights are not reduced.
        built: they must have their weights already.

    Raises:
        ValueError: something else than layers, as Horovod's; or a layer without its weights.
    """
    one = isinstance(local_layers, keras.layers.Layer)
    layers = [local_layers] if one else list(local_layers or ())
    for layer in layers:
        if not isinstance(layer, keras.layers.Layer):
            raise ValueError(
                f"local_layers: required Keras layers, got a {type(layer).__name__}; mark "
                "single variables with mark_worker_local()"
            )
        if built and not layer.built:
            raise ValueError(
                f"local_layers: required layers that have their weights, got {layer.name} "
                "before its first call; call the model once, or build it"
            )
    return [variable for layer in layers for variable in layer.trainable_weights]
