"""A rank's slice of all ranks' buffers, worked on in float64 blocks that fit the cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from adasum_hvd.distributed.coefficients import Tree, constant
from adasum_hvd.distributed.slices import PADDED_ELEMENTS, Chunk, Run, chunks_of

# Float64 elements that are worked on together, of all ranks: 2 MiB, or 16 MiB where a kernel has
# to be started for every step.
_ELEMENTS = {"cpu": 1 << 18}
_ELEMENTS_ON_DEVICE = 1 << 21
# Ranks whose dot products one call of the matrix library forms. In larger products it adds up some
# of them in another order than others, and identical vectors would not give identical numbers.
_TILE = 4


class Slice:
    """The same elements of every rank's buffer.

    Args:
        rows: every rank's, one-dimensional, all of one floating dtype.
        runs: which tensors they are.

    Attributes:
        owners: int64 [blocks], the tensor of each block.

    `factors`, float64 [tensors, ranks], are what methods multiply the ranks' vectors by.
    """

    def __init__(self, rows: Sequence[torch.Tensor], runs: tuple[Run, ...]):
        self._rows = rows
        self.dtype, device = rows[0].dtype, rows[0].device
        elements = _ELEMENTS.get(device.type, _ELEMENTS_ON_DEVICE)
        most = max(1, elements // len(rows) // PADDED_ELEMENTS)
        self._chunks = chunks_of(runs, most)
        tensors = tuple(tensor for chunk in self._chunks for tensor in chunk.tensors)
        self.owners = constant(tensors, torch.int64, device)
        filled = len(rows) + (-len(rows) % _TILE if len(rows) > _TILE else 0)
        self._space = torch.empty(
            (filled, min(most, len(tensors)), PADDED_ELEMENTS),
            dtype=torch.float64,
            device=device,
        )
        self._space[len(rows) :].zero_()

    def _load(self, chunk: Chunk, factors: torch.Tensor | None = None) -> torch.Tensor:
        """Return float64 [ranks, blocks, PADDED_ELEMENTS], until the next chunk is loaded."""
        blocks = self._space[:, : len(chunk.tensors)]
        flat = self._space.flatten(1)[: len(self._rows), : sum(chunk.sizes)]
        if any(chunk.sizes[1::2]):
            flat.zero_()
        for row, to in zip(self._rows, flat, strict=True):
            parts = to.split(chunk.sizes)[::2]
            torch._foreach_copy_(parts, row[chunk.range].split(chunk.counts))
        if factors is not None:
            own = blocks[: len(self._rows)]
            own.mul_(self._by_block(chunk, factors).movedim(-1, 0)[..., None])
        return blocks

    def _by_block(self, chunk: Chunk, values: torch.Tensor) -> torch.Tensor:
        """Return [blocks, ...] of [tensors, ...]."""
        return values[self.owners[chunk.first : chunk.first + len(chunk.tensors)]]

    def largest(self) -> torch.Tensor:
        """Return float64 [blocks, 1]: the largest magnitude of any rank."""
        found = [self._load(chunk).abs().amax((0, 2)) for chunk in self._chunks]
        return torch.cat([*found, self._space.new_empty(0)])[:, None]

    def gram(self, factors: torch.Tensor | None) -> torch.Tensor:
        """Return float64 [blocks, N (N + 1) / 2]: the upper triangles of their Gram matrices."""
        ranks, filled = len(self._rows), len(self._space)
        matrices = self._space.new_empty((len(self.owners), filled, filled))
        tiles = [slice(first, first + _TILE) for first in range(0, filled, _TILE)]
        for chunk in self._chunks:
            blocks = self._load(chunk, factors)
            to = matrices[chunk.first : chunk.first + blocks.shape[1]]
            for number, left in enumerate(tiles):
                for right in tiles[number:]:
                    to[:, left, right] = _products(blocks[left], blocks[right])
        rows, columns = torch.triu_indices(ranks, ranks, device=matrices.device)
        return matrices[:, rows, columns]

    def _nodes(
        self,
        chunk: Chunk,
        tree: Tree,
        sides: Sequence[torch.Tensor],
        factors: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the blocks with each node, after as many tiers, in its first rank's place."""
        blocks = self._load(chunk, factors)
        for tier, side in zip(tree.tiers, sides, strict=False):
            by_block = self._by_block(chunk, side)
            for merge, (left, right, by_adasum) in enumerate(zip(*tier, strict=True)):
                if by_adasum:
                    blocks[left].mul_(by_block[:, merge, 0, None])
                    blocks[right].mul_(by_block[:, merge, 1, None])
                blocks[left].add_(blocks[right])
        return blocks

    def node_products(
        self,
        tree: Tree,
        sides: Sequence[torch.Tensor],
        factors: torch.Tensor | None,
        cancelled: torch.Tensor,
    ) -> torch.Tensor:
        """Return float64 [blocks, 3 x merges]: dot products of the nodes of the next tier.

        They are `left.left`, `left.right` and `right.right`; of tensors that have not cancelled
        perhaps zeros. The sides are of the tiers before, as of `coefficients.walk`.
        """
        tier = tree.tiers[len(sides)]
        found = self._space.new_zeros((len(self.owners), len(tier.left), 3))
        for chunk in self._chunks:
            if cancelled.is_cpu and not self._by_block(chunk, cancelled).any():
                continue
            blocks = self._nodes(chunk, tree, sides, factors)
            to = found[chunk.first : chunk.first + blocks.shape[1]]
            for merge, (left, right, _) in enumerate(zip(*tier, strict=True)):
                both = blocks[left : right + 1 : right - left]
                products = _products(both, both)
                to[:, merge, :2], to[:, merge, 2] = products[:, 0], products[:, 1, 1]
        return found.flatten(1)

    def combine(
        self,
        tree: Tree,
        coefficients: torch.Tensor,
        scale: torch.Tensor | None,
        result: torch.Tensor,
    ) -> None:
        """Write the sum of the ranks' vectors times their coefficients, rounded once.

        In the order of the tree, in which identical vectors with powers of two add up to
        themselves. Sums are formed of vectors times `scale`, float64 [tensors], and divided by it.
        The result may be a row.
        """
        factors = coefficients if scale is None else coefficients * scale[:, None]
        pairs = [pair for tier in tree.tiers for pair in zip(*tier[:2], strict=True)]
        for chunk in self._chunks:
            blocks = self._load(chunk, factors)
            for left, right in pairs:
                blocks[left].add_(blocks[right])
            if scale is not None:
                blocks[0].div_(self._by_block(chunk, scale)[:, None])
            parts = blocks[0].view(-1).split(chunk.sizes)[::2]
            torch._foreach_copy_(result[chunk.range].split(chunk.counts), parts)


def _products(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return [blocks, K, L], block by block the dot products of [K, blocks, PADDED_ELEMENTS]."""
    count = left.shape[1]
    if count == 1:  # on CUDA it would have other bits than as one of several
        left, right = left.expand(-1, 2, -1), right.expand(-1, 2, -1)
    return torch.bmm(left.permute(1, 0, 2), right.permute(1, 2, 0))[:count]
