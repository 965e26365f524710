"""`AdasumMonitor` for torch optimizers: records of AdaSum in a run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from horovod.torch import mpi_ops

from adasum_hvd import distributed
from adasum_hvd.base import ops
from adasum_hvd.base.options import ProcessSet
from adasum_hvd.horovod import binding
from adasum_hvd.monitor.monitor import Entries, Monitor, check_job, inputs_of
from adasum_hvd.monitor.statistics import Rows
from adasum_hvd.torch import ops as torch_ops
from adasum_hvd.torch import wire
from adasum_hvd.torch.objects import allgather_object, ranks_of
from adasum_hvd.torch.optimizer.wrapper import DistributedWrapper


class _Channel:
    """The connection between the ranks of a process set."""

    def __init__(self, process_set: ProcessSet):
        self.rank, self.ranks = mpi_ops.rank(), ranks_of(process_set)
        self._process_set = process_set
        self.request_record = partial(binding.request_record, wire.LIBRARY)
        self.latest_record = partial(binding.latest_record, wire.LIBRARY)

    def gather(self, obj: Any) -> list[Any]:
        return allgather_object(obj, "adasum.monitor", self._process_set)

    def start_sum(self, rows: Rows, name: str) -> Callable[[bool], Rows | None]:
        handle = torch_ops.allreduce_async(
            torch.from_numpy(rows), name=name, op=ops.Sum, process_set=self._process_set
        )

        def finish(wait: bool) -> Rows | None:
            if not wait and not wire.poll(handle):
                return None
            return wire.synchronize(handle).numpy()

        return finish


class AdasumMonitor:
    """Records statistics of AdaSum for each parameter, every k steps.

    docs/monitor.md has the keys of a record. Its `step` counts from the monitor's creation, and
    `tensors` has the values of :func:`adasum_hvd.monitor.statistics.statistics` by parameter name.
    Recording does not change a bit of the results. A record is written a few steps after its step.

    Args:
        source: an optimizer from `DistributedOptimizer` with an AdaSum op. For the `AdasumState`
            of DDP's hook this makes an `adasum_hvd.distributed.AdasumMonitor`.
        every: steps between two records.
        to: where records go, on the first rank of the process set: paths that end in `.jsonl`,
            other paths (folders for TensorBoard), functions of a record; or one of these.
        named_parameters: for an `AdasumState` only.
        scaler: torch's `GradScaler` of the run, if it has one, so that records are of the unscaled
            gradients. An optimizer knows an `hvd.GradScaler` itself.

    Raises:
        TypeError: `source` or an element of `to` has a wrong type.
        ValueError: the optimizer's op is not AdaSum; `every` is not an integer of at least 1; a
            file cannot be written; TensorBoard is not installed. On every rank.
        RuntimeError: `ADASUM_HVD_OP=off`, because Horovod's own op makes no records.
        NotImplementedError: the job is elastic.

    Collective: every rank of the process set creates it and takes the same steps; a recorded step
    sends a few doubles per parameter. Blocks only here and in `close`.

    References:
        arXiv 2006.02924, figure 1.
    """

    def __new__(
        cls,
        source: Any,
        every: int = 50,
        to: Any = (),
        named_parameters: Any = None,
        scaler: Any = None,
    ) -> Any:
        """Return a monitor of the engine that `source` belongs to."""
        if isinstance(source, distributed.AdasumState):
            names = named_parameters or ()
            return distributed.AdasumMonitor(source, every, to, names, scaler)
        return super().__new__(cls)

    def __init__(
        self,
        source: Any,
        every: int = 50,
        to: Any = (),
        named_parameters: Any = None,
        scaler: Any = None,
    ):
        check_job(torch_ops.settings())
        if not isinstance(source, DistributedWrapper):
            raise TypeError(
                "AdasumMonitor: expected an optimizer from DistributedOptimizer or an "
                f"AdasumState, but got {type(source).__name__}"
            )
        self._reducer: Any = source._adasum
        self._scaler = scaler
        self._monitor: Monitor | None = None
        options = source._adasum.options
        inputs, process_set = inputs_of(options.op), options.process_set
        if process_set.included() and process_set.size() > 1:
            channel = _Channel(process_set)
            monitor = Monitor(every, to, channel, inputs, self._loss_scale)
            hook = source.register_step_post_hook(
                lambda *_: monitor.after_step(self._entries)
            )
            self._monitor, self._detach = monitor, hook.remove
            monitor.request_first(self._entries)

    def _loss_scale(self) -> float:
        if self._reducer.options.is_delta:
            return 1.0  # changes of weights
        ours = self._reducer.scaler
        scaler = (ours and ours()) or self._scaler
        return float(scaler.get_scale()) if scaler is not None else 1.0

    def _entries(self) -> Entries:
        return {b.entry: b.names for b in self._reducer.common_buckets}

    def close(self) -> None:
        """Write the last record and stop. Collective; blocks."""
        if self._monitor is not None:
            self._detach()
            self._monitor.close()
            self._monitor = None
