"""`DistributedGradientTape`: gradients come back reduced over the ranks."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import horovod.tensorflow as horovod_tf
import tensorflow as tf
from horovod.tensorflow import mpi_ops
from horovod.tensorflow.compression import Compression

from adasum_hvd.base import ops
from adasum_hvd.base.agreement import refuse_process_set
from adasum_hvd.base.dynamic_subclass import as_dynamic_subclass
from adasum_hvd.base.marks import is_marked_local
from adasum_hvd.base.namespaces import with_signature_of
from adasum_hvd.base.options import Options, ProcessSet, check, groups_of
from adasum_hvd.offload.keras import after_data
from adasum_hvd.tensorflow.horovod_arguments import (
    by_name,
    warn_without_effect,
    weights_of,
)
from adasum_hvd.tensorflow.reduction import Reduction, is_alone
from adasum_hvd.tensorflow.reduction.buckets import prepared

# A tape lives for one step, but the result of the ranks' comparison must be kept.
_reductions: dict[Hashable, Reduction] = {}


def _reduction_of(options: Options) -> Reduction:
    """Return the reduction that all tapes with these options share."""
    groups = options.groups
    if isinstance(groups, Sequence):  # of variables, which have no hash
        groups = tuple(tuple(map(id, group)) for group in groups)
    key = replace(options, groups=None), groups
    if key not in _reductions:
        _reductions[key] = Reduction(
            "DistributedGradientTape", options, many_lists=True
        )
    return _reductions[key]


class _Tape(tf.GradientTape):
    """A mixin before the user's tape class."""

    _adasum_options: Options
    _adasum_local: set[int]

    def register_local_source(self, source: Any) -> None:
        """Neither reduce the gradient of `source`, nor divide it, as Horovod's tape does."""
        self._adasum_local.add(id(source))

    @tf.autograph.experimental.do_not_convert
    def gradient(self, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        """As TensorFlow's, reduced over the ranks. Collective; blocks (eagerly).

        None contributes zeros; in a `tf.function` it must be None on all ranks.
        """
        gradients = super().gradient(target, sources, *args, **kwargs)
        options = self._adasum_options
        if is_alone(options.process_set):
            return gradients
        flat, sources = tf.nest.flatten(gradients), tf.nest.flatten(sources)
        # Also sources without a gradient, because another rank may have one.
        places = [
            place
            for place, source in enumerate(sources)
            if id(source) not in self._adasum_local and not is_marked_local(source)
        ]
        variables = [sources[place] for place in places]
        ready = prepared([flat[place] for place in places], variables, options)
        with after_data(ready):
            results = _reduction_of(options).gradients(ready, variables, places)
        for place, result in zip(places, results, strict=True):
            flat[place] = result
        return tf.nest.pack_sequence_as(gradients, flat)


def DistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: ops.ReduceOp | int | str = ops.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = mpi_ops.global_process_set,
    scale_local_gradients: bool = False,
) -> Any:
    """Return a tape whose `gradient()` is reduced over the ranks.

    Args:
        gradtape: a tape, before or after it has recorded.
        device_dense: as :func:`adasum_hvd.tensorflow.optimizer.DistributedOptimizer`'s, like all
            others but these.
        op: a reduction or its name. `Adasum` and `AdasumGrad` are the same here.
        groups: a number of buckets, or lists of sources that share one.
        process_set: the ranks that reduce; others keep their own gradients.

    Returns:
        An instance of a subclass of `type(gradtape)`.

    Raises:
        ValueError: bad arguments; a process set that is not registered; `AdasumDelta`, because a
            tape has no weight changes. In `gradient()`: a sparse gradient for AdaSum without
            `sparse_as_dense`; sources that differ between ranks (in a graph an `OpError`).
        NotImplementedError: a process set in an elastic job. In `gradient()`: under XLA or a
            tf.distribute strategy.
    """
    warn_without_effect(
        "DistributedGradientTape",
        device_dense=device_dense,
        device_sparse=device_sparse,
        scale_local_gradients=scale_local_gradients,
    )
    reduction = ops.parse(op)
    if reduction is ops.AdasumDelta:
        raise ValueError(
            "DistributedGradientTape: expected a reduction of gradients, but got AdasumDelta, "
            "which reduces weight changes; use DistributedOptimizer(op=AdasumDelta)"
        )
    options = Options(
        op=reduction,
        process_set=process_set,
        compression=compression,
        gradient_predivide_factor=gradient_predivide_factor,
        groups=groups_of("DistributedGradientTape", num_groups, groups),
        sparse_as_dense=sparse_as_dense,
    )
    check(options, (Compression.none, Compression.fp16))
    refuse_process_set(process_set, mpi_ops.global_process_set)
    tape = as_dynamic_subclass(gradtape, _Tape, type(gradtape).__name__)
    tape._adasum_options = options
    tape._adasum_local = set()
    return tape


@with_signature_of(horovod_tf.PartialDistributedGradientTape)
def PartialDistributedGradientTape(
    gradtape: tf.GradientTape, *args: Any, **kwargs: Any
) -> Any:
    """Return a tape that reduces all gradients but those of `local_layers`.

    Args:
        gradtape: as :func:`DistributedGradientTape`, like the errors; TypeError: too many `args`.
        *args: by position in Horovod's order, which has `local_layers` after `process_set`.
        **kwargs: as :func:`DistributedGradientTape`, and `local_layers`: a Keras layer or
            several, whose gradients are not reduced.
    """
    given = by_name(horovod_tf.PartialDistributedGradientTape, args, kwargs)
    local = weights_of(given.pop("local_layers", None))
    tape = DistributedGradientTape(gradtape, **given)
    for variable in local:
        tape.register_local_source(variable)
    return tape
