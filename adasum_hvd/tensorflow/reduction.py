"""Lists of gradients or weight changes over the ranks, under names that all ranks share."""

from __future__ import annotations

import itertools
import os
import weakref
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from horovod.tensorflow import mpi_ops
from tensorflow.python.framework.func_graph import FuncGraph

from adasum_hvd import ops
from adasum_hvd.agreement import (
    OPTIONS,
    Described,
    comparable,
    compare_parameters,
    compare_settings,
)
from adasum_hvd.options import Options
from adasum_hvd.partition import partition
from adasum_hvd.tensorflow import ops as tf_ops
from adasum_hvd.tensorflow.functions import allgather_object

# Numbers of lists that the ranks have compared. All ranks of a process set count alike, since
# comparing is collective.
_numbers: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # by process set
_uses: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # by graph

# What can be computed from all ranks' rows, for `tf.IndexedSlices`.
SPARSE_OPS = (ops.Average, ops.Sum)


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


def shape_of(tensor: Any) -> tuple[int, ...]:
    """Return the shape; TensorFlow 1's behaviour has objects in it that have no hash."""
    return tuple(tf.TensorShape(tensor.shape).as_list())


def must_reduce(options: Options) -> bool:
    """Return whether steps reduce; on a single rank only where that does more than reduce."""
    process_set = options.process_set
    return not is_alone(process_set) or (
        process_set.included() and options.clip_delta_norm is not None
    )


def name_in_graph(name: str, user: object) -> str:
    """Return `name`, with a number behind it from its second use in the outermost graph on.

    Operations of one graph may run at the same time, in any order, and Horovod pairs those of
    the ranks by their names.

    Args:
        name: the same on all ranks that reduce.
        user: who uses it; uses are counted for each user apart.
    """
    if tf.executing_eagerly():
        return name
    graph = tf.compat.v1.get_default_graph()
    while isinstance(getattr(graph, "outer_graph", None), FuncGraph):
        graph = graph.outer_graph
    counts = _uses.setdefault(graph, Counter())
    counts[user, name] += 1
    use = counts[user, name] - 1
    return f"{name}.use{use}" if use else name


def _is_sparse(tensor: Any) -> bool:
    return isinstance(tensor, tf.IndexedSlices)


@dataclass(frozen=True)
class Agreed:
    """What the ranks found when they compared a list: its number, and about their models."""

    number: int
    any_local: bool  # some rank has worker-local variables


