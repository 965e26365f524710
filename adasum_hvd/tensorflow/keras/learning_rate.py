"""Keras 3 callbacks that set the learning rate, as Horovod's do (arXiv 1706.02677, 2.2 and 3)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
from horovod.tensorflow import mpi_ops

from adasum_hvd.base.logging import logger
from adasum_hvd.tensorflow.optimizer.slots import inner


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """Multiplies the learning rate, per epoch or per batch.

    Args:
        initial_lr: the rate to multiply.
        multiplier: a function of the epoch (fractional without `staircase`), or a base whose
            exponent is the number of epochs since `start_epoch`.
        start_epoch: the first epoch with an effect.
        end_epoch: the first epoch without an effect again.
        staircase: change the rate at the first batch of an epoch only.
        momentum_correction: multiply SGD's velocities, which contain the old rate, by the same
            factor as the rate (Goyal et al., arXiv 1706.02677, section 3).
        steps_per_epoch: batches in an epoch; needed only if Keras does not know it.

    Raises:
        ValueError: in `fit`, the optimizer's rate cannot be set, or `steps_per_epoch` is missing.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ):
        super().__init__()
        self._initial_lr, self._staircase = initial_lr, staircase
        self._start, self._end = start_epoch, end_epoch
        self._momentum_correction = momentum_correction
        self._given_steps, self._epoch = steps_per_epoch, 0
        self._multiplier = (
            multiplier
            if callable(multiplier)
            else lambda epoch: multiplier ** (epoch - start_epoch)
        )

    @property
    def _steps(self) -> int | None:
        """The batches in an epoch of this `fit`."""
        return self._given_steps or (self.params or {}).get("steps")

    def on_train_begin(self, logs: Any = None) -> None:
        """Check the optimizer and the number of batches."""
        rate = inner(self.model.optimizer)._learning_rate
        if not hasattr(rate, "assign"):
            raise ValueError(
                f"{type(self).__name__}: expected an optimizer with a number as learning rate, "
                f"but got {type(rate).__name__}; remove this callback, or pass a number to the "
                "optimizer and the schedule to LearningRateScheduleCallback(multiplier=...)"
            )
        if not self._steps and not self._staircase:
            raise ValueError(
                f"{type(self).__name__}: expected steps_per_epoch for data of unknown length, "
                "but got none; pass steps_per_epoch="
            )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Record the epoch."""
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Set the learning rate of this batch."""
        over = self._end is not None and self._epoch >= self._end
        if self._epoch < self._start or over or (self._staircase and batch > 0):
            return
        part = 0.0 if self._staircase else batch / (self._steps or 1)
        self._set(self._initial_lr * self._multiplier(self._epoch + part))

    def _set(self, new: float) -> None:
        optimizer = inner(self.model.optimizer)
        old = float(optimizer.learning_rate)
        optimizer.learning_rate = new
        if self._momentum_correction and getattr(optimizer, "momentum", None) and old:
            for velocity in getattr(optimizer, "momentums", ()):
                velocity.assign(velocity * (new / old))

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Log the learning rate."""
        if logs is not None:
            logs["lr"] = float(inner(self.model.optimizer).learning_rate)


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from `initial_lr / size` to `initial_lr`, batch by batch.

    Args:
        initial_lr: the rate after warm-up: see `adasum_lr`.
        warmup_epochs: length of the warm-up.
        momentum_correction: as the schedule's.
        steps_per_epoch: as the schedule's.
        verbose: log a line on rank 0 at the end.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ):
        def multiplier(epoch: float) -> float:
            # One batch ahead, so that an epoch ends with a round number.
            epoch = min(epoch + 1.0 / (self._steps or 1), warmup_epochs)
            size = mpi_ops.size()
            return (epoch * (size - 1) / warmup_epochs + 1) / size

        super().__init__(
            initial_lr,
            multiplier,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self._verbose = verbose

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Log the learning rate, and the end of the warm-up, which has `initial_lr`."""
        ends = epoch < (self._end or 0) <= epoch + 1
        # The last batch may have set none: `steps_per_execution`, a shortened epoch.
        if ends:
            self._set(self._initial_lr)
        super().on_epoch_end(epoch, logs)
        if self._verbose and ends:
            rate = float(inner(self.model.optimizer).learning_rate)
            logger.info("epoch %d: warm-up ends at learning rate %g", epoch + 1, rate)
