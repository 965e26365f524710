"""Which learning rate to use with which reduction, and why."""

from __future__ import annotations

from typing import NamedTuple

from adasum_hvd import ops, topology


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
        op: `Average`, `Sum` or an AdaSum variant.
        size: number of ranks.
        group_op: how ranks inside a group are joined ("adasum", "average", "sum").
        group_size: ranks in a group, for "average" and "sum": what `init` was given, or the
            ranks of one host, which is `init`'s default and not this one.

    Returns:
        The rate, its factor over `base_lr`, and the reason.

    Raises:
        ValueError: an `op` or `group_op` that is unknown or has no rule, or a rate or size
            that is not positive.

    Example:
        >>> adasum_lr(0.1, "adasum-delta", size=64).factor
        1.0
        >>> adasum_lr(0.1, "average", size=4).lr
        0.4

    References:
        arXiv 2006.02924, section 5. Horovod's AdaSum guide (SEEDS row 1F) allows 2 to 2.5
        times the single worker's rate on CPU, and local_size times it where a node is
        averaged first; docs/convergence.md found other best rates: 1 and 3 times at 32
        workers, 3 and 10 times at 64 (gradient and delta variant).
    """
    if not base_lr > 0 or size < 1 or group_size < 1:
        raise ValueError(
            f"adasum_lr: required base_lr > 0, size >= 1 and group_size >= 1, got {base_lr!r}, "
            f"{size!r} and {group_size!r}"
        )
    if group_op not in topology.GROUP_OPS:
        raise ValueError(
            f"adasum_lr: group_op: required one of {topology.GROUP_OPS}, got {group_op!r}"
        )
    factor, reason = _rule(ops.parse(op), float(size), group_op, float(group_size))
    return LearningRate(base_lr * factor, factor, reason)


def _rule(
    op: ops.ReduceOp, size: float, group_op: str, group_size: float
) -> tuple[float, str]:
    if op is ops.Average:
        return size, (
            "an average of N gradients is one step on an N times larger batch: linear "
            "scaling, with warm-up, as far as it holds"
        )
    if op is ops.Sum:
        return 1.0, "a sum already grows with the number of ranks"
    if not ops.is_adasum(op):
        raise ValueError(
            f"adasum_lr: op: required average, sum or an AdaSum variant, got {op.name}, for "
            "which there is no rule"
        )
    if group_op == "average" and group_size > 1:
        return group_size, (
            "groups are averaged before AdaSum: scale by the ranks in a group, as for an "
            "average, and not by the number of groups"
        )
    if group_op == "average":
        return 1.0, (
            "groups of one rank leave nothing to average: keep the single-process rate; where "
            "groups are larger (a host, by default) give group_size"
        )
    if group_op == "sum":
        return 1.0, (
            "groups are summed before AdaSum, which already grows with the ranks in a group: "
            "keep the single-process rate"
        )
    return 1.0, (
        "AdaSum adds what is orthogonal by itself: start from the single-process rate; from "
        "32 ranks on tune it, see docs/convergence.md"
    )
