"""Changes of weights, which the delta variants reduce: their dtype, their bound, their sum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from adasum_hvd.tensorflow.reduction import Reduction


def wide(variable: Any) -> Any:
    """Return the value in the dtype in which changes are computed: bfloat16 is too coarse."""
    value = tf.convert_to_tensor(variable)
    return tf.cast(value, tf.float32) if value.dtype == tf.bfloat16 else value


def reduce_changes(
    reduction: Reduction,
    variables: Sequence[Any],
    starts: Sequence[Any],
    limit: float | None,
) -> tuple[list[Any], list[Any]]:
    """Return where `variables` started and by how much the ranks together change them.

    Args:
        reduction: the optimizer's.
        variables: those that are reduced, with this rank's own steps in them.
        starts: what each held before, in the dtype of :func:`wide`; None where this rank has
            left it alone.
        limit: largest 2-norm of all changes; None: any.

    Collective: every rank of the process set; blocks (eagerly).
    """
    # Read once all steps are taken, also where a variable is a TF1 reference to its memory.
    values = [wide(_read(variable)) for variable in variables]
    pairs = list(zip(starts, values, strict=True))
    changes, _ = reduction(
        [None if start is None else value - start for start, value in pairs], variables
    )
    starts = [value if start is None else start for start, value in pairs]
    return starts, _bounded(changes, limit)


def _read(variable: Any) -> Any:
    read = getattr(variable, "read_value", None)  # a Keras variable has none
    return variable if read is None else read()


def _bounded(changes: Sequence[Any], limit: float | None) -> list[Any]:
    if limit is None:
        return list(changes)
    norm = tf.linalg.global_norm([tf.cast(change, tf.float32) for change in changes])
    factor = tf.where(norm > limit, limit / norm, 1.0)
    return [change * tf.cast(factor, change.dtype) for change in changes]
