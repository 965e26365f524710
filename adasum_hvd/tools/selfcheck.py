"""The program of a rank in `adasum-hvd doctor`: reductions, compared with the reference.

python -m adasum_hvd.tools.selfcheck gloo,mpi torch,tensorflow OUTPUT

mpirun starts it if MPI is checked; its ranks can connect over Gloo, too.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from adasum_hvd import reference
from adasum_hvd.horovod import binding

Array: TypeAlias = NDArray[Any]
Results: TypeAlias = dict[str, dict[str, Any]]  # by framework
SIZES = (1, 1000, 70_000)  # one block, several, and more than one exchange
DTYPES = (np.float32, np.float64)


def inputs(ranks: int) -> dict[str, list[Array]]:
    """Return the inputs of all ranks by the tensor's name."""
    return {
        f"{np.dtype(dtype).name} of {size}": [
            np.random.default_rng([rank, size]).normal(size=size).astype(dtype)
            for rank in range(ranks)
        ]
        for size in SIZES
        for dtype in DTYPES
    }


def is_right(actual: Array, tensors: list[Array]) -> bool:
    """Return whether `actual` is the AdaSum of all ranks' `tensors` up to one rounding."""
    expected = reference.adasum(tensors)
    error = np.abs(actual - expected)
    return bool(np.all(error <= np.finfo(actual.dtype).eps * np.abs(expected).max()))


def examine(framework: Any) -> dict[str, object]:
    """Reduce and return this rank's report. Collective: all ranks of one host; blocks.

    Args:
        framework: a module with `hvd`, `LIBRARY` and `reduce(name, array)`.
    """
    hvd, library = framework.hvd, framework.LIBRARY
    hvd.init()
    rank, ranks = hvd.rank(), hvd.size()
    wrong = [
        name
        for name, tensors in inputs(ranks).items()
        if not is_right(framework.reduce(name, tensors[rank]), tensors)
    ]
    backends = ("gloo", "mpi", "nccl")
    return {
        "rank": rank,
        "ranks": ranks,
        "tried": len(SIZES) * len(DTYPES),
        "wrong": sorted(
            {name for all_of in hvd.allgather_object(wrong) for name in all_of}
        ),
        "version": binding.version(library),
        "built": [n for n in backends if getattr(library, f"horovod_{n}_built")()],
        "settings": binding.settings(library),
        "path": binding.transport_description(library),
    }


def over(backend: str, frameworks: Mapping[str, Any]) -> Results:
    """Return each framework's report over one backend, or its error.

    Args:
        backend: "gloo" or "mpi", for the life of this process.
        frameworks: by name, a module for :func:`examine`, or the error of importing it.
    """
    os.environ["HOROVOD_CONTROLLER"] = backend
    found: Results = {}
    for name, framework in frameworks.items():
        try:
            if isinstance(framework, Exception):
                raise framework
            found[name] = examine(framework)
        except Exception as error:  # the next framework may still work
            traceback.print_exception(error)
            found[name] = {"error": f"{type(error).__name__}: {error}"}
    return found


def over_in_a_copy(backend: str, frameworks: Mapping[str, Any]) -> Results:
    """Return the result of :func:`over` from a forked copy of this process.

    A process can use one backend of Horovod only, and nearly all of the time goes into loading
    the frameworks. A copy is safe, because they have not started a thread yet.
    """
    reader, writer = os.pipe()
    copy = os.fork()
    if copy == 0:
        try:
            found = over(backend, frameworks)
            os.write(writer, json.dumps(found).encode())
            for framework in frameworks.values():
                if isinstance(framework, ModuleType):
                    framework.hvd.shutdown()
        finally:
            sys.stdout.flush()
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        report = pipe.read()
    _, status = os.waitpid(copy, 0)
    if not report:
        sys.exit(
            f"the ranks over {backend} ended with status {status} and without a report"
        )
    return dict(json.loads(report))


def _loaded(name: str) -> Any:
    """Return a framework's module, or the error of importing it."""
    try:
        return importlib.import_module(f"adasum_hvd.tools.{name}_selfcheck")
    except Exception as error:
        return error


def main() -> None:
    """Check all; rank 0 writes a report or an error by backend and framework."""
    backends, names, output = *(word.split(",") for word in sys.argv[1:3]), sys.argv[3]
    frameworks = {name: _loaded(name) for name in names}
    found = {backend: over_in_a_copy(backend, frameworks) for backend in backends[:-1]}
    found[backends[-1]] = over(backends[-1], frameworks)
    results = [result for of in found.values() for result in of.values()]
    if not any(result.get("rank") for result in results):
        partial = Path(f"{output}.{os.getpid()}")
        partial.write_text(json.dumps(found))
        partial.rename(output)


if __name__ == "__main__":
    main()
