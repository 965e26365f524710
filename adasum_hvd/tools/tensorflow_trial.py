"""`adasum_hvd.tools.trial` with TensorFlow's tensors."""

from __future__ import annotations

import tensorflow as tf
from horovod.tensorflow import mpi_ops

import adasum_hvd.tensorflow as hvd
from adasum_hvd.tools.trial import Array, examine


def _reduce(name: str, array: Array) -> Array:
    return hvd.allreduce(tf.constant(array), op=hvd.Adasum, name=name).numpy()


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
