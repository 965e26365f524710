"""Changes of weights, which the delta variants reduce: their dtype and their bound."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf


def wide(variable: Any) -> Any:
    """Return the value in the dtype in which changes are computed: bfloat16 is too coarse."""
    value = tf.convert_to_tensor(variable)
    return tf.cast(value, tf.float32) if value.dtype == tf.bfloat16 else value


def bounded(changes: Sequence[Any], limit: float | None) -> list[Any]:
    """Return the changes scaled so that the 2-norm of all is at most `limit`."""
    if limit is None:
        return list(changes)
    norm = tf.linalg.global_norm([tf.cast(change, tf.float32) for change in changes])
    factor = tf.where(norm > limit, limit / norm, 1.0)
    return [change * tf.cast(factor, change.dtype) for change in changes]
