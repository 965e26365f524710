"""Which variant and which learning rate to use, from the figures of docs/convergence.md.

**The rule**: use the gradient variant, `AdasumGrad`. Wherever both were measured with momentum
it is level with the delta variant or above it, and above it where steps are few: from 32
workers on, and from 16 on with 32 images per worker instead of 8.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from adasum_hvd.advice.convergence_results import (
    FIGURES,
    MEASURED,
    WORKLOAD,
    Figures,
    Measured,
)
from adasum_hvd.common import ops

__all__ = [
    "FIGURES",
    "MEASURED",
    "WORKLOAD",
    "Figures",
    "LearningRate",
    "Measured",
    "adasum_lr",
    "study_of",
    "variant_advice",
]


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
    optimizer: str = "momentum",
) -> LearningRate:
    """Return the learning rate to start from, given the one that is best for one process.

    The factor over `base_lr` is the better of the two of `FIGURES[optimizer]`, one and the best of
    a grid; between two numbers of workers it is interpolated, both on a logarithmic scale. It was
    found with one model: a start to tune from, not a law.

    Args:
        base_lr: the learning rate tuned on a single process, with the same batch per rank.
        op: `Average`, `Sum` or an AdaSum variant; `Adasum` is the delta variant, as in
            `DistributedOptimizer`.
        size: number of ranks.
        group_op: how ranks inside a group are joined ("adasum", "average", "sum").
        group_size: ranks in a group, for "average" and "sum": what `init` was given, or the
            ranks of one host, which is `init`'s default and not this one.
        optimizer: the study to answer from: "momentum" (SGD), "adam" or "adamw"; see
            :func:`study_of`.

    Returns:
        The rate, its factor over `base_lr`, the reason, how sure it is, and the figures.

    Raises:
        ValueError: an `op`, `group_op` or `optimizer` that is unknown or has no figures, or a
            rate or size that is not positive.

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
    if optimizer not in FIGURES:
        raise ValueError(
            f"adasum_lr: optimizer: required one of {tuple(FIGURES)}, got {optimizer!r}"
        )
    figures = FIGURES[optimizer]
    reduction = ops.parse(op)
    reduction = ops.AdasumDelta if reduction is ops.Adasum else reduction
    grouped = group_op != "adasum" and group_size > 1 and ops.is_adasum(reduction)
    for needed in (reduction, *([ops.parse(group_op)] if grouped else [])):
        if needed not in figures.rows:
            raise ValueError(
                "adasum_lr: op: required average, sum or an AdaSum variant, got "
                f"{needed.name}, for which there are no figures with {optimizer}"
            )
    if grouped:
        return _grouped(base_lr, figures, reduction, size, group_op, group_size)
    factor, certainty, rows = _factor(figures, reduction, size)
    reason = _reason(figures, reduction, size, certainty, rows)
    if advice := variant_advice(reduction, size, optimizer):
        reason += f"; {reduction.name} was {advice}"
    if group_op != "adasum" and ops.is_adasum(reduction):
        reason += (
            "; groups of one rank leave nothing to reduce: where groups are larger (a host, by "
            "default) give group_size"
        )
    return LearningRate(base_lr * factor, factor, reason, certainty, rows)


def study_of(optimizer: object) -> str:
    """Return the name in `FIGURES` of the study that says most of an optimizer.

    By its class: "adamw" for AdamW, "adam" for Adam and others named after it, "momentum" for
    all else.

    Example:
        >>> study_of(object())
        'momentum'
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)  # of Keras's loss scaling
    names = " ".join(kind.__name__.lower() for kind in type(inner).__mro__)
    return next((name for name in ("adamw", "adam") if name in names), "momentum")


def variant_advice(op: ops.ReduceOp, size: int, optimizer: str = "momentum") -> str:
    """Return what the figures say against this variant at this size, "" where nothing.

    That the other variant did better on the measured number of workers that is next to `size`
    (in ratio), each at its better rate, by more than both spreads together.

    Example:
        >>> variant_advice(ops.AdasumGrad, 64)
        ''
        >>> variant_advice(ops.AdasumDelta, 32).partition("; ")[0]
        'measured below AdasumGrad on 32 workers (97.6 +- 0.7 to 98.9 +- 0.3 %'
    """
    figures = FIGURES[optimizer]
    variants = [ops.AdasumGrad, ops.AdasumDelta]
    if op not in variants or not set(variants) <= figures.rows.keys():
        return ""
    other = variants[1 - variants.index(op)]
    near = min(
        (row.workers for row in figures.rows[op]),
        key=lambda workers: abs(math.log(size / workers)),
    )
    mine, theirs = (
        next(
            (figures.best(row) for row in figures.rows[of] if row.workers == near), None
        )
        for of in (op, other)
    )
    if mine is None or theirs is None:
        return ""
    ahead = theirs.result - mine.result
    if (-ahead if figures.is_loss else ahead) <= mine.deviation + theirs.deviation:
        return ""
    return (
        f"measured below {other.name} on {near} workers ({mine.result} +- {mine.deviation} to "
        f"{theirs.result} +- {theirs.deviation} {figures.unit}; docs/convergence.md)"
    )


def _factor(
    figures: Figures, op: ops.ReduceOp, size: float
) -> tuple[float, str, tuple[Measured, ...]]:
    """Return the factor, how sure it is, and the rows that it comes from."""
    known = [(row, figures.best(row)) for row in figures.rows[op]]
    tuned = [(row, best.factor) for row, best in known if best is not None]
    below, factor = [pair for pair in tuned if pair[0].workers <= size][-1]
    if below.workers == size:
        return factor, "measured", (below,)
    above = [pair for pair in tuned if pair[0].workers > size][:1]
    if not above:
        return factor, "extrapolated", (below,)
    (more, larger), less = above[0], below.workers
    part = math.log(size / less) / math.log(more.workers / less)
    return factor * (larger / factor) ** part, "interpolated", (below, more)


def _reason(
    figures: Figures,
    op: ops.ReduceOp,
    size: int,
    certainty: str,
    rows: tuple[Measured, ...],
) -> str:
    said = " and ".join(
        f"{best.result} +- {best.deviation} {figures.unit} on {row.workers} at "
        f"{best.factor:g} times the rate of one worker"
        for row in rows
        if (best := figures.best(row)) is not None
    )
    here = next((row for row in figures.rows[op] if row.workers == size), None)
    if here:
        said += (
            f"; {here.unscaled} +- {here.unscaled_deviation} {figures.unit} on {size} at that "
            "rate itself"
        )
    if here and certainty == "extrapolated":
        said += f"; no rate of the grid trained it on {size}"
    return f"{certainty}: {op.name} reached {said} ({figures.workload}; docs/convergence.md)"


def _grouped(
    base_lr: float,
    figures: Figures,
    op: ops.ReduceOp,
    size: int,
    group_op: str,
    group_size: int,
) -> LearningRate:
    """Return the group's factor times that of AdaSum over the groups."""
    inside, _, rows = _factor(figures, ops.parse(group_op), group_size)
    across, _, more = _factor(figures, op, max(1.0, size / group_size))
    reason = (
        f"extrapolated: {inside:.3g} times for groups of {group_size} joined by {group_op}, "
        f"and {across:.3g} times for {op.name} over {size / group_size:g} of them; the two "
        "were measured apart, not together (docs/convergence.md)"
    )
    factor = inside * across
    return LearningRate(base_lr * factor, factor, reason, "extrapolated", rows + more)
