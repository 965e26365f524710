"""AdaSum as a Horovod reduction of TensorFlow tensors, eagerly and in `tf.function`.

This file and `named.py` call Horovod's TensorFlow operations directly, because Horovod's Python
refuses AdaSum on process sets and on numbers of ranks that are not a power of two. It relies on
`mpi_ops._allreduce`, as it is in Horovod 0.28.1 (tests/unit/test_tensorflow_internals.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as horovod_tf
import tensorflow as tf
from horovod.tensorflow import mpi_ops
from horovod.tensorflow.compression import Compression
from tensorflow.python.framework import ops as tf_ops
from tensorflow.python.ops import control_flow_util

from adasum_hvd.base import agreement, ops
from adasum_hvd.base.options import ProcessSet
from adasum_hvd.horovod import binding
from adasum_hvd.horovod import start as horovod_start
from adasum_hvd.horovod.launch.variables import before_init
from adasum_hvd.tensorflow.broadcasting import allgather_object
from adasum_hvd.tensorflow.unfolded import unfolded

LIBRARY = mpi_ops._basics.MPI_LIB_CTYPES
_with_average = mpi_ops.handle_average_backwards_compatibility


def init(
    *args: Any,
    group_op: str | None = None,
    group_size: int | None = None,
    **kwargs: Any,
) -> None:
    """Start Horovod, as `horovod.tensorflow.init`, and check that AdaSum can run.

    It runs no TensorFlow operation, so devices can still be chosen by `local_rank()` afterwards.
    The first AdaSum compares the ranks' settings. Launchers: docs/clusters.md.

    Args:
        *args: as `horovod.tensorflow.init`, like **kwargs.
        group_op: with `group_size`, see :func:`adasum_hvd.horovod.groups.configure`.

    Raises:
        RuntimeError: the installed Horovod lacks the op; a launcher's variables are missing or
            contradict one another; or Horovod runs with other groups.
        ValueError: a setting is invalid.

    Collective: every rank calls it; blocks until all have.
    """
    horovod_start.configure(mpi_ops, LIBRARY, group_op, group_size)
    start(*args, **kwargs)


def start(*args: Any, again: bool = False, **kwargs: Any) -> None:
    """Start Horovod as :func:`adasum_hvd.horovod.start.start`. Collective; blocks."""
    horovod_start.start(mpi_ops, LIBRARY, before_init, again, *args, **kwargs)
    horovod_start.log_startup(mpi_ops, LIBRARY, "")  # no reduction yet: no path


def agree() -> None:
    """Check that all ranks have the same settings. Collective; blocks."""
    mine = agreement.comparable(settings())
    by_rank = allgather_object(mine, name="adasum.settings")
    agreement.compare_settings(by_rank, mpi_ops.rank())


def settings() -> dict[str, object]:
    """Return the settings that the op has read at `init`: kernels, groups, chunk sizes."""
    return binding.settings(LIBRARY)


def counters() -> binding.Counters:
    """Return how many calls, tensors and bytes the op has reduced in this process."""
    return binding.counters(LIBRARY)


def refuse_xla(what: str) -> None:
    """Raise NotImplementedError if the caller is traced into a function that XLA compiles."""
    if tf.executing_eagerly():
        return
    if control_flow_util.GraphOrParentsInXlaContext(tf_ops.get_default_graph()):
        raise NotImplementedError(
            f"{what}: expected a function that XLA does not compile, but got jit_compile=True "
            '(Keras\'s "auto" means True if a GPU is visible); pass jit_compile=False to '
            "compile(jit_compile=False) or tf.function, or use "
            "adasum_hvd.tensorflow.keras.compile(model, ...)"
        )


def refuse_sparse(tensor: Any, what: str) -> None:
    """Raise SparseAdasumError for `tf.IndexedSlices`, which AdaSum cannot reduce."""
    if isinstance(tensor, tf.IndexedSlices):
        raise ops.SparseAdasumError(
            f"{what}: expected a dense tensor, but got tf.IndexedSlices of shape "
            f"{tensor.shape}; pass sparse_as_dense=True, or use tf.convert_to_tensor"
        )


def wire_dtype(dtype: Any, compression: Any = Compression.none) -> tf.DType:
    """Return the dtype on the wire for a tensor of `dtype`."""
    dtype = tf.as_dtype(dtype)
    if compression is Compression.fp16 and dtype.is_floating:
        return tf.float16
    return tf.float32 if dtype == tf.bfloat16 else dtype


def _adasum_name(name: str | None, tensor: Any, op: ops.ReduceOp) -> str | None:
    if tf.executing_eagerly() or op is not ops.AdasumDelta:
        return name
    return ops.DELTA_PREFIX + (name or mpi_ops._normalize_name(tensor.name))


def join() -> Any:
    """Contribute zeros until all ranks have joined; return the last (int32). Collective; blocks."""
    if not tf.executing_eagerly():
        return mpi_ops.join()
    # TensorFlow would keep the first result of Horovod's operation. It does in any function, too.
    return tf.function(mpi_ops.join, autograph=False).get_concrete_function()()


class SyncBatchNormalization:
    """Horovod's layer, which Keras 3 cannot make: raises NotImplementedError."""

    def __init__(self, *args: Any, **kwargs: Any):
        raise NotImplementedError(
            "SyncBatchNormalization: expected Keras 2, whose layer Horovod's is made of, but got "
            f"Keras {tf.keras.__version__}; use keras.layers.BatchNormalization, whose statistics "
            "stay on each rank"
        )


