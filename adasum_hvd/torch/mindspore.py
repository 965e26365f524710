"""MindSpore's names: wrap cells of both variants, and the gradient reducer (docs/mindspore.md)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from horovod.torch import mpi_ops
from horovod.torch.mpi_ops import size

from adasum_hvd.base import ops
from adasum_hvd.base.options import ProcessSet
from adasum_hvd.mindspore import wrap_cells
from adasum_hvd.mindspore.grad_reducer import GradReducer
from adasum_hvd.offload.optimizer import AdamOffload
from adasum_hvd.parallel import ParallelContext
from adasum_hvd.parallel.torch_modes import context_of
from adasum_hvd.torch import marks
from adasum_hvd.torch import ops as torch_ops
from adasum_hvd.torch.optimizer import DistributedOptimizer, find_modes
from adasum_hvd.torch.optimizer.buckets import NamedParameter
from adasum_hvd.torch.sparse import sparse_allreduce_async

_LAYOUTS = (torch.strided, torch.sparse_coo)


class DistributedGradReducer(GradReducer):
    """Sums gradients over the ranks of a group in float32, and multiplies by 1 / degree.

    Arguments and errors: those of :class:`adasum_hvd.mindspore.grad_reducer.GradReducer`.
    Sparse gradients are COO tensors. Parameters marked with `mark_replicated_over` also keep
    their own gradients. `reduce_gradients` works in place, on `.grad`.
    """

    _all_ranks = mpi_ops.global_process_set

    def _keeps_its_own(self, parameter: torch.Tensor) -> bool:
        return super()._keeps_its_own(parameter) or marks.is_marked(parameter)

    def _is_sparse(self, gradient: torch.Tensor) -> bool:
        if not isinstance(gradient, torch.Tensor):
            raise TypeError(
                "DistributedGradReducer: expected a tensor, or a list or tuple of tensors, but got "
                f"{type(gradient).__name__}"
            )
        if not gradient.is_floating_point() or gradient.layout not in _LAYOUTS:
            raise ValueError(
                "DistributedGradReducer: expected real gradients of a float dtype, dense or COO, "
                f"but got {gradient.dtype} of layout {gradient.layout}"
            )
        return gradient.is_sparse

    def _reduce(self, name: str, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        wide = [g.to(torch.float32, copy=True).contiguous() for g in gradients]
        mpi_ops.grouped_allreduce_(
            wide, name=name, op=mpi_ops.Sum, process_set=self._group
        )
        if self._factor != 1.0:
            torch._foreach_mul_(wide, self._factor)
        return [w.to(g.dtype) for w, g in zip(wide, gradients, strict=True)]

    def _reduce_sparse(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        # Not coalesced, because adding entries of one position in float16 loses precision.
        wide = torch.sparse_coo_tensor(
            gradient._indices(), gradient._values().float(), gradient.shape
        )
        total = sparse_allreduce_async(wide, name, ops.Sum, self._group)()
        values = (total._values() * self._factor).to(gradient.dtype)
        return torch.sparse_coo_tensor(total._indices(), values, gradient.shape)

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """Reduce every parameter's `.grad` in place. Collective; blocks.

        The gradient of a parameter that requires one and has none is first set to dense zeros; a
        sparse gradient must exist on every rank.
        """
        for parameter in self.parameters:
            needs = parameter.requires_grad and not self._keeps_its_own(parameter)
            if needs and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = tuple(parameter.grad for parameter in self.parameters)
        for parameter, reduced in zip(self.parameters, self(gradients), strict=True):
            parameter.grad = reduced


class WrapCell(wrap_cells.WrapCell):
    """A distributed optimizer that is called with a tuple of gradients; docs/mindspore.md.

    Args and errors as of :class:`adasum_hvd.mindspore.wrap_cells.WrapCell`; the default context is
    the one detected in the job. `named_parameters` and `model` as `DistributedOptimizer`'s.
    """

    _plain, _plain_name = torch.optim.Optimizer, "torch.optim.Optimizer"
    _reducing = DistributedGradReducer

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        relaxed: bool = False,
        named_parameters: Iterable[NamedParameter] | None = None,
        context: ParallelContext | None = None,
        model: Any = None,
        gradient_group: ProcessSet | None = None,
    ):
        by_rank = find_modes(optimizer, model)
        if context is None:
            context = context_of([f for modes in by_rank for f in modes], size())
        settings = torch_ops.settings()
        super().__init__(optimizer, context, settings, relaxed, gradient_group)
        self.optimizer = DistributedOptimizer(
            optimizer, named_parameters, op=self._op, model=model
        )

    @property
    def parameters(self) -> tuple[torch.Tensor, ...]:
        """Parameters that require a gradient, by `AdamOffload`'s "order_params" or the groups."""
        parameters = self.optimizer._adasum.parameters
        if isinstance(self.optimizer, AdamOffload):
            parameters = self.optimizer.update_order()[::-1]
        return tuple(parameter for parameter in parameters if parameter.requires_grad)

    def _fits(self, gradient: Any, parameter: torch.Tensor) -> bool:
        tensor = isinstance(gradient, torch.Tensor)
        return tensor and gradient.shape == parameter.shape

    def _step(self, parameters: tuple[Any, ...], gradients: Sequence[Any]) -> Any:
        # A backward pass may have left gradients in .grad.
        self.optimizer.zero_grad()
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.detach().to(parameter.dtype, copy=True)
        try:
            return self.optimizer.step()
        finally:
            self.optimizer.zero_grad()


class AdaSumByGradWrapCell(WrapCell):
    """Reduces gradients with AdaSum, then takes the optimizer's step, and returns its result."""

    _op = ops.AdasumGrad


class AdaSumByDeltaWeightWrapCell(WrapCell):
    """Takes the optimizer's step, then reduces the weight changes; returns the parameters."""

    _op = ops.AdasumDelta
