"""Keras 3 callbacks: equal starts, averaged metrics, learning rates, files on rank 0."""

from __future__ import annotations

import warnings
from typing import Any

import keras
import numpy as np
from horovod.tensorflow import mpi_ops

from adasum_hvd.base.agreement import is_elastic
from adasum_hvd.base.marks import is_marked_local, mark_worker_local
from adasum_hvd.base.options import ProcessSet, check_count
from adasum_hvd.tensorflow.broadcasting import allgather_object, broadcast_variables
from adasum_hvd.tensorflow.horovod_arguments import warn_without_effect
from adasum_hvd.tensorflow.keras.learning_rate import (
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
)
from adasum_hvd.tensorflow.monitor import AdasumMonitor
from adasum_hvd.tensorflow.optimizer import is_distributed
from adasum_hvd.tensorflow.optimizer.slots import inner, local_slots, variables_of
from adasum_hvd.tensorflow.replicas import check_replicas, digest

__all__ = [
    "AdasumMonitorCallback",
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "CheckReplicasCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
    "ProgressCallback",
]


def batches_of(model: Any) -> int:
    """Return the batches of one call of `on_train_batch_end`: `steps_per_execution`."""
    count = getattr(model, "steps_per_execution", 1)
    return count if isinstance(count, int) else 1


def _has_windows(optimizer: Any) -> bool:
    """Return whether there are several local steps between two reductions."""
    optimizer = inner(optimizer)
    return is_distributed(optimizer) and optimizer._adasum.starts.length > 1


class AdasumMonitorCallback(keras.callbacks.Callback):
    """Records statistics of AdaSum in `fit`, as `adasum_hvd.tensorflow.AdasumMonitor`.

    With `steps_per_execution` a batch here is that number of steps, and one of them is recorded.

    Args:
        every: batches between two records, whose `step` is the optimizer's `iterations`.
        to: as `AdasumMonitor`'s, which raises its errors in `fit`.

    Collective: on all ranks, with the same `every`.
    """

    def __init__(self, every: int = 50, to: Any = ()):
        super().__init__()
        self._every, self._to = every, to
        self._monitor: AdasumMonitor | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Create the monitor. Collective; blocks."""
        self._monitor = AdasumMonitor(self.model.optimizer, self._every, self._to)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Count the step; collective and blocking if it is recorded."""
        if self._monitor is not None:
            # Keras before 3.9 counts only inside a loss scale.
            self._monitor.step(int(inner(self.model.optimizer).iterations))

    def on_train_end(self, logs: Any = None) -> None:
        """Close the sinks. Collective."""
        if self._monitor is not None:
            self._monitor.close()
            self._monitor = None


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Gives every rank the root's weights and optimizer state, and checks the first step.

    It broadcasts before the first batch, or after it if the model is not yet built on every rank:
    docs/tensorflow.md, callbacks and checks.

    Args:
        root_rank: the rank that sends its values.
        device: without effect, for Horovod's scripts: setting it warns with the reason.
        local_variables: one or several variables to mark as by `mark_worker_local`.
        process_set: the ranks that train together.

    Raises:
        TypeError: `local_variables` has an element that is not a variable.
        NotImplementedError: the job is elastic, because only new ranks would broadcast.
        RuntimeError: in `fit`, Horovod's own optimizer, or a step that made the replicas differ; on
            every rank.
    """

    def __init__(
        self,
        root_rank: int = 0,
        device: str = "",
        local_variables: Any = None,
        *,
        process_set: ProcessSet = mpi_ops.global_process_set,
    ):
        warn_without_effect("BroadcastGlobalVariablesCallback", device=device)
        if is_elastic():
            raise NotImplementedError(
                "BroadcastGlobalVariablesCallback: expected a job with a fixed number of ranks, "
                "but got an elastic job, in which only new ranks would broadcast; remove the "
                "callback, because the elastic state sends them everything"
            )
        super().__init__()
        if local_variables is not None:
            one = hasattr(local_variables, "shape")  # TensorFlow's are iterable, too
            mark_worker_local(*([local_variables] if one else local_variables))
        self._root_rank, self._process_set = root_rank, process_set
        self._of_model: Any = None
        self._of_optimizer: Any = None

    def set_model(self, model: Any) -> None:
        """Start again with another model or optimizer; a second `fit` of both continues."""
        if model is not self._of_model or model.optimizer is not self._of_optimizer:
            self._of_model, self._of_optimizer = model, model.optimizer
            self._broadcast_done = self._checked = self._epoch_checked = False
        super().set_model(model)

    def on_train_begin(self, logs: Any = None) -> None:
        """Broadcast if the model is built on every rank. Collective."""
        optimizer = self.model.optimizer
        if type(inner(optimizer)).__module__.startswith("horovod."):
            raise RuntimeError(
                "fit: expected an optimizer that reduces, but got horovod.tensorflow.keras's "
                "DistributedOptimizer, which reduces nothing under Keras 3; use "
                "adasum_hvd.tensorflow.keras.DistributedOptimizer"
            )
        if not self._process_set.included():
            # This rank trains alone.
            self._broadcast_done = self._checked = self._epoch_checked = True
        if not self._broadcast_done and all(
            self._gather(bool(self.model.built), "adasum.built")
        ):
            if not optimizer.built:
                optimizer.build(self.model.trainable_variables)
            self._broadcast()

    def _gather(self, obj: Any, name: str) -> list[Any]:
        return allgather_object(obj, name=name, process_set=self._process_set)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Broadcast if that was not possible before, otherwise check the first step."""
        if not self._broadcast_done:
            self._broadcast()
        elif not self._checked:
            self._checked = True
            self._check_replicas()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Check again, because the first batch may have been accumulated or skipped."""
        if not self._epoch_checked:
            self._epoch_checked = True
            self._check_replicas()

    def _broadcast(self) -> None:
        self._broadcast_done = True
        optimizer = self.model.optimizer
        variables = [*self.model.weights, *variables_of(optimizer)]
        if is_distributed(optimizer):
            if optimizer._adasum.gradients.length > 1:
                self._compare_passes(optimizer._adasum.gradients.steps)
            variables += inner(optimizer).window_variables
        local = local_slots(optimizer)
        shared = [v for v in variables if not (is_marked_local(v) or id(v) in local)]
        broadcast_variables(shared, self._root_rank, self._process_set)

    def _compare_passes(self, mine: int) -> None:
        passes = self._gather(mine, "adasum.passes")
        if len(set(passes)) > 1:
            warnings.warn(
                "BroadcastGlobalVariablesCallback: expected all ranks at the same pass of a "
                f"window of backward_passes_per_step, but they are at passes {passes}. The next "
                "step lacks gradients of the ranks at lower passes; let every rank load its own "
                "file, or save between windows",
                stacklevel=2,
            )

    def _check_replicas(self) -> None:
        if _has_windows(self.model.optimizer):
            return  # replicas may differ inside a window of local steps
        weights = self.model.trainable_weights
        mine = tuple(digest(v) for v in weights if not is_marked_local(v))
        digests = self._gather(mine, "adasum.check_first_step")
        if len(set(digests)) > 1:
            raise RuntimeError(
                f"fit: expected first steps that leave {len(digests)} equal replicas, but got "
                "weights that differ; compile the model with "
                "adasum_hvd.tensorflow.keras.DistributedOptimizer(optimizer), or mark weights "
                "that must differ with mark_worker_local()"
            )


class CheckReplicasCallback(keras.callbacks.Callback):
    """Calls :func:`adasum_hvd.tensorflow.check_replicas` every k batches and after training.

    With `local_steps > 1` it compares nothing: the ranks' weights differ between reductions.

    Args:
        every: batches from one comparison to the next.
        process_set: the ranks that train together.

    Raises:
        ValueError: `every` is not an integer of at least 1.
        ReplicaMismatch: in `fit`, the replicas differ; on every rank.
    """

    def __init__(
        self, every: int = 100, *, process_set: ProcessSet = mpi_ops.global_process_set
    ):
        super().__init__()
        check_count("CheckReplicasCallback: every", every)
        self._every, self._process_set, self._batches = every, process_set, 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Compare if it is due. Collective."""
        due = self._batches // self._every
        self._batches += batches_of(self.model)
        if self._batches // self._every > due:
            self._check()

    def on_train_end(self, logs: Any = None) -> None:
        """Compare. Collective."""
        self._check()

    def _check(self) -> None:
        optimizer = self.model.optimizer
        if self._process_set.included() and not _has_windows(optimizer):
            check_replicas(self.model, optimizer, process_set=self._process_set)


