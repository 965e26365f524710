"""The delta variant: each rank takes its own optimizer step, and AdaSum joins weight changes.

References:
    arXiv 2006.02924, section 4; adasum_hvd/torch/optimizer/delta.py for Horovod.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from adasum_hvd.distributed.all_reduce import adasum_all_reduce
from adasum_hvd.distributed.rules import Coefficients

__all__ = ["reduce_changes"]


def reduce_changes(
    optimizer: torch.optim.Optimizer,
    group: Any = None,
    *,
    rule: str | Coefficients = "adasum",
    group_op: str | None = None,
    group_size: int | None = None,
) -> Callable[[], None]:
    """Make each step of an optimizer end with `w_old + AdaSum(w_new - w_old)`, from now on.

    Gradients stay local: leave DDP out, or run its backward passes inside `no_sync()`. Every rank
    takes every step, so that a `GradScaler`, which may skip one on some ranks, does not fit.

    Args:
        optimizer: any; its state stays local. A copy of the weights is kept during a step.
        group: as of `adasum_all_reduce`.
        rule: as of `adasum_all_reduce`.
        group_op: as of `adasum_all_reduce`.
        group_size: as of `adasum_all_reduce`.

    Returns:
        A function that ends it.

    Raises:
        ValueError: from a step, as `adasum_all_reduce`.

    Collective: steps are, from then on; they block on a CPU.

    Example:
        >>> reduce_changes(optimizer)  # doctest: +SKIP
    """
    starts: list[torch.Tensor] = []

    def parameters() -> list[torch.Tensor]:
        groups = optimizer.param_groups
        return [p.detach() for one in groups for p in one["params"] if p.requires_grad]

    def before(*_: Any) -> None:
        starts[:] = [parameter.clone() for parameter in parameters()]

    def after(*_: Any) -> None:
        pairs = list(zip(parameters(), starts, strict=True))
        changes = [new - old for new, old in pairs]
        adasum_all_reduce(
            changes, group, rule=rule, group_op=group_op, group_size=group_size
        )
        for (new, old), change in zip(pairs, changes, strict=True):
            torch.add(old, change, out=new)
        starts.clear()

    handles = [
        optimizer.register_step_pre_hook(before),
        optimizer.register_step_post_hook(after),
    ]

    def end() -> None:
        for handle in handles:
            handle.remove()

    return end
