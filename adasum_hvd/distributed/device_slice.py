"""A rank's slice of all ranks' buffers on a CUDA device, worked on by `triton_kernels`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import combinations_with_replacement
from typing import Any

import torch

from adasum_hvd.base.options import turned_off
from adasum_hvd.distributed.blocks import Slice
from adasum_hvd.distributed.coefficients import Tree, constant, tree_of
from adasum_hvd.distributed.slices import BLOCK_ELEMENTS, Run, blocks_of

SETTING = "ADASUM_HVD_TRITON"  # turned off: torch's operations
OLDEST = (3, 6)  # whose kernels take tuples
RANKS_AT_ONCE = 8  # whose dot products one pass forms; of more, those of 8 with 8
TILE_ELEMENTS = 1024  # that `combine_kernel` works on together
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
ADD = -1


@lru_cache(maxsize=1024)
def table_of(
    runs: tuple[Run, ...], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return blocks' starts (int64), counts (int32) and owners (int64), sent to a device once."""
    blocks = blocks_of(runs, BLOCK_ELEMENTS)
    table = torch.tensor(blocks, dtype=torch.int64).view(-1, 3).T.contiguous()
    starts, counts, owners = table.to(device).unbind()
    return starts, counts.int(), owners


@lru_cache(maxsize=1024)
def program(tree: Tree, tier: int, node: int, by_sides: bool) -> tuple[int, ...]:
    """Return the steps that form a node in postfix order, with the fewest vectors at a time.

    A step is the number of a rank, whose vector is pushed; `ADD`; or `ADD - 1 - column`, an
    addition of vectors that are multiplied by the sides in this and the next column. So many tiers
    come before the node, which goes by its first rank. If not `by_sides`, all merges only add.
    """
    columns = [sum(2 * len(t.left) for t in tree.tiers[:k]) for k in range(tier)]
    for k in reversed(range(tier)):
        merges = zip(*tree.tiers[k], strict=True)
        for merge, (left, right, by_adasum) in enumerate(merges):
            if left == node:
                multiplied = by_sides and by_adasum
                step = ADD - 1 - (columns[k] + 2 * merge) if multiplied else ADD
                sides = (program(tree, k, side, by_sides) for side in (left, right))
                return (*next(sides), *next(sides), step)
    return (node,)


