"""Tells the other ranks why this one leaves: the exception that ends its script."""

from __future__ import annotations

import ctypes
import sys
from types import TracebackType

from horovod.common.exceptions import HorovodInternalError

_MOST = 300  # characters; the message that carries them is of one size
_libraries: list[ctypes.CDLL] = []


def tell_why(library: ctypes.CDLL) -> None:
    """Have an uncaught exception of this process end up in the errors of the other ranks.

    Those that wait for this rank get a `HorovodInternalError` as soon as it shuts down; its text
    then says what was raised here. Exceptions that are Horovod's own say nothing new.

    Args:
        library: Horovod's library of the framework that was initialized.
    """
    if not _libraries:
        hook = sys.excepthook

        def tell(
            kind: type[BaseException],
            error: BaseException,
            trace: TracebackType | None,
        ) -> None:
            if not issubclass(kind, HorovodInternalError):
                text = f"its script raised {kind.__name__}: {error}"[:_MOST]
                for one in _libraries:
                    one.horovod_adasum_leave(text.encode())
            hook(kind, error, trace)

        sys.excepthook = tell
    if library not in _libraries:
        _libraries.append(library)
