"""The gradient variant: gradients are reduced, then every rank takes the same step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from adasum_hvd.marks import is_marked_local
from adasum_hvd.tensorflow.distributed import KerasDistributed
from adasum_hvd.tensorflow.tape import prepared
from adasum_hvd.tensorflow.window import returning


class GradientOptimizer(KerasDistributed):
    """Reduces the gradients of a step, unscaled and accumulated, before they are clipped."""

    def _prepared(self, grads: list[Any], variables: Sequence[Any]) -> list[Any]:
        grads = super()._prepared(grads, variables)
        return prepared(grads, variables, self._adasum.options)

    def _clip_gradients(self, grads: Sequence[Any]) -> Any:
        state = self._adasum
        if state.reducing:
            grads = self._reduce(list(grads), state.step_variables)
        return super()._clip_gradients(grads)

    def _reduce(self, grads: list[Any], variables: Sequence[Any]) -> list[Any]:
        state = self._adasum
        chosen = state.reduced(variables)
        mine = [
            grad
            for grad, variable in zip(grads, variables, strict=True)
            if not is_marked_local(variable)
        ]
        agreed = state.reduction.agree(mine, chosen, len(chosen) < len(variables))
        if self.global_clipnorm and agreed.any_local:
            raise ValueError(
                "global_clipnorm: required variables that are all reduced, got worker-local "
                "ones; every rank would clip by another norm and the replicas would drift "
                "apart, so use clipnorm or clipvalue"
            )
        results = state.reduction(mine, chosen)
        self._note_finite(results)
        reduced = iter(results)
        return [
            grad if is_marked_local(variable) else next(reduced)
            for grad, variable in zip(grads, variables, strict=True)
        ]

    def _apply_weight_decay(self, variables: Any) -> None:
        decay = super()._apply_weight_decay
        self._where_finite(lambda: decay(variables))

    def _backend_update_step(
        self, grads: Any, trainable_variables: Any, learning_rate: Any
    ) -> None:
        step = super()._backend_update_step
        self._where_finite(lambda: step(grads, trainable_variables, learning_rate))

    def _where_finite(self, action: Callable[[], None]) -> None:
        """Do `action`, unless a loss scale is to see that the reduced gradients overflowed."""
        flag = self._adasum.finite
        if flag is None:
            action()
        else:
            tf.cond(flag.read_value(), returning(action), lambda: 0)
