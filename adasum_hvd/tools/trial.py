"""What a rank of `adasum-hvd doctor` does: reductions whose results the reference knows.

python -m adasum_hvd.tools.trial gloo,mpi torch,tensorflow OUTPUT

Started by mpirun where MPI is tried: ranks find one another over Gloo there, too.
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
from adasum_hvd.common import binding

Array: TypeAlias = NDArray[Any]
Results: TypeAlias = dict[str, dict[str, Any]]  # by framework
SIZES = (1, 1000, 70_000)  # one block, several, and more than one exchange
DTYPES = (np.float32, np.float64)


def inputs(ranks: int) -> dict[str, list[Array]]:
    """Return what every rank puts in, by the tensor's name."""
    return {
        f"{np.dtype(dtype).name} of {size}": [
            np.random.default_rng([rank, size]).normal(size=size).astype(dtype)
            for rank in range(ranks)
        ]
        for size in SIZES
        for dtype in DTYPES
    }


def is_right(got: Array, tensors: list[Array]) -> bool:
    """Return whether `got` is the AdaSum of all ranks' `tensors` up to one rounding."""
    wanted = reference.adasum(tensors)
    error = np.abs(got - wanted)
    return bool(np.all(error <= np.finfo(got.dtype).eps * np.abs(wanted).max()))


def examine(framework: Any) -> dict[str, object]:
    """Return what the ranks find. Collective: all ranks, all on one host; blocks.

    Args:
        framework: a module with its `hvd`, its `LIBRARY` and `reduce(name, array)`.
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
    """Return what each framework's ranks find over one backend, or what ails it.

    Args:
        backend: "gloo" or "mpi", chosen for the life of this process.
        frameworks: by name, a module for :func:`examine`, or an error.
    """
    os.environ["HOROVOD_CONTROLLER"] = backend
    found: Results = {}
    for name, framework in frameworks.items():
        try:
            if isinstance(framework, Exception):
                raise framework
            found[name] = examine(framework)
        except Exception as error:  # whatever ails one, the next one is tried
            traceback.print_exception(error)
            found[name] = {"error": f"{type(error).__name__}: {error}"}
    return found


def over_in_a_copy(backend: str, frameworks: Mapping[str, Any]) -> Results:
    """Return the same as :func:`over`, from a copy of this process that ends with it.

    Loading the frameworks is nearly all that a trial costs, and a process of Horovod's can have
    one backend only. They have started no thread yet, so a copy is as good as a new process.
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
        said = pipe.read()
    _, status = os.waitpid(copy, 0)
    if not said:
        sys.exit(
            f"the ranks over {backend} ended with status {status} and said nothing"
        )
    return dict(json.loads(said))


def _loaded(name: str) -> Any:
    """Return a framework's module, or what it says when it does not load."""
    try:
        return importlib.import_module(f"adasum_hvd.tools.{name}_trial")
    except Exception as error:
        return error


def main() -> None:
    """Try all; rank 0 writes, by backend and framework, what was found or the error."""
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
