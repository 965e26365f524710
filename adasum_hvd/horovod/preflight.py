"""The check that the installed Horovod has the op, before a framework's module imports it.

`python -m adasum_hvd.horovod.preflight` checks in a process of its own that the op loads.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import sys
from pathlib import Path

from adasum_hvd.horovod import binding

_LIBRARIES = {"torch": "torch/mpi_lib_v2", "tensorflow": "tensorflow/mpi_lib"}
_KERAS = "keras"


def library_path(framework: str) -> Path | None:
    """Return the path of Horovod's library for `framework`, without importing it."""
    spec = importlib.util.find_spec("horovod")
    if spec is None or not spec.submodule_search_locations:
        return None
    folder, name = _LIBRARIES[framework].split("/")
    candidates = Path(spec.submodule_search_locations[0], folder).glob(f"{name}*.so")
    return next(candidates, None)


def has_mpi(framework: str) -> bool:
    """Return whether Horovod's library for `framework` was built with MPI, by its symbols."""
    path = library_path(framework)
    return path is not None and b"MPI_Init_thread" in path.read_bytes()


def mpi_of(library: ctypes.CDLL, built: bool) -> str:
    """Return the family of Horovod's MPI: "Open MPI", "MPICH" for others, "" without MPI."""
    if not built:
        return ""
    return "Open MPI" if hasattr(library, "ompi_mpi_comm_world") else "MPICH"


def _no_op_error(framework: str, actual: str) -> ImportError:
    return ImportError(
        f"adasum_hvd.{framework}: expected a Horovod built with the AdaSum op for "
        f"{framework}, but got {actual}; run `adasum-hvd build` (`adasum-hvd doctor` shows what "
        "is installed)",
        name="horovod",
    )


def _require_keras() -> None:
    """Import Keras first, so that its errors are not reported as Horovod's."""
    try:
        importlib.import_module(_KERAS)
    except ImportError as error:
        raise ImportError(
            "adasum_hvd.tensorflow: expected Keras on TensorFlow, but Keras does not load "
            f"({error}; KERAS_BACKEND={os.environ.get('KERAS_BACKEND', 'not set')}); set "
            "KERAS_BACKEND=tensorflow",
            name=_KERAS,
        ) from error


def require_unfinished_mpi(library: ctypes.CDLL) -> None:
    """Raise RuntimeError if `hvd.shutdown()` has finalized MPI: calls after that would abort."""
    finalized = ctypes.c_int()
    is_gloo = os.environ.get("HOROVOD_CONTROLLER", "").lower() == "gloo"
    if not is_gloo and hasattr(library, "MPI_Finalized"):
        library.MPI_Finalized(ctypes.byref(finalized))
    if finalized.value:
        raise RuntimeError(
            "hvd.init(): expected a process in which MPI has not ended, but hvd.shutdown() has "
            "ended it, and MPI starts once in a process; call shutdown() at the end only, or use "
            "horovodrun --gloo"
        )


def require_horovod(framework: str) -> None:
    """Import Horovod's module for a framework, or raise ImportError with the fix."""
    if importlib.util.find_spec(framework) is None:
        raise ImportError(
            f"adasum_hvd.{framework}: expected {framework}, but got none; run `pip install "
            f"{framework}`, then `adasum-hvd build`",
            name=framework,
        )
    if importlib.util.find_spec("horovod") is None:
        raise _no_op_error(framework, "none")
    if library_path(framework) is None:
        raise _no_op_error(framework, f"one that was built without {framework}")
    # First, so that the framework's own errors are not reported as Horovod's.
    importlib.import_module(framework)
    if framework == "tensorflow":
        _require_keras()
    try:
        operations = importlib.import_module(f"horovod.{framework}.mpi_ops")
        library = operations._basics.MPI_LIB_CTYPES
    # TensorFlow raises its own classes for a library that does not load.
    except Exception as error:
        raise _no_op_error(framework, f"one that does not load ({error})") from error
    if not binding.has_op(library):
        raise _no_op_error(framework, f"{library._name} without the op")


def _load_all() -> list[str]:
    """Load the op for every framework that Horovod was built for; return the errors."""
    found = []
    for framework in filter(importlib.util.find_spec, _LIBRARIES):
        if path := library_path(framework):
            try:
                importlib.import_module(framework)
                ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
            except (ImportError, OSError) as error:
                found.append(f"{framework}: {error}")
    return found


if __name__ == "__main__":
    errors = _load_all()
    print(*errors, sep="\n")
    sys.exit(bool(errors))
