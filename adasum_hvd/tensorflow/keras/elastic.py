"""Elastic training of Keras models: the state, and callbacks that keep it up to date.

Names and calls are those of Horovod 0.28.1, whose callbacks shorten an epoch by changing `params`,
which Keras 3 ignores: docs/elastic.md.
"""

from __future__ import annotations

from typing import Any

import keras

from adasum_hvd.horovod.elastic.state import SharedState
from adasum_hvd.tensorflow.elastic import TensorFlowKerasState
from adasum_hvd.tensorflow.elastic import TensorFlowState as TensorFlowState
from adasum_hvd.tensorflow.elastic import run as run
from adasum_hvd.tensorflow.keras.callbacks import batches_of

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "TensorFlowState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]


class KerasState(TensorFlowKerasState):
    """Horovod's name of :class:`TensorFlowKerasState`, which has the arguments."""


class _StateCallback(keras.callbacks.Callback):
    """Knows the state, and how many batches of an epoch this `fit` has finished.

    All of Keras 3 passes an execution's first batch to `on_train_batch_begin`; what it passes to
    `on_train_batch_end` depends on the version.
    """

    _begun = 0

    def __init__(self, state: SharedState):
        super().__init__()
        self.state = state

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Record the first batch of an execution."""
        self._begun = batch

    def _finished(self) -> int:
        return self._begun + batches_of(self.model)

    def _ends(self, finished: int) -> bool:
        """Return whether an epoch ends after so many batches; unknown ends are never reached."""
        steps = (self.params or {}).get("steps")
        return bool(steps and finished >= steps)  # the last execution may be too long


class CommitStateCallback(_StateCallback):
    """Commits after every so many batches, and at the end of every epoch; put it last.

    Args:
        state: to commit.
        batches_per_commit: number of batches that a failure may lose; with `steps_per_execution`
            at least one execution's.
    """

    def __init__(self, state: SharedState, batches_per_commit: int = 1):
        super().__init__(state)
        self.batches_per_commit = self.batches_remaining = batches_per_commit

    def on_train_begin(self, logs: Any = None) -> None:
        """Start a new count, as all ranks do here."""
        self.batches_remaining = self.batches_per_commit

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Commit if it is due; after the last batch `on_epoch_end` commits."""
        self.batches_remaining -= batches_of(self.model)
        is_last = self._ends(self._finished()) or self.model.stop_training
        if self.batches_remaining <= 0 and not is_last:
            self._commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Commit."""
        self._commit()

    def _commit(self) -> None:
        self.batches_remaining = self.batches_per_commit
        self.state.commit()


class UpdateBatchStateCallback(_StateCallback):
    """Counts the finished batches of an epoch in `state.batch`.

    If Keras knows the number of batches in an epoch, the first epoch of a `fit` is shortened by the
    batches that were finished before. Put it before callbacks that stop the training.
    """

    _done_before = 0
    _ends_epoch = False

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Record where the epoch continues."""
        self._done_before, self._ends_epoch = self.state.batch, False

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Count, and end a shortened epoch."""
        self.state.batch = self._done_before + self._finished()
        if self._done_before and self._ends(self.state.batch):
            # The only way to end an epoch early; `on_epoch_end` resets it.
            self.model.stop_training = self._ends_epoch = True

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Reset the count."""
        self.state.batch = 0
        if self._ends_epoch:
            self.model.stop_training = self._ends_epoch = False


class UpdateEpochStateCallback(_StateCallback):
    """Counts finished epochs in `state.epoch`, in this `fit` and before."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Count."""
        self.state.epoch += 1
