"""Which variant and which learning rate to use, from the figures of docs/convergence.md.

**The rule**: use the gradient variant, `AdasumGrad`. Wherever both were measured with momentum
it is level with the delta variant or above it, and above it where steps are few: from 32
workers on, and from 16 on with 32 images per worker instead of 8.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from adasum_hvd import ops

__all__ = [
    "MEASURED",
    "WORKLOAD",
    "LearningRate",
    "Measured",
    "adasum_lr",
    "variant_advice",
]

WORKLOAD = (
    "LeNet-5 on 1437 digits, 30 epochs, 8 images per worker and step, SGD with momentum "
    "0.9, 5 seeds, rates a factor of 3 apart"
)
_TRAINED = 50.0  # per cent; where no rate of the grid did better, none is the best one
_LEVEL_UNTIL = 16  # workers up to which the variants are level


class Measured(NamedTuple):
    """What `benchmarks/convergence.py` found for one reduction, in per cent of the test set.

    `factor` is the best rate of the grid over the single worker's, `accuracy` and `deviation`
    belong to it. They are None where the rate was not tuned again. `unscaled` is the accuracy
    at the single worker's rate.
    """

    workers: int
    unscaled: float
    unscaled_deviation: float
    factor: float | None = None
    accuracy: float | None = None
    deviation: float | None = None


# tests/unit/test_learning_rate.py makes the same table from docs/convergence/results.json.
_ONE = Measured(1, 98.6, 0.4, 1, 98.6, 0.4)
MEASURED: dict[ops.ReduceOp, tuple[Measured, ...]] = {
    ops.Sum: (
        _ONE,
        Measured(2, 98.4, 0.3),
        Measured(4, 98.7, 0.5),
        Measured(8, 98.6, 0.3),
        Measured(16, 97.8, 0.4, 0.3, 98.7, 0.4),
        Measured(32, 25.8, 38.8, 0.3, 95.6, 2.6),
        Measured(64, 9.2, 1.5, 1, 9.2, 1.5),
    ),
    ops.Average: (
        _ONE,
        Measured(2, 98.6, 0.6),
        Measured(4, 98.4, 0.7),
        Measured(8, 97.3, 1.0),
        Measured(16, 78.2, 22.1, 10, 98.3, 0.7),
        Measured(32, 31.3, 19.3, 10, 96.4, 2.4),
        Measured(64, 12.9, 4.5, 10, 69.6, 28.3),
    ),
    ops.AdasumGrad: (
        _ONE,
        Measured(2, 99.1, 0.3),
        Measured(4, 98.8, 0.4),
        Measured(8, 98.8, 0.8),
        Measured(16, 98.8, 0.7, 1, 98.8, 0.7),
        Measured(32, 98.9, 0.3, 1, 98.9, 0.3),
        Measured(64, 96.1, 1.3, 3, 98.4, 0.6),
    ),
    ops.AdasumDelta: (
        _ONE,
        Measured(2, 98.6, 0.5),
        Measured(4, 98.8, 0.6),
        Measured(8, 98.9, 0.4),
        Measured(16, 98.8, 0.5, 1, 98.8, 0.5),
        Measured(32, 75.6, 26.1, 3, 97.6, 0.7),
        Measured(64, 28.8, 20.9, 10, 64.8, 29.7),
    ),
}


class LearningRate(NamedTuple):
    """A learning rate, the reason for it, and how sure it is.

    `certainty` is "measured" (this number of workers), "interpolated" (between two), or
    "extrapolated" (more workers than were measured with success, or groups, for which
    the factors of two reductions are multiplied). `figures` are the rows that it rests on.
    """

    lr: float
    factor: float
    reason: str
    certainty: str
    figures: tuple[Measured, ...]


def adasum_lr(
    base_lr: float,
    op: ops.ReduceOp | int | str = ops.AdasumGrad,
    size: int = 1,
    group_op: str = "adasum",
    group_size: int = 1,
) -> LearningRate:
    """Return the learning rate to start from, given the one that is best for one process.

    The factor over `base_lr` is the best one of `MEASURED`; between two numbers of workers it
    is interpolated, both on a logarithmic scale. It was found with one model: a start to tune
    from, not a law.

    Args:
        base_lr: the learning rate tuned on a single process, with the same batch per rank.
        op: `Average`, `Sum` or an AdaSum variant; `Adasum` is the delta variant, as in
            `DistributedOptimizer`.
        size: number of ranks.
        group_op: how ranks inside a group are joined ("adasum", "average", "sum").
        group_size: ranks in a group, for "average" and "sum": what `init` was given, or the
            ranks of one host, which is `init`'s default and not this one.

    Returns:
        The rate, its factor over `base_lr`, the reason, how sure it is, and the figures.

    Raises:
        ValueError: an `op` or `group_op` that is unknown or has no figures, or a rate or size
            that is not positive.

    Example:
        >>> adasum_lr(0.1, "adasum-grad", size=32).factor
        1.0
        >>> rate = adasum_lr(0.01, "adasum-delta", size=64)
        >>> rate.lr, rate.certainty, rate.figures[0].accuracy
        (0.1, 'measured', 64.8)
        >>> adasum_lr(0.1, "adasum-grad", size=256).certainty
        'extrapolated'

    References:
        arXiv 2006.02924, section 5, and docs/convergence.md. Horovod's AdaSum guide (SEEDS
        row 1F) gives 2 to 2.5 times the single worker's rate, and local_size times it where a
        node is averaged first; neither came out here.
    """
    if not (base_lr > 0 and math.isfinite(base_lr)) or size < 1 or group_size < 1:
        raise ValueError(
            f"adasum_lr: required base_lr > 0, size >= 1 and group_size >= 1, got {base_lr!r}, "
            f"{size!r} and {group_size!r}"
        )
    if group_op not in ops.GROUP_OPS:
        raise ValueError(
            f"adasum_lr: group_op: required one of {ops.GROUP_OPS}, got {group_op!r}"
        )
    reduction = ops.parse(op)
    reduction = ops.AdasumDelta if reduction is ops.Adasum else reduction
    if reduction not in MEASURED:
        raise ValueError(
            "adasum_lr: op: required average, sum or an AdaSum variant, got "
            f"{reduction.name}, for which there are no figures"
        )
    if group_op != "adasum" and group_size > 1 and ops.is_adasum(reduction):
        return _grouped(base_lr, reduction, size, group_op, group_size)
    factor, certainty, figures = _factor(reduction, size)
    reason = _reason(reduction, size, certainty, figures)
    if group_op != "adasum" and ops.is_adasum(reduction):
        reason += (
            "; groups of one rank leave nothing to reduce: where groups are larger (a host, by "
            "default) give group_size"
        )
    return LearningRate(base_lr * factor, factor, reason, certainty, figures)


def variant_advice(op: ops.ReduceOp, size: int) -> str:
    """Return what the rule says against this variant at this size, "" where nothing.

    Example:
        >>> variant_advice(ops.AdasumGrad, 64)
        ''
        >>> variant_advice(ops.AdasumDelta, 64)
        'measured below AdasumGrad from 32 ranks on (docs/convergence.md)'
    """
    if op is ops.AdasumDelta and size > _LEVEL_UNTIL:
        return "measured below AdasumGrad from 32 ranks on (docs/convergence.md)"
    return ""


def _factor(op: ops.ReduceOp, size: float) -> tuple[float, str, tuple[Measured, ...]]:
    """Return the factor, how sure it is, and the rows that it comes from."""
    tuned = [
        (row, row.factor)
        for row in MEASURED[op]
        if row.factor is not None and (row.accuracy or 0) > _TRAINED
    ]
    below, factor = [pair for pair in tuned if pair[0].workers <= size][-1]
    if below.workers == size:
        return float(factor), "measured", (below,)
    above = [pair for pair in tuned if pair[0].workers > size][:1]
    if not above:
        return float(factor), "extrapolated", (below,)
    (more, larger), less = above[0], below.workers
    part = math.log(size / less) / math.log(more.workers / less)
    return factor * (larger / factor) ** part, "interpolated", (below, more)


def _reason(
    op: ops.ReduceOp, size: int, certainty: str, figures: tuple[Measured, ...]
) -> str:
    said = " and ".join(
        f"{row.accuracy} +- {row.deviation} % on {row.workers} at {row.factor:g} times the "
        "rate of one worker"
        for row in figures
    )
    here = next((row for row in MEASURED[op] if row.workers == size), None)
    if here:
        said += f"; {here.unscaled} +- {here.unscaled_deviation} % on {size} at that rate itself"
    if here and certainty == "extrapolated":
        said += f"; no rate of the grid trained it on {size}"
    reason = f"{certainty}: {op.name} reached {said} ({WORKLOAD}; docs/convergence.md)"
    advice = variant_advice(op, size)
    return f"{reason}; {op.name} was {advice}" if advice else reason


def _grouped(
    base_lr: float, op: ops.ReduceOp, size: int, group_op: str, group_size: int
) -> LearningRate:
    """Return the group's factor times that of AdaSum over the groups."""
    inside, _, figures = _factor(ops.parse(group_op), group_size)
    across, _, more = _factor(op, max(1.0, size / group_size))
    reason = (
        f"extrapolated: {inside:.3g} times for groups of {group_size} joined by {group_op}, "
        f"and {across:.3g} times for {op.name} over {size / group_size:g} of them; the two "
        "were measured apart, not together (docs/convergence.md)"
    )
    factor = inside * across
    return LearningRate(
        base_lr * factor, factor, reason, "extrapolated", figures + more
    )
