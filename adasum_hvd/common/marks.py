"""Parameters that each rank keeps and updates by itself, in either framework."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

_LOCAL = "_adasum_worker_local"
_times_marked = 0


def mark_worker_local(*tensors: Any) -> None:
    """Exclude parameters from every reduction: each rank keeps and updates its own.

    For parameters that exist on one rank only (tensor parallelism) or must differ. Call it
    before `DistributedOptimizer` and before the first step. A buffer may be marked too:
    `check_replicas` then leaves it out.

    Args:
        *tensors: parameters, variables or buffers.

    Raises:
        TypeError: something else, such as a layer or a list, which no reduction looks at.
    """
    check_tensors("mark_worker_local", tensors)
    mark(tensors, _LOCAL, True)


def mark(tensors: Iterable[Any], name: str, value: Any) -> None:
    """Set an attribute that says how tensors are reduced."""
    global _times_marked
    _times_marked += 1
    for tensor in tensors:
        setattr(tensor, name, value)


def times_marked() -> int:
    """Return how often tensors were marked: no mark is new where the number is not."""
    return _times_marked


def check_tensors(what: str, tensors: Iterable[Any]) -> None:
    """Raise TypeError unless all of these have a shape and a dtype, in whatever framework.

    Args:
        what: who asks, for the message.
        tensors: what was passed.
    """
    for tensor in tensors:
        if not (hasattr(tensor, "shape") and hasattr(tensor, "dtype")):
            raise TypeError(
                f"{what}: required parameters, variables or buffers, got a "
                f"{type(tensor).__name__}; pass what is in it one by one, as in "
                f"{what}(..., *model.parameters())"
            )


def is_marked_local(tensor: Any) -> bool:
    """Return whether :func:`mark_worker_local` was called for the parameter."""
    return getattr(tensor, _LOCAL, False)
