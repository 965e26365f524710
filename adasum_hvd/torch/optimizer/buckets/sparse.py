"""Sparse gradients under Average and Sum: the ranks' rows are gathered, as in Horovod.

Only a gradient shows that its parameter is sparse, so the first reduction uses a dense bucket.
Then the ranks exchange the parameters' names, and later reductions use the bucket in this file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from adasum_hvd.base.options import Options
from adasum_hvd.torch.optimizer.buckets.bucket import NamedParameter
from adasum_hvd.torch.sparse import sparse_allreduce_async


class SparseBucket:
    """Parameters with sparse gradients: a bucket without a flat tensor; as :class:`Bucket`."""

    def __init__(self, label: str, named: Sequence[NamedParameter], options: Options):
        self.params = [parameter for _, parameter in named]
        self._names = [f"{label}/{name}" for name, _ in named]
        self._options = options
        self._sources: list[torch.Tensor] = []
        self._finishers: list[Callable[[], torch.Tensor]] = []

    @property
    def in_flight(self) -> bool:
        """Whether the rows were sent and not yet received."""
        return bool(self._finishers)

    def copies_eagerly(self, index: int) -> bool:
        """Return False: rows are not copied."""
        return False

    def holds(self, index: int, gradient: torch.Tensor) -> bool:
        """Return False."""
        return False

    def fill(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Set one gradient per parameter; None means no rows."""
        pairs = zip(gradients, self.params, strict=True)
        self._sources = [_rows(gradient, parameter) for gradient, parameter in pairs]

    def start(self) -> None:
        """Begin to gather. Collective over the process set; does not block."""
        options = self._options
        self._finishers = [
            sparse_allreduce_async(rows, name, options.op, options.process_set)
            for name, rows in zip(self._names, self._sources, strict=True)
        ]

    def finish(self) -> None:
        """Wait until `reduced` holds the rows of all ranks."""
        finishers, self._finishers = self._finishers, []
        self.reduced = [finish() for finish in finishers]
        self._sources = []

    def write_back(self) -> None:
        """Set every `.grad` to the gathered rows; without rows it stays unchanged."""
        for parameter, reduced in zip(self.params, self.reduced, strict=True):
            if reduced._nnz():
                parameter.grad = reduced
        self.reduced = []

    def drop(self) -> None:
        """Forget an exchange that was interrupted by Horovod's end."""
        self._finishers, self._sources = [], []


def _rows(gradient: torch.Tensor | None, parameter: torch.Tensor) -> torch.Tensor:
    if gradient is None:
        indices = torch.empty(1, 0, dtype=torch.int64, device=parameter.device)
        return torch.sparse_coo_tensor(
            indices, parameter.new_empty(0, *parameter.shape[1:]), parameter.shape
        )
    return gradient if gradient.is_sparse else gradient.to_sparse(1)
