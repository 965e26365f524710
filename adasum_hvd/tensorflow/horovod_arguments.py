"""Arguments that Horovod's functions have, so that its scripts run unchanged.

What has no effect here is accepted, with a warning where it was set.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

_REASONS = {
    "name": "tensors get names that all ranks share by themselves",
    "use_locking": "the wrapped optimizer's own setting counts",
    "device_dense": "tensors are reduced where they are",
    "device_sparse": "tensors are reduced where they are",
    "scale_local_gradients": "worker-local gradients stay as they are",
    "inplace": "every variable is assigned what was received",
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
    what: str, order: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return positional and keyword arguments as keyword arguments.

    Args:
        what: the function, for messages.
        order: the names of the positional ones.
        args: given by position.
        kwargs: given by name.

    Raises:
        TypeError: too many by position, or one both by position and by name.
    """
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
