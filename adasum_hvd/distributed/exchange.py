"""From sums over a rank's slice to sums over the whole tensors."""

from __future__ import annotations

import torch

from adasum_hvd.distributed.coefficients import constant
from adasum_hvd.distributed.communicator import Communicator
from adasum_hvd.distributed.slices import Layout
from adasum_hvd.distributed.sums import Sums, sums_by_tensor


class Exchange:
    """Tables with a row per tensor, of which each rank knows its slice's part.

    A tensor inside one slice is that rank's own business. The rows of tensors that cross a
    border, at most two of a rank, go to all ranks, who add them up in the same order.

    Args:
        layout: of the buffer.
        communicator: the ranks.
        device: of the tables.
        everything: all ranks get the rows of all tensors.
    """

    def __init__(
        self,
        layout: Layout,
        communicator: Communicator,
        device: torch.device,
        everything: bool = False,
    ):
        parts = layout.held if everything else layout.shared
        self._communicator = communicator
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
        return found.scatter_reduce_(0, self._owners, rows, "amax")[:-1]

    def total(self, sums: Sums) -> torch.Tensor:
        """Return float64 [tensors, columns]: sums over all ranks, of tensors that are known here.

        Collective if any tensor crosses a border.
        """
        if not self.shared:
            return sums.rounded()
        rows = self._rows(torch.cat(sums, 1))
        terms = torch.cat(rows.chunk(2, 1))
        found = sums_by_tensor(terms, self._owners.repeat(2), self.tensors + 1)
        return found.rounded()[:-1]
