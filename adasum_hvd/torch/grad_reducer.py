"""`DistributedGradReducer` for torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from horovod.torch import mpi_ops

from adasum_hvd.grad_reducer import GradReducer
from adasum_hvd.torch import marks

_LAYOUTS = (torch.strided, torch.sparse_coo)


class DistributedGradReducer(GradReducer):
    """Sums gradients over the ranks of a group in float32, and multiplies by 1 / degree.

    Arguments and errors: :class:`adasum_hvd.grad_reducer.GradReducer`. Sparse gradients are
    COO tensors. A parameter given to `mark_replicated_over` keeps its own gradient, too.

    Example:
        >>> reducer = DistributedGradReducer(list(model.parameters()))  # doctest: +SKIP
        >>> gradients = reducer(tuple(p.grad for p in model.parameters()))  # doctest: +SKIP
        >>> reducer.reduce_gradients()    # or in place, on .grad       # doctest: +SKIP

    References:
        Seed 001; SEEDS row 1D.
    """

    _all_ranks = mpi_ops.global_process_set

    def _keeps_its_own(self, parameter: torch.Tensor) -> bool:
        return super()._keeps_its_own(parameter) or marks.is_marked(parameter)

    def _is_sparse(self, gradient: torch.Tensor) -> bool:
        if not isinstance(gradient, torch.Tensor):
            raise TypeError(
                "DistributedGradReducer: required a tensor, or a list or tuple of tensors, got "
                f"{type(gradient).__name__}"
            )
        if gradient.is_complex() or gradient.layout not in _LAYOUTS:
            raise ValueError(
                "DistributedGradReducer: required real gradients, dense or COO, got "
                f"{gradient.dtype} of layout {gradient.layout}"
            )
        return gradient.is_sparse

    def _start(
        self, name: str, gradients: list[torch.Tensor]
    ) -> Callable[[], list[torch.Tensor]]:
        wide = [g.to(torch.float32, copy=True).contiguous() for g in gradients]
        handle = mpi_ops.grouped_allreduce_async_(
            wide, name=name, op=mpi_ops.Sum, process_set=self._group
        )

        def finish() -> list[torch.Tensor]:
            mpi_ops.synchronize(handle)
            if self._factor != 1.0:
                torch._foreach_mul_(wide, self._factor)
            return [w.to(g.dtype) for w, g in zip(wide, gradients, strict=True)]

        return finish

    def _reduce_sparse(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        # Not coalesced: entries of one position are not added up, in float16 least of all.
        def gather(tensor: torch.Tensor, what: str) -> Any:
            return mpi_ops.allgather(
                tensor, name=f"{name}.{what}", process_set=self._group
            )

        positions = gather(gradient._indices().t().contiguous(), "i")
        values = gather(gradient._values().float(), "v") * self._factor
        return torch.sparse_coo_tensor(
            positions.t(), values.to(gradient.dtype), gradient.shape
        )

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """Reduce every parameter's `.grad` in place. Collective; blocks.

        A gradient that is None counts as dense zeros, and then exists on this rank too; a
        sparse gradient must exist on every rank.
        """
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = tuple(parameter.grad for parameter in self.parameters)
        for parameter, reduced in zip(self.parameters, self(gradients), strict=True):
            parameter.grad = reduced
