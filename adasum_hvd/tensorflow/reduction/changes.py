"""Changes of weights, which the delta variants reduce: their dtype, their bound, their sum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from adasum_hvd.base.options import Options
from adasum_hvd.tensorflow.reduction import Reduction, must_reduce

# Their steps compute weights from sums over all steps, or evaluate others than the trained ones.
# Known by names, because a step does not show it.
_FROM_RECORDS = {"Ftrl", "ScheduleFreeAdamW"}


def refuse_records(kind: type, options: Options) -> None:
    """Raise ValueError if the steps of a class of optimizers undo reductions of changes."""
    names = {base.__name__ for base in kind.__mro__}
    if options.is_delta and must_reduce(options) and names & _FROM_RECORDS:
        raise ValueError(
            "DistributedOptimizer: expected an optimizer whose steps change the weights, but got "
            f"{kind.__name__} with {options.op.name}. It computes them from each rank's own state, "
            "which undoes reductions of changes; use op=AdasumGrad, which reduces gradients"
        )


def wide(variable: Any) -> Any:
    """Return the value in the dtype for changes: float32 instead of bfloat16."""
    value = tf.convert_to_tensor(variable)
    return tf.cast(value, tf.float32) if value.dtype == tf.bfloat16 else value


def reduce_changes(
    reduction: Reduction,
    variables: Sequence[Any],
    starts: Sequence[Any],
    limit: float | None,
) -> tuple[list[Any], list[Any]]:
    """Return the start of each of `variables` and the change that the ranks agree on.

    Args:
        reduction: the optimizer's.
        variables: the variables to reduce, after this rank's own steps.
        starts: each variable's value before those steps, in the dtype of :func:`wide`; None if
            this rank did not change it.
        limit: largest 2-norm of all changes; None for no limit.

    Collective: every rank of the process set; blocks (eagerly).
    """
    pairs = list(zip(starts, variables, strict=True))
    mine = [None if start is None else wide(v) - start for start, v in pairs]
    changes, _ = reduction(mine, variables)
    starts = [wide(v) if start is None else start for start, v in pairs]
    return starts, _bounded(changes, limit)


def _bounded(changes: Sequence[Any], limit: float | None) -> list[Any]:
    if limit is None:
        return list(changes)
    norm = tf.linalg.global_norm([tf.cast(change, tf.float32) for change in changes])
    factor = tf.where(norm > limit, limit / norm, 1.0)
    return [change * tf.cast(factor, change.dtype) for change in changes]
