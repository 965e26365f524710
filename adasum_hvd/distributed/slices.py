"""Which elements of a flat buffer a rank reduces, and the blocks in which it reads them.

A flat buffer holds tensors end to end and is cut into one slice per rank. Blocks are counted from
each tensor's own start and no slice border lies inside one, so that the sums over a block do not
depend on the buffer that the tensor is in.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import NamedTuple

BLOCK_ELEMENTS = 4096  # between slice borders; one program of a kernel works on them
PADDED_ELEMENTS = 1024  # of torch's operations, which fill each tensor's last block


class Run(NamedTuple):
    """The part of a tensor that lies in one slice."""

    tensor: int  # its number in the buffer
    start: int  # element of the slice
    elements: int  # at least 1
    whole: bool  # the run is the whole tensor


@dataclass(frozen=True)
class Chunk:
    """Blocks that are worked on together; the last block of a tensor is filled with zeros."""

    first: int  # number of its first block in the slice
    start: int  # its first element in the slice
    tensors: tuple[int, ...]  # of each block
    counts: tuple[
        int, ...
    ]  # elements of each of its runs, which lie end to end in the slice

    @property
    def range(self) -> slice:
        """The elements of the slice."""
        return slice(self.start, self.start + sum(self.counts))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The elements of each run, and of the filling after it."""
        return tuple(
            n for count in self.counts for n in (count, -count % PADDED_ELEMENTS)
        )

    @property
    def is_filled(self) -> bool:
        """Whether a run has filling after it."""
        return any(self.sizes[1::2])


@dataclass(frozen=True)
class Layout:
    """A buffer of tensors with these element counts, cut into one slice per rank.

    Args:
        sizes: elements of every tensor; zero is allowed.
        ranks: how many slices.
    """

    sizes: tuple[int, ...]
    ranks: int

    @cached_property
    def bounds(self) -> tuple[int, ...]:
        """The first element of every slice, and the end of the buffer."""
        elements = sum(self.sizes)
        ends = list(accumulate(self.sizes))
        borders, tensor = [0], 0
        for part in range(1, self.ranks):
            target = elements * part // self.ranks
            while tensor < len(ends) and ends[tensor] < target:
                tensor += 1
            if tensor == len(ends):
                borders.append(elements)
                continue
            start = ends[tensor] - self.sizes[tensor]
            blocks = -(-(target - start) // BLOCK_ELEMENTS)
            borders.append(min(start + blocks * BLOCK_ELEMENTS, ends[tensor]))
        return (*borders, elements)

    @cached_property
    def runs(self) -> tuple[tuple[Run, ...], ...]:
        """By rank, what its slice consists of."""
        return tuple(map(self._runs_of, range(self.ranks)))

    def _runs_of(self, rank: int) -> tuple[Run, ...]:
        begin, end = self.bounds[rank], self.bounds[rank + 1]
        runs, start = [], 0
        for tensor, size in enumerate(self.sizes):
            first, last = max(start, begin), min(start + size, end)
            if first < last:
                runs.append(
                    Run(tensor, first - begin, last - first, last - first == size)
                )
            start += size
        return tuple(runs)

    @cached_property
    def split(self) -> tuple[tuple[int, ...], ...]:
        """By rank, the tensors of which it holds a part only: at most two."""
        return tuple(
            tuple(run.tensor for run in runs if not run.whole) for runs in self.runs
        )

    @cached_property
    def held(self) -> tuple[tuple[int, ...], ...]:
        """By rank, the tensors of which it holds any element."""
        return tuple(tuple(run.tensor for run in runs) for runs in self.runs)


@lru_cache(maxsize=1024)
def layout_of(sizes: tuple[int, ...], ranks: int) -> Layout:
    """Return the layout, which is computed once."""
    return Layout(sizes, ranks)


@lru_cache(maxsize=1024)
def chunks_of(runs: Sequence[Run], blocks: int) -> tuple[Chunk, ...]:
    """Return the runs as chunks of at most `blocks` blocks."""
    return tuple(_chunks(runs, blocks))


def _chunks(runs: Sequence[Run], blocks: int) -> Iterator[Chunk]:
    first, start, tensors, counts = 0, 0, list[int](), list[int]()
    for run in runs:
        left = run.elements
        while left:
            counts.append(min(left, (blocks - len(tensors)) * PADDED_ELEMENTS))
            tensors += [run.tensor] * -(-counts[-1] // PADDED_ELEMENTS)
            left -= counts[-1]
            if len(tensors) == blocks:
                yield Chunk(first, start, tuple(tensors), tuple(counts))
                first, start, tensors, counts = (
                    first + blocks,
                    start + sum(counts),
                    [],
                    [],
                )
    if tensors:
        yield Chunk(first, start, tuple(tensors), tuple(counts))
