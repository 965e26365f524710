"""Marks for parameters that only some ranks hold: updated locally, or reduced over those ranks."""

from __future__ import annotations

from typing import Any

import torch
from horovod.torch.mpi_ops import ProcessSet, global_process_set

from adasum_hvd.base.agreement import refuse_process_set
from adasum_hvd.base.marks import check_tensors, is_marked_local, mark
from adasum_hvd.torch.objects import here

_HOLDERS = "_adasum_holders"


def mark_replicated_over(process_set: ProcessSet, *tensors: torch.Tensor) -> None:
    """Reduce parameters over the ranks that hold them, never with other ranks' parameters.

    Call it before `DistributedOptimizer`, on the ranks that hold the parameters, with the
    same names, shapes and order on each of them: docs/parallel.md. Freeze and unfreeze them on all
    ranks of the job in the same step. A set of one rank makes them worker-local.

    Args:
        process_set: a registered Horovod process set that includes this rank.
        *tensors: parameters, and buffers for `check_replicas`.

    Raises:
        ValueError: the process set is not registered, or does not include this rank.
        TypeError: `process_set` is not a process set, or an element of `tensors` is not a tensor.
        NotImplementedError: the job is elastic, and process sets end when ranks come or go.
    """
    if not isinstance(process_set, ProcessSet):
        raise TypeError(
            f"mark_replicated_over: expected a process set first, but got {process_set!r:.80}; "
            "create one with hvd.add_process_set"
        )
    check_tensors("mark_replicated_over", tensors)
    refuse_process_set(process_set, global_process_set)
    if not process_set.included():
        raise ValueError(
            "mark_replicated_over: expected a process set with this rank in it, but got "
            f"{process_set} {here()}; mark parameters on its ranks only"
        )
    mark(tensors, _HOLDERS, process_set)


def holders(tensor: torch.Tensor) -> Any:
    """Return the process set given to :func:`mark_replicated_over`, or None."""
    return getattr(tensor, _HOLDERS, None)


def is_worker_local(tensor: torch.Tensor) -> bool:
    """Return whether only this rank steps the parameter."""
    process_set = holders(tensor)
    alone = process_set is not None and process_set.size() == 1
    return alone or is_marked_local(tensor)


def is_marked(tensor: torch.Tensor) -> bool:
    """Return whether only some ranks hold the parameter."""
    return holders(tensor) is not None or is_worker_local(tensor)
