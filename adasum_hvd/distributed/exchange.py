"""From sums over a rank's slice to sums over the whole tensors."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch

from adasum_hvd.distributed.coefficients import constant
from adasum_hvd.distributed.communicator import Communicator
from adasum_hvd.distributed.slices import Layout
from adasum_hvd.distributed.sums import Sums, sums_by_tensor


class Shards(NamedTuple):
    """Tensors of which every rank of a group holds a shard."""

    communicator: Communicator
    tensors: tuple[int, ...]  # numbers in the buffer


class Exchange:
    """Tables with a row per tensor, of which each rank knows its slice's part.

    A tensor inside one slice needs no exchange. The rows of tensors that cross a border, at most
    two of a rank, go to all ranks, which add them up in the same order.

    Args:
        layout: of the buffer.
        communicator: the ranks.
        device: of the tables.
        everything: all ranks get the rows of all tensors.
        shards: ranks over which tensors of the buffer are sharded, once more, and which
            tensors; implies `everything`.
    """

    def __init__(
        self,
        layout: Layout,
        communicator: Communicator,
        device: torch.device,
        everything: bool = False,
        shards: Sequence[Shards] = (),
    ):
        parts = layout.held if everything or shards else layout.shared
        self._communicator, self._shards = communicator, shards
        self.tensors = len(layout.sizes)
        # Rows that fill a table, and those that another rank knows, go to one tensor more.
        nobody, width = self.tensors, max(map(len, parts))
        padded = [(*part, *[nobody] * (width - len(part))) for part in parts]
        sent = set(parts[communicator.rank])
        own = [nobody if tensor in sent else tensor for tensor in range(nobody)]
        owners = (*(tensor for part in padded for tensor in part), *own)
        self._sent = constant(padded[communicator.rank], torch.int64, device)
        self._owners = constant(owners, torch.int64, device)
        self.shared = sorted({tensor for part in parts for tensor in part})

    def _rows(self, table: torch.Tensor) -> torch.Tensor:
        """Return [rows, columns]: all ranks' rows that were sent, and this rank's."""
        if not self.shared:
            return table
        sent = torch.cat([table, table.new_zeros((1, table.shape[1]))])[self._sent]
        return torch.cat([self._communicator.all_gather(sent).flatten(0, 1), table])

    def largest(self, values: torch.Tensor, owners: torch.Tensor) -> torch.Tensor:
        """Return float64 [tensors]: the largest of all ranks' values of a tensor.

        Args:
            values: float64 [blocks, 1], none negative.
            owners: int64 [blocks], the tensor of each.

        Collective if any tensor crosses a border.
        """
        table = values.new_zeros(self.tensors + 1)
        table.scatter_reduce_(0, owners, values.flatten(), "amax")
        rows = self._rows(table[:-1, None]).flatten()
        found = torch.zeros_like(table)
        found = found.scatter_reduce_(0, self._owners, rows, "amax")[:-1]
        for communicator, tensors in self._shards:
            index = constant(tensors, torch.int64, table.device)
            found[index] = communicator.all_gather(found[index]).amax(0)
        return found

    def total(self, sums: Sums, only: Collection[int] | None = None) -> torch.Tensor:
        """Return float64 [tensors, columns]: sums over all ranks of this rank's tensors.

        Args:
            sums: over this rank's slice.
            only: the tensors whose sums are needed; None: all. The ranks that have parts of a
                tensor agree on it.

        Collective for each group of ranks that have parts of one of these tensors.
        """

        def needed(tensors: Sequence[int]) -> bool:
            return only is None or not set(only).isdisjoint(tensors)

        if self.shared and needed(self.shared):
            terms = torch.cat(self._rows(torch.cat(sums, 1)).chunk(2, 1))
            owners = self._owners.repeat(2)
            high, low = sums_by_tensor(terms, owners, self.tensors + 1)
            sums = Sums(high[:-1], low[:-1])
        for communicator, tensors in self._shards:
            if needed(tensors):
                sums = self._over_shards(sums, communicator, tensors)
        return sums.rounded()

    def _over_shards(
        self, sums: Sums, communicator: Communicator, tensors: tuple[int, ...]
    ) -> Sums:
        """Replace the sums of sharded tensors by their sums over the shards."""
        index = constant(tensors, torch.int64, sums.high.device)
        rows = communicator.all_gather(torch.cat(sums, 1)[index]).flatten(0, 1)
        owners = torch.arange(len(tensors), device=index.device)
        terms = torch.cat(rows.chunk(2, 1))
        found = sums_by_tensor(
            terms, owners.repeat(2 * communicator.size), len(tensors)
        )
        high, low = sums.high.clone(), sums.low.clone()
        high[index], low[index] = found
        return Sums(high, low)
