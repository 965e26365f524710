"""Nodes whose squared norm is lost in the Gram matrix: their vectors are formed.

A node where opposite vectors cancel is small against the terms that its norm is the sum of. Its
vector is never stored: each tier forms it again, block by block, and takes its dot products.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from adasum_hvd.distributed.blocks import Slice
from adasum_hvd.distributed.coefficients import Tree
from adasum_hvd.distributed.exchange import Exchange
from adasum_hvd.distributed.sums import sums_by_tensor


class FormNodes:
    """Gives `coefficients.walk` the dot products of nodes from the nodes' vectors.

    On a CPU only for tensors that need it. The ranks that have parts of a tensor agree on that,
    and ranks without a part of it, such as those of an empty shard, take no notice.
    On other devices for all tensors, because the program does not wait for a device's values.

    Attributes:
        waiting: types of devices whose values the program waits for.

    Args:
        part: this rank's slice.
        exchange: to the other ranks.
        tree: the order of the merges.
        factors: float64 [tensors, ranks], what the ranks' vectors are multiplied by.
    """

    waiting = ("cpu",)

    def __init__(
        self,
        part: Slice,
        exchange: Exchange,
        tree: Tree,
        factors: torch.Tensor | None,
    ):
        self._slice, self._exchange = part, exchange
        self._tree, self._factors = tree, factors

    def __call__(
        self,
        tier: int,
        sides: Sequence[torch.Tensor],
        cancelled: torch.Tensor,
        dots: torch.Tensor,
    ) -> torch.Tensor:
        """Return the dot products of a tier with those of cancelled tensors replaced.

        Collective if a tensor that crosses a slice border is among them.
        """
        only: list[int] | None = None
        if cancelled.device.type in self.waiting:
            only = cancelled.nonzero().flatten().tolist()
            if not only:
                return dots
        values = self._slice.node_products(self._tree, sides, self._factors, only)
        sums = sums_by_tensor(values, self._slice.owners, len(dots))
        formed = self._exchange.total(sums, only)
        return torch.where(cancelled[:, None, None], formed.view_as(dots), dots)
