"""Is a Horovod installed that can run the op? Asked before a framework's module imports it."""

from __future__ import annotations

import importlib
import importlib.util
import os
from pathlib import Path

from adasum_hvd.common import binding

_LIBRARIES = {"torch": "torch/mpi_lib_v2", "tensorflow": "tensorflow/mpi_lib"}
_KERAS = "keras"


def library_path(framework: str) -> Path | None:
    """Return the path of Horovod's library for `framework`, without importing anything."""
    spec = importlib.util.find_spec("horovod")
    if spec is None or not spec.submodule_search_locations:
        return None
    folder, name = _LIBRARIES[framework].split("/")
    candidates = Path(spec.submodule_search_locations[0], folder).glob(f"{name}*.so")
    return next(candidates, None)


def has_mpi(framework: str) -> bool:
    """Return whether Horovod's library for `framework` speaks MPI, by its symbols."""
    path = library_path(framework)
    return path is not None and b"MPI_Init_thread" in path.read_bytes()


def _refusal(framework: str, found: str) -> ImportError:
    return ImportError(
        f"adasum_hvd.{framework}: required a Horovod built with the AdaSum op for "
        f"{framework}, got {found}; run `adasum-hvd build` (`adasum-hvd doctor` says what "
        "there is)",
        name="horovod",
    )


def _require_keras() -> None:
    """Import Keras before Horovod does, so that its errors are not taken for Horovod's."""
    try:
        importlib.import_module(_KERAS)
    except ImportError as error:
        raise ImportError(
            "adasum_hvd.tensorflow: expected Keras on TensorFlow, but Keras does not load "
            f"({error}; KERAS_BACKEND={os.environ.get('KERAS_BACKEND', 'not set')}); set "
            "KERAS_BACKEND=tensorflow",
            name=_KERAS,
        ) from error


def require_horovod(framework: str) -> None:
    """Import Horovod's module for a framework, which must be there and hold the op.

    Args:
        framework: "torch" or "tensorflow".

    Raises:
        ImportError: no such Horovod, or Keras does not load; the message says what there is,
            and names the command or the variable.
    """
    if importlib.util.find_spec(framework) is None:
        raise ImportError(
            f"adasum_hvd.{framework}: required {framework}, got none; run `pip install "
            f"{framework}`, then `adasum-hvd build`",
            name=framework,
        )
    if importlib.util.find_spec("horovod") is None:
        raise _refusal(framework, "none")
    if library_path(framework) is None:
        raise _refusal(framework, f"one that was built without {framework}")
    importlib.import_module(framework)  # what ails it is not Horovod's
    if framework == "tensorflow":
        _require_keras()
    try:
        operations = importlib.import_module(f"horovod.{framework}.mpi_ops")
        library = operations._basics.MPI_LIB_CTYPES
    except (
        Exception
    ) as error:  # TensorFlow has classes of its own for what does not load
        raise _refusal(framework, f"one that does not load ({error})") from error
    if not binding.has_op(library):
        raise _refusal(framework, f"{library._name} without the op")
