"""MindSpore's names: wrap cells of both variants, and the gradient reducer (docs/mindspore.md)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import keras
import tensorflow as tf
from horovod.tensorflow import mpi_ops

from adasum_hvd.base import ops
from adasum_hvd.base.options import ProcessSet
from adasum_hvd.mindspore import wrap_cells
from adasum_hvd.mindspore.grad_reducer import GradReducer
from adasum_hvd.parallel import ParallelContext, refuse
from adasum_hvd.parallel.tensorflow_modes import detect
from adasum_hvd.tensorflow import ops as tf_ops
from adasum_hvd.tensorflow.broadcasting import allgather_object
from adasum_hvd.tensorflow.optimizer import DistributedOptimizer
from adasum_hvd.tensorflow.reduction.lists import name_of
from adasum_hvd.tensorflow.reduction.named import gather_named, reduce_named


class DistributedGradReducer(GradReducer):
    """Sums gradients over the ranks of a group in float32, and multiplies by 1 / degree.

    Arguments and errors: those of :class:`adasum_hvd.mindspore.grad_reducer.GradReducer`.
    Sparse gradients are `tf.IndexedSlices`. Eagerly and in `tf.function`.
    """

    _all_ranks = mpi_ops.global_process_set

    @tf.autograph.experimental.do_not_convert
    def __call__(self, gradients: Any) -> Any:
        """As the base's; raises NotImplementedError under XLA."""
        tf_ops.refuse_xla("DistributedGradReducer")
        return super().__call__(gradients)

    def _is_sparse(self, gradient: Any) -> bool:
        return isinstance(gradient, tf.IndexedSlices)

    def _reduce(self, name: str, gradients: list[Any]) -> list[Any]:
        wide = [tf.cast(gradient, tf.float32) for gradient in gradients]
        totals = reduce_named(wide, name, ops.Sum, self._group)
        return [
            tf.cast(total * self._factor, tf.convert_to_tensor(gradient).dtype)
            for total, gradient in zip(totals, gradients, strict=True)
        ]

    def _reduce_sparse(self, name: str, gradient: tf.IndexedSlices) -> Any:
        def gather(tensor: Any, what: str) -> Any:
            return gather_named(tensor, f"{name}.{what}", self._group)

        values = gather(tf.cast(gradient.values, tf.float32), "values") * self._factor
        return tf.IndexedSlices(
            tf.cast(values, gradient.values.dtype),
            gather(gradient.indices, "indices"),
            gradient.dense_shape,
        )


class WrapCell(wrap_cells.WrapCell):
    """A distributed Keras optimizer that is called with a list of gradients: docs/mindspore.md.

    Args and errors as of :class:`adasum_hvd.mindspore.wrap_cells.WrapCell`; the default context is
    data parallel over all ranks. `allow_modes` as `DistributedOptimizer`'s.

    Args:
        variables: the variables that the gradients belong to, in the gradients' order;
            by default the model's, or those that the optimizer was built for.
        model: a Keras model, for its trainable variables.
    """

    _own = wrap_cells.WrapCell._own | {"_variables"}
    _plain, _plain_name = keras.optimizers.Optimizer, "Keras 3 optimizer"
    _reducing = DistributedGradReducer

    def __init__(
        self,
        optimizer: Any,
        variables: Sequence[Any] | None = None,
        relaxed: bool = False,
        context: ParallelContext | None = None,
        model: Any = None,
        gradient_group: ProcessSet | None = None,
        allow_modes: Collection[str] = (),
    ):
        if context is None:
            mode = "stand_alone" if mpi_ops.size() == 1 else "data_parallel"
            context = ParallelContext(mode, mpi_ops.size(), gradients_mean=True)
        settings = tf_ops.settings()
        super().__init__(optimizer, context, settings, relaxed, gradient_group)
        if variables is None and model is not None:
            variables = model.trainable_variables
        self._variables = None if variables is None else tuple(variables)
        found = allgather_object(detect(self._variables or ()))
        refuse(found, allow_modes, mpi_ops.rank())
        self.optimizer = DistributedOptimizer(
            optimizer, op=self._op, allow_modes=allow_modes
        )

    __call__ = tf.autograph.experimental.do_not_convert(wrap_cells.WrapCell.__call__)

    @property
    def parameters(self) -> tuple[Any, ...]:
        """The variables of the gradients, in the same order."""
        if self._variables is not None:
            return self._variables
        if not self.optimizer.built:
            raise ValueError(
                f"{type(self).__name__}: expected variables or a model, but got neither, and the "
                "optimizer is not built; pass variables= or model="
            )
        return tuple(self.optimizer._trainable_variables)

    def _fits(self, gradient: Any, parameter: Any) -> bool:
        return hasattr(gradient, "shape") and tf.TensorShape(
            gradient.shape
        ).is_compatible_with(parameter.shape)

    def _step(self, parameters: tuple[Any, ...], gradients: Sequence[Any]) -> Any:
        return self.optimizer.apply(gradients, self._variables)

    def _name_of(self, index: int, parameter: Any) -> str:
        return name_of(parameter)


class AdaSumByGradWrapCell(WrapCell):
    """Reduces gradients with AdaSum, then takes the optimizer's step."""

    _op = ops.AdasumGrad


class AdaSumByDeltaWeightWrapCell(WrapCell):
    """Takes the optimizer's step, reduces the change of weights, and returns the variables."""

    _op = ops.AdasumDelta
