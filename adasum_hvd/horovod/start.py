"""`hvd.init()` of every framework: each of its steps is a line of :func:`start`."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

from horovod.common.exceptions import HorovodInternalError

from adasum_hvd.advice.banner import startup_line
from adasum_hvd.base.logging import log_on_first_rank, logger
from adasum_hvd.base.options import warn_of_one_group
from adasum_hvd.horovod import binding, groups, preflight
from adasum_hvd.horovod.elastic import arrival
from adasum_hvd.horovod.launch import variables

_libraries: list[ctypes.CDLL] = []  # that report uncaught exceptions


def configure(
    mpi_ops: Any, library: ctypes.CDLL, group_op: str | None, group_size: int | None
) -> None:
    """Check the library and its settings, and set the groups of the next start."""
    binding.require_library(library)
    running = binding.settings(library) if mpi_ops.is_initialized() else None
    groups.configure(group_op, group_size, running)
    binding.require_op(library)


def start(
    mpi_ops: Any,
    library: ctypes.CDLL,
    set_variables: Callable[[str], variables.Expected | None],
    again: bool,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Start Horovod with the groups of the last :func:`configure`.

    `set_variables` is :func:`variables.before_init` or the framework's own. `again`: restart with
    the current ranks of an elastic job. Raises RuntimeError if `shutdown()` has ended MPI, or ranks
    are missing. Collective: every rank; blocks until all have.
    """
    preflight.require_unfinished_mpi(library)
    expected = set_variables(preflight.mpi_of(library, mpi_ops.mpi_built()))
    arrival.init_together(functools.partial(mpi_ops.init, *args, **kwargs), again)
    variables.check_size(mpi_ops.size(), expected, *args, **kwargs)
    log_on_first_rank(mpi_ops.rank())
    _report_uncaught(library)
    settings: Any = binding.settings(library)
    ranks = mpi_ops.rank(), mpi_ops.size(), mpi_ops.local_size()
    warn_of_one_group(settings["group_op"], settings["group_size"], *ranks)


def log_startup(mpi_ops: Any, library: ctypes.CDLL, path: str) -> None:
    """Log one line on rank 0: version, ranks, transport (`path`, "" if unknown) and groups."""
    if mpi_ops.rank() == 0:
        backend = "MPI" if mpi_ops.mpi_enabled() else "Gloo"
        ranks, hosts = mpi_ops.size(), mpi_ops.cross_size()
        settings = binding.settings(library)
        logger.info(startup_line(settings, backend, ranks, hosts, path))


def _report_uncaught(library: ctypes.CDLL) -> None:
    """Name an uncaught exception of this process in the errors of the ranks that wait for it.

    Horovod's own exceptions are not reported, because every rank raises them.
    """
    if not _libraries:
        hook = sys.excepthook

        def report(
            kind: type[BaseException], error: BaseException, trace: TracebackType | None
        ) -> None:
            try:
                if not issubclass(kind, HorovodInternalError):
                    text = f"its script raised {kind.__name__}: {error}"
                    for loaded in _libraries:
                        loaded.horovod_adasum_leave(text.encode(errors="replace"))
            finally:
                hook(kind, error, trace)

        sys.excepthook = report
    if library not in _libraries:
        _libraries.append(library)
