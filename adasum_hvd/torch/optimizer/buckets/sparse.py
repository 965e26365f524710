"""Sparse gradients under Average and Sum: the ranks' rows, gathered, as Horovod does it.

Which parameters these are shows in the first gradients only, and maybe on one rank only.
So the first round carries them densely in their bucket, which is right but long. Then the ranks
exchange which they are (checks/consistency.py), and from the next round on they travel in here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from adasum_hvd.common import ops
from adasum_hvd.common.options import ProcessSet
from adasum_hvd.torch.optimizer.buckets.bucket import NamedParameter
from adasum_hvd.torch.sparse import sparse_allreduce_async


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
        process_set: ProcessSet,
    ):
        self.params = [parameter for _, parameter in named]
        self._names = [f"{label}/{name}" for name, _ in named]
        self._op, self._process_set = op, process_set
        self._sources: list[torch.Tensor] = []
        self._finishers: list[Callable[[], torch.Tensor]] = []

    @property
    def in_flight(self) -> bool:
        """Whether the rows were sent and not yet received."""
        return bool(self._finishers)

    def copies_eagerly(self, index: int) -> bool:
        """Return False: rows travel from where they are."""
        return False

    def holds(self, index: int, gradient: torch.Tensor) -> bool:
        """Return False."""
        return False

    def fill(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Take one gradient per parameter; None counts as no rows."""
        pairs = zip(gradients, self.params, strict=True)
        self._sources = [_rows(gradient, parameter) for gradient, parameter in pairs]

    def start(self) -> None:
        """Begin to gather. Collective over the process set; does not block."""
        self._finishers = [
            sparse_allreduce_async(rows, name, self._op, self._process_set)
            for name, rows in zip(self._names, self._sources, strict=True)
        ]

    def finish(self) -> None:
        """Wait until `reduced` has what all ranks sent."""
        finishers, self._finishers = self._finishers, []
        self.reduced = [finish() for finish in finishers]
        self._sources = []

    def write_back(self) -> None:
        """Set every `.grad` to the gathered rows; it stays as it is where there are none."""
        for parameter, reduced in zip(self.params, self.reduced, strict=True):
            if reduced._nnz():
                parameter.grad = reduced
        self.reduced = []

    def drop(self) -> None:
        """Forget rows whose exchange ended with Horovod."""
        self._finishers, self._sources = [], []

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
