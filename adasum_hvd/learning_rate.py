"""Which learning rate to use with which reduction, and why."""

from __future__ import annotations

from typing import NamedTuple

from adasum_hvd import ops


class LearningRate(NamedTuple):
    """A learning rate and the reason for it."""

    lr: float
    factor: float
    reason: str


def adasum_lr(
    base_lr: float,
    op: ops.ReduceOp | int | str = ops.AdasumDelta,
    size: int = 1,
    group_op: str = "adasum",
    group_size: int = 1,
) -> LearningRate:
    """Return the learning rate to start from, given the one that is best for one process.

    Args:
        base_lr: the learning rate tuned on a single process, with the same batch per rank.
        op: the reduction.
        size: number of ranks.
        group_op: how ranks inside a group are joined ("adasum", "average", "sum").
        group_size: ranks in a group, for "average" and "sum".

    Returns:
        The rate, its factor over `base_lr`, and the reason.

    Raises:
        ValueError: unknown `op`, or a rate or size that is not positive.

    Example:
        >>> adasum_lr(0.1, "adasum-delta", size=64).factor
        1.0
        >>> adasum_lr(0.1, "average", size=4).lr
        0.4

    References:
        arXiv 2006.02924, section 5; Horovod's AdaSum guide (SEEDS row 1F), which allows 2 to
        2.5 times the single worker's rate on CPU, and local_size times it where a node is
        averaged first.
    """
    if not base_lr > 0 or size < 1 or group_size < 1:
        raise ValueError(
            f"adasum_lr: required base_lr > 0, size >= 1 and group_size >= 1, got {base_lr!r}, "
            f"{size!r} and {group_size!r}"
        )
    reduction = ops.parse(op)
    if reduction is ops.Average:
        factor, reason = (
            float(size),
            (
                "an average of N gradients is one step on an N times larger batch: linear "
                "scaling, with warm-up, as far as it holds"
            ),
        )
    elif not ops.is_adasum(reduction):
        factor, reason = 1.0, "a sum already grows with the number of ranks"
    elif group_op == "average":
        factor, reason = (
            float(group_size),
            (
                "groups are averaged before AdaSum: scale by the ranks in a group, as for an "
                "average, and not by the number of groups"
            ),
        )
    else:
        factor, reason = (
            1.0,
            (
                "AdaSum adds what is orthogonal by itself: keep the single-process rate; 2 to 2.5 "
                "times it may be worth a try"
            ),
        )
    return LearningRate(base_lr * factor, factor, reason)
