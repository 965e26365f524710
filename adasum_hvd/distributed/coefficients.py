"""The tree over the ranks, and coefficients from Gram matrices: AdaSum's and those of rules.

The tree is that of `reference.tree`; all tensors are walked together, without a look at a value.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from adasum_hvd import reference

SMALLEST_NORM = sys.float_info.min**0.5  # a squared norm below it counts as zero
CANCELLED = 1e-6  # of the terms' magnitudes: below it a node's squared norm is lost
# From the sides so far, which tensors are affected and the dot products so far.
FormNodes = Callable[[Sequence[torch.Tensor], torch.Tensor, torch.Tensor], torch.Tensor]


class Tier(NamedTuple):
    """Merges that can be done at the same time; a node goes by its first rank."""

    left: tuple[int, ...]
    right: tuple[int, ...]
    by_adasum: tuple[bool, ...]  # else by plain addition


class Tree(NamedTuple):
    """The order in which ranks are merged."""

    weights: tuple[float, ...]  # by rank: 1, or 1 / (size of its averaged group)
    tiers: tuple[Tier, ...]


@lru_cache(maxsize=256)
def tree_of(hosts: tuple[int, ...], group_op: str, group_size: int) -> Tree:
    """Return the tree of `reference.tree`, which explains the arguments, in tiers."""
    weights = [1.0] * len(hosts)
    if group_op == "average":
        for group in reference.groups_of(hosts, group_size):
            for rank in group:
                weights[rank] = 1.0 / len(group)
    first, depth = list(range(len(hosts))), [0] * len(hosts)
    tiers: list[list[tuple[int, int, bool]]] = []
    for left, right, by_adasum in reference.tree(hosts, group_op, group_size):
        tier = max(depth[left], depth[right])
        if tier == len(tiers):
            tiers.append([])
        tiers[tier].append((first[left], first[right], by_adasum))
        first.append(first[left])
        depth.append(tier + 1)
    return Tree(tuple(weights), tuple(Tier(*zip(*tier, strict=True)) for tier in tiers))


@lru_cache(maxsize=1024)
def constant(
    values: tuple[Any, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return a small constant tensor, which travels to the device once."""
    return torch.tensor(values, dtype=dtype, device=device)


def symmetric(triangles: torch.Tensor) -> torch.Tensor:
    """Return [tensors, N, N] of their upper triangles, [tensors, N (N + 1) / 2]."""
    ranks = math.isqrt(2 * triangles.shape[1])
    return triangles[:, _places_in_triangle(ranks, triangles.device)]


@lru_cache(maxsize=256)
def _places_in_triangle(ranks: int, device: torch.device) -> torch.Tensor:
    """Return for each element of a matrix its place in the upper triangle, row by row."""
    rows, columns = torch.triu_indices(ranks, ranks)
    places = torch.empty(ranks, ranks, dtype=torch.int64)
    places[rows, columns] = places[columns, rows] = torch.arange(len(rows))
    return places.to(device)


