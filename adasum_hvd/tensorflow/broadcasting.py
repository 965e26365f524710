"""Objects and variables over the ranks: eagerly, while tracing, and in TF1 graphs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf
from horovod.tensorflow import functions, mpi_ops

from adasum_hvd.base.agreement import compare_parameters, registered
from adasum_hvd.base.options import ProcessSet
from adasum_hvd.parallel.tensorflow_modes import native
from adasum_hvd.tensorflow.horovod_arguments import warn_without_effect

# Dtypes that Horovod lacks, and the dtypes in which their bits are sent.
_WIRE_DTYPES = {tf.uint32: tf.int32, tf.uint64: tf.int64, tf.bfloat16: tf.uint16}


@contextmanager
def _session(given: Any = None) -> Iterator[Any]:
    """Yield the session for Horovod's functions: `given`, None eagerly, or one for a TF1 graph."""
    with tf.init_scope():
        if tf.executing_eagerly() or given is not None:
            yield given
            return
    with tf.Graph().as_default(), tf.compat.v1.Session() as own:
        yield own


def allgather_object(
    obj: Any,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = mpi_ops.global_process_set,
) -> list[Any]:
    """Return every rank's `obj`, in rank order: eagerly, while tracing, and in TF1 graphs.

    Args:
        obj: anything that pickles.
        session: as Horovod's; without it, a TF1 graph uses a new session.
        name: base name of the two tensors that are sent.
        process_set: the ranks that exchange objects.

    Collective: every rank of `process_set`; blocks, also while a function is traced.
    """
    name = name or "adasum.allgather_object"
    with _session(session) as used:
        return functions.allgather_object(obj, used, name, registered(process_set))


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str = "adasum.broadcast_object",
    process_set: ProcessSet = mpi_ops.global_process_set,
) -> Any:
    """Return the root's `obj`, as :func:`allgather_object`. Collective; blocks."""
    with _session() as used:
        ranks = registered(process_set)
        return functions.broadcast_object(obj, root_rank, used, name, ranks)


def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int = 0,
    process_set: ProcessSet = mpi_ops.global_process_set,
    inplace: bool = False,
) -> Any:
    """Give every rank the root's values, by the variables' order: Keras numbers their names.

    Args:
        variables: Keras or TensorFlow variables of any dtype, in the same order on all ranks.
        root_rank: the rank, in the job, that sends its values.
        process_set: the ranks that get the values.
        inplace: without effect, for Horovod's scripts.

    Returns:
        In a TF1 graph, the operation that assigns the values; otherwise None.

    Raises:
        ValueError: the ranks' variables differ in number, shape or dtype (eagerly).

    Collective: every rank of `process_set`; blocks (eagerly).
    """
    warn_without_effect("broadcast_variables", inplace=inplace)
    targets = [native(variable) for variable in variables]
    if tf.executing_eagerly():
        mine = [(t.name, tuple(t.shape), tf.as_dtype(t.dtype).name) for t in targets]
        by_rank = allgather_object(
            mine, name="adasum.variables", process_set=process_set
        )
        compare_parameters("broadcast_variables", by_rank, mpi_ops.rank(), names=False)

    def assign_all() -> list[Any]:
        return [
            target.assign(_broadcast(target, root_rank, index, process_set))
            for index, target in enumerate(targets)
        ]

    if tf.executing_eagerly():
        tf.function(assign_all, autograph=False).get_concrete_function()()
        return None
    return tf.group(*assign_all())


def _broadcast(
    variable: Any, root_rank: int, index: int, process_set: ProcessSet
) -> Any:
    value = tf.convert_to_tensor(variable)
    wire_dtype = _WIRE_DTYPES.get(value.dtype)
    received = mpi_ops.broadcast(
        value if wire_dtype is None else tf.bitcast(value, wire_dtype),
        root_rank,
        name=f"adasum.broadcast.{index}",
        ignore_name_scope=True,
        process_set=registered(process_set),
    )
    return received if wire_dtype is None else tf.bitcast(received, value.dtype)
