"""Flags of a bucket: one number per parameter, which is reduced with the gradients.

Each rank adds a code: NONE, DENSE, a larger one for a sparse gradient, or CHANGE. The result tells
what the ranks had. With N ranks and the code S of a sparse gradient:

| reduction | gradients all dense or none | one of them sparse | S |
|---|---|---|---|
| Average | at most 1 | at least S / N | 2 N |
| Max | at most 1 | at least S | 2 |
| Sum | at most N | at least S | 2 N |
| AdaSum | at most N, if groups add | at least S / 2 N | 4 N^2 |

AdaSum of two numbers is their mean, or their sum if one of them is 0. So one of N numbers is halved
at most ceil(log2 N) times.
"""

from __future__ import annotations

import math

import torch

from adasum_hvd.base import ops

NONE, DENSE, CHANGE = 0.0, 1.0, math.inf


class Flags:
    """The numbers of one bucket: a part of its flat tensor, one per parameter, or empty."""

    def __init__(self, numbers: torch.Tensor, op: ops.ReduceOp, ranks: int):
        self._numbers = numbers
        is_adasum = ops.is_adasum(op)
        self._most_dense = ranks if is_adasum or op is ops.Sum else 1
        divided_by = {ops.Average: ranks, ops.Sum: 1, ops.Max: 1}.get(op, 2 * ranks)
        self._sparse = 2.0 * self._most_dense * divided_by
        # In float16 the sum of many ranks' codes would be CHANGE.
        self._tells_sparse = self._sparse * ranks < torch.finfo(numbers.dtype).max

    def set_dense(self) -> None:
        """Set all codes to DENSE."""
        self._numbers.fill_(DENSE)

    def set_from(self, index: int, gradient: torch.Tensor | None) -> None:
        """Set a parameter's code, if its gradient is not a dense one."""
        if gradient is None:
            self._numbers[index : index + 1] = NONE
        elif gradient.is_sparse and self._tells_sparse:
            self._numbers[index : index + 1] = self._sparse

    def announce_change(self) -> None:
        """Notify all ranks, by this reduction, that this rank's parameters change."""
        self._numbers.fill_(CHANGE)

    @property
    def announces_change(self) -> bool:
        """Whether a rank has announced a change. False on devices: reading would stall them."""
        return self._numbers.is_cpu and not bool(self._numbers.isfinite().all())

    @property
    def tells_of_sparse(self) -> bool:
        """Whether a rank had a sparse gradient. False on devices, as above."""
        return self._numbers.is_cpu and self._is_sparse(self._numbers)

    def is_none(self, index: int) -> bool:
        """Return whether no rank has a gradient of a parameter."""
        return bool(self._numbers[index] == NONE)

    def is_sparse(self, index: int) -> bool:
        """Return whether a rank has a sparse gradient; False if the codes are not used."""
        return self._is_sparse(self._numbers[index])

    def _is_sparse(self, numbers: torch.Tensor) -> bool:
        if not self._tells_sparse:
            return False
        # A change is no sparse gradient: what only some ranks hold is not reduced again.
        is_sparse = (numbers > 1.5 * self._most_dense) & (numbers < CHANGE)
        return bool(is_sparse.any())
