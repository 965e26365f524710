"""The engines of `adasum-hvd demo` and of the examples, imported only when they are used."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

EVERY = 2  # steps between two records of the monitor


class Training(NamedTuple):
    """A model and an optimizer that reduce over the ranks."""

    model: torch.nn.Module
    optimizer: Any
    close: Callable[[], None]


class Engine(Protocol):
    """The ranks of a job, and how they reduce."""

    rank: int
    size: int
    local_rank: int
    local_size: int

    def train(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        op: str,
        records: Path | None,
    ) -> Training:
        """Return the model and optimizer with a reduction, and a monitor's file. Collective."""

    def check_replicas(self, model: torch.nn.Module) -> bool:
        """Return True, or raise RuntimeError if the replicas differ. Collective."""

    def shut_down(self) -> None:
        """End the job. Collective."""


class Horovod:
    """Horovod's op and `DistributedOptimizer`."""

    def __init__(self) -> None:
        import adasum_hvd.torch as hvd

        hvd.init()
        self._hvd = hvd
        self.rank, self.size = hvd.rank(), hvd.size()
        self.local_rank, self.local_size = hvd.local_rank(), hvd.local_size()
        self.check_replicas, self.shut_down = hvd.check_replicas, hvd.shutdown

    def train(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        op: str,
        records: Path | None,
    ) -> Training:
        """Return the model and a `DistributedOptimizer`."""
        hvd = self._hvd
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        wrapped = hvd.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters(), op=op
        )
        if records is None:
            return Training(model, wrapped, lambda: None)
        return Training(
            model, wrapped, hvd.AdasumMonitor(wrapped, EVERY, records).close
        )


def _ones(gram: torch.Tensor) -> torch.Tensor:
    """Return the coefficients of a plain sum, as an example of a rule."""
    return torch.ones_like(gram[:, 0])


class TorchDistributed:
    """`adasum_hvd.distributed`: DDP with a hook, under torchrun."""

    def __init__(self) -> None:
        import torch.distributed as dist

        from adasum_hvd import distributed

        dist.init_process_group("gloo")
        self._distributed = distributed
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.local_size = int(os.environ["LOCAL_WORLD_SIZE"])
        self.check_replicas = distributed.check_replicas
        self.shut_down = dist.destroy_process_group

    def train(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        op: str,
        records: Path | None,
    ) -> Training:
        """Return DDP with a hook; for the delta variant the model as it is."""
        distributed = self._distributed
        if op == "adasum-delta":
            distributed.reduce_changes(optimizer)
            return Training(model, optimizer, lambda: None)
        rules = {"sum": _ones, "average": "mean", "adasum-grad": "adasum"}
        state = distributed.AdasumState(rule=rules[op])
        ddp = torch.nn.parallel.DistributedDataParallel(model)
        ddp.register_comm_hook(state, distributed.adasum_hook)
        if records is None:
            return Training(ddp, optimizer, lambda: None)
        named = model.named_parameters()
        monitor = distributed.AdasumMonitor(state, EVERY, records, named)
        return Training(ddp, optimizer, monitor.close)


ENGINES: dict[str, Callable[[], Engine]] = {
    "horovod": Horovod,
    "torch": TorchDistributed,
}
