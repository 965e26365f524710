"""How tests start ranks: horovodrun, mpirun or torchrun, and the environment of the ranks."""

from __future__ import annotations

import os
import sys
from pathlib import Path

# Without pytest, which has it on its path: the programs there import each other.
sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

from jobs import HOROVODRUN, OF_RANKS, REPOSITORY, launcher, run_launcher, search_path

from tests.parallel.harness.imported import python

__all__ = [
    "HOROVODRUN",
    "REPOSITORY",
    "command",
    "environment",
    "run_launcher",
    "search_path",
    "torchrun",
    "waits",
]
PROGRAMS = Path(__file__).parents[1] / "programs"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
# Where programs of ranks import from, next to the package and the tests.
IMPORTED = [REPOSITORY / f for f in ("benchmarks", "examples")]


def command(backend: str, ranks: int, hosts: str = "") -> list[str]:
    """Return the launcher's words in front of the program's."""
    words = launcher(backend, ranks)
    if backend == "torchrun":
        return [*python(), *words[1:]]
    return [*words, *(["-H", hosts] if hosts else [])]


def torchrun() -> list[str]:
    """Return torchrun's words, in a process that has imported torch."""
    return [*python(), *TORCHRUN[1:]]


def waits(seconds: int) -> tuple[tuple[str, str], ...]:
    """Return the variables that say how long Horovod and the op wait for a silent rank."""
    names = "HOROVOD_GLOO_TIMEOUT_SECONDS", "ADASUM_HVD_TIMEOUT_SECONDS"
    return tuple((name, str(seconds)) for name in names)


def environment(extra: tuple[tuple[str, str], ...] = ()) -> dict[str, str]:
    """Return the environment of a launch: one thread per rank, quiet TensorFlow."""
    own = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    places = dict.fromkeys([str(REPOSITORY), *map(str, IMPORTED), *filter(None, own)])
    return {
        **os.environ,
        "PATH": search_path(),
        "PYTHONPATH": os.pathsep.join(places),
        "OMP_NUM_THREADS": "1",
        **OF_RANKS,
        "HOROVOD_DYNAMIC_PROCESS_SETS": "1",
        **dict(waits(120)),  # a busy machine is not a broken one
        "OMPI_MCA_mpi_yield_when_idle": "1",  # also where each rank might have a processor
        **dict(extra),
    }
