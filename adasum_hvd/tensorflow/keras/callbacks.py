"""Keras 3 callbacks: equal starts, averaged metrics, learning rates, files on rank 0 only."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from horovod.tensorflow import mpi_ops

from adasum_hvd.tensorflow.functions import allgather_object, broadcast_variables
from adasum_hvd.tensorflow.keras_optimizer import is_distributed
from adasum_hvd.tensorflow.reduction import is_worker_local


def _inner(optimizer: Any) -> Any:
    """Return the optimizer inside a loss scale."""
    return getattr(optimizer, "inner_optimizer", optimizer)


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Gives every rank the root's weights and optimizer state, and checks the first step.

    It broadcasts before the first batch, or after it when the model is not built before.
    Random seeds stay different. After the next batch it compares the trainable weights over
    the ranks, because a job whose steps reduce nothing looks healthy otherwise.

    Args:
        root_rank: the rank whose values count.
        process_set: the ranks that train together.
    """

    def __init__(
        self, root_rank: int = 0, process_set: Any = mpi_ops.global_process_set
    ):
        super().__init__()
        self._root_rank, self._process_set = root_rank, process_set
        self._broadcast_done = self._checked = False

    def on_train_begin(self, logs: Any = None) -> None:
        """Broadcast if the model is built.

        Raises:
            RuntimeError: the model has Horovod's own optimizer, which reduces nothing.
        """
        optimizer = self.model.optimizer
        if type(_inner(optimizer)).__module__.startswith("horovod."):
            raise RuntimeError(
                "fit: required an optimizer that reduces, got horovod.tensorflow.keras's "
                "DistributedOptimizer, which reduces nothing under Keras 3; use "
                "adasum_hvd.tensorflow.keras.DistributedOptimizer"
            )
        self._broadcast_done = self._checked = False
        if self.model.built:
            if not optimizer.built:
                optimizer.build(self.model.trainable_variables)
            self._broadcast()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Broadcast if that is still to do, or else check the first step.

        Raises:
            RuntimeError: the step made the replicas differ; on every rank.
        """
        if not self._broadcast_done:
            self._broadcast()
        elif not self._checked:
            self._checked = True
            self._check_replicas()

    def _broadcast(self) -> None:
        self._broadcast_done = True
        variables = [*self.model.weights, *self.model.optimizer.variables]
        reduced = [variable for variable in variables if not is_worker_local(variable)]
        broadcast_variables(reduced, self._root_rank, self._process_set)

    def _check_replicas(self) -> None:
        optimizer = _inner(self.model.optimizer)
        if is_distributed(optimizer) and optimizer._adasum.starts.length > 1:
            return  # replicas may differ inside a window of local steps
        if not self._process_set.included():
            return
        digest = hashlib.sha256()
        for variable in self.model.trainable_weights:
            if not is_worker_local(variable):
                digest.update(np.asarray(variable).tobytes())
        everyone = allgather_object(
            digest.hexdigest(),
            name="adasum.check_first_step",
            process_set=self._process_set,
        )
        if len(set(everyone)) > 1:
            raise RuntimeError(
                f"fit: required a first step that leaves {len(everyone)} equal replicas, got "
                "weights that differ; compile the model with "
                "adasum_hvd.tensorflow.keras.DistributedOptimizer(optimizer), or mark what "
                "must differ with mark_worker_local()"
            )


class MetricAverageCallback(keras.callbacks.Callback):
    """Averages the epoch's metrics over the ranks; put it before callbacks that use them.

    Args:
        process_set: the ranks that train together.
    """

    def __init__(self, process_set: Any = mpi_ops.global_process_set):
        super().__init__()
        self._process_set = process_set

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Replace each value in `logs`. Collective.

        Raises:
            ValueError: the ranks have different metrics; on every rank.
        """
        logs = {} if logs is None else logs
        mine = {name: float(value) for name, value in logs.items()}
        everyone = allgather_object(
            mine, name="adasum.metrics", process_set=self._process_set
        )
        for rank, theirs in enumerate(everyone):
            if set(theirs) != set(everyone[0]):
                raise ValueError(
                    "MetricAverageCallback: required the same metrics on all ranks, got "
                    f"{sorted(theirs)} on rank {rank} and {sorted(everyone[0])} on rank 0 "
                    f"(this is rank {mpi_ops.rank()})"
                )
        for name in mine:
            logs[name] = sum(theirs[name] for theirs in everyone) / len(everyone)


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """Multiplies the learning rate, per epoch or per batch.

    Args:
        initial_lr: the rate that is multiplied.
        multiplier: a function of the epoch (a fraction of one, without `staircase`), or a
            base whose power is taken per epoch since `start_epoch`.
        start_epoch: the first epoch in which to act.
        end_epoch: the first epoch in which not to act any more.
        staircase: act at the first batch of an epoch only.
        momentum_correction: when the rate changes by a factor, so do SGD's velocities, which
            hold the old rate (Goyal et al., arXiv 1706.02677, section 3).
        steps_per_epoch: batches in an epoch; found out by itself where Keras knows.
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
        self._steps_per_epoch = steps_per_epoch
        self._epoch = 0
        self._multiplier = (
            multiplier
            if callable(multiplier)
            else lambda epoch: multiplier ** (epoch - start_epoch)
        )

    def on_train_begin(self, logs: Any = None) -> None:
        """Find out how many batches an epoch has.

        Raises:
            ValueError: Keras does not know, and `steps_per_epoch` was not given.
        """
        steps = self._steps_per_epoch or (self.params or {}).get("steps")
        if not steps and not self._staircase:
            raise ValueError(
                f"{type(self).__name__}: required steps_per_epoch for data of unknown length, "
                "got none"
            )
        self._steps_per_epoch = steps

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Note the epoch."""
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Set the learning rate of this batch."""
        over = self._end is not None and self._epoch >= self._end
        if self._epoch < self._start or over or (self._staircase and batch > 0):
            return
        part = 0.0 if self._staircase else batch / (self._steps_per_epoch or 1)
        self._set(self._initial_lr * self._multiplier(self._epoch + part))

    def _set(self, new: float) -> None:
        optimizer = _inner(self.model.optimizer)
        old = float(optimizer.learning_rate)
        optimizer.learning_rate = new
        if self._momentum_correction and getattr(optimizer, "momentum", None) and old:
            for velocity in getattr(optimizer, "momentums", ()):
                velocity.assign(velocity * (new / old))

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Log the learning rate."""
        if logs is not None:
            logs["lr"] = float(_inner(self.model.optimizer).learning_rate)


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from `initial_lr / size` to `initial_lr`, batch by batch.

    Args:
        initial_lr: the rate after warm-up. With AdaSum, the single-process rate: see
            `adasum_lr`.
        warmup_epochs: how long it takes.
        momentum_correction: as the schedule's.
        steps_per_epoch: as the schedule's.
        verbose: print a line on rank 0 at the end.
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
            epoch += 1.0 / (self._steps_per_epoch or 1)
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
        """Log the learning rate, and say when warm-up is over."""
        super().on_epoch_end(epoch, logs)
        if self._verbose and epoch + 1 == self._end and mpi_ops.rank() == 0:
            rate = float(_inner(self.model.optimizer).learning_rate)
            print(f"\nepoch {epoch + 1}: warm-up finished at learning rate {rate:g}")


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """Keras's `ModelCheckpoint` that saves the best model, on rank 0 only.

    Put it behind `MetricAverageCallback`, so that the best is the best of all ranks.

    Args:
        filepath: as Keras's.
        **kwargs: as Keras's; `save_best_only` is True.
    """

    def __init__(self, filepath: str, **kwargs: Any):
        super().__init__(filepath, save_best_only=True, **kwargs)

    def _save_model(self, *args: Any, **kwargs: Any) -> None:
        if mpi_ops.rank() == 0:
            super()._save_model(*args, **kwargs)


class ProgressCallback(keras.callbacks.ProgbarLogger):
    """Keras's progress bar on rank 0 only; use it with `fit(verbose=0)`."""

    def set_params(self, params: dict[str, Any]) -> None:
        """As Keras's, with a verbosity by rank."""
        super().set_params({**params, "verbose": int(mpi_ops.rank() == 0)})
