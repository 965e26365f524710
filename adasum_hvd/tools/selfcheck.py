"""The program of a rank in `adasum-hvd doctor`: reductions, compared with the reference.

python -m adasum_hvd.tools.selfcheck torch|tensorflow|torch.distributed OUTPUT
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from adasum_hvd import reference
from adasum_hvd.horovod import binding

Array: TypeAlias = NDArray[Any]
Report: TypeAlias = dict[str, Any]
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
) -> Report:
    """Return this rank's report of what was wrong on any rank. Collective; blocks.

    `reduce` returns the AdaSum of all ranks' arrays of a name, `gather` all ranks' objects.
    """
    tried = inputs(ranks)
    right = {k: is_right(reduce(k, own[rank]), own) for k, own in tried.items()}
    wrong = [name for name, is_equal in right.items() if not is_equal]
    names = sorted({name for of_rank in gather(wrong) for name in of_rank})
    return {"rank": rank, "ranks": ranks, "tried": len(tried), "wrong": names}


def horovod(framework: str) -> Report:
    """Return the report of the op under a framework. Collective; blocks."""
    hvd = import_module(f"adasum_hvd.{framework}")
    library = import_module(f"adasum_hvd.{framework}.ops").LIBRARY
    maker = "from_numpy" if framework == "torch" else "constant"
    tensor_of = getattr(import_module(framework), maker)

    def reduce(name: str, array: Array) -> Array:
        return hvd.allreduce(tensor_of(array), op=hvd.Adasum, name=name).numpy()

    hvd.init()
    found = compared(hvd.rank(), hvd.size(), reduce, hvd.allgather_object)
    backends = ("gloo", "mpi", "nccl")
    return {
        **found,
        "version": binding.version(library),
        "built": [n for n in backends if getattr(library, f"horovod_{n}_built")()],
        "settings": hvd.settings(),
        "path": binding.transport_description(library),
    }


def torch_distributed() -> Report:
    """Return the report of the engine on torch.distributed. Collective; blocks."""
    torch, dist = import_module("torch"), import_module("torch.distributed")
    engine = import_module("adasum_hvd.distributed")
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    ranks = dist.get_world_size()

    def reduce(_: str, array: Array) -> Array:
        tensor = torch.from_numpy(array.copy())
        engine.adasum_all_reduce(tensor)
        return tensor.numpy()

    def gather(obj: Any) -> list[Any]:
        of_all = [None] * ranks
        dist.all_gather_object(of_all, obj)
        return of_all

    found = compared(dist.get_rank(), ranks, reduce, gather)
    dist.destroy_process_group()
    if torch.cuda.is_available():
        by = import_module("adasum_hvd.distributed.device_slice").described
        found["cuda"] = by(torch.device("cuda", 0))
    return found


def main() -> None:
    """Check; rank 0 writes the report, and any rank an error, because it may have no number yet."""
    framework, output = sys.argv[1:]
    try:
        is_ours = framework == "torch.distributed"
        found = torch_distributed() if is_ours else horovod(framework)
    except Exception as error:
        traceback.print_exception(error)
        found = {"error": f"{type(error).__name__}: {error}"}
    if not found.get("rank"):
        write(found, output)


def write(found: Any, output: str) -> None:
    """Write a job's result, whole or not at all."""
    partial = Path(f"{output}.{os.getpid()}")
    partial.write_text(json.dumps(found))
    partial.rename(output)


if __name__ == "__main__":
    main()