@tf.autograph.experimental.do_not_convert
def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: ops.ReduceOp | int | str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = mpi_ops.global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """Return `tensor` reduced over the ranks; differentiable, eagerly and in `tf.function`.

    Args:
        tensor: float16, float32, float64 or bfloat16 (float32 on the wire), any shape.
        average: deprecated, as Horovod's.
        device_dense: as Horovod's, like `device_sparse`, `compression` and `ignore_name_scope`.
        op: a reduction or its name; AdaSum works for any number of ranks. Default Average.
        prescale_factor: multiplies the input.
        postscale_factor: multiplies the result. AdaSum applies both factors once, in float64.
        name: the tensor's name, the same on all ranks; needed if the ranks' graphs differ.
        process_set: the ranks that reduce.

    Raises:
        ValueError: unknown `op`.
        SparseAdasumError: AdaSum of `tf.IndexedSlices`.
        NotImplementedError: traced into a function that XLA compiles.
        tf.errors.InvalidArgumentError: an integer dtype; on every rank.

    Collective: every rank of `process_set`; blocks (eagerly).
    """
    refuse_xla("allreduce")
    reduction = ops.requested(op, average, _with_average)
    common: Any = {
        "prescale_factor": prescale_factor, "postscale_factor": postscale_factor,
        "process_set": agreement.registered(process_set), "ignore_name_scope": ignore_name_scope,
    }  # fmt: skip
    tensor = unfolded(tensor)
    if not ops.is_adasum(reduction):
        args = tensor, None, device_dense, device_sparse, compression, int(reduction)
        return horovod_tf.allreduce(*args, name=name, **common)
    refuse_sparse(tensor, "AdaSum")
    with tf.device(device_dense):
        compressed, context = compression.compress(tensor)
        sent = tf.cast(compressed, wire_dtype(compressed.dtype))
        name = _adasum_name(name, tensor, reduction)
        reduced = mpi_ops._allreduce(sent, name=name, op=int(ops.Adasum), **common)
        return compression.decompress(tf.cast(reduced, compressed.dtype), context)


@tf.autograph.experimental.do_not_convert
def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: ops.ReduceOp | int | str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = mpi_ops.global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Any]:
    """Return the tensors reduced over the ranks, each with separate coefficients.

    Arguments and errors as :func:`allreduce`. For AdaSum the dtypes may differ; tensors of one
    dtype share a message. An empty list must be empty on all ranks, and sends nothing.
    """
    refuse_xla("grouped_allreduce")
    reduction = ops.requested(op, average, _with_average)
    if not tensors:
        return []
    common: Any = {
        "prescale_factor": prescale_factor, "postscale_factor": postscale_factor,
        "process_set": agreement.registered(process_set), "ignore_name_scope": ignore_name_scope,
    }  # fmt: skip
    tensors = list(map(unfolded, tensors))
    if not ops.is_adasum(reduction):
        args = tensors, None, device_dense, device_sparse, compression, int(reduction)
        return horovod_tf.grouped_allreduce(*args, name=name, **common)
    for tensor in tensors:
        refuse_sparse(tensor, "AdaSum")
    results: list[Any] = [None] * len(tensors)
    by_dtype: dict[tf.DType, list[int]] = {}
    with tf.device(device_dense):
        compressed, contexts = zip(*map(compression.compress, tensors), strict=True)
        for index, tensor in enumerate(compressed):
            by_dtype.setdefault(wire_dtype(tensor.dtype), []).append(index)
        for dtype, indices in by_dtype.items():
            first = tensors[indices[0]]
            reduced = mpi_ops._grouped_allreduce(
                [tf.cast(compressed[index], dtype) for index in indices],
                name=_adasum_name(name and f"{name}.{dtype.name}", first, reduction),
                op=int(ops.Adasum),
                **common,
            )
            for index, tensor in zip(indices, reduced, strict=True):
                tensor = tf.cast(tensor, compressed[index].dtype)
                results[index] = compression.decompress(tensor, contexts[index])
    return results
