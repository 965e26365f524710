"""What follows Horovod's own `init`, in every framework."""

from __future__ import annotations

import ctypes
from typing import Any

from adasum_hvd import binding, departure, messages, topology
from adasum_hvd.options import started


def follow(mpi_ops: Any, library: ctypes.CDLL) -> None:
    """Set up what each rank says, of itself and of its groups.

    Args:
        mpi_ops: Horovod's, of the framework.
        library: the framework's Horovod library.
    """
    messages.speak_on(mpi_ops.rank())
    departure.tell_why(library)
    topology.warn_of_one_group(
        binding.settings(library),
        mpi_ops.rank(),
        mpi_ops.size(),
        mpi_ops.local_size(),
    )


def announce(mpi_ops: Any, library: ctypes.CDLL, path: str) -> None:
    """Say on rank 0 what there is now.

    Args:
        mpi_ops: Horovod's, of the framework.
        library: the framework's Horovod library.
        path: as `binding.path` says it, "" before the first reduction.
    """
    if mpi_ops.rank() == 0:
        backend = "MPI" if mpi_ops.mpi_enabled() else "Gloo"
        where = mpi_ops.size(), mpi_ops.cross_size(), path
        messages.logger.info(started(binding.settings(library), backend, *where))
