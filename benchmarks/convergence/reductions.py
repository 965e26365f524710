"""The reductions of `adasum_hvd/reference.py`, for many workers and tensors at once in float32.

AdaSum of N vectors is one linear combination of them, whose coefficients come from their inner
products alone. So a Gram matrix and one combination per tensor replace the N - 1
passes of the tree of `reference.py`: tests/unit/test_convergence.py compares them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from adasum_hvd.distributed.coefficients import (
    adasum,
    grafted,
    mean,
    mean_direction,
    rda,
)

# The rules that compete in study 7: N workers' gradients become one direction and one factor.
RULES = {
    "average": mean,
    "adasum": adasum,
    "adasum-grad": adasum,
    "grafted": grafted,
    "mean-direction": mean_direction,
    "rda": rda,
}
WIRES = {"float32": None, "float16": torch.float16, "bfloat16": torch.bfloat16}
# These need no inner products. AdaScale is the mean at a rate of its own.
_SHARES = {
    "sum": lambda workers: 1.0,
    "average": lambda workers: 1.0 / workers,
    "adascale": lambda workers: 1.0 / workers,
}


class Reduced(NamedTuple):
    """One vector per tensor, and the coefficients (tensors, workers) that made them."""

    tensors: list[torch.Tensor]
    coefficients: torch.Tensor


def gram(stacked: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the inner products, float64 (tensors, workers, workers), of (workers, ...) each."""
    flat = [tensor.flatten(1) for tensor in stacked]
    return torch.stack([vectors @ vectors.T for vectors in flat]).double()


def combine(stacked: Sequence[torch.Tensor], weights: torch.Tensor) -> Reduced:
    """Return the combination of each (workers, ...) tensor with its row of `weights`."""
    pairs = zip(stacked, weights.float(), strict=True)
    sums = [(row @ t.flatten(1)).view(t.shape[1:]) for t, row in pairs]
    return Reduced(sums, weights)


def reduce_workers(
    stacked: Sequence[torch.Tensor], op: str, group_size: int = 1, wire: str = "float32"
) -> Reduced:
    """Return the reduction of each tensor over its first axis.

    Args:
        stacked: float32 tensors (workers, ...).
        op: "sum", "average", "adascale", or one of `RULES`.
        group_size: AdaSum only: so many consecutive workers are averaged first.
        wire: the dtype in which vectors travel; the sum is rounded to it once.
    """
    dtype = WIRES[wire]
    if dtype is not None:
        stacked = [tensor.to(dtype).float() for tensor in stacked]
    workers = stacked[0].shape[0]
    if workers == 1:
        return Reduced([t[0] for t in stacked], torch.ones(len(stacked), 1).double())
    if op in _SHARES:
        share = _SHARES[op](workers)
        weights = torch.full((len(stacked), workers), share, dtype=torch.float64)
        reduced = combine(stacked, weights)
    else:
        means = stacked
        if group_size > 1:
            shape = (workers // group_size, group_size)
            means = [t.view(*shape, *t.shape[1:]).mean(1) for t in stacked]
        reduced = combine(means, RULES[op](gram(means)))
    if dtype is not None:
        reduced = Reduced([t.to(dtype).float() for t in reduced[0]], reduced[1])
    return reduced


def agreement(stacked: Sequence[torch.Tensor]) -> tuple[float, float]:
    """Return how parallel the workers' vectors are, over all tensors together.

    Returns:
        The mean cosine between two of them, each tensor weighted by its norm, and the ratio
        `|AdaSum|^2 / sum |g_i|^2`: 1 if all are orthogonal, 1/N if parallel.
    """
    products = gram(stacked)
    weights = adasum(products)
    own = products.diagonal(dim1=1, dim2=2).sum()
    workers = products.shape[1]
    if not own > 0:
        return 0.0, 0.0
    between = (products.sum() - own) / max(1, workers - 1)
    squared = ((weights[:, None] @ products)[:, 0] * weights).sum()
    return round(float(between / own), 5), round(float(squared / own), 5)
