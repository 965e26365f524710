"""Steps after Horovod's own `init`, in every framework."""

from __future__ import annotations

import ctypes
from typing import Any

from adasum_hvd.advice.banner import startup_line
from adasum_hvd.base.logging import log_on_first_rank, logger
from adasum_hvd.base.one_group import warn_of_one_group
from adasum_hvd.horovod import binding
from adasum_hvd.horovod.startup.uncaught import report_uncaught


def after_init(mpi_ops: Any, library: ctypes.CDLL) -> None:
    """Set up logging and the exception hook, and warn about groups that leave AdaSum unused.

    Args:
        mpi_ops: Horovod's module for the framework.
        library: the framework's Horovod library.
    """
    log_on_first_rank(mpi_ops.rank())
    report_uncaught(library)
    settings = binding.settings(library)
    warn_of_one_group(
        str(settings["group_op"]),
        int(str(settings["group_size"])),
        mpi_ops.rank(),
        mpi_ops.size(),
        mpi_ops.local_size(),
    )


def log_startup(mpi_ops: Any, library: ctypes.CDLL, path: str) -> None:
    """Log one line on rank 0: version, ranks, transport and groups.

    Args:
        mpi_ops: Horovod's module for the framework.
        library: the framework's Horovod library.
        path: `binding.transport_description`, "" before the first reduction.
    """
    if mpi_ops.rank() == 0:
        backend = "MPI" if mpi_ops.mpi_enabled() else "Gloo"
        ranks, hosts = mpi_ops.size(), mpi_ops.cross_size()
        settings = binding.settings(library)
        logger.info(startup_line(settings, backend, ranks, hosts, path))
