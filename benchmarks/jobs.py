"""Runs a benchmark's own file as a job of several ranks on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent


def run(
    backend: str, ranks: int, script: str, *arguments: object, **variables: str
) -> Any:
    """Run `script --rank ARGUMENTS OUTPUT` on every rank; return what rank 0 wrote as JSON.

    Args:
        backend: "gloo" or "mpi".
        ranks: how many processes.
        script: the file to run.
        *arguments: come in front of the path that rank 0 writes to.
        **variables: environment variables besides the usual ones.

    Raises:
        RuntimeError: the job wrote nothing; with the end of what it said.
    """
    launcher = {
        "gloo": [str(BIN / "horovodrun"), "--gloo"],
        "mpi": [str(BIN / "mpirun"), "--oversubscribe"],
    }[backend]
    environment = {
        **os.environ,
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(REPOSITORY),
        "OMP_NUM_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        **variables,
    }
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory, "out.json")
        words = [*launcher, "-np", str(ranks), sys.executable, script, "--rank"]
        words += [*map(str, arguments), str(output)]
        done = subprocess.run(
            words, env=environment, capture_output=True, text=True, check=False
        )
        if not output.exists():
            said = (done.stdout + done.stderr)[-3000:]
            raise RuntimeError(f"{backend}, {ranks} ranks, {arguments}: {said}")
        return json.loads(output.read_text())
