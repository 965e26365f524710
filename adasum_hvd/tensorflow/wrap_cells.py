"""MindSpore's names for the two variants of the Keras 3 optimizer.

References:
    Seeds 000 and 002; SEEDS rows 1A and 1B.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import keras

from adasum_hvd import ops
from adasum_hvd.parallel import ParallelContext, refuse
from adasum_hvd.parallel.tensorflow_modes import detect
from adasum_hvd.wrap_cells import check_job


class WrapCell:
    """A distributed Keras optimizer that is called with a list of gradients.

    Attributes that a cell lacks (`apply`, `learning_rate`, `variables`, ...) are those of
    `optimizer`, the `DistributedOptimizer` inside; give that one to `model.compile`.

    Args:
        optimizer: a Keras 3 optimizer.
        variables: the variables that the gradients belong to, in the gradients' order;
            without them the optimizer must have been built.
        relaxed: lift the constraints of MindSpore's cells: at least 16 ranks, a power of two,
            groups of 8 ranks averaged (`hvd.init(group_op="average", group_size=8)`).
        context: the parallel context to check; by default data parallel over all ranks.

    Raises:
        RuntimeError: one rank, optimizer sharding, a pipeline, too few ranks or no power of
            two, other groups; in this order, and before the type of `optimizer` is looked at.
            A tf.distribute strategy or keras.distribution on any rank.
        TypeError: `optimizer` is no Keras optimizer.

    Collective: every rank; blocks.
    """

    _op: ops.ReduceOp

    def __init__(
        self,
        optimizer: Any,
        variables: Sequence[Any] | None = None,
        relaxed: bool = False,
        context: ParallelContext | None = None,
    ):
        # The package imports this module.
        hvd: Any = importlib.import_module("adasum_hvd.tensorflow.keras")

        if context is None:
            mode = "stand_alone" if hvd.size() == 1 else "data_parallel"
            context = ParallelContext(mode, hvd.size())
        check_job(context, hvd.settings(), relaxed)
        if not isinstance(optimizer, keras.optimizers.Optimizer):
            raise TypeError(
                f"{type(self).__name__}: required a Keras 3 optimizer, got "
                f"{type(optimizer).__name__}"
            )
        refuse(hvd.allgather_object(detect(variables or ())), rank=hvd.rank())
        self.optimizer = hvd.DistributedOptimizer(optimizer, op=self._op)
        self._variables = None if variables is None else list(variables)

    def __call__(self, gradients: Sequence[Any]) -> Any:
        """Step with `gradients`, one per variable, and return what the optimizer returns.

        Raises:
            ValueError: another number of gradients than of variables.

        Collective: every rank; blocks.
        """
        return self.optimizer.apply(gradients, self._variables)

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # not there yet: __init__ has raised
            raise AttributeError(name)
        return getattr(self.optimizer, name)


class AdaSumByGradWrapCell(WrapCell):
    """Reduces gradients with AdaSum, then takes the optimizer's step."""

    _op = ops.AdasumGrad


class AdaSumByDeltaWeightWrapCell(WrapCell):
    """Takes the optimizer's step, reduces the weights' change; returns the variables."""

    _op = ops.AdasumDelta

    def __call__(self, gradients: Sequence[Any]) -> tuple[Any, ...]:
        """Step with `gradients` and return the updated variables; errors as the base's."""
        super().__call__(gradients)
        if self._variables is not None:
            return tuple(self._variables)
        return tuple(self.optimizer._trainable_variables)
