"""Do all ranks still do the same? Asked every tenth round of reductions.

A rank that leaves out a `step()`, another learning rate, or weights that somebody else has
changed: nothing of that shows in a reduction, whose tensors pair up by name, and the replicas
part without a word. So the ranks say now and then what each of them has done so far.
"""

from __future__ import annotations

import numbers
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from horovod.torch import mpi_ops

from adasum_hvd.common import ops
from adasum_hvd.common.options import ProcessSet
from adasum_hvd.torch import ops as torch_ops

EVERY = 10  # rounds; a question is one small message that all wait for
Fact = tuple[float, str, str]  # value, what this rank has, what to do
_epoch = 0  # how often all ranks have joined


def join(device: int = -1) -> int:
    """Take part in the others' reductions with zeros until all have joined; as Horovod's.

    Ranks have taken different numbers of steps by then: distributed optimizers count anew.
    Broadcast the parameters before training goes on.

    Args:
        device: where the zeros are made: a CUDA device's number, or -1 for the CPU.

    Returns:
        The rank that joined last.

    Raises:
        HorovodInternalError: another rank failed.

    Collective: every rank; blocks until all have joined.
    """
    global _epoch
    last = mpi_ops.join(device)
    _epoch += 1
    return last


def epoch() -> int:
    """Return how often all ranks have joined."""
    return _epoch


class Rounds:
    """Counts rounds of reductions, which all ranks take together, and compares facts.

    Args:
        name: the same on all ranks, of one optimizer only.
        process_set: the ranks that reduce.
    """

    def __init__(self, name: str, process_set: ProcessSet):
        self._name, self._process_set = name, process_set
        self._round = self._steps = 0
        self._epoch = epoch()

    def note_step(self) -> None:
        """Count a step."""
        self._begin_epoch()
        self._steps += 1

    def _begin_epoch(self) -> None:
        if self._epoch != epoch():
            self._round, self._steps, self._epoch = 0, 0, epoch()

    def next(
        self,
        facts_of: Callable[[], Mapping[str, Fact]],
        has_news: Callable[[], bool],
    ) -> bool:
        """Begin a round; the first one and every tenth after it compare. Collective; blocks there.

        Args:
            facts_of: returns, by name, what must be the same on all ranks beside the number of
                steps: its value (an integer below 2**53), what this rank has in words, and
                what to do about it.
            has_news: returns whether this rank has news for the others.

        Returns:
            Whether any rank has news; the same on all ranks.

        Raises:
            RuntimeError: the ranks differ; on every rank.
        """
        self._begin_epoch()
        due, self._round = self._round % EVERY == 0, self._round + 1
        if not due:
            return False
        steps = (
            float(self._steps),
            f"which has taken {self._steps}",
            "a rank that leaves out a step() after a backward pass must not do so alone: agree on "
            "it, or let all ranks step; the replicas differ now",
        )
        facts = {"number of steps": steps, **facts_of()}
        told = self._told([*(value for value, _, _ in facts.values()), has_news()])
        for column, (what, fact) in enumerate(facts.items()):
            _compare(what, fact, {rank: said[column] for rank, said in told.items()})
        return any(said[-1] for said in told.values())

    def ask(self, what: str, value: float) -> dict[int, float]:
        """Return what every rank says, by rank; ranks that have joined are left out.

        Args:
            what: part of the message's name.
            value: an integer below 2**53.

        Collective; blocks.
        """
        return {rank: said for rank, (said,) in self._told([value], what).items()}

    def _told(
        self, values: Sequence[float], what: str = "next"
    ) -> dict[int, list[float]]:
        """Return all ranks' values, as many on each, by rank."""
        ranks = list(self._process_set.ranks)
        # One row a rank, zeros from all others: an exact sum, in which a rank that has joined
        # takes part, too. One more than the value, so that zero means "has joined".
        rows = torch.zeros(len(ranks), len(values), dtype=torch.float64)
        mine = torch.tensor(values, dtype=torch.float64)
        rows[ranks.index(mpi_ops.rank())] = 1 + mine
        everyone = torch_ops.allreduce(
            rows, name=f"{self._name}.{what}", op=ops.Sum, process_set=self._process_set
        )
        pairs = zip(ranks, everyone.tolist(), strict=True)
        return {rank: [v - 1 for v in said] for rank, said in pairs if any(said)}


def _compare(what: str, fact: Fact, values: Mapping[int, float]) -> None:
    told = list(values.values())
    usual = max(told, key=lambda value: (told.count(value), value))
    others = [rank for rank, value in values.items() if value != usual]
    if others:
        _, here, remedy = fact
        raise RuntimeError(
            f"DistributedOptimizer: required the same {what} on all ranks, got another on "
            f"ranks {others} than on the rest of {list(values)} (this is rank "
            f"{mpi_ops.rank()}, {here}); {remedy}"
        )


def checksum(text: str) -> float:
    """Return a number that is another one, most likely, for another text."""
    return float(zlib.crc32(text.encode()))


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a tensor's bits, in which NaN equals itself."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(kinds[tensor.element_size()])


def bits_of(tensors: Sequence[torch.Tensor]) -> int:
    """Return a number that is another one, most likely, where a bit of the tensors is."""
    total = 0
    for position, tensor in enumerate(tensors):
        bits = as_integers(tensor.detach().contiguous())
        total = (total * 31 + position + int(bits.sum(dtype=torch.int64))) % (1 << 52)
    return total


def group_options(param_groups: Sequence[Mapping[str, Any]]) -> str:
    """Return the hyperparameters in words: all numbers and flags of all groups."""

    def word(value: Any) -> Any:
        if isinstance(value, torch.Tensor):  # one on a device would cost a wait for it
            return value.item() if value.numel() == 1 and value.is_cpu else "tensor"
        if isinstance(value, tuple | list):
            return [word(item) for item in value]
        if isinstance(value, numbers.Real):
            return float(value)
        return value if isinstance(value, str | type(None)) else type(value).__name__

    return "; ".join(
        ", ".join(
            f"{key}={word(value)}"
            for key, value in sorted(group.items())
            if key not in ("params", "param_names")
        )
        for group in param_groups
    )