class DeviceSlice:
    """The same elements of every rank's buffer, with the methods of `blocks.Slice`.

    `node_products` returns zeros for tensors that are not `cancelled`, `largest` infinity for NaN.
    """

    devices = ("cuda",)  # types of devices that have the kernels

    def __init__(self, rows: Sequence[torch.Tensor], runs: tuple[Run, ...]):
        from adasum_hvd.distributed import triton_kernels

        self._kernels: Any = triton_kernels
        self._rows = tuple(rows)
        self.dtype, self._device = rows[0].dtype, rows[0].device
        self._table = table_of(runs, self._device)
        self.owners = self._table[-1]
        self._width = 16 // self.dtype.itemsize

    def _start(self, kernel: Any, *words: Any, **constants: Any) -> None:
        """Start one program per block, on the current stream of the slice's device."""
        if blocks := len(self.owners):
            with torch.cuda.device_of(self._rows[0]):
                kernel[(blocks,)](*words, **constants, width=self._width, **OPTIONS)

    def _empty(self, columns: int) -> torch.Tensor:
        shape = len(self.owners), columns
        return torch.empty(shape, dtype=torch.float64, device=self._device)

    def largest(self) -> torch.Tensor:
        """As of `blocks.Slice`."""
        found = self._empty(1)
        self._start(self._kernels.largest_kernel, self._rows, *self._table[:2], found)
        return found

    def gram(self, factors: torch.Tensor | None) -> torch.Tensor:
        """As of `blocks.Slice`."""
        ranks = len(self._rows)
        found, column = self._empty(ranks * (ranks + 1) // 2), 0
        tiles = _tiles(ranks)
        for left, right in tiles:
            chosen = (*left, *right)
            own = None if factors is None else factors[:, chosen].contiguous()
            self._start(
                self._kernels.gram_kernel,
                tuple(self._rows[rank] for rank in chosen),
                *self._table,
                found if own is None else own,
                found[:, column:],
                found.shape[1],
                _aligned(self._rows),
                lefts=len(left) if right else 0,
                scaled=own is not None,
            )
            column += len(_pairs(left, right))
        if len(tiles) == 1:
            return found
        return found[:, constant(_places(ranks), torch.int64, self._device)]

    def node_products(
        self,
        tree: Tree,
        sides: Sequence[torch.Tensor],
        factors: torch.Tensor | None,
        cancelled: torch.Tensor,
    ) -> torch.Tensor:
        """As of `blocks.Slice`."""
        number, tier = len(sides), tree.tiers[len(sides)]
        found = self._empty(3 * len(tier.left)).zero_()
        asked = cancelled.to(torch.int8)
        known = torch.cat([side.flatten(1) for side in sides], 1)
        own = known if factors is None else factors.contiguous()
        for merge, nodes in enumerate(zip(tier.left, tier.right, strict=True)):
            left, right = (program(tree, number, node, True) for node in nodes)
            self._start(
                self._kernels.nodes_kernel,
                self._rows,
                *self._table,
                asked,
                own,
                known,
                found[:, 3 * merge :],
                found.shape[1],
                known.shape[1],
                left=left,
                right=right,
                scaled=factors is not None,
            )
        return found

    def combine(
        self,
        tree: Tree,
        coefficients: torch.Tensor,
        scale: torch.Tensor | None,
        result: torch.Tensor,
    ) -> None:
        """As of `blocks.Slice`."""
        factors = coefficients if scale is None else coefficients * scale[:, None]
        self._start(
            self._kernels.combine_kernel,
            self._rows,
            result,
            *self._table,
            factors.contiguous(),
            factors if scale is None else scale,
            _aligned((*self._rows, result)),
            program=program(tree, len(tree.tiers), 0, False),
            tile=TILE_ELEMENTS,
            scaled=scale is not None,
        )


AnySlice = Slice | DeviceSlice


def slice_of(rows: Sequence[torch.Tensor], runs: tuple[Run, ...]) -> AnySlice:
    """Return a slice that Triton's kernels work on if they can, or else torch's operations."""
    device = rows[0].device
    if device.type in DeviceSlice.devices and not why_not(device):
        return DeviceSlice(rows, runs)
    return Slice(rows, runs)


@lru_cache
def why_not(device: torch.device) -> str:
    """Return why a device's tensors are not reduced by Triton's kernels; "" if they are.

    A first reduction by them is compared with torch's, because Triton finds out only then whether
    there is a C compiler, and whether it knows the device.
    """
    if off := turned_off(SETTING):
        return off
    if torch.version.hip:
        return "not tried on ROCm"
    try:
        import triton

        version = tuple(map(int, triton.__version__.split(".")[:2]))
        if version < OLDEST:
            return f"Triton {triton.__version__} is older than {OLDEST[0]}.{OLDEST[1]}"
        if not all(_agrees(dtype, device) for dtype in (torch.float32, torch.bfloat16)):
            return (
                "Triton's results are not those of torch's operations; please report it"
            )
    except Exception as error:
        first = (str(error) or type(error).__name__).splitlines()[0]
        return f"Triton: {first}"
    return ""


def _agrees(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether kernels and torch's operations give one result, of a whole block and more."""
    count = BLOCK_ELEMENTS + 2
    values = torch.arange(2 * count, device=device).view(2, -1)
    # Sums of squares are exact.
    rows = ((values * 37 % 101 - 50) / 8).to(dtype).unbind()
    runs, tree = (Run(0, 0, count, True),), tree_of((0, 0), "adasum", 0)
    coefficients = torch.tensor([[0.75, 0.625]], dtype=torch.float64, device=device)
    found = []
    for part in (Slice(rows, runs), DeviceSlice(rows, runs)):
        result = torch.empty_like(rows[0])
        part.combine(tree, coefficients, None, result)
        found.append((part.gram(None).sum(0), result))
    return all(map(torch.equal, *found))


def described(device: torch.device) -> str:
    """Return how a device's tensors are reduced, and why not by Triton's kernels."""
    missing = why_not(device)
    return f"torch's operations ({missing})" if missing else "Triton's kernels"


def _aligned(rows: Sequence[torch.Tensor]) -> int:
    return int(all(row.data_ptr() % 16 == 0 for row in rows))


def _tiles(ranks: int) -> list[tuple[range, range]]:
    """Return the ranks whose dot products are formed in one pass; no second ones: all pairs."""
    groups = [
        range(ranks)[first : first + RANKS_AT_ONCE]
        for first in range(0, ranks, RANKS_AT_ONCE)
    ]
    return [
        (group, range(0) if group is other else other)
        for group, other in combinations_with_replacement(groups, 2)
    ]


def _pairs(left: range, right: range) -> list[tuple[int, int]]:
    """Return the pairs of a tile in the order of `gram_kernel`."""
    return [(i, j) for i in left for j in (right or range(i, left.stop))]


@lru_cache(maxsize=256)
def _places(ranks: int) -> tuple[int, ...]:
    """Return for each pair of the upper triangle its place in the tiles."""
    pairs = [pair for tile in _tiles(ranks) for pair in _pairs(*tile)]
    return tuple(sorted(range(len(pairs)), key=pairs.__getitem__))
