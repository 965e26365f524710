"""The program of a rank in `adasum-hvd doctor`: reductions, compared with the reference.

python -m adasum_hvd.tools.selfcheck gloo,mpi torch,tensorflow OUTPUT
python -m adasum_hvd.tools.selfcheck torchrun torch.distributed OUTPUT

mpirun starts it if MPI is checked; its ranks can connect over Gloo, too.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
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


def compared(
    rank: int,
    ranks: int,
    reduce: Callable[[str, Array], Array],
    gather: Callable[[Any], list[Any]],
) -> dict[str, object]:
    """Return this rank's report of what was wrong on any rank. Collective; blocks.

    `reduce` returns the AdaSum of all ranks' arrays of a name, `gather` all ranks' objects.
    """
    tried = inputs(ranks)
    wrong = [
        name
        for name, tensors in tried.items()
        if not is_right(reduce(name, tensors[rank]), tensors)
    ]
    names = sorted({name for of_rank in gather(wrong) for name in of_rank})
    return {"rank": rank, "ranks": ranks, "tried": len(tried), "wrong": names}


class _Horovod:
    """The op under one framework."""

    def __init__(self, framework: str):
        is_torch = framework == "torch"
        self.hvd = import_module(f"adasum_hvd.{framework}")
        self._library = import_module(f"adasum_hvd.{framework}.ops").LIBRARY
        array = "from_numpy" if is_torch else "constant"
        self._tensor = getattr(import_module(framework), array)
        self.shutdown = self.hvd.shutdown

    def examine(self) -> dict[str, object]:
        self.hvd.init()
        found = compared(
            self.hvd.rank(), self.hvd.size(), self._reduce, self.hvd.allgather_object
        )
        backends = ("gloo", "mpi", "nccl")
        library = self._library
        return {
            **found,
            "version": binding.version(library),
            "built": [n for n in backends if getattr(library, f"horovod_{n}_built")()],
            "settings": self.hvd.settings(),
            "path": binding.transport_description(library),
        }

    def _reduce(self, name: str, array: Array) -> Any:
        tensor = self._tensor(array)
        return self.hvd.allreduce(tensor, op=self.hvd.Adasum, name=name).numpy()


class _Distributed:
    """The engine on torch.distributed."""

    def __init__(self) -> None:
        self._torch = import_module("torch")
        self._engine = import_module("adasum_hvd.distributed")
        self._dist = import_module("torch.distributed")

    def examine(self) -> dict[str, object]:
        self._dist.init_process_group("gloo")
        self._torch.set_num_threads(1)
        rank, self._ranks = self._dist.get_rank(), self._dist.get_world_size()
        found = compared(rank, self._ranks, self._reduce, self._gather)
        self._dist.destroy_process_group()
        if self._torch.cuda.is_available():
            by = import_module("adasum_hvd.distributed.device_slice").described
            found["cuda"] = by(self._torch.device("cuda", 0))
        return found

    def _reduce(self, name: str, array: Array) -> Any:
        tensor = self._torch.from_numpy(array.copy())
        self._engine.adasum_all_reduce(tensor)
        return tensor.numpy()

    def _gather(self, obj: Any) -> list[Any]:
        of_all = [None] * self._ranks
        self._dist.all_gather_object(of_all, obj)
        return of_all


def over(backend: str, frameworks: Mapping[str, Any]) -> Results:
    """Return each framework's report over one backend, or its error.

    `frameworks` has, by name, the object that examines it, or the error of importing it.
    """
    os.environ["HOROVOD_CONTROLLER"] = backend
    found: Results = {}
    for name, framework in frameworks.items():
        try:
            if isinstance(framework, Exception):
                raise framework
            found[name] = framework.examine()
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
                if not isinstance(framework, Exception):
                    framework.shutdown()
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
    """Return what examines a framework, or the error of importing it."""
    try:
        return _Distributed() if name == "torch.distributed" else _Horovod(name)
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
