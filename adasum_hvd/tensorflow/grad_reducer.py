"""`DistributedGradReducer`: plain sums or means of gradients, float32 on the wire.

References:
    Seed 001 (mindspore.nn.DistributedGradReducer), SEEDS row 1D. Parameter-server mode has
    no counterpart in Horovod.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf
from horovod.tensorflow import mpi_ops

from adasum_hvd import ops
from adasum_hvd.partition import checked_degree, fusion_groups
from adasum_hvd.tensorflow import ops as tf_ops
from adasum_hvd.tensorflow.reduction import name_in_graph

# Names must agree on the ranks of a group, whatever other ranks construct.
_reducers: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


class DistributedGradReducer:
    """Sums gradients over the ranks of a group in float32, and multiplies by 1 / degree.

    Eagerly and in `tf.function`.

    Args:
        parameters: the variables that the gradients belong to, in the gradients' order. One
            with a true attribute `layerwise_parallel` keeps its own gradient; one with an
            attribute `comm_fusion` is reduced together with those of the same number.
        mean: multiply the sums by 1 / degree.
        degree: the divisor; by default the number of ranks in `group` (not in the job).
        fusion_type: the fusion number of parameters without a `comm_fusion`.
        group: a Horovod process set; by default all ranks.
        split_indices: with `fusion_type=1`, a new fusion group begins behind each index.

    Raises:
        ValueError: `degree` is not an int or not larger than 0.

    Example:
        >>> reducer = DistributedGradReducer(model.trainable_variables)  # doctest: +SKIP
        >>> gradients = reducer(tape.gradient(loss, model.trainable_variables))  # doctest: +SKIP

    References:
        Seed 001; SEEDS row 1D.
    """

    def __init__(
        self,
        parameters: Iterable[Any],
        mean: bool = True,
        degree: int | None = None,
        fusion_type: int = 1,
        group: Any = None,
        split_indices: Sequence[int] | None = None,
    ):
        self._parameters = list(parameters)
        self._group = mpi_ops.global_process_set if group is None else group
        degree = checked_degree(self._group.size() if degree is None else degree)
        self._factor = 1.0 / degree if mean else 1.0
        self._fusion = fusion_groups(self._parameters, fusion_type, split_indices)
        count = _reducers.setdefault(self._group, itertools.count())
        self._name = f"grad_reducer.{self._group.process_set_id}.{next(count)}"

    @tf.autograph.experimental.do_not_convert
    def __call__(self, gradients: Any) -> Any:
        """Return the reduced gradients: a tensor for a tensor, a tuple for a sequence.

        Args:
            gradients: one per parameter, of any float dtype, dense or `tf.IndexedSlices`. A
                sparse one comes back with all ranks' slices. None stays None, and must be
                None on all ranks.

        Raises:
            ValueError: another number of gradients than of parameters.
            NotImplementedError: traced into a function that XLA compiles.

        Collective: every rank of the group; blocks (eagerly).
        """
        tf_ops.refuse_xla("DistributedGradReducer")
        if not isinstance(gradients, list | tuple):
            return self((gradients,))[0]
        if len(gradients) != len(self._parameters):
            raise ValueError(
                f"DistributedGradReducer: required {len(self._parameters)} gradients, one per "
                f"parameter, got {len(gradients)}"
            )
        results = list(gradients)
        name = name_in_graph(self._name, self)
        groups: dict[int, list[int]] = {}
        for index, (parameter, gradient) in enumerate(
            zip(self._parameters, gradients, strict=True)
        ):
            if gradient is None or getattr(parameter, "layerwise_parallel", False):
                continue
            if isinstance(gradient, tf.IndexedSlices):
                results[index] = self._reduce_sparse(f"{name}.sparse.{index}", gradient)
            else:
                groups.setdefault(self._fusion[index], []).append(index)
        for fusion, indices in groups.items():
            totals = tf_ops.reduce_named(
                [tf.cast(gradients[index], tf.float32) for index in indices],
                f"{name}.{fusion}",
                ops.Sum,
                (1.0, 1.0),
                self._group.process_set_id,
            )
            for index, total in zip(indices, totals, strict=True):
                results[index] = tf.cast(
                    total * self._factor, tf.convert_to_tensor(gradients[index]).dtype
                )
        return tuple(results)

    def _reduce_sparse(self, name: str, gradient: tf.IndexedSlices) -> Any:
        def gather(tensor: Any, what: str) -> Any:
            return mpi_ops.allgather(
                tensor,
                name=f"{name}.{what}",
                ignore_name_scope=True,
                process_set=self._group,
            )

        values = gather(tf.cast(gradient.values, tf.float32), "values") * self._factor
        return tf.IndexedSlices(
            tf.cast(values, gradient.values.dtype),
            gather(gradient.indices, "indices"),
            gradient.dense_shape,
        )
