"""`AdasumMonitor` for the hook that needs no Horovod: records of AdaSum in a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from adasum_hvd.distributed.communicator import Communicator
from adasum_hvd.distributed.ddp import AdasumState
from adasum_hvd.monitor.monitor import Entries, Monitor
from adasum_hvd.monitor.statistics import Rows


class _Channel:
    """The connection between the ranks of a state's process group."""

    def __init__(self, state: AdasumState):
        self.request_record = state.requested.add
        self.latest_record = state.records.get
        self._communicator = Communicator(state.communicator.group)
        self.gather = self._communicator.all_gather_object
        self.ranks: Sequence[int] = self._communicator.ranks
        self.rank = self.ranks[self._communicator.rank]

    def start_sum(self, rows: Rows, name: str) -> Callable[[bool], Rows | None]:
        total = torch.from_numpy(rows).to(self._communicator.control_device)
        work = dist.all_reduce(total, group=self._communicator.group, async_op=True)

        def finish(wait: bool) -> Rows | None:
            if not wait and not work.is_completed():
                return None
            work.wait()
            return total.cpu().numpy()

        return finish


class AdasumMonitor:
    """Records statistics of AdaSum for each parameter, every k steps, as docs/monitor.md says.

    Args:
        source: the :class:`AdasumState` of DDP's hook.
        every: steps between two records.
        to: the sinks, on the first rank of the process group: paths that end in `.jsonl`, other
            paths (folders for TensorBoard), functions of a record; or one of these.
        named_parameters: (name, parameter) pairs, as from `model.named_parameters()`.
        scaler: torch's `GradScaler` of the run, if it has one.

    Raises:
        TypeError: another `source`, or something else in `to`.
        ValueError: `rule="mean"`, which has no Gram matrices; `every` is not an integer of at
            least 1; a file that cannot be written; TensorBoard is not installed. On every rank.

    Collective: every rank of the process group. Blocks on creation and in `close`, and on a device
    in recorded steps.

    References:
        docs/monitor.md; arXiv 2006.02924, figure 1.
    """

    def __init__(
        self,
        source: AdasumState,
        every: int = 50,
        to: Any = (),
        named_parameters: Iterable[tuple[str, torch.Tensor]] = (),
        scaler: Any = None,
    ):
        if not isinstance(source, AdasumState):
            raise TypeError(
                "AdasumMonitor: expected an AdasumState of adasum_hvd.distributed, but got "
                f"{type(source).__name__}"
            )
        if source.rule.kind == "mean":
            raise ValueError(
                "AdasumMonitor: expected rule='adasum' or a function of Gram matrices, but got "
                "rule='mean', which computes none"
            )
        self._source = source
        self._names = {id(p): name for name, p in named_parameters}
        scale = (lambda: 1.0) if scaler is None else scaler.get_scale
        monitor = Monitor(every, to, _Channel(source), loss_scale=scale)
        self._monitor: Monitor | None = monitor
        self._detach = source.on_round(lambda: monitor.after_step(self._entries))
        monitor.request_first(self._entries)

    def _entries(self) -> Entries:
        """Return the names of the parameters in each bucket, by the bucket's name."""
        return {
            entry: [
                self._names.get(id(parameter), f"bucket{number}.parameter{position}")
                for position, parameter in enumerate(parameters)
            ]
            for number, (entry, parameters) in enumerate(self._source.reduced.items())
            if any(one.numel() for one in parameters)  # else nothing is reduced
        }

    def close(self) -> None:
        """Write the last record and stop. Collective; blocks."""
        if self._monitor is not None:
            self._detach()
            self._monitor.close()
            self._monitor = None
