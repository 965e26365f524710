"""Records of reductions that a monitor has requested."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from adasum_hvd.distributed.coefficients import Tree
from adasum_hvd.distributed.native import Rows
from adasum_hvd.distributed.slices import Layout
from adasum_hvd.monitor.statistics import TensorRecord


class Solution(NamedTuple):
    """The coefficients of a reduction, and the numbers that they follow from."""

    coefficients: torch.Tensor  # float64 [tensors, ranks]
    gram: torch.Tensor | None = None  # float64 [tensors, N, N], of the scaled vectors
    scale: torch.Tensor | None = None  # float64 [tensors], powers of two


def inputs_of(tree: Tree) -> list[list[int]]:
    """Return the ranks of each vector that AdaSum joins: ranks, or groups that are added up."""
    members = {rank: [rank] for rank in range(len(tree.weights))}
    found: list[list[int]] = []
    for tier in tree.tiers:
        for left, right, by_adasum in zip(*tier, strict=True):
            both = members.pop(left, None), members.pop(right, None)
            if not by_adasum and all(both):
                members[left] = [rank for part in both for rank in part or ()]
            else:
                found += filter(None, both)
    return sorted(found)


def rows_of(solution: Solution, layout: Layout, rank: int, tree: Tree) -> Rows:
    """Return rows of 5 + inputs numbers; none without inputs, of one group that is added up.

    Rows of tensors whose first element is in another rank's slice are zero.

    Args:
        solution: of a rule on Gram matrices.
        layout: of the buffer.
        rank: this rank.
        tree: the order of the merges.
    """
    gram = solution.gram
    assert gram is not None
    tensors, ranks = gram.shape[:2]
    inputs = inputs_of(tree)
    if not inputs:
        return Rows((), np.zeros(0))
    by_input = gram.new_zeros((len(inputs), ranks))
    for number, members in enumerate(inputs):
        for member in members:
            by_input[number, member] = tree.weights[member]
    first = [members[0] for members in inputs]
    coefficients = (
        solution.coefficients[:, first] / gram.new_tensor(tree.weights)[first]
    )
    products = by_input @ gram @ by_input.T
    squares = products.diagonal(dim1=1, dim2=2)
    norms = squares.clamp_min(0).sqrt()
    pairs = torch.triu_indices(len(inputs), len(inputs), 1, device=gram.device).unbind()
    scales = norms[:, pairs[0]] * norms[:, pairs[1]]
    cosines = torch.where(scales > 0, products[:, pairs[0], pairs[1]] / scales, 0.0)
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
    before = {tensor for held in layout.held[:rank] for tensor in held}
    mine[[tensor for tensor in layout.held[rank] if tensor not in before]] = True
    return Rows((len(inputs),), torch.where(mine, rows, 0.0).cpu().numpy())


class Records:
    """The latest record of each bucket, by its name; of `monitor.monitor.Channel`."""

    def __init__(self) -> None:
        self._requested: set[str] = set()
        self._latest: dict[str, TensorRecord] = {}

    def requested(self, entry: str) -> bool:
        """Return whether the next reduction of a bucket is to be recorded."""
        return entry in self._requested

    def request(self, entry: str) -> None:
        """Request a record of the next reduction of a bucket."""
        self._requested.add(entry)

    def latest(self, entry: str) -> TensorRecord | None:
        """Return the latest record of a bucket, or None if there is none."""
        return self._latest.get(entry)

    def add(self, entry: str, found: Rows) -> None:
        """Record a reduction of a bucket, as was requested."""
        self._requested.discard(entry)
        before = self._latest.get(entry)
        number = 1 + (before.number if before else 0)
        self._latest[entry] = TensorRecord(number, found.sizes, found.rows.ravel())
