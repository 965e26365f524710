"""Loss scaling: an overflow on one rank counts on all ranks, so that replicas stay equal."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from adasum_hvd.base.dynamic_subclass import as_instance_of
from adasum_hvd.tensorflow.optimizer.saving import saved_config
from adasum_hvd.tensorflow.optimizer.window import run_if
from adasum_hvd.tensorflow.reduction import is_alone


class DistributedLossScale(keras.optimizers.LossScaleOptimizer):
    """Skips a step of the distributed optimizer inside on all ranks or on none; a mixin."""

    _base: type  # the user's class
    inner_optimizer: Any

    @property
    def _adasum(self) -> Any:
        return self.inner_optimizer._adasum

    def check_finite(self, grads: Any) -> Any:
        """Return whether the gradients of all ranks are finite. Collective."""
        finite = super().check_finite(grads)
        if is_alone(self._adasum.options.process_set):
            return finite
        return self._adasum.reduction.all_of(finite)

    @tf.autograph.experimental.do_not_convert
    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """As Keras's, with one decision for all ranks. Collective; blocks (eagerly)."""
        grads = list(grads)
        if trainable_variables is not None:
            trainable_variables = list(trainable_variables)
        variables = trainable_variables or self._trainable_variables
        super().apply(
            self.inner_optimizer._prepared(grads, variables), trainable_variables
        )

    def _stateful_handle_finite_grads(
        self, grads: Any, trainable_variables: Any
    ) -> None:
        # The inner optimizer keeps the old weights if the reduced values are not finite.
        flag = self._adasum.finite
        flag.assign(True)
        scale = tf.identity(self.dynamic_scale.value)
        super()._stateful_handle_finite_grads(grads, trainable_variables)

        def shrink() -> None:
            self.dynamic_scale.assign(scale)  # the step may have raised it
            self._stateful_handle_non_finite_grads()

        run_if(tf.logical_not(flag), shrink)

    def _stateful_handle_non_finite_grads(self) -> None:
        super()._stateful_handle_non_finite_grads()
        # A local step may have made one rank's weights infinite. Then no later gradient would
        # be finite, and the window would never end.
        if self._adasum.options.is_delta:
            self.inner_optimizer.discard_window()

    def extra_bytes(self) -> dict[str, int]:
        """Return the bytes that the wrapper adds to the optimizer."""
        return self.inner_optimizer.extra_bytes()

    def get_config(self) -> dict[str, Any]:
        """Return the plain optimizer, serialized, and the wrapper's arguments."""
        return saved_config(self._plain(), self._adasum.options)

    def _plain(self) -> Any:
        plain = as_instance_of(self, self._base)
        plain.__dict__["inner_optimizer"] = self.inner_optimizer._plain()
        return plain
