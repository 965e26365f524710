"""Sums and averages of sparse tensors: an allgather of their entries, as in Horovod."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from horovod.torch import mpi_ops

from adasum_hvd.base import ops
from adasum_hvd.base.options import ProcessSet
from adasum_hvd.torch import wire
from adasum_hvd.torch.objects import here


def _checked(tensor: Any, name: str, op: Any) -> ops.ReduceOp:
    reduction = ops.parse(op)
    if reduction not in (ops.Average, ops.Sum):
        error = ops.SparseAdasumError if ops.is_adasum(reduction) else ValueError
        raise error(
            f"sparse_allreduce {name}: expected Average or Sum, but got {reduction.name} "
            f"{here()}; reduce to_dense() with hvd.allreduce"
        )
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.sparse_coo:
        actual = getattr(tensor, "layout", type(tensor).__name__)
        raise ValueError(
            f"sparse_allreduce {name}: expected a sparse COO tensor, but got {actual} {here()}; "
            "use hvd.allreduce, or to_sparse_coo()"
        )
    return reduction


def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: Any = ops.Average,
    process_set: ProcessSet = mpi_ops.global_process_set,
) -> Callable[[], torch.Tensor]:
    """Start to sum or average a sparse tensor over the ranks of `process_set`.

    Args:
        tensor: a COO tensor, of the same shape and dtype on all ranks.
        name: the tensor's name, the same on all ranks; counted up when None.
        op: Average or Sum, or the name of one.
        process_set: the ranks to reduce over.

    Returns:
        A function that waits and returns the entries of all ranks, in rank order and not
        coalesced. `synchronize` calls it.

    Raises:
        SparseAdasumError: `op` is AdaSum; both a NotImplementedError and a ValueError.
        ValueError: `op` is another reduction, or `tensor` is not sparse.

    Collective: every rank of `process_set`; does not block.
    """
    name = wire.nameless(process_set) if name is None else name
    reduction = _checked(tensor, name, op)
    values = tensor.detach()._values().contiguous()
    as_bits = values.dtype == torch.bfloat16
    handles = [
        mpi_ops.allgather_async(part, f"{name}.{suffix}", process_set)
        for part, suffix in (
            (tensor.detach()._indices().t().contiguous(), "indices"),
            (values.view(torch.int16) if as_bits else values, "values"),
        )
    ]

    def finish() -> torch.Tensor:
        indices, gathered = map(mpi_ops.synchronize, handles)
        gathered = gathered.view(torch.bfloat16) if as_bits else gathered
        if reduction is ops.Average:
            gathered = gathered / process_set.size()
        return torch.sparse_coo_tensor(
            indices.t(), gathered, tensor.shape, check_invariants=False
        )

    return finish
