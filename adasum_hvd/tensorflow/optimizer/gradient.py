"""The gradient variant: gradients are reduced, then every rank takes the same step."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from adasum_hvd.base.marks import is_marked_local
from adasum_hvd.tensorflow.optimizer.base import KerasDistributed
from adasum_hvd.tensorflow.optimizer.window import run_if
from adasum_hvd.tensorflow.reduction.buckets import prepared


class GradientOptimizer(KerasDistributed):
    """Reduces the gradients of a step, unscaled and accumulated, before they are clipped."""

    def _prepared(self, grads: list[Any], variables: Sequence[Any]) -> list[Any]:
        grads = super()._prepared(grads, variables)
        return prepared(grads, variables, self._adasum.options)

    def _apply_together(self, present: dict[int, Any]) -> None:
        self._adasum.present = frozenset(present)
        grads = []
        for index, variable in enumerate(self._trainable_variables):
            grad = present.get(index)
            if grad is None and not is_marked_local(variable):
                grad = tf.zeros(variable.shape, tf.as_dtype(variable.dtype))
            grads.append(grad)
        super(KerasDistributed, self).apply(grads, self._trainable_variables)

    def _clip_gradients(self, grads: Sequence[Any]) -> Any:
        state = self._adasum
        if state.reducing:
            grads = self._reduce(list(grads), state.step_variables)
        return super()._clip_gradients(grads)

    def _reduce(self, grads: list[Any], variables: Sequence[Any]) -> list[Any]:
        state = self._adasum
        chosen = state.reduced(variables)
        mine = [
            g for g, v in zip(grads, variables, strict=True) if not is_marked_local(v)
        ]
        present = [self._get_variable_index(v) in state.present for v in chosen]
        given = [g if here else None for g, here in zip(mine, present, strict=True)]
        has_local = any(map(is_marked_local, self._trainable_variables))
        agreed = self._require_any(state.reduction.agree(given, chosen, has_local))
        if self.global_clipnorm and agreed.any_local:
            raise ValueError(
                "global_clipnorm: expected variables that are all reduced, but got worker-local "
                "ones. Every rank would clip by another norm and the replicas would diverge; use "
                "clipnorm or clipvalue"
            )
        summed = bool(self.gradient_accumulation_steps)
        tensors = mine if summed else given
        results, used = state.reduction(tensors, chosen, present=present)
        if summed:
            # A sum has gradients of earlier passes, too. Only its value shows that: another
            # process may have taken these passes, or a traced function.
            pairs = zip(used, results, strict=True)
            used = [u is True or u | tf.reduce_any(r != 0) for u, r in pairs]
        indices = map(self._get_variable_index, chosen)
        state.used = dict(zip(indices, used, strict=True))
        self._note_finite(results)
        reduced = iter(results)
        return [
            grad if is_marked_local(variable) else next(reduced)
            for grad, variable in zip(grads, variables, strict=True)
        ]

    def _apply_weight_decay(self, variables: Any) -> None:
        if self.weight_decay is None:
            return
        decay = super()._apply_weight_decay

        def decay_used() -> None:
            for variable in variables:
                run_if(self._is_used(variable), functools.partial(decay, [variable]))

        run_if(self._is_finite(), decay_used)

    def _backend_update_step(
        self, grads: Any, trainable_variables: Any, learning_rate: Any
    ) -> None:
        step = super()._backend_update_step
        run_if(
            self._is_finite(), lambda: step(grads, trainable_variables, learning_rate)
        )

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """As the optimizer's, if any rank has a gradient for the variable."""
        step = super().update_step
        run_if(self._is_used(variable), lambda: step(gradient, variable, learning_rate))

    def _is_used(self, variable: Any) -> Any:
        """Return whether any rank has a gradient for `variable`; plain training skips others."""
        return self._adasum.used.get(self._get_variable_index(variable), True)

    def _is_finite(self) -> Any:
        """Return whether the reduced gradients are finite, which counts under a loss scale only."""
        flag = self._adasum.finite
        return True if flag is None else flag.read_value()
