"""Reports the exception that ends this rank's script to the other ranks."""

from __future__ import annotations

import ctypes
import sys
from types import TracebackType

from horovod.common.exceptions import HorovodInternalError

_MOST = 300  # characters; the message that carries them is of one size
_libraries: list[ctypes.CDLL] = []


def report_uncaught(library: ctypes.CDLL) -> None:
    """Report an uncaught exception of this process in the errors of the other ranks.

    Ranks that wait for this one get a `HorovodInternalError` as soon as it shuts down, and its
    text names the exception. Horovod's own exceptions are not reported: all ranks have them.

    Args:
        library: Horovod's library of the framework that was initialized.
    """
    if not _libraries:
        hook = sys.excepthook

        def report(
            kind: type[BaseException],
            error: BaseException,
            trace: TracebackType | None,
        ) -> None:
            if not issubclass(kind, HorovodInternalError):
                text = f"its script raised {kind.__name__}: {error}"[:_MOST]
                for one in _libraries:
                    one.horovod_adasum_leave(text.encode())
            hook(kind, error, trace)

        sys.excepthook = report
    if library not in _libraries:
        _libraries.append(library)