def walk(
    gram: torch.Tensor, tree: Tree, form_nodes: FormNodes | None = None
) -> torch.Tensor:
    """Return float64 [tensors, N]: AdaSum's coefficients on a tree.

    Each merge replaces two rows and columns of the Gram matrices, float64 [tensors, N, N], by one
    (arXiv 2006.02924, equation 7). In this order identical inputs only meet powers of two.

    From the second tier on, `form_nodes` gets the sides so far (for each tier the factors of its
    nodes, float64 [tensors, merges, 2]), bool [tensors] of those with a node whose squared norm has
    cancelled, and the dot products, and replaces those of such tensors.
    """
    device = gram.device
    weights = constant(tree.weights, torch.float64, device)
    products = gram * weights[:, None] * weights
    magnitudes = products.abs()
    cancelled = torch.zeros(len(gram), dtype=torch.bool, device=device)
    sides: list[torch.Tensor] = []
    coefficients = weights.expand(len(gram), -1)
    for tier, places in zip(tree.tiers, _places(tree), strict=True):
        left = constant(tier.left, torch.int64, device)
        right = constant(tier.right, torch.int64, device)
        by_adasum = constant(tier.by_adasum, torch.bool, device)
        pairs = (left, left), (left, right), (right, right)
        dots = torch.stack([products[:, i, j] for i, j in pairs], 2)
        if sides:
            for node, norms in ((left, dots[..., 0]), (right, dots[..., 2])):
                lost = norms < CANCELLED * magnitudes[:, node, node]
                cancelled = cancelled | (lost & by_adasum).any(1)
            if form_nodes is not None:
                dots = form_nodes(sides, cancelled, dots)
        both = [
            torch.where(norm < SMALLEST_NORM, 1.0, 1.0 - dots[..., 1] / norm * 0.5)
            for norm in (dots[..., 0], dots[..., 2])
        ]
        side = torch.where(by_adasum[:, None], torch.stack(both, 2), 1.0)
        sides.append(side)
        factors = functional.pad(side.flatten(1), (0, 1), value=1.0)
        coefficients = coefficients * factors[:, constant(places, torch.int64, device)]
        products = _merged(products, left, right, side)
        magnitudes = _merged(magnitudes, left, right, side.abs())
    return coefficients


def _merged(
    matrices: torch.Tensor, left: torch.Tensor, right: torch.Tensor, side: torch.Tensor
) -> torch.Tensor:
    """Return [tensors, N, N] with the left rows and columns replaced by their merges."""
    a, b = side[..., 0], side[..., 1]
    rows = a[:, :, None] * matrices[:, left] + b[:, :, None] * matrices[:, right]
    matrices = matrices.index_copy(1, left, rows)
    columns = (
        a[:, None, :] * matrices[:, :, left] + b[:, None, :] * matrices[:, :, right]
    )
    return matrices.index_copy(2, left, columns)


@lru_cache(maxsize=256)
def _places(tree: Tree) -> list[tuple[int, ...]]:
    """Return for each tier and rank the place of its factor in the tier's sides, or one more."""
    node_of, found = list(range(len(tree.weights))), []
    for tier in tree.tiers:
        both = [*zip(tier.left, tier.right, strict=True)]
        places = {node: k for k, node in enumerate(itertools.chain(*both))}
        found.append(tuple(places.get(node, len(places)) for node in node_of))
        left_of = {right: left for left, right in both}
        node_of = [left_of.get(node, node) for node in node_of]
    return found


# Rules: float64 [tensors, N, N] to float64 [tensors, N], a coefficient for each rank. `m` is the
# mean of a tensor's vectors x_i, and `a` their AdaSum: docs/distributed.md, "Rules".


def adasum(gram: torch.Tensor) -> torch.Tensor:
    """Return AdaSum's coefficients on the tree of one host."""
    return walk(gram, tree_of((0,) * gram.shape[1], "adasum", 0))


def mean(gram: torch.Tensor) -> torch.Tensor:
    """Return 1 / N for each. A sum is the mean at N times the rate."""
    return torch.full_like(gram[:, 0], 1.0 / gram.shape[1])


def mean_direction(gram: torch.Tensor) -> torch.Tensor:
    """Return coefficients of the mean's direction at AdaSum's length: `|a| m / |m|`."""
    means = mean(gram)
    return means * _ratio(lengths(gram, adasum(gram)), lengths(gram, means))[:, None]


def grafted(gram: torch.Tensor) -> torch.Tensor:
    """Return coefficients of AdaSum's direction at the mean's length: `|m| a / |a|`."""
    own = adasum(gram)
    return own * _ratio(lengths(gram, mean(gram)), lengths(gram, own))[:, None]


def rda(gram: torch.Tensor) -> torch.Tensor:
    """Return radial-directional averaging's coefficients, with equal weights.

    `mean(|x_i|) u / |u|` with `u = mean(x_i / |x_i|)` (arXiv 2604.21428, section 3.2). A zero
    vector has no direction. If the unit vectors cancel, the result is their mean, 0.
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
