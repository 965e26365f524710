"""The engines of `adasum-hvd demo`, imported only when they are used."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

EVERY = 2  # steps between two records of the monitor
Trained = tuple[torch.nn.Module, Any, Callable[[], None]]


class Engine(NamedTuple):
    """The ranks of a job, and how they reduce. All functions are collective."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    # Of a model, an optimizer, an op's name and a monitor's file or None. Returns the model and the
    # optimizer with that reduction, and a function that closes the monitor.
    train: Callable[[torch.nn.Module, Any, str, Path | None], Trained]
    check_replicas: Callable[[torch.nn.Module], bool]
    shut_down: Callable[[], None]


def horovod() -> Engine:
    """Return Horovod's op with `DistributedOptimizer`. Collective."""
    import adasum_hvd.torch as hvd

    def train(
        model: torch.nn.Module, optimizer: Any, op: str, records: Path | None
    ) -> Trained:
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        wrapped = hvd.DistributedOptimizer(optimizer, model.named_parameters(), op=op)
        if records is None:
            return model, wrapped, lambda: None
        return model, wrapped, hvd.AdasumMonitor(wrapped, EVERY, records).close

    hvd.init()
    ranks = hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()
    return Engine(*ranks, train, hvd.check_replicas, hvd.shutdown)


def torch_distributed() -> Engine:
    """Return `adasum_hvd.distributed`: DDP with a hook, under torchrun. Collective."""
    import torch.distributed as dist

    from adasum_hvd import distributed

    def train(
        model: torch.nn.Module, optimizer: Any, op: str, records: Path | None
    ) -> Trained:
        if op == "adasum-delta":
            distributed.reduce_changes(optimizer)
            return model, optimizer, lambda: None
        # A function of Gram matrices: the coefficients of a plain sum.
        rules: dict[str, Any] = {
            "sum": _ones,
            "average": "mean",
            "adasum-grad": "adasum",
        }
        state = distributed.AdasumState(rule=rules[op])
        ddp = torch.nn.parallel.DistributedDataParallel(model)
        ddp.register_comm_hook(state, distributed.adasum_hook)
        if records is None:
            return ddp, optimizer, lambda: None
        named = model.named_parameters()
        monitor = distributed.AdasumMonitor(state, EVERY, records, named)
        return ddp, optimizer, monitor.close

    dist.init_process_group("gloo")
    return Engine(
        rank=dist.get_rank(),
        size=dist.get_world_size(),
        local_rank=int(os.environ["LOCAL_RANK"]),
        local_size=int(os.environ["LOCAL_WORLD_SIZE"]),
        train=train,
        check_replicas=distributed.check_replicas,
        shut_down=dist.destroy_process_group,
    )


def _ones(gram: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(gram[:, 0])


ENGINES = {"horovod": horovod, "torch": torch_distributed}
