"""Logging for adasum_hvd: the logger `adasum_hvd`, at level INFO.

Warnings use Python's `warnings`, and errors are raised. If a program has set up `logging`, its
handlers get the messages; otherwise those of rank 0 go to the standard error stream.
"""

from __future__ import annotations

import logging

logger = logging.getLogger("adasum_hvd")


class _Console(logging.StreamHandler):  # type: ignore[type-arg]  # which needs Python 3.11
    """Writes only if the root logger has no handler."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            super().emit(record)


_console = _Console()
_console.setFormatter(logging.Formatter("adasum_hvd: %(message)s"))
logger.addHandler(_console)


if logger.level == logging.NOTSET:
    logger.setLevel(logging.INFO)


_silenced = False  # by `log_on_first_rank`, not by the program


def log_on_first_rank(rank: int) -> None:
    """Log INFO messages on rank 0 only, unless the program has set a level.

    In an elastic job the rank can change between calls.
    """
    global _silenced
    if rank and logger.level == logging.INFO:
        logger.setLevel(logging.WARNING)
        _silenced = True
    elif rank == 0 and _silenced and logger.level == logging.WARNING:
        logger.setLevel(logging.INFO)
        _silenced = False
