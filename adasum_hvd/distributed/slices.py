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

BLOCK_ELEMENTS = 1024


class Run(NamedTuple):
    """The part of a tensor that lies in one slice."""

    tensor: int  # its number in the buffer
    start: int  # element of the slice
    elements: int  # at least 1
    whole: bool  # the run is the whole tensor


class Copy(NamedTuple):
    """Elements that lie side by side in the slice and in a chunk."""

    start: int  # element of the slice
    elements: int
    target: int  # element of the chunk, on a block border


class Chunk(NamedTuple):
    """Blocks that are worked on together; the last block of a tensor is filled with zeros."""

    first: int  # number of its first block in the slice
    tensors: tuple[int, ...]  # of each block
    copies: tuple[Copy, ...]

    @property
    def range(self) -> slice:
        """The elements of the slice, which lie side by side."""
        last = self.copies[-1]
        return slice(self.copies[0].start, last.start + last.elements)

    @property
    def only_tensor(self) -> int | None:
        """The one tensor that all blocks belong to, if there is one."""
        return self.tensors[0] if self.tensors[0] == self.tensors[-1] else None


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
    def shared(self) -> tuple[tuple[int, ...], ...]:
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
    first, tensors, copies = 0, list[int](), list[Copy]()
    for run in runs:
        done = 0
        while done < run.elements:
            room = (blocks - len(tensors)) * BLOCK_ELEMENTS
            count = min(run.elements - done, room)
            _append(
                copies, Copy(run.start + done, count, len(tensors) * BLOCK_ELEMENTS)
            )
            tensors += [run.tensor] * -(-count // BLOCK_ELEMENTS)
            done += count
            if len(tensors) == blocks:
                yield Chunk(first, tuple(tensors), tuple(copies))
                first, tensors, copies = first + blocks, [], []
    if tensors:
        yield Chunk(first, tuple(tensors), tuple(copies))


def _append(copies: list[Copy], new: Copy) -> None:
    """Append a copy, or extend the last one if the new copy continues it."""
    if copies:
        start, elements, target = copies[-1]
        if (start + elements, target + elements) == (new.start, new.target):
            copies[-1] = Copy(start, elements + new.elements, target)
            return
    copies.append(new)
