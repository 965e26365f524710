"""The delta variant: local steps, then `w = w_old + AdaSum(w_new - w_old)`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from adasum_hvd.tensorflow.distributed import KerasDistributed


def wide(variable: Any) -> Any:
    """Return the value in the dtype in which changes are computed: bfloat16 is too coarse."""
    value = tf.convert_to_tensor(variable)
    return tf.cast(value, tf.float32) if value.dtype == tf.bfloat16 else value


def bounded(changes: Sequence[Any], limit: float | None) -> list[Any]:
    """Return the changes scaled so that the 2-norm of all is at most `limit`."""
    if limit is None:
        return list(changes)
    norm = tf.linalg.global_norm([tf.cast(change, tf.float32) for change in changes])
    factor = tf.where(norm > limit, limit / norm, 1.0)
    return [change * tf.cast(factor, change.dtype) for change in changes]


class DeltaOptimizer(KerasDistributed):
    """Takes the local step, clipping and weight decay included, and reduces what it changed.

    Variables hold weights whenever user code can look: moving averages and constraints, which
    Keras applies after the step, see the reduced weights.
    """

    def _clip_gradients(self, grads: Sequence[Any]) -> Any:
        # Keras calls this right before weight decay and the step.
        if self._adasum.reducing:
            self._keep_starts()
        return super()._clip_gradients(grads)

    def _keep_starts(self) -> None:
        state = self._adasum
        window = state.starts
        if window.length == 1:
            changing = state.reduced(state.step_variables)
            state.start_values = [wide(variable) for variable in changing]
            state.reduction.agree(state.start_values, changing)
            return

        # Any variable may change in one of the window's steps.
        changing = state.reduced(self._trainable_variables)
        state.reduction.agree([wide(variable) for variable in changing], changing)

        def keep() -> None:
            for variable in changing:
                window.of(variable).assign(variable)

        window.at_start(keep)

    def _backend_update_step(
        self, grads: Any, trainable_variables: Any, learning_rate: Any
    ) -> None:
        super()._backend_update_step(grads, trainable_variables, learning_rate)
        if self._adasum.reducing and self._adasum.did_reduce:
            self._adasum.starts.count(at_end=self._reduce_changes)

    def _reduce_changes(self) -> None:
        state = self._adasum
        if state.starts.length == 1:
            changed = state.reduced(state.step_variables)
            starts, state.start_values = state.start_values, []
        else:
            changed = state.reduced(self._trainable_variables)
            starts = [wide(state.starts.of(variable)) for variable in changed]
        changes = [wide(v) - start for v, start in zip(changed, starts, strict=True)]
        reduced = bounded(
            state.reduction(changes, changed), state.options.clip_delta_norm
        )
        finite = self._note_finite(reduced)
        for variable, start, change in zip(changed, starts, reduced, strict=True):
            new = (
                start + change
                if finite is None
                else tf.where(finite, start + change, start)
            )
            variable.assign(tf.cast(new, variable.dtype))

    def give_up_window(self) -> None:
        """Put the weights back to where an unfinished window of local steps began."""
        window = self._adasum.starts

        def restore() -> None:
            for variable in self._adasum.reduced(self._trainable_variables):
                variable.assign(window.of(variable))

        window.abandon(restore)
