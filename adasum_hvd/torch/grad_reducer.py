"""`DistributedGradReducer`: plain sums or means of gradients, float32 on the wire.

References:
    Seed 001 (mindspore.nn.DistributedGradReducer), SEEDS row 1D. Parameter-server mode has
    no counterpart in Horovod.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from horovod.torch import mpi_ops

from adasum_hvd.partition import checked_degree, fusion_groups

# Names must agree on the ranks of a group, whatever other ranks construct.
_reducers: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


class DistributedGradReducer:
    """Sums gradients over the ranks of a group in float32, and multiplies by 1 / degree.

    Args:
        parameters: the parameters that the gradients belong to, in the gradients' order. One
            with a true attribute `layerwise_parallel` keeps its own gradient; one with an
            attribute `comm_fusion` is reduced together with those of the same number.
        mean: multiply the sums by 1 / degree.
        degree: the divisor; by default the number of ranks in `group` (not in the job).
        fusion_type: the fusion number of parameters without a `comm_fusion`.
        group: a Horovod process set; by default all ranks.
        split_indices: with `fusion_type=1`, a new fusion group begins behind each index.

    Raises:
        ValueError: `degree` is not an int or not larger than 0.

    Example:
        >>> reducer = DistributedGradReducer(list(model.parameters()))  # doctest: +SKIP
        >>> gradients = reducer(tuple(p.grad for p in model.parameters()))  # doctest: +SKIP
        >>> reducer.reduce_gradients()    # or in place, on .grad       # doctest: +SKIP

    References:
        Seed 001; SEEDS row 1D.
    """

    def __init__(
        self,
        parameters: Iterable[torch.Tensor],
        mean: bool = True,
        degree: int | None = None,
        fusion_type: int = 1,
        group: Any = None,
        split_indices: Sequence[int] | None = None,
    ):
        self._parameters = list(parameters)
        self._group = mpi_ops.global_process_set if group is None else group
        if degree is None:
            degree = self._group.size()
        degree = checked_degree(degree)
        self._factor = 1.0 / degree if mean else None
        self._fusion = fusion_groups(self._parameters, fusion_type, split_indices)
        count = _reducers.setdefault(self._group, itertools.count())
        self._name = f"grad_reducer.{self._group.process_set_id}.{next(count)}"

    def __call__(self, gradients: torch.Tensor | Sequence[torch.Tensor]) -> Any:
        """Return the reduced gradients: a tensor for a tensor, a tuple for a sequence.

        Args:
            gradients: one per parameter, of any float dtype, dense or sparse (COO). A sparse
                one comes back with all ranks' entries, not coalesced.

        Raises:
            ValueError: another number of gradients than of parameters.

        Collective: every rank of the group; blocks.
        """
        if isinstance(gradients, torch.Tensor):
            return self((gradients,))[0]
        if len(gradients) != len(self._parameters):
            raise ValueError(
                f"DistributedGradReducer: required {len(self._parameters)} gradients, one per "
                f"parameter, got {len(gradients)}"
            )
        results = list(gradients)
        groups: dict[int, list[int]] = {}
        for index, parameter in enumerate(self._parameters):
            if getattr(parameter, "layerwise_parallel", False):
                continue
            if gradients[index].is_sparse:
                results[index] = self._reduce_sparse(index, gradients[index])
            else:
                groups.setdefault(self._fusion[index], []).append(index)
        handles = []
        for fusion, indices in groups.items():
            wide = [
                gradients[i].to(torch.float32, copy=True).contiguous() for i in indices
            ]
            name = f"{self._name}.{fusion}"
            handle = mpi_ops.grouped_allreduce_async_(
                wide, name=name, op=mpi_ops.Sum, process_set=self._group
            )
            handles.append((handle, indices, wide))
        for handle, indices, wide in handles:
            mpi_ops.synchronize(handle)
            if self._factor is not None:
                torch._foreach_mul_(wide, self._factor)
            for index, tensor in zip(indices, wide, strict=True):
                results[index] = tensor.to(gradients[index].dtype)
        return tuple(results)

    def _reduce_sparse(self, index: int, gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.coalesce()
        name = f"{self._name}.sparse.{index}"
        positions = mpi_ops.allgather(
            gradient.indices().t().contiguous(),
            name=f"{name}.i",
            process_set=self._group,
        )
        values = mpi_ops.allgather(
            gradient.values().float(), name=f"{name}.v", process_set=self._group
        )
        if self._factor is not None:
            values.mul_(self._factor)
        return torch.sparse_coo_tensor(
            positions.t(), values.to(gradient.dtype), gradient.shape
        )

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """Reduce every parameter's `.grad` in place. Collective; blocks.

        A gradient that is None counts as dense zeros, and then exists on this rank too; a
        sparse gradient must exist on every rank.
        """
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = tuple(p.grad for p in self._parameters if p.grad is not None)
        for parameter, reduced in zip(self._parameters, self(gradients), strict=True):
            parameter.grad = reduced
