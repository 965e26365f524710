"""The gradient variant: gradients are reduced, then every rank takes the same step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from adasum_hvd.marks import is_marked_local
from adasum_hvd.tensorflow.distributed import KerasDistributed
from adasum_hvd.tensorflow.tape import prepared


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
        reduced = iter(state.reduction(mine, chosen))
        return [
            grad if is_marked_local(variable) else next(reduced)
            for grad, variable in zip(grads, variables, strict=True)
        ]
