"""MindSpore's names for the two variants: `AdaSumByGradWrapCell`, `AdaSumByDeltaWeightWrapCell`.

References:
    Seeds 000 and 002; SEEDS rows 1A and 1B.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from horovod.torch.mpi_ops import size

from adasum_hvd import ops
from adasum_hvd.parallel import ParallelContext
from adasum_hvd.parallel.torch_modes import context_of
from adasum_hvd.torch import ops as torch_ops
from adasum_hvd.torch.buckets import NamedParameter
from adasum_hvd.torch.grad_reducer import DistributedGradReducer
from adasum_hvd.torch.modes import find_modes
from adasum_hvd.torch.optimizer import DistributedOptimizer
from adasum_hvd.wrap_cells import Forwarding, check_gradients, check_job


def _described(gradient: Any) -> tuple[int, ...] | str:
    if isinstance(gradient, torch.Tensor):
        return tuple(gradient.shape)
    return "None" if gradient is None else type(gradient).__name__


class WrapCell(Forwarding):
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

    _own = frozenset({"optimizer", "_group", "_mean", "_reducer"})
    _op: ops.ReduceOp

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        relaxed: bool = False,
        named_parameters: Iterable[NamedParameter] | None = None,
        context: ParallelContext | None = None,
        model: Any = None,
        gradient_group: Any = None,
    ):
        found = find_modes(optimizer, model)
        if context is None:
            context = context_of([f for of_rank in found for f in of_rank], size())
        check_job(context, torch_ops.settings(), relaxed, gradient_group is not None)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"{type(self).__name__}: required a torch.optim.Optimizer, got "
                f"{type(optimizer).__name__}"
            )
        self.optimizer = DistributedOptimizer(
            optimizer, named_parameters, op=self._op, model=model
        )
        self._group = gradient_group
        self._mean = context.gradients_mean
        self._reducer: DistributedGradReducer | None = None

    @property
    def parameters(self) -> tuple[torch.Tensor, ...]:
        """The optimizer's parameters that require a gradient, in the order of gradients."""
        groups = self.optimizer.param_groups
        everything = (parameter for group in groups for parameter in group["params"])
        return tuple(parameter for parameter in everything if parameter.requires_grad)

    def __call__(self, gradients: Sequence[torch.Tensor]) -> Any:
        """Step with `gradients`, one per parameter, and return what the optimizer returns.

        Raises:
            ValueError: other shapes or another number of gradients than of parameters, or None
                among them.

        Collective: every rank; blocks.
        """
        parameters, gradients = self.parameters, tuple(gradients)
        check_gradients(
            type(self).__name__,
            [f"parameter {index}" for index in range(len(parameters))],
            [tuple(parameter.shape) for parameter in parameters],
            [_described(gradient) for gradient in gradients],
        )
        gradients = self._reduced_in_group(parameters, gradients)
        # Drops what a backward pass by torch has left in .grad.
        self.optimizer.zero_grad()
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.detach().to(parameter.dtype, copy=True)
        try:
            return self.optimizer.step()
        finally:
            self.optimizer.zero_grad()

    def _reduced_in_group(
        self, parameters: tuple[torch.Tensor, ...], gradients: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        if self._group is None:
            return gradients
        known = self._reducer.parameters if self._reducer else ()
        if [*map(id, known)] != [*map(id, parameters)]:  # some were (un)frozen since
            self._reducer = DistributedGradReducer(
                parameters, self._mean, group=self._group
            )
        assert self._reducer is not None
        return self._reducer(tuple(gradients))


class AdaSumByGradWrapCell(WrapCell):
    """Reduces gradients with AdaSum, then takes the optimizer's step; returns its result."""

    _op = ops.AdasumGrad


class AdaSumByDeltaWeightWrapCell(WrapCell):
    """Takes the optimizer's step, reduces the weights' change; returns the parameters."""

    _op = ops.AdasumDelta

    def __call__(self, gradients: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Step with `gradients` and return the updated parameters; errors as the base's."""
        super().__call__(gradients)
        return self.parameters
