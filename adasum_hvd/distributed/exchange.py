"""From sums over a rank's slice to sums over the whole tensors.

Nodes are formed for docs/internals.md, "Ill-conditioned tensors".
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import chain
from typing import NamedTuple

import torch

from adasum_hvd.distributed.coefficients import Tree, constant
from adasum_hvd.distributed.communicator import Communicator
from adasum_hvd.distributed.device_slice import AnySlice
from adasum_hvd.distributed.slices import Layout

WAITING = ("cpu",)  # types of devices whose values the program waits for


def sums_by_tensor(
    values: torch.Tensor, owners: torch.Tensor, tensors: int
) -> torch.Tensor:
    """Return float64 [tensors, 2, columns]: sums of each tensor's rows, high and low parts.

    Together they have about 100 bits of the largest term. Every term is split into multiples of one
    grid, of which float64 adds that many without an error, and a rest that is split in the same way
    once more (Demmel and Nguyen, "Parallel Reproducible Summation", 2015). NaN and infinity give
    NaN. The values are float64 [rows, columns], and the owners int64 [rows] tensors.
    """
    rows, columns = values.shape
    places = owners[:, None] * columns + torch.arange(columns, device=values.device)
    places = places.flatten()
    terms = values.flatten()
    largest = terms.new_zeros(tensors * columns)
    largest.scatter_reduce_(0, places, terms.abs(), "amax")
    # Four times as many as the rows, rounded up to a power of two.
    spread = float(1 << (rows.bit_length() + 2))
    grid = largest.mul_(spread)[places]
    high = (terms + grid) - grid
    low = terms - high
    grid.mul_(spread * 2.0**-53)
    low = (low + grid) - grid
    sums = terms.new_zeros(2, tensors * columns)
    for to, part in zip(sums, (high, low), strict=True):
        to.index_add_(0, places, part)
    return sums.view(2, tensors, columns).transpose(0, 1)


class Shards(NamedTuple):
    """Tensors of which every rank of a group holds a shard."""

    communicator: Communicator
    tensors: tuple[int, ...]  # numbers in the buffer


class Exchange:
    """Tables with a row per tensor, of which each rank knows its slice's part.

    The rows of tensors that cross a border, at most two of a rank, go to all ranks. So do those of
    tensors that are sharded once more, or with `everything` all rows.
    """

    def __init__(
        self,
        layout: Layout,
        communicator: Communicator,
        device: torch.device,
        everything: bool = False,
        shards: Sequence[Shards] = (),
    ):
        self.layout, self.tensors = layout, len(layout.sizes)
        self._communicator = communicator
        self._shards = [one for one in shards if one.tensors]
        needed = {*range(self.tensors)} if everything else {*layout.split}
        needed.update(*(one.tensors for one in shards))
        parts = [[*filter(needed.__contains__, held)] for held in layout.held]
        # Rows that fill a table, and those that another rank knows, go to one tensor more.
        nobody, width = self.tensors, max(map(len, parts))
        padded = [(*part, *[nobody] * (width - len(part))) for part in parts]
        sent = set(parts[communicator.rank])
        own = [nobody if tensor in sent else tensor for tensor in range(nobody)]
        owners = (*chain(*padded), *own)
        self._sent = constant(padded[communicator.rank], torch.int64, device)
        self._owners = constant(owners, torch.int64, device)
        self.exchanged = tuple(sorted({*chain(*parts)}))

    def _rows(self, table: torch.Tensor) -> torch.Tensor:
        """Return [rows, columns]: all ranks' rows that were sent, and this rank's."""
        if not self.exchanged:
            return table
        sent = torch.cat([table, table.new_zeros((1, table.shape[1]))])[self._sent]
        return torch.cat([self._communicator.all_gather(sent).flatten(0, 1), table])

    def largest(self, values: torch.Tensor, owners: torch.Tensor) -> torch.Tensor:
        """Return float64 [tensors]: the largest of all ranks' values, float64 [blocks, 1].

        They are not negative. Collective if a tensor crosses a border.
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

    def total(
        self, sums: torch.Tensor, only: Collection[int] | None = None
    ) -> torch.Tensor:
        """Return float64 [tensors, columns]: sums over all ranks of those of this rank's slice.

        Of the tensors in `only`, if that is given: collective for the ranks that have parts of
        them, which agree on it.
        """

        def needed(tensors: Sequence[int]) -> bool:
            return only is None or not set(only).isdisjoint(tensors)

        columns = sums.shape[2]
        if self.exchanged and needed(self.exchanged):
            terms = self._rows(sums.flatten(1)).view(-1, columns)
            owners = self._owners.repeat_interleave(2)
            sums = sums_by_tensor(terms, owners, self.tensors + 1)[:-1]
        for communicator, tensors in self._shards:
            if needed(tensors):
                index = constant(tensors, torch.int64, sums.device)
                terms = communicator.all_gather(sums[index]).view(-1, columns)
                numbers = torch.arange(len(tensors), device=sums.device)
                owners = numbers.repeat_interleave(2).repeat(communicator.size)
                found = sums_by_tensor(terms, owners, len(tensors))
                sums = sums.index_copy(0, index, found)
        return sums[:, 0] + sums[:, 1]


def form_nodes(
    part: AnySlice,
    exchange: Exchange,
    tree: Tree,
    factors: torch.Tensor | None,
    sides: Sequence[torch.Tensor],
    cancelled: torch.Tensor,
    dots: torch.Tensor,
) -> torch.Tensor:
    """Return the dot products of a tier, with those of cancelled tensors from the nodes' vectors.

    The slice's vectors are multiplied by `factors`; the last three are as of `coefficients.walk`.
    Collective as `Exchange.total`: on a CPU for tensors that need it, on other devices, whose
    values the program does not wait for, for all.
    """
    only: list[int] | None = None
    if cancelled.device.type in WAITING:
        only = cancelled.nonzero().flatten().tolist()
        if not only:
            return dots
    values = part.node_products(tree, sides, factors, cancelled)
    sums = sums_by_tensor(values, part.owners, len(dots))
    formed = exchange.total(sums, only)
    return torch.where(cancelled[:, None, None], formed.view_as(dots), dots)
