"""`DistributedGradReducer` for TensorFlow, eagerly and in `tf.function`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from horovod.tensorflow import mpi_ops

from adasum_hvd import ops
from adasum_hvd.grad_reducer import GradReducer
from adasum_hvd.tensorflow import ops as tf_ops
from adasum_hvd.tensorflow.named import gather_named, reduce_named


class DistributedGradReducer(GradReducer):
    """Sums gradients over the ranks of a group in float32, and multiplies by 1 / degree.

    Arguments and errors: :class:`adasum_hvd.grad_reducer.GradReducer`. Sparse gradients are
    `tf.IndexedSlices`. Eagerly and in `tf.function`.

    Example:
        >>> reducer = DistributedGradReducer(model.trainable_variables)  # doctest: +SKIP
        >>> gradients = reducer(tape.gradient(loss, model.trainable_variables))  # doctest: +SKIP

    References:
        Seed 001; SEEDS row 1D.
    """

    _all_ranks = mpi_ops.global_process_set

    @tf.autograph.experimental.do_not_convert
    def __call__(self, gradients: Any) -> Any:
        """As the base's.

        Raises:
            ValueError: another number of gradients than of parameters.
            NotImplementedError: traced into a function that XLA compiles.
        """
        tf_ops.refuse_xla("DistributedGradReducer")
        return super().__call__(gradients)

    def _is_sparse(self, gradient: Any) -> bool:
        return isinstance(gradient, tf.IndexedSlices)

    def _start(self, name: str, gradients: list[Any]) -> Callable[[], list[Any]]:
        totals = reduce_named(
            [tf.cast(gradient, tf.float32) for gradient in gradients],
            name,
            ops.Sum,
            (1.0, 1.0),
            self._group.process_set_id,
        )
        return lambda: [
            tf.cast(total * self._factor, tf.convert_to_tensor(gradient).dtype)
            for total, gradient in zip(totals, gradients, strict=True)
        ]

    def _reduce_sparse(self, name: str, gradient: tf.IndexedSlices) -> Any:
        def gather(tensor: Any, what: str) -> Any:
            return gather_named(tensor, f"{name}.{what}", self._group.process_set_id)

        values = gather(tf.cast(gradient.values, tf.float32), "values") * self._factor
        return tf.IndexedSlices(
            tf.cast(values, gradient.values.dtype),
            gather(gradient.indices, "indices"),
            gradient.dense_shape,
        )
