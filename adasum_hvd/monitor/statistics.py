"""Statistics of AdaSum, computed from the op's records."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["NAMES", "statistics"]

NAMES = (
    *("cosine", "orthogonality", "gain", "lowest", "highest"),
    *("variance", "squared_mean", "length"),
)
# The factor k of all vectors is a factor k^degree of these, and of no others.
DEGREES = {"variance": 2, "squared_mean": 2, "length": 1}
_SUMS = 5  # per group, before its coefficients: core/reduce/observation.h

Rows: TypeAlias = NDArray[np.float64]


class TensorRecord(NamedTuple):
    """One rank's record of a reduction, by segment of the tensor.

    Attributes:
        number: how many reductions of this tensor have been recorded, this one included.
        sizes: by level of the AdaSum tree, innermost first: how many vectors a group combines.
            Empty on one rank.
        rows: float64 of (segments * width,), in the layout of this module. A rank has
            zeros for the segments that other ranks solved; the sum over the ranks is complete.
    """

    number: int
    sizes: tuple[int, ...]
    rows: Rows


def width(sizes: Sequence[int]) -> int:
    """Return the number of doubles in a segment's record; `TensorRecord` explains sizes."""
    count, groups = 0, 1
    for size in reversed(sizes):
        count += groups * (_SUMS + size)
        groups *= size
    return count


def statistics(rows: Rows, sizes: Sequence[int]) -> dict[str, Rows]:
    """Return statistics of each tensor, from the sums of its Gram matrices.

    docs/monitor.md, Recorded values, defines them, also for several levels.

    Args:
        rows: (tensors, width(sizes)), summed over the ranks; see `TensorRecord.rows`.
        sizes: see `TensorRecord.sizes`.

    Returns:
        By name in :data:`NAMES`, float64 of (tensors,). NaN if a tensor is zero on all ranks or
        a value is not finite; `gain` is infinite if the ranks' vectors cancel.

    References:
        arXiv 2006.02924, figure 1, shows the orthogonality. The estimates are those of
        arXiv 1812.06162, appendix A.
    """
    count = len(rows)
    cosines, pairs = np.zeros(count), np.zeros(count)
    energy, gain = np.ones(count), np.ones(count)
    nothing = np.full(count, np.nan)
    moments, length = (nothing, nothing), nothing
    coefficients = np.ones((count, 1))
    end = rows.shape[1]
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
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
            length = result if level == len(sizes) - 1 else length
            moments = _moments(part, size) if size > 1 else moments
            below = coefficients[:, :, None] * part[:, :, _SUMS:]
            coefficients = below.reshape(count, groups * size)
        extremes = coefficients.min(1), coefficients.max(1)
        values = (cosines / pairs, energy, gain, *extremes, *moments, length)
    return dict(zip(NAMES, values, strict=True))


def _moments(part: Rows, size: int) -> tuple[Rows, Rows]:
    """Return `variance` and `squared_mean` by tensor: means over a level's groups.

    The level's records are (tensors, groups, _SUMS + size); a group combines `size` > 1 vectors.
    """
    squares, squared_mean = part[:, :, 2] ** 2, part[:, :, 3] ** 2
    variance = (squares - size * squared_mean) / (size - 1)
    return variance.mean(1), (squared_mean - variance / size).mean(1)


def _norm(norms: Rows) -> Rows:
    """Return the norm of concatenated vectors from their norms, without overflow of squares."""
    largest = norms.max(1)
    scale = np.where((largest > 0) & np.isfinite(largest), largest, 1.0)
    return scale * np.sqrt(((norms / scale[:, None]) ** 2).sum(1))