class Reduction:
    """Reduces lists of tensors that belong to variables.

    Args:
        what: who asks, for messages and in the tensors' names.
        options: op, wire, factors, process set, groups and bucket size.
    """

    def __init__(self, what: str, options: Options):
        self._what, self._options = what, options
        self._known: dict[Hashable, Agreed] = {}
        self._places: dict[int, int] = {}  # among all variables, by id

    def number(self, variables: Sequence[Any]) -> None:
        """Take note of all variables, of which ranks may come to use different ones.

        Names may differ between ranks, and shapes be equal: only their places tell them apart.
        """
        self._places = {id(variable): k for k, variable in enumerate(variables)}

    def __call__(
        self,
        tensors: Sequence[Any],
        variables: Sequence[Any],
        places: Sequence[int] | None = None,
    ) -> list[Any]:
        """Return `tensors` reduced, one per variable.

        Args:
            tensors: one per variable; `tf.IndexedSlices` for `SPARSE_OPS`, which come back as
                such, each row once.
            variables: what they belong to; shapes and dtypes in the same order on all ranks.
            places: as :meth:`agree`.

        Raises:
            ValueError: the ranks' lists differ; on every rank, the first time.
            NotImplementedError: under XLA or a tf.distribute strategy.

        Collective: every rank of the process set, at its first step for this list. It compares
        then, even while a function is traced.
        """
        tensors = [
            tensor if _is_sparse(tensor) else tf.convert_to_tensor(tensor)
            for tensor in tensors
        ]
        label = self._label(self.agree(tensors, variables, places=places))
        options = self._options
        results: list[Any] = [None] * len(tensors)
        kinds = {}
        for index, variable in enumerate(variables):
            if _is_sparse(tensors[index]):
                results[index] = self._gather(f"{label}.rows{index}", tensors[index])
            else:
                kinds[id(variable)] = self._kind(tensors[index])
        buckets = partition(
            [entry for entry in enumerate(variables) if results[entry[0]] is None],
            lambda variable: kinds[id(variable)],
            options.bucket_bytes,
            options.groups,
        )
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

    def _gather(self, name: str, slices: tf.IndexedSlices) -> tf.IndexedSlices:
        """Return the sum or mean of all ranks' rows; ranks may have other numbers of them."""

        def gather(tensor: Any, what: str) -> Any:
            return mpi_ops.allgather(
                tensor,
                name=f"{name}.{what}",
                ignore_name_scope=True,
                process_set=self._options.process_set,
            )

        dtype = slices.values.dtype
        wire = tf_ops.wire_dtype(dtype, self._options.compression)
        values = tf.cast(gather(tf.cast(slices.values, wire), "values"), dtype)
        # Optimizers that square a gradient need each row once.
        rows, places = tf.unique(gather(slices.indices, "indices"))
        total = tf.math.unsorted_segment_sum(values, places, tf.size(rows))
        if self._options.op is ops.Average:
            process_set = self._options.process_set
            size: Any = process_set.size()
            if _is_elastic():  # it changes under a traced function
                size = mpi_ops.size_op(process_set_id=process_set.process_set_id)
            total /= tf.cast(size, dtype)
        return tf.IndexedSlices(total, rows, slices.dense_shape)

    def agree(
        self,
        tensors: Sequence[Any],
        variables: Sequence[Any],
        has_local: bool = False,
        places: Sequence[int] | None = None,
    ) -> Agreed:
        """Compare what is to be reduced, the options and the op's settings over the ranks.

        Args:
            tensors: as they will be reduced; only their shapes and dtypes count. All ranks must
                come with an empty list too, so that they hear of it where others have more.
            variables: what they belong to, for the message.
            has_local: whether this rank has worker-local variables.
            places: of the variables among all there are; by default as `number` was told.

        Raises:
            ValueError: the ranks differ; on every rank.
            NotImplementedError: under XLA or a tf.distribute strategy.

        Collective: every rank of the process set, the first time that a list is seen.
        """
        tf_ops.refuse_xla(self._what)
        if tf.distribute.has_strategy():
            raise NotImplementedError(
                f"{self._what}: required one model per rank, got a tf.distribute strategy; "
                "let Horovod start one process per device instead"
            )
        if places is None:
            places = [self._places.get(id(variable), -1) for variable in variables]
        described = []
        for tensor, variable, place in zip(tensors, variables, places, strict=True):
            rows = " rows" if _is_sparse(tensor) else ""
            number = f", number {place}" if place >= 0 else ""
            shape = shape_of(variable if rows else tensor)
            kind = f"{tensor.dtype.name}{rows}{number}"
            described.append((name_of(variable), shape, kind))
        key = tuple(entry[1:] for entry in described)
        if key not in self._known:
            self._known[key] = self._compare(described, has_local)
        return self._known[key]

    def _compare(self, described: Sequence[Described], has_local: bool) -> Agreed:
        process_set = self._options.process_set
        any_local = has_local
        if not _is_elastic() and process_set.size() > 1:
            mine = (
                comparable(tf_ops.settings()),
                self._options.shared,
                list(described),
                has_local,
            )
            theirs = allgather_object(
                mine, name="adasum.compare", process_set=process_set
            )
            settings, shared, lists, local = zip(*theirs, strict=True)
            compare_settings(settings, mpi_ops.rank())
            compare_settings(shared, mpi_ops.rank(), *OPTIONS)
            compare_parameters(self._what, lists, mpi_ops.rank(), names=False)
            any_local = any(local)
        number = next(_numbers.setdefault(process_set, itertools.count()))
        return Agreed(number, any_local)

    def _label(self, agreed: Agreed) -> str:
        """Return a name for one reduction of a list, the same on all ranks."""
        return name_in_graph(f"{self._what}.{agreed.number}", self)

    def all_of(self, flag: Any) -> Any:
        """Return whether the boolean scalar `flag` is true on all ranks.

        Raises:
            NotImplementedError: traced into a function that XLA compiles.

        Collective: every rank of the process set; blocks (eagerly).
        """
        # A rank that has joined counts as zero: the largest, of what is not so.
        missing = 1 - tf.cast(flag, tf.int32)
        (missing,) = tf_ops.reduce_named(
            [missing],
            self._label(self.agree([missing], [missing])),
            ops.Max,
            (1.0, 1.0),
            self._options.process_set.process_set_id,
        )
        return tf.equal(missing, 0)
