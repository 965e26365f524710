"""Horovod's operations under names that do not depend on their place in a graph.

TensorFlow prefixes an operation's name with the scopes and functions around it, and numbers some,
so it depends on the rest of a rank's graph. A function that is never inlined keeps its name.

Relies on `MPI_LIB.horovod_grouped_allreduce` and `horovod_allgather`, as they are in Horovod
0.28.1 (tests/unit/test_tensorflow_internals.py).
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import tensorflow as tf
from horovod.tensorflow import mpi_ops

from adasum_hvd.base import ops
from adasum_hvd.base.agreement import registered
from adasum_hvd.base.options import ProcessSet
from adasum_hvd.tensorflow.unfolded import unfolded

_order_variables: dict[str, tf.Variable] = {}  # by name
_uses: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # by TF1 graph


def reduce_named(
    tensors: Sequence[Any],
    name: str,
    op: ops.ReduceOp,
    process_set: ProcessSet,
    factors: tuple[float, float] = (1.0, 1.0),
) -> list[Any]:
    """Return tensors of one dtype reduced under exactly this name, with a suffix such as "_1of2".

    Uses of one name run in the order of the program. `factors` are prescale and postscale factor.
    An OpError on every rank if their tensors differ. Collective; blocks (eagerly).
    """
    name, ordered = _in_graph(name)
    tensors = tensors if ordered else [*map(unfolded, tensors)]
    specs = tuple(tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors)
    number = registered(process_set).process_set_id
    function = _reducing(name, ordered, op, factors, number, specs)
    return list(function(*tensors))


def entries_of(name: str, op: ops.ReduceOp, count: int) -> list[str]:
    """Return Horovod's names for the tensors of :func:`reduce_named`, outside TF1 graphs."""
    return [f"{_shown(name, op)}_{k + 1}of{count}" for k in range(count)]


def _shown(name: str, op: ops.ReduceOp) -> str:
    return ops.DELTA_PREFIX + name if op is ops.AdasumDelta else name


def gather_named(tensor: Any, name: str, process_set: ProcessSet) -> tf.Tensor:
    """Return all ranks' tensors, one after the other, as :func:`reduce_named`. Collective."""
    name, ordered = _in_graph(name)
    tensor = tensor if ordered else unfolded(tensor)
    spec = tf.TensorSpec([None, *tensor.shape[1:]], tensor.dtype)
    number = registered(process_set).process_set_id
    return _gathering(name, ordered, number, spec)(tensor)


def _in_graph(name: str) -> tuple[str, bool]:
    """Return the name to use here, and whether its uses keep their order, unlike in TF1 graphs."""
    with tf.init_scope():
        if tf.executing_eagerly():
            return name, True
    counts = _uses.setdefault(tf.compat.v1.get_default_graph(), Counter())
    use = counts[name]
    counts[name] += 1
    return (f"{name}.use{use}" if use else name), False


@functools.lru_cache(1024)
def _reducing(
    name: str,
    ordered: bool,
    op: ops.ReduceOp,
    factors: tuple[float, float],
    process_set_id: int,
    specs: tuple[tf.TensorSpec, ...],
) -> Any:
    code = int(ops.Adasum if ops.is_adasum(op) else op)
    shown = _shown(name, op)

    def reduce(*tensors: Any) -> Any:
        return mpi_ops.MPI_LIB.horovod_grouped_allreduce(
            list(tensors),
            name=shown,
            reduce_op=code,
            prescale_factor=factors[0],
            postscale_factor=factors[1],
            process_set_id=process_set_id,
        )

    return _function(reduce, name, ordered, specs)


@functools.lru_cache(1024)
def _gathering(
    name: str, ordered: bool, process_set_id: int, spec: tf.TensorSpec
) -> Any:
    def gather(tensor: Any) -> Any:
        return mpi_ops.MPI_LIB.horovod_allgather(
            tensor, name=name, ignore_name_scope=True, process_set_id=process_set_id
        )

    return _function(gather, name, ordered, (spec,))


def _function(
    body: Callable[..., Any], name: str, ordered: bool, specs: Sequence[tf.TensorSpec]
) -> Any:
    """Return `body` as a function that is never inlined.

    Two calls may have the same name, because names must not depend on how often a rank has traced.
    Each call assigns to one variable, which keeps them apart and in order across functions.
    """

    def ordered_body(*tensors: Any) -> Any:
        with tf.control_dependencies([order.assign_add(1)]):
            results = body(*tensors)
        # TensorFlow removes an operation without a used result, and other ranks would wait for
        # it.
        with tf.control_dependencies(tf.nest.flatten(results)):
            order.assign_add(1)
        return results

    if ordered:
        if name not in _order_variables:
            with tf.init_scope(), tf.device("CPU:0"):
                _order_variables[name] = tf.Variable(0, trainable=False, dtype=tf.int64)
        order = _order_variables[name]
    function = tf.function(
        ordered_body if ordered else body,
        autograph=False,
        experimental_attributes={"_noinline": True},
    )
    return function.get_concrete_function(*specs)
