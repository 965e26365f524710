"""The tree over the ranks, and the coefficients that Gram matrices give it, on any device.

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
    """Return the tree of `reference.tree`, in tiers.

    Args:
        hosts: any id of each rank's host.
        group_op: "adasum", "average" or "sum": how ranks inside a group are joined.
        group_size: ranks in a group; 0 means that a host is a group.
    """
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


def coefficient(dot: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    """Return `1 - dot / 2 norm`; exactly 1 when the squared norm `norm` counts as zero."""
    return torch.where(norm < SMALLEST_NORM, 1.0, 1.0 - dot / norm * 0.5)


def walk(
    gram: torch.Tensor, tree: Tree, form_nodes: FormNodes | None = None
) -> list[torch.Tensor]:
    """Return the coefficients of both sides of every merge.

    A node is a linear combination of the ranks' vectors, so each merge replaces two rows and
    columns of the Gram matrix by one. In this order identical inputs only meet powers of two.

    Args:
        gram: float64 [tensors, N, N].
        tree: of N ranks.
        form_nodes: from the second tier on, called with (sides so far, bool [tensors] of those
            with a node whose squared norm has cancelled, dot products); returns the dot products
            with those of such tensors replaced.

    Returns:
        For each tier float64 [tensors, merges, 2]: what the left and the right node are
        multiplied by.

    References:
        arXiv 2006.02924, equation 7.
    """
    device = gram.device
    weights = constant(tree.weights, torch.float64, device)
    products = gram * weights[:, None] * weights
    magnitudes = products.abs()
    cancelled = torch.zeros(len(gram), dtype=torch.bool, device=device)
    sides: list[torch.Tensor] = []
    for tier in tree.tiers:
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
        both = [coefficient(dots[..., 1], dots[..., norm]) for norm in (0, 2)]
        side = torch.where(by_adasum[:, None], torch.stack(both, 2), 1.0)
        sides.append(side)
        products = _merged(products, left, right, side)
        magnitudes = _merged(magnitudes, left, right, side.abs())
    return sides


def _merged(
    matrices: torch.Tensor,
    left: torch.Tensor,
    right: torch.Tensor,
    side: torch.Tensor,
) -> torch.Tensor:
    """Return [tensors, N, N] with the left rows and columns replaced by their merges."""
    a, b = side[..., 0], side[..., 1]
    rows = a[:, :, None] * matrices[:, left] + b[:, :, None] * matrices[:, right]
    matrices = matrices.index_copy(1, left, rows)
    columns = (
        a[:, None, :] * matrices[:, :, left] + b[:, None, :] * matrices[:, :, right]
    )
    return matrices.index_copy(2, left, columns)


def leaf_coefficients(
    sides: Sequence[torch.Tensor], tree: Tree, tensors: int
) -> torch.Tensor:
    """Return float64 [tensors, N]: the product of the sides on each rank's way to the root."""
    device = sides[0].device if sides else torch.device("cpu")
    found = constant(tree.weights, torch.float64, device).expand(tensors, -1)
    for side, places in zip(sides, _places(tree), strict=True):
        factors = functional.pad(side.flatten(1), (0, 1), value=1.0)
        found = found * factors[:, constant(places, torch.int64, device)]
    return found


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
