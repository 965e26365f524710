"""Checks that find replicas that would diverge silently.

If one rank skips a `step()`, has another learning rate or changes weights, reductions still
succeed. So the ranks compare these in a small message, in the first and in every tenth reduction.
"""

from __future__ import annotations

import numbers
import warnings
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from horovod.torch import mpi_ops

from adasum_hvd.base import ops
from adasum_hvd.base.agreement import HYPERPARAMETERS, compare_settings
from adasum_hvd.base.options import ProcessSet
from adasum_hvd.torch import ops as torch_ops
from adasum_hvd.torch.objects import allgather_object

EVERY = 10  # rounds; all ranks wait for the message
_epoch = 0  # how often all ranks have joined


def join(device: int = -1) -> int:
    """Contribute zeros to the other ranks' reductions until all have joined; as Horovod's.

    Ranks have then taken different numbers of steps: distributed optimizers reset their counts.
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


class ConsistencyCheck:
    """Counts rounds of reductions, and compares the ranks; by a name unique to the optimizer."""

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

    def next_round(
        self,
        settings_of: Callable[[bool], Mapping[str, Any]],
        has_report: Callable[[], bool],
        own_names: Callable[[], Collection[str]] = tuple,
    ) -> bool:
        """Begin a round; return whether any rank has a report. Collective; blocks if it is due.

        `settings_of` gets whether this is the first round. RuntimeError on every rank if settings
        differ that are not among any rank's `own_names`.
        """
        is_due, number = self.is_due, self._round
        self._round += 1
        if not is_due:
            return False
        settings = settings_of(number == 0)
        checksum = zlib.crc32(repr(settings).encode())
        by_rank = self.gather("next", [self._steps, checksum, has_report()])
        _compare_steps({rank: steps for rank, (steps, _, _) in by_rank.items()})
        if len({checksum for _, checksum, _ in by_rank.values()}) > 1:
            self._name_difference(settings, own_names())
        return any(report for _, _, report in by_rank.values())

    def _name_difference(
        self, settings: Mapping[str, Any], own_names: Collection[str]
    ) -> None:
        """Raise RuntimeError with the first setting that must not differ. Collective."""
        gathered = allgather_object(
            (settings, own_names), f"{self._name}.settings", self._process_set
        )
        own = set().union(*(names for _, names in gathered))
        of_ranks = [
            {name: value for name, value in each.items() if name not in own}
            for each, _ in gathered
        ]
        try:
            compare_settings(
                of_ranks, mpi_ops.rank(), *HYPERPARAMETERS, self._process_set.ranks
            )
        except ValueError as error:
            raise RuntimeError(str(error)) from None

    @property
    def is_due(self) -> bool:
        """Whether the next round compares."""
        self._begin_epoch()
        return self._round % EVERY == 0

    def message_name(self, what: str) -> str:
        """Return the name of a message in Horovod: "next", or the `what` of :meth:`gather`."""
        return f"{self._name}.{what}"

    def ask(self, what: str, value: float) -> dict[int, float]:
        """Return the value of every rank, as :meth:`gather`."""
        return {rank: found[0] for rank, found in self.gather(what, [value]).items()}

    def gather(self, what: str, values: Sequence[float]) -> dict[int, list[float]]:
        """Return all ranks' integers, below 2**53, by rank, without joined ranks. Collective."""
        ranks = list(self._process_set.ranks)
        # One row a rank, zeros from all others: an exact sum, to which ranks that have joined
        # contribute zeros. Rows hold the value plus one, so that zero means "has joined".
        rows = torch.zeros(len(ranks), len(values), dtype=torch.float64)
        mine = torch.tensor(values, dtype=torch.float64)
        rows[ranks.index(mpi_ops.rank())] = 1 + mine
        where = {"name": self.message_name(what), "process_set": self._process_set}
        everyone = torch_ops.allreduce(rows, op=ops.Sum, **where)
        pairs = zip(ranks, everyone.tolist(), strict=True)
        return {rank: [v - 1 for v in row] for rank, row in pairs if any(row)}


def _compare_steps(by_rank: Mapping[int, float]) -> None:
    steps = list(by_rank.values())
    usual = max(steps, key=lambda value: (steps.count(value), value))
    others = [rank for rank, value in by_rank.items() if value != usual]
    if others:
        rank = mpi_ops.rank()
        raise RuntimeError(
            "DistributedOptimizer: expected the same number of steps on all ranks, but got another "
            f"on ranks {others} than on the rest of {list(by_rank)} (seen by rank {rank}, which "
            f"has taken {by_rank[rank]:.0f}); a rank that leaves out a step() after a backward "
            "pass must not do so alone: agree on it, or let all ranks step; the replicas differ now"
        )


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a tensor's bits, in which NaN equals itself."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(kinds[tensor.element_size()])


def checksum_of(tensors: Sequence[torch.Tensor]) -> int:
    """Return a checksum of the tensors' bits and of their order, below 2**32."""
    checksum = 0
    for tensor in tensors:
        bits = as_integers(tensor.detach().contiguous()).cpu()
        checksum = zlib.crc32(bits.numpy(), checksum)
    return checksum


def hyperparameters(param_groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the hyperparameters by name: all numbers and flags of all groups."""

    def word(value: Any) -> Any:
        if isinstance(value, torch.Tensor):  # reading a device tensor would stall
            return value.item() if value.numel() == 1 and value.is_cpu else "tensor"
        if isinstance(value, tuple | list):
            return [word(item) for item in value]
        if isinstance(value, numbers.Real):
            return float(value)
        return value if isinstance(value, str | type(None)) else type(value).__name__

    return {
        key if len(param_groups) == 1 else f"param_groups[{index}].{key}": word(value)
        for index, group in enumerate(param_groups)
        for key, value in sorted(group.items())
        if key not in ("params", "param_names")
    }


class MissedStepCheck:
    """Check for dropped gradients and changed weights without a `step()`, as SAM's own steps do."""

    def __init__(self) -> None:
        self._stepped = True
        self._warned = False
        self._changes = 0
        self._versions: list[int] | None = None

    def forget(self) -> None:
        """Reset, because a step was taken."""
        self._stepped, self._changes, self._versions = True, 0, None

    def note(self, parameters: Iterable[torch.Tensor]) -> None:
        """Check a `zero_grad()`; the third in a row that drops gradients of new weights warns."""
        parameters = list(parameters)
        stepped, self._stepped = self._stepped, False
        if stepped or all(p.grad is None for p in parameters):
            return
        before, self._versions = self._versions, [p._version for p in parameters]
        self._changes += before is not None and before != self._versions
        if self._changes == 2 and not self._warned:
            self._warned = True
            warnings.warn(
                "DistributedOptimizer: expected step() between backward and zero_grad(), but got "
                "weights that change without it: nothing is reduced then, and replicas diverge. "
                "An optimizer with calls of its own (SAM's first_step and second_step) must get "
                "the distributed one as its base optimizer, or be called as step(closure)",
                stacklevel=5,
            )
