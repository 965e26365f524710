"""Sparse gradients under Average and Sum: the ranks' rows, gathered, as Horovod does it.

Which parameters these are shows in the first gradients only, and maybe on one rank only.
So the first round carries them densely in their bucket, which is right but long; the ranks
tell each other (see rounds.py), and from the next round on they travel in here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from horovod.torch import mpi_ops

from adasum_hvd import ops
from adasum_hvd.torch import ops as torch_ops
from adasum_hvd.torch.buckets import NamedParameter


class SparseBucket:
    """Parameters whose gradients are rows: a bucket without a flat tensor.

    Args:
        label: makes the names in Horovod unique.
        named: the parameters; the same names and shapes in the same order on all ranks.
        op: Average or Sum.
        process_set: the ranks that reduce.
    """

    def __init__(
        self,
        label: str,
        named: Sequence[NamedParameter],
        op: ops.ReduceOp,
        process_set: Any,
    ):
        self.params = [parameter for _, parameter in named]
        self._names = [f"{label}/{name}" for name, _ in named]
        self._average = op is ops.Average
        self._process_set = process_set
        self._sources: list[torch.Tensor] = []
        self._handles: list[tuple[int, int]] = []

    @property
    def in_flight(self) -> bool:
        """Whether the rows were sent and not yet received."""
        return bool(self._handles)

    def fill(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Take one gradient per parameter; None counts as no rows."""
        pairs = zip(gradients, self.params, strict=True)
        self._sources = [_rows(gradient, parameter) for gradient, parameter in pairs]

    def start(self) -> None:
        """Begin to gather. Collective over the process set; does not block."""
        for name, rows in zip(self._names, self._sources, strict=True):
            values = rows._values()
            if values.dtype == torch.bfloat16:  # of which Horovod has no type
                values = values.float()
            pair = [
                mpi_ops.allgather_async(
                    part.contiguous(),
                    name=f"{name}.{what}",
                    process_set=self._process_set,
                )
                for what, part in (("indices", rows._indices().t()), ("values", values))
            ]
            self._handles.append((pair[0], pair[1]))

    def finish(self) -> None:
        """Wait until `reduced` has what all ranks sent."""
        handles, self._handles = self._handles, []
        parts = [tuple(torch_ops.synchronize(handle) for handle in h) for h in handles]
        scale = self._process_set.size() if self._average else 1
        self.reduced = [
            torch.sparse_coo_tensor(
                indices.t(),
                (values / scale).to(p.dtype),
                p.shape,
                check_invariants=False,
            )
            for (indices, values), p in zip(parts, self.params, strict=True)
        ]
        self._sources = []

    def write_back(self) -> None:
        """Set every `.grad` to the gathered rows; it stays as it is where there are none."""
        for parameter, reduced in zip(self.params, self.reduced, strict=True):
            if reduced._nnz():
                parameter.grad = reduced

    def close(self) -> None:
        """Wait for rows that are under way."""
        if self.in_flight:
            self.finish()


def _rows(gradient: torch.Tensor | None, parameter: torch.Tensor) -> torch.Tensor:
    if gradient is None:
        indices = torch.empty(1, 0, dtype=torch.int64, device=parameter.device)
        return torch.sparse_coo_tensor(
            indices, parameter.new_empty(0, *parameter.shape[1:]), parameter.shape
        )
    return gradient if gradient.is_sparse else gradient.to_sparse(1)
