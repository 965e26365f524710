"""A `sys.excepthook` that reports this rank's uncaught exception to the other ranks."""

from __future__ import annotations

import ctypes
import sys
from types import TracebackType

from horovod.common.exceptions import HorovodInternalError

_libraries: list[ctypes.CDLL] = []


def report_uncaught(library: ctypes.CDLL) -> None:
    """Report an uncaught exception of this process in the errors of the other ranks.

    Ranks that wait for this rank get a `HorovodInternalError` as soon as it shuts down; the
    error's text names the exception. Horovod's own exceptions are not reported, because every
    rank raises them.
    """
    if not _libraries:
        hook = sys.excepthook

        def report(
            kind: type[BaseException],
            error: BaseException,
            trace: TracebackType | None,
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
