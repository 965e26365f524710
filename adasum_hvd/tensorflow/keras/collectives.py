"""Collectives with the arguments of `horovod.tensorflow.keras`, which take any value.

All are collective over the process set, and block (eagerly). `value` is a tensor or converts to
one, and `name` is the same on all ranks. `kwargs` and errors are those of `horovod.tensorflow`.
"""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as horovod_tf
import tensorflow as tf
from horovod.tensorflow.compression import Compression

from adasum_hvd.base import ops
from adasum_hvd.tensorflow import ops as tf_ops


def _tensor(value: Any) -> Any:
    sparse = isinstance(value, tf.IndexedSlices)
    return value if sparse else tf.convert_to_tensor(value)


@tf.autograph.experimental.do_not_convert
def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: Any = None,
    compression: Any = Compression.none,
    **kwargs: Any,
) -> Any:
    """Return `value` as :func:`adasum_hvd.tensorflow.ops.allreduce` reduces it."""
    return tf_ops.allreduce(
        _tensor(value), average, compression=compression, op=op, name=name,
        prescale_factor=prescale_factor, postscale_factor=postscale_factor, **kwargs,
    )  # fmt: skip


def allgather(value: Any, name: str | None = None, **kwargs: Any) -> tf.Tensor:
    """Return all ranks' values, one after the other along the first dimension, which may differ."""
    return horovod_tf.allgather(_tensor(value), name, **kwargs)


def broadcast(
    value: Any, root_rank: int, name: str | None = None, **kwargs: Any
) -> tf.Tensor:
    """Return the value of `root_rank`, a rank of the job; all values have one shape and dtype."""
    return horovod_tf.broadcast(_tensor(value), root_rank, name, **kwargs)


def reducescatter(
    value: Any, name: str | None = None, op: Any = ops.Average, **kwargs: Any
) -> tf.Tensor:
    """Return this rank's share, along the first dimension, of the reduced value.

    Args:
        value: of one shape and dtype on all ranks.
        name: the same on all ranks.
        op: `Average` or `Sum`, or the name of one; else ValueError.
    """
    reduction = ops.parse(op)
    if reduction not in (ops.Average, ops.Sum):
        raise ValueError(
            f"reducescatter: op: expected average or sum, but got {reduction.name}"
        )
    return horovod_tf.reducescatter(
        _tensor(value), op=int(reduction), name=name, **kwargs
    )
