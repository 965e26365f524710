"""Objects over the ranks, on any process set."""

from __future__ import annotations

import pickle
from typing import Any

import torch
from horovod.torch import mpi_ops


def allgather_object(
    obj: Any, name: str | None = None, process_set: Any = mpi_ops.global_process_set
) -> list[Any]:
    """Return every rank's `obj`, in rank order; Horovod's knows the global process set only.

    Args:
        obj: anything that pickles.
        name: base name of the two tensors that travel.
        process_set: the ranks that take part.

    Raises:
        pickle.PicklingError: `obj` does not pickle.

    Collective: every rank of `process_set`; blocks.
    """
    data = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)
    base = name or "adasum.allgather_object"
    lengths = mpi_ops.allgather(
        torch.tensor([data.numel()]), name=f"{base}.length", process_set=process_set
    )
    everything = mpi_ops.allgather(data, name=f"{base}.data", process_set=process_set)
    return [
        pickle.loads(part.numpy().tobytes())
        for part in everything.split(lengths.tolist())
    ]


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int = 0,
    process_set: Any = mpi_ops.global_process_set,
) -> None:
    """Give every rank the root's optimizer state and hyperparameters.

    Horovod's takes a step with zero gradients where there is no state yet, which decays
    weights, and for a distributed optimizer is collective on some ranks only after one of
    them has loaded a checkpoint. This one only copies.

    Args:
        optimizer: any torch optimizer, distributed or not.
        root_rank: the rank, in the job, whose state counts.
        process_set: the ranks that take part.

    Raises:
        ValueError: `root_rank` is not in `process_set`; on all its ranks.

    Collective: every rank of `process_set`; blocks.
    """
    ranks = process_set.ranks or range(mpi_ops.size())
    if root_rank not in ranks:
        raise ValueError(
            f"broadcast_optimizer_state: required a root_rank of {list(ranks)}, got {root_rank}"
        )
    mine = optimizer.state_dict() if mpi_ops.rank() == root_rank else None
    states = allgather_object(mine, "adasum.optimizer_state", process_set)
    if mpi_ops.rank() != root_rank:
        optimizer.load_state_dict(states[list(ranks).index(root_rank)])
