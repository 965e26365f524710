"""Parameters that each rank keeps and updates by itself, in either framework."""

from __future__ import annotations

from typing import Any

_LOCAL = "_adasum_worker_local"


def mark_worker_local(*tensors: Any) -> None:
    """Exclude parameters from every reduction: each rank keeps and updates its own.

    For parameters that exist on one rank only (tensor parallelism) or must differ. Call it
    before `DistributedOptimizer` and before the first step. A buffer may be marked too:
    `check_replicas` then leaves it out.
    """
    for tensor in tensors:
        setattr(tensor, _LOCAL, True)


def is_marked_local(tensor: Any) -> bool:
    """Return whether :func:`mark_worker_local` was called for the parameter."""
    return getattr(tensor, _LOCAL, False)
