"""Which elements of a flat buffer a rank reduces, and the blocks in which it reads them.

Why blocks begin at a tensor's own start: docs/internals.md, "Same bits".
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, groupby, pairwise
from operator import attrgetter
from typing import NamedTuple

BLOCK_ELEMENTS = 4096  # between slice borders; one program of a kernel works on them
PADDED_ELEMENTS = 1024  # of torch's operations, which fill each tensor's last block


class Run(NamedTuple):
    """The part of a tensor that lies in one slice."""

    tensor: int  # its number in the buffer
    start: int  # element of the slice
    elements: int  # at least 1
    whole: bool  # the run is the whole tensor


class Block(NamedTuple):
    """Elements of one tensor in a slice."""

    start: int  # element of the slice
    elements: int
    tensor: int


class Chunk(NamedTuple):
    """Blocks that are worked on together; the last block of a tensor is filled with zeros."""

    first: int  # number of its first block in the slice
    range: slice  # its elements of the slice
    tensors: tuple[int, ...]  # of each block
    counts: tuple[int, ...]  # elements of each tensor, which lie end to end
    sizes: tuple[int, ...]  # the same, each followed by the elements of the filling


@dataclass(frozen=True)
class Layout:
    """A buffer of tensors with these element counts, cut into one slice per rank."""

    sizes: tuple[int, ...]  # zero is allowed
    ranks: int

    @cached_property
    def bounds(self) -> tuple[int, ...]:
        """The first element of every slice, and the end of the buffer."""
        starts = [*accumulate(self.sizes or (0,), initial=0)]
        borders = [0]
        for part in range(1, self.ranks):
            target = starts[-1] * part // self.ranks
            # The end of the tensor that the border is in.
            end = bisect_left(starts, target, lo=1)
            blocks = -(-(target - starts[end - 1]) // BLOCK_ELEMENTS)
            border = starts[end - 1] + blocks * BLOCK_ELEMENTS
            borders.append(min(border, starts[end]))
        return (*borders, starts[-1])

    @cached_property
    def runs(self) -> tuple[tuple[Run, ...], ...]:
        """By rank, what its slice consists of."""
        found = []
        for begin, end in pairwise(self.bounds):
            runs, start = [], 0
            for tensor, size in enumerate(self.sizes):
                first, last = max(start, begin), min(start + size, end)
                if first < last:
                    count = last - first
                    runs.append(Run(tensor, first - begin, count, count == size))
                start += size
            found.append(tuple(runs))
        return tuple(found)

    @cached_property
    def parts(self) -> tuple[tuple[int, ...], ...]:
        """By rank, the elements of each tensor in its slice."""
        found = [{run.tensor: run.elements for run in runs} for runs in self.runs]
        every = range(len(self.sizes))
        return tuple(tuple(own.get(k, 0) for k in every) for own in found)

    @cached_property
    def split(self) -> frozenset[int]:
        """The tensors that cross a border: at most two of a slice."""
        every = (run for runs in self.runs for run in runs)
        return frozenset(run.tensor for run in every if not run.whole)

    @cached_property
    def held(self) -> tuple[tuple[int, ...], ...]:
        """By rank, the tensors of which it holds any element."""
        return tuple(tuple(run.tensor for run in runs) for runs in self.runs)


layout_of = lru_cache(maxsize=1024)(Layout)


def blocks_of(runs: tuple[Run, ...], elements: int) -> list[Block]:
    """Return the blocks of runs, each of at most so many elements."""
    return [
        Block(run.start + at, min(elements, run.elements - at), run.tensor)
        for run in runs
        for at in range(0, run.elements, elements)
    ]


@lru_cache(maxsize=1024)
def chunks_of(runs: tuple[Run, ...], most: int) -> tuple[Chunk, ...]:
    """Return the padded blocks of runs as chunks of at most `most` blocks."""
    blocks, found = blocks_of(runs, PADDED_ELEMENTS), []
    for first in range(0, len(blocks), most):
        some = blocks[first : first + most]
        counts = tuple(
            sum(block.elements for block in own)
            for _, own in groupby(some, attrgetter("tensor"))
        )
        sizes = (size for n in counts for size in (n, -n % PADDED_ELEMENTS))
        place = slice(some[0].start, some[0].start + sum(counts))
        tensors = tuple(block.tensor for block in some)
        found.append(Chunk(first, place, tensors, counts, tuple(sizes)))
    return tuple(found)
