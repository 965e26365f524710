"""Records for a monitor, as of core/reduce/observation.h, from the Gram matrices of a reduction."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional

from adasum_hvd.distributed.coefficients import Tree
from adasum_hvd.distributed.communicator import Communicator
from adasum_hvd.distributed.slices import Layout
from adasum_hvd.monitor.statistics import TensorRecord


class Level(NamedTuple):
    """The ranks that this rank reduces with, and the tree over them."""

    communicator: Communicator
    tree: Tree


class Solution(NamedTuple):
    """The coefficients of a level, and the numbers that they follow from."""

    layout: Layout
    coefficients: torch.Tensor  # float64 [tensors, ranks]
    gram: torch.Tensor | None = None  # float64 [tensors, N, N], of the scaled vectors
    scale: torch.Tensor | None = None  # float64 [tensors], powers of two


def record_of(levels: Sequence[Level], solutions: Sequence[Solution]) -> TensorRecord:
    """Return a record, not numbered; the rank with a tensor's first element fills its row.

    A level has columns for each of its groups, or none if it only adds up.
    """
    own = set(range(len(solutions[0].layout.sizes)))  # tensors that begin in the slice
    sizes: list[int] = []
    tables: list[torch.Tensor] = []
    for (communicator, tree), solution in zip(levels, solutions, strict=True):
        rank, held = communicator.rank, solution.layout.held
        # Columns of the other groups, of which the level's other ranks know one each.
        before, after = rank, communicator.size - 1 - rank
        widths = [(before * t.shape[1], after * t.shape[1]) for t in tables]
        tables = [*map(functional.pad, tables, widths)]
        own &= set(held[rank]).difference(*held[:rank])
        inputs = _inputs_of(tree)
        if len(inputs) > 1:
            tables.append(_table(solution, inputs, tree.weights, own))
            sizes.append(len(inputs))
    rows = torch.cat(tables, 1).cpu().numpy().ravel() if tables else np.zeros(0)
    return TensorRecord(0, tuple(sizes), rows)


def _inputs_of(tree: Tree) -> list[list[int]]:
    """Return the ranks of each vector that AdaSum joins; one if it joins none."""
    inputs = {rank: [rank] for rank in range(len(tree.weights))}
    for tier in tree.tiers:
        for left, right, by_adasum in zip(*tier, strict=True):
            if not by_adasum:
                inputs[left] += inputs.pop(right)
    return list(inputs.values())


def _table(
    solution: Solution,
    inputs: Sequence[Sequence[int]],
    weights: Sequence[float],
    own: Collection[int],
) -> torch.Tensor:
    """Return float64 [tensors, 5 + inputs], zero but for the tensors `own`."""
    gram = solution.gram
    assert gram is not None
    tensors, ranks = gram.shape[:2]
    by_rank = gram.new_tensor(weights)
    by_input = gram.new_zeros((len(inputs), ranks))
    for number, members in enumerate(inputs):
        by_input[number, members] = by_rank[members]
    first = [members[0] for members in inputs]
    coefficients = solution.coefficients[:, first] / by_rank[first]
    products = by_input @ gram @ by_input.T
    squares = products.diagonal(dim1=1, dim2=2)
    norms = squares.clamp_min(0).sqrt()
    i, j = torch.triu_indices(len(inputs), len(inputs), 1, device=gram.device)
    scales = norms[:, i] * norms[:, j]
    cosines = torch.where(scales > 0, products[:, i, j] / scales, 0.0)
    result = (coefficients[:, None] @ products @ coefficients[..., None]).flatten()
    inverse = 1.0 if solution.scale is None else 1.0 / solution.scale
    columns = [
        cosines.sum(1),
        (scales > 0).sum(1).double(),
        squares.sum(1).clamp_min(0).sqrt() * inverse,
        products.sum((1, 2)).clamp_min(0).sqrt() / len(inputs) * inverse,
        result.clamp_min(0).sqrt() * inverse,
    ]
    rows = torch.cat([torch.stack(columns, 1), coefficients], 1)
    mine = torch.zeros(tensors, 1, dtype=torch.bool, device=gram.device)
    mine[[*own]] = True
    return torch.where(mine, rows, 0.0)
