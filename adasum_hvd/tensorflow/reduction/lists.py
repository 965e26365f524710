"""Lists of the tensors that the ranks reduce: compared once, then identified by a number."""

from __future__ import annotations

import hashlib
import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from horovod.tensorflow import mpi_ops

from adasum_hvd.base import agreement
from adasum_hvd.base.options import Options
from adasum_hvd.tensorflow import ops as tf_ops
from adasum_hvd.tensorflow.broadcasting import allgather_object
from adasum_hvd.tensorflow.unfolded import zero

# The numbers of compared lists, by process set. All its ranks count alike, because every
# comparison is collective.
_numbers: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Kind:
    """The form in which all ranks reduce the tensor of a variable."""

    dtype: tf.DType
    is_rows: bool  # `tf.IndexedSlices`


@dataclass(frozen=True)
class Entry:
    """One rank's description of one variable in a list."""

    name: str
    shape: tuple[int, ...]
    place: int  # position among all variables; -1 if unknown
    kind: Kind | None  # None if this rank has no tensor for it
    dtype: tf.DType  # of the tensor that the variable may have

    @property
    def key(self) -> tuple[Any, ...]:
        """The facts that identify the variable in a list. Whether it has a tensor is not one."""
        return self.shape, self.place, self.dtype


@dataclass(frozen=True)
class Agreed:
    """The result of the ranks' comparison of a list."""

    number: int
    any_local: bool  # some rank has worker-local variables
    any_tensor: bool  # some rank had a tensor
    note: str  # the first rank's text that is not empty
    kinds: tuple[Kind, ...]  # by variable


def is_sparse(tensor: Any) -> bool:
    """Return whether it is `tf.IndexedSlices`."""
    return isinstance(tensor, tf.IndexedSlices)


def name_of(variable: Any) -> str:
    """Return the variable's path in its model, or its name if it has no path."""
    name = getattr(variable, "path", None) or getattr(variable, "name", "unnamed")
    return str(name)


def shape_of(tensor: Any) -> tuple[int, ...]:
    """Return the shape as a tuple, because the dimensions of TF1 shapes have no hash."""
    return tuple(tf.TensorShape(tensor.shape).as_list())


def describe(tensor: Any, variable: Any, place: int, is_delta: bool) -> Entry:
    """Return this rank's description of a variable; `tensor` is None if it has none."""
    own = tf.as_dtype(variable.dtype).base_dtype
    if is_delta and own == tf.bfloat16:
        own = tf.float32  # as `delta.wide`
    kind = None if tensor is None else Kind(tensor.dtype, is_sparse(tensor))
    return Entry(name_of(variable), shape_of(variable), place, kind, own)


def in_kind(tensor: Any, variable: Any, kind: Kind) -> Any:
    """Return `tensor` in the form that all ranks reduce, or zeros if it is None."""
    if kind.is_rows:
        return _as_rows(tensor, variable, kind.dtype)
    if tensor is not None:
        return tf.cast(tf.convert_to_tensor(tensor), kind.dtype)
    shape = shape_of(variable)
    dims = tf.shape(variable) if None in shape else shape
    return tf.fill(dims, zero(kind.dtype))


def _as_rows(tensor: Any, variable: Any, dtype: tf.DType) -> tf.IndexedSlices:
    count, *rest = shape = shape_of(variable)
    dense = tensor.dense_shape if is_sparse(tensor) else None
    if tensor is None:
        values, indices = tf.zeros([0, *rest], dtype), tf.zeros([0], tf.int64)
    elif is_sparse(tensor):
        values, indices = tensor.values, tf.cast(tensor.indices, tf.int64)
    else:
        values, indices = tensor, tf.range(count, dtype=tf.int64)
    return tf.IndexedSlices(
        tf.cast(values, dtype), indices, tf.constant(shape) if dense is None else dense
    )


def compare(
    what: str,
    options: Options,
    optimizer: dict[str, object],
    mine: list[Entry],
    has_local: bool,
    together: bool = True,
    note: str = "",
) -> Agreed:
    """Compare a list, the optimizer, the options and the op's settings, as `Reduction.agree`.

    Raises ValueError on every rank if they differ. Without `together` this rank decides alone.
    Collective; blocks, while a function is traced too.
    """
    process_set = options.process_set
    settings = agreement.comparable(tf_ops.settings())
    report = settings, options.shared, optimizer, mine, has_local, note
    reports, rank, ranks = [report], mpi_ops.rank(), []
    if together:
        ranks = process_set.ranks or []
        reports = allgather_object(
            report, name="adasum.compare", process_set=process_set
        )
    by_rank, shared, optimizers, lists, local, notes = zip(*reports, strict=True)
    agreement.compare_settings(by_rank, rank, ranks=ranks)
    agreement.compare_settings(shared, rank, *agreement.OPTIONS, ranks=ranks)
    agreement.compare_settings(optimizers, rank, *agreement.OPTIMIZER, ranks=ranks)
    kinds = [_merged(entries) for entries in zip(*lists, strict=False)]
    described = [_described(entries, kinds) for entries in lists]
    agreement.compare_parameters(what, described, rank, names=False)
    elastic = agreement.is_elastic()
    if elastic:
        number = _fingerprint([options.shared, [e.key for e in mine], kinds])
    else:
        number = next(_numbers.setdefault(process_set, itertools.count()))
    # In an elastic job this rank does not know whether another one has a tensor.
    any_tensor = elastic or any(e.kind for entries in lists for e in entries)
    first_note = next(filter(None, notes), "")
    return Agreed(number, any(local), any_tensor, first_note, tuple(kinds))


def _fingerprint(content: Any) -> int:
    """Return a number of a list that is equal on all ranks, whenever they joined the job."""
    digest = hashlib.sha256(repr(content).encode()).digest()
    return int.from_bytes(digest[:3], "big")


def _merged(entries: Sequence[Entry]) -> Kind:
    """Return the form that suits all ranks: rows only if no rank has a dense tensor."""
    kinds = [entry.kind for entry in entries if entry.kind]
    if not kinds:
        return Kind(entries[0].dtype, False)
    return Kind(kinds[0].dtype, all(kind.is_rows for kind in kinds))


def _described(
    entries: Sequence[Entry], kinds: Sequence[Kind]
) -> list[tuple[str, tuple[int, ...], str]]:
    described = []
    for entry, known in itertools.zip_longest(entries, kinds):
        dtype = (entry.kind or known or entry).dtype
        number = f", number {entry.place}" if entry.place >= 0 else ""
        described.append((entry.name, entry.shape, f"{dtype.name}{number}"))
    return described
