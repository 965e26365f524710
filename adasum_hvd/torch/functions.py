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
