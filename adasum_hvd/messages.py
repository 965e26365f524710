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


_silenced = False  # by `speak_on`, and not by the program


def speak_on(rank: int) -> None:
    """Leave what all ranks would say to the first one, unless a program has set a level.

    Args:
        rank: this one's; in an elastic job another may become the first.
    """
    global _silenced
    if rank and logger.level == logging.INFO:
        logger.setLevel(logging.WARNING)
        _silenced = True
    elif rank == 0 and _silenced and logger.level == logging.WARNING:
        logger.setLevel(logging.INFO)
        _silenced = False
