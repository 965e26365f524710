"""What the library says where it was asked to: the logger `adasum_hvd`, at INFO.

Warnings are Python's `warnings`, and errors are raised. A program that has set up `logging` gets
the messages its own way; without that the first rank's go to the standard error stream.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, TextIO

logger = logging.getLogger("adasum_hvd")
# Python 3.10's class takes no argument at run time.
if TYPE_CHECKING:
    Console = logging.StreamHandler[TextIO]
else:
    Console = logging.StreamHandler


class _Console(Console):
    """Writes where nobody else would."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            super().emit(record)


_console = _Console()
_console.setFormatter(logging.Formatter("adasum_hvd: %(message)s"))
logger.addHandler(_console)


if logger.level == logging.NOTSET:
    logger.setLevel(logging.INFO)


def speak_on(rank: int) -> None:
    """Leave what all ranks would say to the first one, unless a program has set a level."""
    if rank and logger.level == logging.INFO:
        logger.setLevel(logging.WARNING)
