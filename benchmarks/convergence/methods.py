"""The rules that compete in study 7: N workers' gradients become one direction and one factor.

Every rule is a linear combination of the N vectors of a tensor, and its coefficients need only
their inner products. So each rule is a pure function of the Gram matrices of
`reductions.gram`, float64 (tensors, N, N), and returns coefficients (tensors, N).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

_SMALLEST = torch.finfo(torch.float64).tiny ** 0.5


def average(products: torch.Tensor) -> torch.Tensor:
    """Return 1 / N for each: the mean. A sum is the mean at N times the rate."""
    count, workers, _ = products.shape
    return torch.full((count, workers), 1.0 / workers, dtype=torch.float64)


def adasum(products: torch.Tensor) -> torch.Tensor:
    """Return AdaSum's coefficients.

    Two vectors become `(1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b` (Maleki et al., MLSys 2021,
    arXiv 2006.02924, equation 3). Nearest neighbours are joined level by level; an odd one out
    moves up, as in `reference.tree`.
    """
    count, workers, _ = products.shape
    nodes = torch.eye(workers, dtype=torch.float64).expand(count, -1, -1)
    while nodes.shape[1] > 1:
        left, right = nodes[:, :-1:2], nodes[:, 1::2]
        through = left @ products
        dot = (through * right).sum(-1, keepdim=True)
        joined = _share(dot, (through * left).sum(-1, keepdim=True)) * left
        norm = ((right @ products) * right).sum(-1, keepdim=True)
        joined = joined + _share(dot, norm) * right
        odd = nodes[:, nodes.shape[1] - nodes.shape[1] % 2 :]
        nodes = torch.cat([joined, odd], dim=1)
    return nodes[:, 0]


def _share(dot: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    """Return `reference.coefficient` for each."""
    small = norm < _SMALLEST
    return torch.where(small, 1.0, 1.0 - dot / norm.masked_fill(small, 1.0) * 0.5)


def mean_direction(products: torch.Tensor) -> torch.Tensor:
    """Return coefficients of the mean's direction at AdaSum's length, per tensor.

    The ablation: AdaSum without its choice of direction.
    """
    mean = average(products)
    long, short = lengths(products, adasum(products)), lengths(products, mean)
    return mean * _ratio(long, short)[:, None]


def rda(products: torch.Tensor) -> torch.Tensor:
    """Return radial-directional averaging's coefficients, per tensor and with equal weights.

    The mean of the norms, in the direction of the mean unit vector (Douillard et al., Decoupled
    DiLoCo, arXiv 2604.21428, section 3.2): `mean(|g_i|) u / |u|` with `u = mean(g_i / |g_i|)`.
    A zero vector has no direction. If the unit vectors cancel, the result is their mean, 0.
    """
    norms = products.diagonal(dim1=1, dim2=2).clamp_min(0).sqrt()
    units = torch.where(norms > _SMALLEST, 1.0 / norms, 0.0) / norms.shape[1]
    radius = norms.mean(1)
    return units * _ratio(radius, lengths(products, units))[:, None]


def lengths(products: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the norm (tensors,) of each tensor's combination."""
    squared = ((weights[:, None] @ products)[:, 0] * weights).sum(1)
    return squared.clamp_min(0).sqrt()


def _ratio(above: torch.Tensor, below: torch.Tensor) -> torch.Tensor:
    """Return the quotient; 1 if the denominator is 0."""
    small = below < _SMALLEST
    return torch.where(small, 1.0, above / below.masked_fill(small, 1.0))


RULES = {
    "average": average,
    "adasum": adasum,
    "adasum-grad": adasum,
    "mean-direction": mean_direction,
    "rda": rda,
}


class Moments(NamedTuple):
    """Running estimates for one worker's gradient: its variance and its mean's squared norm."""

    variance: float
    squared_mean: float


def moments(squares: float, squared_mean: float, workers: int) -> Moments:
    """Return unbiased estimates from `sum |g_i|^2` and `|mean g|^2`; none is below 0.

    The estimates of AdaScale SGD (Johnson et al. 2020, arXiv 2007.05105). The simple noise scale
    of McCandlish et al. (arXiv 1812.06162) is `variance / squared_mean`, in workers' batches.
    """
    variance = max((squares - workers * squared_mean) / (workers - 1), 0.0)
    return Moments(variance, max(squared_mean - variance / workers, 0.0))


def smooth(last: Moments, new: Moments, workers: int, count: int) -> Moments:
    """Return AdaScale's moving average of `count` estimates, the new one included.

    It keeps `max(0, 1 - N / 1000)` of the last; of few estimates it is the plain mean (appendix
    B.3 of the paper).
    """
    kept = min(max(0.0, 1.0 - workers / 1000), 1.0 - 1.0 / count)
    pairs = zip(last, new, strict=True)
    return Moments(*(kept * old + (1 - kept) * fresh for old, fresh in pairs))


def gain(estimate: Moments, workers: int) -> float:
    """Return AdaScale's gain, from 1 (no noise) to N (only noise): it multiplies the rate.

    `r = (variance + mean^2) / (variance / N + mean^2)`.
    """
    variance, squared_mean = estimate
    below = variance / workers + squared_mean
    return (variance + squared_mean) / below if below > 0 else 1.0
