"""`adasum_hvd.tools.trial` with PyTorch's tensors."""

from __future__ import annotations

import torch
from horovod.torch import mpi_ops

import adasum_hvd.torch as hvd
from adasum_hvd.tools.trial import Array, examine


def _reduce(name: str, array: Array) -> Array:
    return hvd.allreduce(torch.from_numpy(array), op=hvd.Adasum, name=name).numpy()


def rank() -> int:
    """Return this process's rank."""
    return hvd.rank()


def run() -> dict[str, object]:
    """Return what the ranks find; see :func:`adasum_hvd.tools.trial.examine`."""
    hvd.init()
    library = mpi_ops._basics.MPI_LIB_CTYPES
    found = examine(library, hvd.rank(), hvd.size(), _reduce)
    wrong = hvd.allgather_object(found["wrong"])
    return {**found, "wrong": sorted({name for theirs in wrong for name in theirs})}
