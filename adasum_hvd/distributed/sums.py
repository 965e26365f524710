"""Float64 sums by tensor whose value does not depend on the order of their terms."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Sums(NamedTuple):
    """Sums as `high + low`, each float64 [tensors, columns]; together about 100 bits."""

    high: torch.Tensor
    low: torch.Tensor

    def rounded(self) -> torch.Tensor:
        """Return the sums in float64."""
        return self.high + self.low


def sums_by_tensor(values: torch.Tensor, owners: torch.Tensor, tensors: int) -> Sums:
    r"""Add up the rows of each tensor.

    Every term is split into multiples of one grid, of which float64 adds that many without an
    error, and a rest that is split in the same way once more. NaN and infinity give NaN.

    Args:
        values: float64 [rows, columns].
        owners: int64 [rows], the tensor of each row.
        tensors: how many tensors there are.

    References:
        Demmel and Nguyen, "Parallel Reproducible Summation", 2015: the splitting.
    """
    rows, columns = values.shape
    places = owners[:, None] * columns + torch.arange(columns, device=values.device)
    places = places.flatten()
    terms = values.flatten()
    largest = terms.new_zeros(tensors * columns)
    largest.scatter_reduce_(0, places, terms.abs(), "amax")
    # Four times as many as the rows, rounded up to a power of two.
    spread = float(1 << (rows.bit_length() + 2))
    grid = largest.mul_(spread)[places]
    high = (terms + grid) - grid
    low = terms - high
    grid.mul_(spread * 2.0**-53)
    low = (low + grid) - grid
    parts = (
        terms.new_zeros(tensors * columns).index_add_(0, places, part)
        for part in (high, low)
    )
    return Sums(*(part.view(tensors, columns) for part in parts))