class MetricAverageCallback(keras.callbacks.Callback):
    """Averages the epoch's metrics, numbers or arrays; put it before callbacks that use them.

    Args:
        device: without effect, for Horovod's scripts: setting it warns with the reason.
        process_set: the ranks that train together.

    Raises:
        ValueError: in `fit`, the ranks have different metrics or shapes; on every rank.
        TypeError: in `fit`, a metric that is neither a number nor an array.
    """

    def __init__(
        self, device: str = "", *, process_set: ProcessSet = mpi_ops.global_process_set
    ):
        warn_without_effect("MetricAverageCallback", device=device)
        super().__init__()
        self._process_set = process_set

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Replace each value in `logs`. Collective; does nothing outside the process set."""
        if not self._process_set.included():
            return
        logs = {} if logs is None else logs
        mine = {name: _numbers(name, value) for name, value in logs.items()}
        by_rank = allgather_object(
            mine, name="adasum.metrics", process_set=self._process_set
        )
        all_shapes = [{n: v.shape for n, v in sorted(m.items())} for m in by_rank]
        for rank, shapes in enumerate(all_shapes):
            if shapes != all_shapes[0]:
                raise ValueError(
                    "MetricAverageCallback: expected the same metrics on all ranks, but got shapes "
                    f"{shapes} on rank {rank} and {all_shapes[0]} on rank 0 "
                    f"(this is rank {mpi_ops.rank()}); compile the same metrics on all ranks"
                )
        for name, value in mine.items():
            mean = sum(metrics[name] for metrics in by_rank) / len(by_rank)
            logs[name] = mean if value.ndim else float(mean)


def _numbers(name: str, value: Any) -> np.ndarray:
    try:
        return np.asarray(value, np.float64)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"MetricAverageCallback: expected numbers or arrays of them, but got {value!r} for "
            f"{name}; remove that metric, or let it return numbers"
        ) from error


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """Keras's `ModelCheckpoint` that saves the best model, on rank 0 only.

    Arguments are Keras's. Put it after `MetricAverageCallback`, to compare the ranks' average.
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
