"""`AdasumMonitor`: statistics of AdaSum in a run, for Keras optimizers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import tensorflow as tf
from horovod.tensorflow import mpi_ops

from adasum_hvd.base import ops
from adasum_hvd.base.options import ProcessSet
from adasum_hvd.horovod import binding
from adasum_hvd.monitor.monitor import Monitor, check_job, inputs_of
from adasum_hvd.monitor.statistics import Rows
from adasum_hvd.tensorflow import ops as tf_ops
from adasum_hvd.tensorflow.broadcasting import allgather_object
from adasum_hvd.tensorflow.optimizer import state_of
from adasum_hvd.tensorflow.reduction import named


class _Channel:
    """The ranks of a process set."""

    def __init__(self, process_set: ProcessSet):
        self.rank = mpi_ops.rank()
        self.ranks: Sequence[int] = process_set.ranks or range(mpi_ops.size())
        self._process_set = process_set
        self.request_record = partial(binding.request_record, tf_ops.LIBRARY)
        self.latest_record = partial(binding.latest_record, tf_ops.LIBRARY)

    def gather(self, obj: Any) -> list[Any]:
        return allgather_object(
            obj, name="adasum.monitor", process_set=self._process_set
        )

    def start_sum(self, rows: Rows, name: str) -> Callable[[bool], Rows | None]:
        with tf.init_scope(), tf.device("CPU:0"):
            tensors = [tf.constant(rows)]
            (total,) = named.reduce_named(tensors, name, ops.Sum, self._process_set)
            return lambda wait: total.numpy()


class AdasumMonitor:
    """Records statistics of AdaSum for each variable, every k steps.

    Records, sinks and errors are those of `adasum_hvd.torch.AdasumMonitor`; see docs/monitor.md.
    `step` is the number of calls of :meth:`step`, or the number given there. Variables go by their
    paths. Under `fit` use `callbacks.AdasumMonitorCallback`, which calls :meth:`step`.

    Args:
        optimizer: from `DistributedOptimizer` with an AdaSum op.
        every: steps between two records.
        to: the sinks, on the first rank of the process set.

    Collective: every rank of the process set; blocks.
    """

    def __init__(self, optimizer: Any, every: int = 50, to: Any = ()):
        check_job(tf_ops.settings())
        state = state_of("AdasumMonitor", optimizer)
        self._reduction = state.reduction
        inputs = inputs_of(state.options.op)
        self._monitor: Monitor | None = None
        process_set = state.options.process_set
        if process_set.included() and process_set.size() > 1:
            self._monitor = Monitor(every, to, _Channel(process_set), inputs)

    def step(self, number: int | None = None) -> None:
        """Count a step, outside a `tf.function`. Collective, and blocks on recorded steps.

        Args:
            number: the step's number, for the record; by default the number of calls.
        """
        if self._monitor is not None:
            self._monitor.after_step(lambda: self._reduction.entries, number)

    def close(self) -> None:
        """Stop. Collective; blocks."""
        if self._monitor is not None:
            self._monitor.close()
            self._monitor = None
