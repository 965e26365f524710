"""Rules that AdaSum is compared with: pure functions from Gram matrices to coefficients.

Each gets float64 [tensors, N, N] and returns float64 [tensors, N], one coefficient for each rank.
docs/convergence.md has what the studies found.
"""

from __future__ import annotations

import torch

from adasum_hvd.distributed.coefficients import (
    SMALLEST_NORM,
    leaf_coefficients,
    tree_of,
    walk,
)


def adasum(gram: torch.Tensor) -> torch.Tensor:
    """Return AdaSum's coefficients on the tree of one host."""
    tree = tree_of((0,) * gram.shape[1], "adasum", 0)
    return leaf_coefficients(walk(gram, tree), tree, len(gram))


def mean(gram: torch.Tensor) -> torch.Tensor:
    """Return 1 / N for each. A sum is the mean at N times the rate."""
    return torch.full_like(gram[:, 0], 1.0 / gram.shape[1])


def mean_direction(gram: torch.Tensor) -> torch.Tensor:
    """Return coefficients of the mean's direction at AdaSum's length: `|a| m / |m|`.

    `m` is the mean of a tensor's vectors and `a` their AdaSum, on the tree of one host: AdaSum
    without its choice of direction, in docs/convergence.md, study 7.
    """
    means = mean(gram)
    return means * _ratio(lengths(gram, adasum(gram)), lengths(gram, means))[:, None]


def grafted(gram: torch.Tensor) -> torch.Tensor:
    """Return coefficients of AdaSum's direction at the mean's length: `|m| a / |a|`.

    The mean's magnitude is grafted onto AdaSum's direction (Agarwal et al., "Disentangling
    Adaptive Gradient Methods from Learning Rates", arXiv 2002.11803): AdaSum without its length.
    """
    own = adasum(gram)
    return own * _ratio(lengths(gram, mean(gram)), lengths(gram, own))[:, None]


def rda(gram: torch.Tensor) -> torch.Tensor:
    """Return radial-directional averaging's coefficients, with equal weights.

    The mean of the norms, in the direction of the mean unit vector (Douillard et al., Decoupled
    DiLoCo, arXiv 2604.21428, section 3.2): `mean(|x_i|) u / |u|` with `u = mean(x_i / |x_i|)`.
    A zero vector has no direction. If the unit vectors cancel, the result is their mean, 0.
    """
    norms = gram.diagonal(dim1=1, dim2=2).clamp_min(0).sqrt()
    units = torch.where(norms > SMALLEST_NORM, 1.0 / norms, 0.0) / norms.shape[1]
    return units * _ratio(norms.mean(1), lengths(gram, units))[:, None]


def lengths(gram: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the norm, float64 [tensors], of each tensor's combination by `weights`."""
    squared = ((weights[:, None] @ gram)[:, 0] * weights).sum(1)
    return squared.clamp_min(0).sqrt()


def _ratio(above: torch.Tensor, below: torch.Tensor) -> torch.Tensor:
    """Return the quotient; 1 if the denominator is 0."""
    small = below < SMALLEST_NORM
    return torch.where(small, 1.0, above / below.masked_fill(small, 1.0))
