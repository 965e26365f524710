"""Parameters that each rank keeps and updates by itself, in either framework."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

_LOCAL = "_adasum_worker_local"
_times_marked = 0


def mark_worker_local(*tensors: Any) -> None:
    """Exclude parameters from every reduction: each rank keeps and updates its own.

    Use it for parameters that exist on one rank only (tensor parallelism) or must differ. Call it
    before `DistributedOptimizer` and before the first step, and after `fully_shard` and
    `parallelize_module`, which replace the parameters. `check_replicas` leaves out marked buffers,
    too.

    Args:
        *tensors: parameters, variables or buffers.

    Raises:
        TypeError: an argument has no shape and dtype, such as a layer or a list.
    """
    check_tensors("mark_worker_local", tensors)
    mark(tensors, _LOCAL, True)


def mark(tensors: Iterable[Any], name: str, value: Any) -> None:
    """Set an attribute that decides how tensors are reduced."""
    global _times_marked
    _times_marked += 1
    for tensor in tensors:
        setattr(tensor, name, value)


def times_marked() -> int:
    """Return how often :func:`mark` was called; callers compare it to detect new marks."""
    return _times_marked


def check_tensors(caller: str, tensors: Iterable[Any]) -> None:
    """Raise TypeError unless all arguments of `caller` have a shape and a dtype."""
    for tensor in tensors:
        if not (hasattr(tensor, "shape") and hasattr(tensor, "dtype")):
            raise TypeError(
                f"{caller}: expected parameters, variables or buffers, but got a "
                f"{type(tensor).__name__}; pass its parameters one by one, as in "
                f"{caller}(..., *model.parameters())"
            )


def is_marked_local(tensor: Any) -> bool:
    """Return whether :func:`mark_worker_local` was called for the parameter."""
    return getattr(tensor, _LOCAL, False)
