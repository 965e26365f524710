"""Values that TensorFlow's graph optimizer does not recognise as constants.

It would run Horovod's operation on constants once, on this rank alone, and keep the result.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

_zeros: list[tf.Variable] = []


def zero(dtype: tf.DType) -> Any:
    """Return a scalar 0 that does not look like a constant."""
    with tf.init_scope():
        eager = tf.executing_eagerly()
        if eager and not _zeros:
            with tf.device("CPU:0"):
                _zeros.append(tf.Variable(0, trainable=False, dtype=tf.int64))
    if eager:
        return tf.cast(_zeros[0].read_value(), dtype)
    value = tf.compat.v1.placeholder_with_default(tf.constant(0, tf.int64), [])
    return tf.cast(value, dtype)


def unfolded(tensor: Any) -> Any:
    """Return a tensor, and a sum with `zero` in place of one that a graph computes of constants."""
    if isinstance(tensor, tf.IndexedSlices):
        return tensor
    tensor = tf.convert_to_tensor(tensor)
    is_number = tensor.dtype.is_floating or tensor.dtype.is_integer
    if tf.executing_eagerly() or not is_number or not _is_constant(tensor.op):
        return tensor
    name = tensor.op.name.rpartition("/")[2]
    return tf.add(tensor, zero(tensor.dtype), name=f"{name}_unfolded")


def _is_constant(operation: Any) -> bool:
    """Return whether an operation of a graph has neither arguments nor variables before it."""
    seen, left = set(), [operation]
    while left:
        one = left.pop()
        if one.name in seen:
            continue
        seen.add(one.name)
        definition = one.op_def
        if (
            definition is None
            or definition.is_stateful
            or one.type.startswith("Placeholder")
        ):
            return False
        left += [each.op for each in one.inputs]
    return True
