"""What a rank of `adasum-hvd doctor` does: reductions whose results the reference knows.

python -m adasum_hvd.tools.trial torch,tensorflow OUTPUT
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from adasum_hvd import binding, reference

Array: TypeAlias = NDArray[Any]
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


def examine(
    library: Any, rank: int, ranks: int, reduce: Callable[[str, Array], Array]
) -> dict[str, object]:
    """Return what this rank finds.

    Args:
        library: Horovod's, of the framework.
        rank: this rank.
        ranks: of the job, all on this host.
        reduce: takes a name and this rank's array, and returns the AdaSum.
    """
    wrong = [
        name
        for name, tensors in inputs(ranks).items()
        if not is_right(reduce(name, tensors[rank]), tensors)
    ]
    backends = ("gloo", "mpi", "nccl")
    return {
        "ranks": ranks,
        "tried": len(SIZES) * len(DTYPES),
        "wrong": wrong,
        "version": binding.version(library),
        "built": [n for n in backends if getattr(library, f"horovod_{n}_built")()],
        "settings": binding.settings(library),
        "path": binding.path(library),
    }


def main() -> None:
    """Try each framework; rank 0 writes what it found, or the error, by framework."""
    names, output = sys.argv[1].split(","), Path(sys.argv[2])
    found: dict[str, dict[str, object]] = {}
    first = True
    for name in names:
        try:
            program = importlib.import_module(f"adasum_hvd.tools.{name}_trial")
            found[name] = program.run()
            first = program.rank() == 0
        except (
            Exception
        ) as error:  # whatever ails this framework, the next one is tried
            traceback.print_exc()
            found[name] = {"error": f"{type(error).__name__}: {error}"}
    if first:
        partial = output.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(found))
        partial.rename(output)


if __name__ == "__main__":
    main()
