"""The variant and the learning rate to start from, by the studies in docs/convergence.md.

**The rule**: use the gradient variant, `AdasumGrad`. With momentum it needs fewer steps to a
target than the delta variant from 8 workers on. With Adam and AdamW it is equal or better.
"""

from __future__ import annotations

import math
import operator
from typing import Any, NamedTuple

from adasum_hvd.advice.convergence_results import FIGURES, Best, Figures, Measured
from adasum_hvd.base import ops
from adasum_hvd.base.options import optimizer_op

__all__ = [
    "FIGURES",
    "Figures",
    "LearningRate",
    "Measured",
    "adasum_lr",
    "study_of",
    "variant_advice",
]

_NAMES = {  # parts of the names of optimizers, in this order, and their studies
    "adamw": "adamw",
    "adam": "adam",
    "sgd": "momentum",
    "momentum": "momentum",
    "gradientdescent": "momentum",
}
_CAUTION = (  # of a second workload, about AdasumGrad's factors above 1 with momentum
    "; keep one worker's rate if you do not tune: with a ResNet and 32 workers 1.73 times that "
    "rate took a third more steps than the rate itself"
)
# Their names have such parts, but no study has trained with them.
_OTHERS = frozenset({"adamax", "nadam", "radam", "sparseadam", "asgd"})


class LearningRate(NamedTuple):
    """A learning rate, its factor over the single worker's, the reason and the certainty.

    `certainty` is "measured" (with this number of workers), "nearest" (with the nearest number
    that was measured), or "extrapolated" (more workers than any study trained, or groups).
    `figures` has the row used.
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
    optimizer: object = None,
) -> LearningRate:
    """Return the learning rate to start from, given the best one for a single process.

    The factor over `base_lr` is the better of two in the optimizer's `FIGURES`: 1, and the best
    of a grid, with the number of workers that is nearest in ratio to `size`. Each study used one
    model, so tune from this rate.

    Args:
        base_lr: the learning rate tuned on a single process, with the same batch per rank.
        op: `Average`, `Sum` or an AdaSum variant; `Adasum` is the delta variant, as in
            `DistributedOptimizer`.
        size: number of ranks.
        group_op: the reduction inside a group ("adasum", "average", "sum").
        group_size: ranks in a group, for "average" and "sum": the argument of `init`, or the
            number of ranks per host if `init` got none. A group counts as one worker. Its larger
            batch may allow a larger rate.
        optimizer: required: an optimizer or its class, or the name of the study that fits it:
            "momentum" (SGD), "adam" or "adamw".

    Returns:
        The rate, its factor over `base_lr`, the reason, the certainty, and the row used.

    Raises:
        ValueError: an `op`, `group_op` or `optimizer` is unknown or was not studied, a rate
            or size is not positive, or a size is not an integer.

    Example:
        >>> rate = adasum_lr(0.1, "adasum-grad", size=32, optimizer="momentum")
        >>> rate.factor, rate.certainty, rate.figures[0].result
        (1.73, 'measured', 80)

    References:
        arXiv 2006.02924, section 5, and docs/convergence.md; docs/migration.md compares the rate
        with that of Horovod's guide.
    """
    rate = _number(base_lr)
    if not (0 < rate < math.inf and _is_count(size) and _is_count(group_size)):
        raise ValueError(
            "adasum_lr: expected a number base_lr > 0 and integers size >= 1 and group_size >= 1, "
            f"but got {base_lr!r}, {size!r} and {group_size!r}"
        )
    if group_op not in ops.GROUP_OPS:
        raise ValueError(
            f"adasum_lr: group_op: expected one of {ops.GROUP_OPS}, but got {group_op!r}"
        )
    figures = FIGURES[study := study_of(optimizer)]
    reduction = optimizer_op(op)
    has_groups = group_op != "adasum" and ops.is_adasum(reduction)
    group = min(group_size, size) if has_groups else 1
    for needed in (reduction, *([ops.parse(group_op)] if group > 1 else [])):
        if not figures.covers(needed):
            raise ValueError(
                "adasum_lr: op: expected average, sum or an AdaSum variant, but got "
                f"{needed.name}, which has no measured results with {study}"
            )
    workers = math.ceil(size / group)
    row, best = figures.nearest(reduction, workers)
    is_beyond = workers > row.workers and row is figures.rows_of(reduction)[-1]
    certainty = "measured" if row.workers == workers else "nearest"
    certainty = "extrapolated" if group > 1 or is_beyond else certainty
    summed = size if reduction is ops.Sum else group if group_op == "sum" else 1
    factor = best.factor / summed
    reason = f"{certainty}: {_results(figures, reduction, row, best)}"
    if group > 1:
        reason += f"; a group of {group} ranks counts as one worker"
        reason += f", whose sum is {group} times its mean" if summed > 1 else ""
    elif has_groups and group_size == 1:
        reason += (
            "; group_size=1 means groups of one rank: pass the real group_size (by default the "
            "ranks per host)"
        )
    if advice := variant_advice(reduction, workers, study):
        reason += f"; {reduction.name} was {advice}"
    if factor > 1 and (study, reduction) == ("momentum", ops.AdasumGrad):
        reason += _CAUTION
    return LearningRate(rate * factor, factor, reason, certainty, (row,))


def _results(figures: Figures, op: ops.ReduceOp, row: Measured, best: Best) -> str:
    """Return what was measured, at the rate that is advised and at the single worker's."""
    name = "Average, of which Sum is a multiple" if op is ops.Sum else op.name
    workers = "one worker" if row.workers == 1 else f"{row.workers} workers"
    times = "" if best.factor == 1 else f"{best.factor:.3g} times "
    text = (
        f"{name}: {best.result} ± {best.deviation} {figures.unit} with {workers} at {times}one "
        "worker's rate"
    )
    if best.factor != 1 and row.unscaled is None:
        text += ", at which itself a seed missed the target"
    elif best.factor != 1:
        text += f", and {row.unscaled} ± {row.unscaled_deviation} at that rate itself"
    return f"{text} ({figures.workload}; docs/convergence.md)"


