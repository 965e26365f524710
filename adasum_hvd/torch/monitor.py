"""`AdasumMonitor`: what AdaSum does in a run, for torch optimizers and DDP's hook."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from horovod.torch import mpi_ops

from adasum_hvd.common import ops
from adasum_hvd.common.options import ProcessSet
from adasum_hvd.monitor.statistics import Rows
from adasum_hvd.monitor.watcher import Entries, Watcher, check_job, check_op
from adasum_hvd.torch import ops as torch_ops
from adasum_hvd.torch import wire
from adasum_hvd.torch.ddp import AdasumState
from adasum_hvd.torch.objects import allgather_object, ranks_of
from adasum_hvd.torch.optimizer.base import DistributedBase
from adasum_hvd.torch.optimizer.buckets import NamedParameter


class _Channel:
    """The ranks of a process set."""

    library = wire.LIBRARY

    def __init__(self, process_set: ProcessSet):
        self.rank, self.ranks = mpi_ops.rank(), ranks_of(process_set)
        self._process_set = process_set

    def gather(self, obj: Any) -> list[Any]:
        return allgather_object(obj, "adasum.monitor", self._process_set)

    def start_sum(self, rows: Rows, name: str) -> Callable[[bool], Rows | None]:
        handle = torch_ops.allreduce_async(
            torch.from_numpy(rows),
            name=name,
            op=ops.Sum,
            process_set=self._process_set,
        )

        def finish(wait: bool) -> Rows | None:
            if not wait and not wire.poll(handle):
                return None
            return wire.synchronize(handle).numpy()

        return finish


class AdasumMonitor:
    """Records, every k steps and for each parameter, what AdaSum finds and does.

    A record is a dict: `step` (steps since the monitor was made), `time` (seconds since 1970),
    `ranks`, `joined` (how many vectors AdaSum joins: the ranks, or groups that average or sum),
    and `tensors`. That has of each parameter, by its name, what
    :func:`adasum_hvd.monitor.statistics.statistics` computes: `cosine`, `orthogonality`, `gain`,
    `lowest` and `highest`; None where a value is not finite. Parameters without a gradient on
    any rank are left out, and those marked with `mark_replicated_over` or `mark_worker_local`.

    Results of the reduction do not change by a bit. A record comes some steps after its own.

    Args:
        source: an optimizer from `DistributedOptimizer` with an AdaSum op, or the
            :class:`AdasumState` of DDP's hook.
        every: steps between two records.
        to: where records go, on the first rank of the process set: paths that end in `.jsonl`,
            other paths (folders for TensorBoard), functions of a record; or one of these.
        named_parameters: (name, parameter) pairs for an `AdasumState`, as
            `model.named_parameters()`; an optimizer has them.

    Raises:
        TypeError: another `source`, or something else in `to`.
        ValueError: an optimizer with another op; `every` is no integer of at least 1; a file that
            cannot be written; TensorBoard is not installed. On every rank.
        RuntimeError: `ADASUM_HVD_OP=off`: Horovod's own op tells nothing.
        NotImplementedError: an elastic job.

    Collective: every rank of the process set makes it, and its steps; on the steps that are
    recorded some doubles per parameter travel. Blocks only while it is made, and in `close`.

    Example:
        >>> monitor = hvd.AdasumMonitor(optimizer, 50, "run.jsonl")  # doctest: +SKIP

    References:
        docs/monitor.md; arXiv 2006.02924, figure 1.
    """

    def __init__(
        self,
        source: Any,
        every: int = 50,
        to: Any = (),
        named_parameters: Iterable[NamedParameter] | None = None,
    ):
        check_job(torch_ops.settings())
        self._source = source
        self._names = {id(p): name for name, p in named_parameters or ()}
        self._watcher: Watcher | None = None
        process_set = self._process_set()
        if process_set.included() and process_set.size() > 1:
            self._watcher = Watcher(every, to, _Channel(process_set))
            self._attach(self._watcher)

    def _process_set(self) -> ProcessSet:
        source = self._source
        if isinstance(source, AdasumState):
            return source.process_set
        if not isinstance(source, DistributedBase):
            raise TypeError(
                "AdasumMonitor: required an optimizer from DistributedOptimizer or an "
                f"AdasumState, got {type(source).__name__}"
            )
        check_op(source._options.op)
        return source._options.process_set

    def _attach(self, watcher: Watcher) -> None:
        if isinstance(self._source, AdasumState):
            entries_of = self._entries_of_state
            self._detach = self._source.on_round(lambda: watcher.after_step(entries_of))
        else:
            entries_of = self._entries_of_optimizer
            hook = self._source.register_step_post_hook(
                lambda *_: watcher.after_step(entries_of)
            )
            self._detach = hook.remove
        watcher.ask_first(entries_of)

    def _entries_of_optimizer(self) -> Entries:
        return {bucket.entry: bucket.names for bucket in self._source._common_buckets}

    def _entries_of_state(self) -> Entries:
        return {
            entry: [
                self._names.get(id(parameter), f"bucket{number}.parameter{position}")
                for position, parameter in enumerate(parameters)
            ]
            for number, (entry, parameters) in enumerate(self._source.reduced.items())
        }

    def close(self) -> None:
        """Hand over the last record and stop. Collective; blocks."""
        if self._watcher is not None:
            self._detach()
            self._watcher.close()
            self._watcher = None
