"""MindSpore's names: the wrap cells of both variants, and the gradient reducer.

References:
    Seeds 000, 001 and 002; SEEDS rows 1A, 1B and 1D.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from horovod.torch import mpi_ops
from horovod.torch.mpi_ops import size

from adasum_hvd.common import ops
from adasum_hvd.common.options import ProcessSet
from adasum_hvd.mindspore import cells
from adasum_hvd.mindspore.grad_reducer import GradReducer
from adasum_hvd.parallel import ParallelContext
from adasum_hvd.parallel.torch_modes import context_of
from adasum_hvd.torch import marks
from adasum_hvd.torch import ops as torch_ops
from adasum_hvd.torch.modes import find_modes
from adasum_hvd.torch.optimizer import DistributedOptimizer
from adasum_hvd.torch.optimizer.buckets import NamedParameter

_LAYOUTS = (torch.strided, torch.sparse_coo)


class DistributedGradReducer(GradReducer):
    """Sums gradients over the ranks of a group in float32, and multiplies by 1 / degree.

    Arguments and errors: those of :class:`adasum_hvd.mindspore.grad_reducer.GradReducer`.
    Sparse gradients are COO tensors. A parameter given to `mark_replicated_over` keeps its
    own gradient, too.

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
                "DistributedGradReducer: expected a tensor, or a list or tuple of tensors, but got "
                f"{type(gradient).__name__}"
            )
        if gradient.is_complex() or gradient.layout not in _LAYOUTS:
            raise ValueError(
                "DistributedGradReducer: expected real gradients, dense or COO, but got "
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


class WrapCell(cells.WrapCell):
    """A distributed optimizer that is called with a tuple of gradients; see the subclasses.

    Attributes that a cell lacks (`step`, `zero_grad`, `param_groups`, `state_dict`, ...) are
    those of `optimizer`, the `DistributedOptimizer` inside, to read and to set, so that a
    gradient scaler takes a cell for an optimizer; give LR schedulers the one inside.

    Args:
        optimizer: a torch optimizer.
        relaxed: lift the constraints of MindSpore's cells: at least 16 ranks, a power of two,
            groups of 8 ranks averaged (`hvd.init(group_op="average", group_size=8)`).
        named_parameters: as `DistributedOptimizer`'s.
        context: the parallel context to check; by default what was found in the job.
        model: as `DistributedOptimizer`'s.
        gradient_group: a process set, this rank's group: gradients given to the cell are
            averaged over it (summed with `gradients_mean=False`) before anything else, as
            MindSpore's TrainOneStepCell does. Then the op averages inside its groups, also
            with `gradients_mean=False`: it finds sums that are equal there.

    Raises:
        RuntimeError: one rank, optimizer sharding, a pipeline, too few ranks or no power of
            two, other groups; in this order, and before the type of `optimizer` is looked at.
        TypeError: `optimizer` is no torch optimizer.

    Collective: every rank; blocks.

    Example:
        >>> hvd.init(group_op="average", group_size=8)                  # doctest: +SKIP
        >>> optim = hvd.AdaSumByDeltaWeightWrapCell(                    # doctest: +SKIP
        ...     torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
        >>> optim(torch.autograd.grad(loss, optim.parameters))          # doctest: +SKIP
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
        found = find_modes(optimizer, model)
        if context is None:
            context = context_of([f for of_rank in found for f in of_rank], size())
        super().__init__(
            optimizer,
            context,
            torch_ops.settings(),
            relaxed,
            gradient_group,
            lambda: DistributedOptimizer(
                optimizer, named_parameters, op=self._op, model=model
            ),
        )

    @property
    def parameters(self) -> tuple[torch.Tensor, ...]:
        """The optimizer's parameters that require a gradient, in the order of gradients."""
        groups = self.optimizer.param_groups
        everything = (parameter for group in groups for parameter in group["params"])
        return tuple(parameter for parameter in everything if parameter.requires_grad)

    def _fits(self, gradient: Any, parameter: torch.Tensor) -> bool:
        tensor = isinstance(gradient, torch.Tensor)
        return tensor and gradient.shape == parameter.shape

    def _step(
        self,
        parameters: tuple[torch.Tensor, ...],
        gradients: Sequence[torch.Tensor],
    ) -> Any:
        # Drops what a backward pass by torch has left in .grad.
        self.optimizer.zero_grad()
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.detach().to(parameter.dtype, copy=True)
        try:
            return self.optimizer.step()
        finally:
            self.optimizer.zero_grad()


class AdaSumByGradWrapCell(WrapCell):
    """Reduces gradients with AdaSum, then takes the optimizer's step; returns its result."""

    _op = ops.AdasumGrad


class AdaSumByDeltaWeightWrapCell(WrapCell):
    """Takes the optimizer's step, reduces the weights' change; returns the parameters."""

    _op = ops.AdasumDelta
