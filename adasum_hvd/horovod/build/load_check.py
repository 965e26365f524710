"""Load the op that was just installed; `build.py` runs this file in a process of its own."""

from __future__ import annotations

import ctypes
import importlib
import sys

from adasum_hvd.horovod.build import environment
from adasum_hvd.horovod.preflight import library_path


def failures() -> list[str]:
    """Load the op for every framework that Horovod was built for; return the errors."""
    found = []
    for framework in environment.installed_frameworks():
        if path := library_path(framework):
            try:
                importlib.import_module(framework)
                ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
            except (ImportError, OSError) as error:
                found.append(f"{framework}: {error}")
    return found


if __name__ == "__main__":
    errors = failures()
    print(*errors, sep="\n")
    sys.exit(bool(errors))
