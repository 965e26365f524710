"""Values that TensorFlow's graph optimizer does not recognise as constants.

It treats Horovod's operations as pure functions. It would run an operation on constants once, on
this rank alone, and keep the result.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

_FOLDED_BYTES = (
    1 << 20
)  # larger constants stay as they are: the optimizer's own limit is below
_zeros: list[tf.Variable] = []


def zero(dtype: tf.DType) -> Any:
    """Return a scalar 0 that does not look like a constant."""
    with tf.init_scope():
        eager = tf.executing_eagerly()
        if eager and not _zeros:
            with tf.device("CPU:0"):
                _zeros.append(tf.Variable(0, trainable=False, dtype=tf.int64))
    value: Any = tf.constant(0, tf.int64)
    value = (
        _zeros[0].read_value()
        if eager
        else tf.compat.v1.placeholder_with_default(value, [])
    )
    return tf.cast(value, dtype)


def unfolded(tensor: Any) -> Any:
    """Return a tensor's value such that it does not look like a constant in a graph."""
    tensor = tf.convert_to_tensor(tensor)
    dtype, elements = tensor.dtype, tensor.shape.num_elements()
    is_large = elements is not None and elements * dtype.size > _FOLDED_BYTES
    if (
        tf.executing_eagerly()
        or is_large
        or not (dtype.is_floating or dtype.is_integer)
    ):
        return tensor
    return tensor + zero(dtype)
