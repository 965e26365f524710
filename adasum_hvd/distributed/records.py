"""Records of reductions that a monitor has requested."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from adasum_hvd.distributed.rules import Rule
from adasum_hvd.distributed.slices import Layout
from adasum_hvd.monitor.statistics import TensorRecord
from adasum_hvd.reference import groups_of


class Solution(NamedTuple):
    """The coefficients of a reduction, and the numbers that they follow from."""

    coefficients: torch.Tensor  # float64 [tensors, ranks]
    gram: torch.Tensor | None = None  # float64 [tensors, N, N], of the scaled vectors
    scale: torch.Tensor | None = None  # float64 [tensors], powers of two


def inputs_of(hosts: Sequence[int], rule: Rule) -> list[list[int]]:
    """Return the ranks of each vector that AdaSum joins; none if there is one group only."""
    if rule.group_op == "adasum":
        return [[rank] for rank in range(len(hosts))]
    groups = groups_of(hosts, rule.group_size)
    return groups if len(groups) > 1 else []


def rows_of(
    solution: Solution,
    layout: Layout,
    rank: int,
    weights: Sequence[float],
    inputs: Sequence[Sequence[int]],
) -> TensorRecord:
    """Return rows of 5 + inputs numbers; none without inputs, of one group that is added up.

    Rows of tensors whose first element is in another rank's slice are zero. The ranks' vectors are
    multiplied by their weights.
    """
    gram = solution.gram
    assert gram is not None
    tensors, ranks = gram.shape[:2]
    if not inputs:
        return TensorRecord(0, (), np.zeros(0))
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
    mine[[*set(layout.held[rank]).difference(*layout.held[:rank])]] = True
    found = torch.where(mine, rows, 0.0).cpu().numpy()
    return TensorRecord(0, (len(inputs),), found.ravel())


class Records:
    """The latest record of each bucket, by its name; of `monitor.monitor.Channel`."""

    def __init__(self) -> None:
        self.requested: set[str] = set()
        self._latest: dict[str, TensorRecord] = {}

    def request(self, entry: str) -> None:
        """Request a record of the next reduction of a bucket."""
        self.requested.add(entry)

    def latest(self, entry: str) -> TensorRecord | None:
        """Return the latest record of a bucket, or None if there is none."""
        return self._latest.get(entry)

    def add(self, entry: str, found: TensorRecord) -> None:
        """Number and keep the record of a bucket's reduction, as was requested."""
        self.requested.discard(entry)
        before = self._latest.get(entry)
        number = 1 + (before.number if before else 0)
        self._latest[entry] = found._replace(number=number)
