"""The delta variant: local steps, then `w = w_old + AdaSum(w_new - w_old)`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from adasum_hvd.base.marks import is_marked_local
from adasum_hvd.base.options import Options
from adasum_hvd.tensorflow.optimizer.base import KerasDistributed
from adasum_hvd.tensorflow.optimizer.slots import copy_of_weights
from adasum_hvd.tensorflow.reduction import must_reduce

# Their steps compute weights from sums over all steps, or evaluate others; a step does not show it.
_FROM_RECORDS = {"Ftrl", "ScheduleFreeAdamW"}


def refuse_records(kind: type, options: Options) -> None:
    """Raise ValueError if the steps of a class of optimizers undo reductions of changes."""
    names = {base.__name__ for base in kind.__mro__}
    if options.is_delta and must_reduce(options) and names & _FROM_RECORDS:
        raise ValueError(
            "DistributedOptimizer: expected an optimizer whose steps change the weights, but got "
            f"{kind.__name__} with {options.op.name}. It computes them from each rank's own state, "
            "which undoes reductions of changes; use op=AdasumGrad, which reduces gradients"
        )


def wide(variable: Any) -> Any:
    """Return the value in the dtype for changes: float32 instead of bfloat16."""
    value = tf.convert_to_tensor(variable)
    return tf.cast(value, tf.float32) if value.dtype == tf.bfloat16 else value


class DeltaOptimizer(KerasDistributed):
    """Reduces the change of weights by a local step, before moving averages and constraints."""

    def _clip_gradients(self, grads: Sequence[Any]) -> Any:
        # Keras calls this right before weight decay and the step.
        if self._adasum.reducing:
            self._keep_starts()
        return super()._clip_gradients(grads) if grads else grads

    def _apply_together(self, present: dict[int, Any]) -> None:
        variables = self._trainable_variables
        if present:
            super(KerasDistributed, self).apply(
                list(present.values()), [variables[index] for index in present]
            )
        else:
            # Other ranks have gradients: this rank reduces with them, without a local step.
            self._backend_apply_gradients([], [])
            self._iterations.assign_add(1)
        for index, variable in enumerate(variables):
            constraint = getattr(variable, "constraint", None)
            if constraint and index not in present and not is_marked_local(variable):
                variable.assign(constraint(variable))

    def _keep_starts(self) -> None:
        state = self._adasum
        window = state.starts
        # In a window of several steps any step may change any variable.
        stepped = (
            state.step_variables if window.length == 1 else self._trainable_variables
        )
        index_of = self._get_variable_index
        indices = set(map(index_of, stepped))
        changing = state.reduced(self._trainable_variables)
        values = [wide(v) if index_of(v) in indices else None for v in changing]
        agreed = state.reduction.agree(values, changing, note=self._copy_of_weights)
        self._require_any(agreed)
        if agreed.note:
            raise ValueError(
                f"{self._base.__name__}: expected an optimizer whose state holds no weights, "
                f"but got {agreed.note}, a copy of them. Every rank would continue from its own "
                "copy instead of the reduced weights; use op=AdasumGrad, which reduces gradients"
            )
        if window.length == 1:
            state.start_values = dict(zip(map(index_of, changing), values, strict=True))
            return

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
        changed = state.reduced(self._trainable_variables)
        starts = [self._start_of(variable) for variable in changed]
        state.start_values = {}
        mine = [
            None if start is None else wide(variable) - start
            for start, variable in zip(starts, changed, strict=True)
        ]
        changes = _bounded(state.reduction(mine, changed)[0], state.options)
        finite = self._note_finite(changes)
        for variable, start, change in zip(changed, starts, changes, strict=True):
            start = wide(variable) if start is None else start
            new = start + change
            if finite is not None:
                new = tf.where(finite, new, start)
            variable.assign(tf.cast(new, variable.dtype))

    def _copy_of_weights(self) -> str:
        with tf.init_scope():
            return copy_of_weights(self) if tf.executing_eagerly() else ""

    def _start_of(self, variable: Any) -> Any:
        """Return the value of `variable` before the window, None if this rank did not change it."""
        state = self._adasum
        if state.starts.length == 1:
            return state.start_values[self._get_variable_index(variable)]
        return wide(state.starts.of(variable))

    def discard_window(self) -> None:
        """Restore the weights from before an unfinished window of local steps."""
        window = self._adasum.starts

        def restore() -> None:
            for variable in self._adasum.reduced(self._trainable_variables):
                variable.assign(window.of(variable))

        window.abandon(restore)


def _bounded(changes: Sequence[Any], options: Options) -> list[Any]:
    limit = options.clip_delta_norm
    if limit is None:
        return list(changes)
    norm = tf.linalg.global_norm([tf.cast(change, tf.float32) for change in changes])
    factor = tf.where(norm > limit, limit / norm, 1.0)
    return [change * tf.cast(factor, change.dtype) for change in changes]
