"""The delta variant: each rank takes its own optimizer step, and AdaSum joins weight changes.

References:
    arXiv 2006.02924, section 4; adasum_hvd/torch/optimizer/delta.py for Horovod.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from adasum_hvd.common.frames import is_making_state
from adasum_hvd.common.marks import is_marked_local
from adasum_hvd.distributed import duplicate_weights
from adasum_hvd.distributed.all_reduce import adasum_all_reduce
from adasum_hvd.distributed.communicator import Communicator
from adasum_hvd.distributed.rules import Coefficients

__all__ = ["reduce_changes"]

_NONE, _EQUAL, _OTHERS = range(3)


def check_local(who: str, optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError if an optimizer's step is collective, so that no change is one rank's."""
    if any(
        kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__
    ):
        raise ValueError(
            f"{who}: expected an optimizer that changes each rank's weights by its own gradients, "
            "but got ZeroRedundancyOptimizer, whose ranks send each other the parts that they have "
            "changed; use adasum_hook with it, or another optimizer here"
        )


def copies_of(weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return copies of weights, from which `changes_since` tells what local steps change."""
    return [weight.clone() for weight in weights]


def changes_since(
    starts: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Return `w_new - w_old` of each weight."""
    return [new - old for old, new in zip(starts, weights, strict=True)]


def apply_changes(
    starts: Sequence[torch.Tensor],
    changes: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
) -> None:
    """Set each weight to `w_old + change`, in place."""
    for old, change, new in zip(starts, changes, weights, strict=True):
        torch.add(old, change, out=new)


def restore(starts: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]) -> None:
    """Set each weight to `w_old`, in place."""
    for old, new in zip(starts, weights, strict=True):
        new.copy_(old)


def check_first(
    who: str,
    communicator: Communicator,
    optimizer: torch.optim.Optimizer,
    starts: Iterable[torch.Tensor],
    weights: Iterable[torch.Tensor],
    reduced: Iterable[torch.Tensor],
) -> bool:
    """Check the first reduction.

    Warns if AdaSum of the changes is every rank's change: then all ranks have the same.

    Args:
        who: the name in the messages.
        communicator: of the ranks that reduced.
        optimizer: the one that has changed the weights, right after its step.
        starts: of the weights, before this rank changed them.
        weights: as this rank has changed them.
        reduced: AdaSum of all ranks' changes of each weight.

    Returns:
        Whether a rank has changed a weight, so that the question is answered.

    Raises:
        RuntimeError: on all ranks: the optimizer keeps the weights a second time.

    Collective: all ranks; blocks.
    """
    if communicator.size == 1:
        return True
    copies = () if hasattr(optimizer, "refresh_master") else _copies(optimizer)
    mine = _compared(starts, weights, reduced)
    table = torch.tensor([mine, bool(copies)], device=communicator.control_device)
    states, have_copies = communicator.all_gather(table).unbind(1)
    if have_copies.any():
        where = copies[0] if copies else "on another rank"
        raise RuntimeError(
            f"{who}: expected an optimizer whose weights are the parameters alone, but got a "
            f"{type(optimizer).__name__} that keeps them a second time ({where}), where no "
            "reduction reaches them; reduce its gradients instead (rank "
            f"{communicator.rank} of {communicator.size})"
        )
    found = set(states.tolist())
    if found == {_EQUAL}:
        warnings.warn(
            f"{who}: expected each rank to change the weights by gradients of its own, but the "
            f"first reduction got the same change from all {communicator.size} ranks; run the "
            "backward passes of a DDP model inside no_sync(), and give each rank its own data "
            f"(rank {communicator.rank} of {communicator.size})",
            stacklevel=2,
        )
    return found != {_NONE}


def _copies(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """Return the places where an optimizer keeps all weights a second time."""
    return duplicate_weights.find(optimizer, sorted(vars(optimizer)))


def _compared(
    starts: Iterable[torch.Tensor],
    weights: Iterable[torch.Tensor],
    reduced: Iterable[torch.Tensor],
) -> int:
    """Return whether this rank's changes are none, equal to the reduced ones, or others."""
    found = _NONE
    for old, new, result in zip(starts, weights, reduced, strict=True):
        mine = new - old
        if not mine.any():
            continue
        if not torch.allclose(mine, result, rtol=1e-6, atol=0.0):
            return _OTHERS
        found = _EQUAL
    return found


def reduce_changes(
    optimizer: torch.optim.Optimizer,
    group: Any = None,
    *,
    rule: str | Coefficients = "adasum",
    group_op: str | None = None,
    group_size: int | None = None,
) -> Callable[[], None]:
    """Make each step of an optimizer end with `w_old + AdaSum(w_new - w_old)`, from now on.

    Gradients stay local: leave DDP out, or run its backward passes inside `no_sync()`. The first
    step warns if all ranks change the weights equally. Weights are not broadcast. Every rank
    takes every step, so that a `GradScaler`, which may skip one on some ranks, does not fit.
    Parameters that are frozen, or marked with `mark_worker_local`, are left out. Sharded models,
    and several steps before a reduction: :class:`LocalSGD`.

    Args:
        optimizer: any; its state stays local. A copy of the weights is kept during a step.
        group: as of `adasum_all_reduce`.
        rule: as of `adasum_all_reduce`.
        group_op: as of `adasum_all_reduce`.
        group_size: as of `adasum_all_reduce`.

    Returns:
        A function that ends it.

    Raises:
        ValueError: the optimizer's own step sends weights to the other ranks. Or, from a step, as
            `adasum_all_reduce`. The weights are then those before it.
        RuntimeError: from the first step, the same: the optimizer keeps a copy of the weights,
            such as a float32 master, which no reduction reaches.

    Collective: steps are, from then on; they block on a CPU.

    Example:
        >>> reduce_changes(optimizer)  # doctest: +SKIP
    """
    check_local("reduce_changes", optimizer)
    starts: list[torch.Tensor] = []
    communicator, compared = Communicator(group), False

    def weights() -> list[torch.Tensor]:
        parameters = [p for one in optimizer.param_groups for p in one["params"]]
        return [
            p.detach() for p in parameters if p.requires_grad and not is_marked_local(p)
        ]

    def before(*_: Any) -> None:
        if not is_making_state():
            starts[:] = copies_of(weights())

    def after(*_: Any) -> None:
        nonlocal compared
        if is_making_state():
            return
        changes = changes_since(starts, weights())
        try:
            adasum_all_reduce(
                changes, group, rule=rule, group_op=group_op, group_size=group_size
            )
            if not compared:
                compared = check_first(
                    "reduce_changes",
                    communicator,
                    optimizer,
                    starts,
                    weights(),
                    changes,
                )
        except BaseException:
            restore(starts, weights())
            raise
        apply_changes(starts, changes, weights())
        starts.clear()

    handles = [
        optimizer.register_step_pre_hook(before),
        optimizer.register_step_post_hook(after),
    ]

    def end() -> None:
        for handle in handles:
            handle.remove()

    return end
