"""Reduction of a list: dense tensors in buckets, and rows of sparse ones by gathering."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from horovod.tensorflow import mpi_ops

from adasum_hvd.base import ops
from adasum_hvd.base.agreement import is_elastic
from adasum_hvd.base.marks import is_marked_local
from adasum_hvd.base.options import Options
from adasum_hvd.base.partition import partition
from adasum_hvd.tensorflow.ops import refuse_sparse, wire_dtype
from adasum_hvd.tensorflow.reduction import named
from adasum_hvd.tensorflow.reduction.lists import is_sparse, name_of

# The reductions that can be computed from all ranks' rows of `tf.IndexedSlices`.
_SPARSE_OPS = (ops.Average, ops.Sum)


def prepared(
    gradients: Sequence[Any], variables: Sequence[Any], options: Options
) -> list[Any]:
    """Return the gradients to reduce; with `sparse_as_dense` all of them are dense."""
    result = []
    for gradient, variable in zip(gradients, variables, strict=True):
        if is_sparse(gradient) and not is_marked_local(variable):
            if options.sparse_as_dense:
                gradient = tf.convert_to_tensor(gradient)
            elif options.op not in _SPARSE_OPS:
                refuse_sparse(gradient, f"gradient of {name_of(variable)}")
        result.append(gradient)
    return result


def reduce_list(
    label: str,
    tensors: Sequence[Any],
    variables: Sequence[Any],
    options: Options,
    entries: dict[str, list[str]],
) -> list[Any]:
    """Return `tensors` reduced, each with separate coefficients. Collective; blocks (eagerly).

    All ranks have the same label, a prefix of Horovod's names, and dense or sparse tensors alike.
    `entries` receives a list of each variable's name, by Horovod's name for its tensor.
    """
    results: list[Any] = [None] * len(tensors)
    kinds = {}
    for index, variable in enumerate(variables):
        if is_sparse(tensors[index]):
            name = f"{label}.rows{index}"
            results[index] = _gathered(name, tensors[index], options)
        else:
            kinds[id(variable)] = _on_wire(tensors[index], variable, options)
    buckets = partition(
        [entry for entry in enumerate(variables) if results[entry[0]] is None],
        lambda variable: kinds[id(variable)],
        options.bucket_bytes,
        options.groups,
    )
    for number, members in enumerate(buckets):
        indices = [index for index, _ in members]
        wire = kinds[id(members[0][1])][0]
        name = f"{label}.{number}"
        names = named.entries_of(name, options.op, len(members))
        paths = [[name_of(variable)] for _, variable in members]
        entries.update(zip(names, paths, strict=True))
        reduced = named.reduce_named(
            [tf.cast(tensors[index], wire) for index in indices],
            name,
            options.op,
            options.process_set,
            options.factors,
        )
        for index, tensor in zip(indices, reduced, strict=True):
            results[index] = tf.cast(tensor, tensors[index].dtype)
    return results


def _on_wire(tensor: Any, variable: Any, options: Options) -> tuple[tf.DType, int]:
    """Return dtype and bytes, by the variable's shape: a rank may trace a gradient without one."""
    wire = wire_dtype(tensor.dtype, options.compression)
    return wire, (tf.TensorShape(variable.shape).num_elements() or 0) * wire.size


def _gathered(name: str, slices: tf.IndexedSlices, options: Options) -> Any:
    """Return the sum or mean of all ranks' rows; their numbers may differ by rank."""
    process_set = options.process_set
    dtype = slices.values.dtype
    sent = tf.cast(slices.values, wire_dtype(dtype, options.compression))
    values = named.gather_named(sent, f"{name}.values", process_set)
    indices = named.gather_named(slices.indices, f"{name}.indices", process_set)
    # Optimizers that square a gradient need each row once.
    rows, places = tf.unique(indices)
    total = tf.math.unsorted_segment_sum(tf.cast(values, dtype), places, tf.size(rows))
    if options.op is ops.Average:
        size: Any = process_set.size()
        if is_elastic():  # it may change after a function was traced
            size = mpi_ops.size_op(process_set_id=process_set.process_set_id)
        total /= tf.cast(size, dtype)
    return tf.IndexedSlices(total, rows, slices.dense_shape)
