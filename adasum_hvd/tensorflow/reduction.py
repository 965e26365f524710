"""Lists of gradients or weight changes over the ranks, under names that all ranks share."""

from __future__ import annotations

import itertools
import os
import weakref
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

import tensorflow as tf
from horovod.tensorflow import mpi_ops
from tensorflow.python.framework.func_graph import FuncGraph

from adasum_hvd import ops
from adasum_hvd.agreement import (
    Described,
    comparable,
    compare_parameters,
    compare_settings,
)
from adasum_hvd.options import Options
from adasum_hvd.partition import partition
from adasum_hvd.tensorflow import ops as tf_ops
from adasum_hvd.tensorflow.functions import allgather_object

_LOCAL_MARK = "_adasum_worker_local"

# Numbers of lists that the ranks have compared. All ranks of a process set count alike, since
# comparing is collective.
_numbers: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # by process set
_uses: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # by graph


def mark_worker_local(*variables: Any) -> None:
    """Exclude variables from every reduction: each rank keeps and updates its own.

    For variables that exist on one rank only or must differ. Call it before the first step.
    """
    for variable in variables:
        setattr(variable, _LOCAL_MARK, True)


def is_worker_local(variable: Any) -> bool:
    """Return whether :func:`mark_worker_local` was called for `variable`."""
    return getattr(variable, _LOCAL_MARK, False)


def is_alone(process_set: Any) -> bool:
    """Return whether this rank has nobody to reduce with; never in an elastic job."""
    if not process_set.included():
        return True
    return process_set.size() == 1 and not _is_elastic()


def _is_elastic() -> bool:
    return os.environ.get("HOROVOD_ELASTIC", "0") == "1"


def name_of(variable: Any) -> str:
    """Return the variable's path in its model, or what there is of a name."""
    name = getattr(variable, "path", None) or getattr(variable, "name", "unnamed")
    return str(name)


def use_in_graph(user: Hashable) -> int:
    """Return how often this was called with `user` while the outermost graph was traced.

    Operations of one graph may run at the same time and then need names of their own.
    """
    if tf.executing_eagerly():
        return 0
    graph = tf.compat.v1.get_default_graph()
    while isinstance(getattr(graph, "outer_graph", None), FuncGraph):
        graph = graph.outer_graph
    counts = _uses.setdefault(graph, Counter())
    counts[user] += 1
    return counts[user] - 1


class Reduction:
    """Reduces lists of tensors that belong to variables.

    Args:
        what: who asks, for messages and in the tensors' names.
        options: op, wire, factors, process set, groups and bucket size.
    """

    def __init__(self, what: str, options: Options):
        self._what, self._options = what, options
        self._known: dict[Hashable, int] = {}

    def __call__(
        self, tensors: Sequence[Any], variables: Sequence[Any], key: Hashable
    ) -> list[Any]:
        """Return `tensors` reduced, one per variable.

        Args:
            tensors: dense, one per variable.
            variables: what they belong to; shapes and dtypes in the same order on all ranks.
            key: tells this list from others of the same shapes that may be reduced at the same
                time. All ranks must see a key for the first time together.

        Raises:
            ValueError: the ranks' lists differ; on every rank, the first time.
            NotImplementedError: under XLA or a tf.distribute strategy.

        Collective: every rank of the process set, at its first step for this list. It compares
        then, even while a function is traced.
        """
        tf_ops.refuse_xla(self._what)
        if tf.distribute.has_strategy():
            raise NotImplementedError(
                f"{self._what}: required one model per rank, got a tf.distribute strategy; "
                "let Horovod start one process per device instead"
            )
        tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
        described = [
            (name_of(variable), tuple(tensor.shape), tensor.dtype.name)
            for tensor, variable in zip(tensors, variables, strict=True)
        ]
        label = self.label(key, described)
        options = self._options
        kinds = {
            id(variable): self._kind(tensor)
            for tensor, variable in zip(tensors, variables, strict=True)
        }
        buckets = partition(
            enumerate(variables),
            lambda variable: kinds[id(variable)],
            options.bucket_bytes,
            options.groups,
        )
        results: list[Any] = [None] * len(tensors)
        for number, members in enumerate(buckets):
            wire = kinds[id(members[0][1])][0]
            reduced = tf_ops.reduce_named(
                [tf.cast(tensors[index], wire) for index, _ in members],
                f"{label}.{number}",
                options.op,
                options.factors,
                options.process_set.process_set_id,
            )
            for (index, _), tensor in zip(members, reduced, strict=True):
                results[index] = tf.cast(tensor, tensors[index].dtype)
        return results

    def _kind(self, tensor: Any) -> tuple[tf.DType, int]:
        wire = tf_ops.wire_dtype(tensor.dtype, self._options.compression)
        return wire, (tensor.shape.num_elements() or 0) * wire.size

    def label(self, key: Hashable, described: Sequence[Described]) -> str:
        """Return a name that is this list's on all ranks. Collective the first time."""
        key = (key, *(entry[1:] for entry in described))
        if key not in self._known:
            self._known[key] = self._compare(described)
        return f"{self._what}.{self._known[key]}"

    def _compare(self, described: Sequence[Described]) -> int:
        process_set = self._options.process_set
        if not _is_elastic() and process_set.size() > 1:
            mine = (comparable(tf_ops.settings()), list(described))
            theirs = allgather_object(
                mine, name="adasum.compare", process_set=process_set
            )
            settings, lists = zip(*theirs, strict=True)
            compare_settings(settings, mpi_ops.rank())
            compare_parameters(self._what, lists, mpi_ops.rank(), names=False)
        return next(_numbers.setdefault(process_set, itertools.count()))


def all_of(flag: Any, reduction: Reduction, process_set: Any) -> Any:
    """Return whether the boolean scalar `flag` is true on all ranks of `process_set`.

    Args:
        flag: a boolean scalar.
        reduction: gives the flag its name; one flag at a time.
        process_set: the ranks that agree.

    Collective: every rank of `process_set`; blocks (eagerly).
    """
    tf_ops.refuse_xla("agreement on finite gradients")
    (agreed,) = tf_ops.reduce_named(
        [tf.cast(flag, tf.int32)],
        reduction.label("all_of", ()),
        ops.Min,
        (1.0, 1.0),
        process_set.process_set_id,
    )
    return tf.cast(agreed, tf.bool)


def identities(variables: Sequence[Any]) -> tuple[int, ...]:
    """Return a key of variables that outlive the key."""
    return tuple(map(id, variables))
