"""From what the op observes to numbers that people read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["NAMES", "statistics"]

NAMES = ("cosine", "orthogonality", "gain", "lowest", "highest")
_SUMS = 5  # of a group, before its coefficients: native/reduce/observation.h

Rows: TypeAlias = NDArray[np.float64]


def width(sizes: Sequence[int]) -> int:
    """Return how many doubles the op has of a tensor.

    Args:
        sizes: how many vectors a group joins, by level, outwards.
    """
    return sum(
        math.prod(sizes[level + 1 :]) * (_SUMS + size)
        for level, size in enumerate(sizes)
    )


def statistics(rows: Rows, sizes: Sequence[int]) -> dict[str, Rows]:
    r"""Return, for each tensor, what its Gram matrices tell.

    With `x_i` what AdaSum joins (the ranks' vectors, or what groups have averaged or summed):

    - `cosine`: the mean of `cos(x_i, x_j)` over pairs. Where the reduction has several levels,
      of the pairs that meet in one of them: ranks of a group, then results of groups;
    - `orthogonality`: `|AdaSum|^2 / sum |x_i|^2`: 1 where all are orthogonal, 1/N where all are
      parallel;
    - `gain`: `|AdaSum| / |mean of x_i|`: N where orthogonal, 1 where parallel. Of several levels
      the product;
    - `lowest`, `highest`: of the coefficients `c_i` in `AdaSum = sum c_i x_i`.

    Args:
        rows: (tensors, width(sizes)), added up over the ranks; `binding.Observation.rows`.
        sizes: as there.

    Returns:
        By name of :data:`NAMES`, float64 of (tensors,). NaN where a tensor is zero on all ranks or
        a value is not finite; `gain` is infinite where the ranks' vectors cancel.

    References:
        arXiv 2006.02924, figure 1, shows the orthogonality.
    """
    count = len(rows)
    cosines, pairs = np.zeros(count), np.zeros(count)
    energy, gain = np.ones(count), np.ones(count)
    coefficients = np.ones((count, 1))
    end = rows.shape[1]
    with np.errstate(divide="ignore", invalid="ignore"):
        for level in reversed(range(len(sizes))):
            groups, size = math.prod(sizes[level + 1 :]), sizes[level]
            begin = end - groups * (_SUMS + size)
            part = rows[:, begin:end].reshape(count, groups, _SUMS + size)
            end = begin
            cosines += part[:, :, 0].sum(1)
            pairs += part[:, :, 1].sum(1)
            inputs, mean, result = (_norm(part[:, :, k]) for k in (2, 3, 4))
            energy *= (result / inputs) ** 2
            gain *= result / mean
            below = coefficients[:, :, None] * part[:, :, _SUMS:]
            coefficients = below.reshape(count, groups * size)
        values = (
            cosines / pairs,
            energy,
            gain,
            coefficients.min(1),
            coefficients.max(1),
        )
    return dict(zip(NAMES, values, strict=True))


def _norm(norms: Rows) -> Rows:
    """Return the norm of vectors laid end to end, from theirs; squares would overflow."""
    largest = norms.max(1)
    scale = np.where((largest > 0) & np.isfinite(largest), largest, 1.0)
    return scale * np.sqrt(((norms / scale[:, None]) ** 2).sum(1))