def _number(value: Any) -> float:
    """Return a number, or that of a tensor or variable; NaN for anything else."""
    try:
        return math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError):
        return math.nan


def _is_count(value: object) -> bool:
    try:
        return operator.index(value) >= 1  # type: ignore[arg-type]
    except TypeError:
        return False


def study_of(optimizer: object) -> str:
    """Return the key in `FIGURES` of the study that fits an optimizer.

    The names of its classes decide: "adamw", "adam", and "momentum" for SGD.

    Args:
        optimizer: an optimizer, its class, or a key in `FIGURES`.

    Raises:
        ValueError: another string, or an optimizer that no study has.

    Example:
        >>> study_of(type("SGD", (), {}))
        'momentum'
    """
    if isinstance(optimizer, str):
        if optimizer not in FIGURES:
            raise ValueError(
                f"optimizer: expected one of {tuple(FIGURES)} or an optimizer, but got "
                f"{optimizer!r}"
            )
        return optimizer
    study = find_study(optimizer)
    if study is None:
        kind = optimizer if isinstance(optimizer, type) else type(optimizer)
        raise ValueError(
            f"optimizer: expected SGD, Adam or AdamW, but got {kind.__name__}, which no study has; "
            'pass optimizer="momentum", "adam" or "adamw" to take that one\'s figures'
        )
    return study


def find_study(optimizer: object) -> str | None:
    """As `study_of` of an optimizer or its class; None if no study has it."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)  # Keras's loss scaling
    kind = inner if isinstance(inner, type) else type(inner)
    names = [each.__name__.lower() for each in kind.__mro__]
    if not _OTHERS.isdisjoint(names):
        return None
    text = " ".join(names)
    study = next((study for name, study in _NAMES.items() if name in text), None)
    return "adamw" if study == "adam" and _decays_weights(inner) else study


def _decays_weights(optimizer: Any) -> bool:
    """Return whether Adam decays weights and not through gradients, which makes it AdamW."""
    defaults = getattr(optimizer, "defaults", {})
    # Keras's decay is of that kind (and MindSpore's is not), unless AdamOffload names another.
    of_keras = hasattr(optimizer, "exclude_from_weight_decay")
    decays = of_keras and getattr(optimizer, "weight_decay", False)
    return bool(
        getattr(optimizer, "decoupled_weight_decay", decays)
        or (isinstance(defaults, dict) and defaults.get("decoupled_weight_decay"))
    )


def variant_advice(op: ops.ReduceOp, size: int, optimizer: str = "momentum") -> str:
    """Return a warning if the other variant was measured to be better at this size, or "".

    Compares the two variants at the measured number of workers that is closest to `size` (in
    ratio), each at its better rate. The difference counts if it exceeds the sum of both standard
    deviations.

    Example:
        >>> variant_advice(ops.AdasumDelta, 32).partition("; ")[0]
        'measured worse than AdasumGrad on 32 workers (193 ± 33 against 80 ± 7 steps to 97 %'
    """
    figures = FIGURES[optimizer]
    variants = [ops.AdasumGrad, ops.AdasumDelta]
    if op not in variants or not set(variants) <= figures.rows.keys():
        return ""
    other = variants[1 - variants.index(op)]
    row, best = figures.nearest(op, size)
    same = [figures.best(k) for k in figures.rows[other] if k.workers == row.workers]
    best_other = next(iter(same), None)
    if best_other is None:
        return ""
    difference = best_other.result - best.result
    improvement = -difference if figures.lower_is_better else difference
    if improvement <= best.deviation + best_other.deviation:
        return ""
    return (
        f"measured worse than {other.name} on {row.workers} workers ({best.result} ± "
        f"{best.deviation} against {best_other.result} ± {best_other.deviation} "
        f"{figures.unit}; docs/convergence.md)"
    )
