"""`adasum-hvd exec`: a program that calls plain Horovod, started by any launcher or by this one."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from types import FrameType

from adasum_hvd.launch import start
from adasum_hvd.launch.assignment import Hello
from adasum_hvd.launch.place import LaunchError, Place
from adasum_hvd.launch.route import Route

GRACE_SECONDS = 5.0  # from SIGTERM to SIGKILL, for the others when one has failed
_POLL_SECONDS = 0.02
# Becomes the program, and ends with its parent, whatever ends that (PR_SET_PDEATHSIG). In a
# process of its own: between fork and exec this one, which has threads, must not run Python.
_TETHERED = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execvp(sys.argv[2], sys.argv[2:])
"""


def run(command: list[str], processes: int | None) -> int:
    """Run a program as one rank of the environment's job, or as several ranks on this host.

    Ranks that this process starts are in its session, as mpirun's are: Linux shares processors
    between sessions before it does between their processes.

    Args:
        command: the program and its arguments.
        processes: how many ranks to start here; None where a launcher has started them.

    Returns:
        The program's exit status; of several ranks the first that is not 0, and 128 plus the
        signal's number where one was killed. The other ranks are ended then.

    Raises:
        LaunchError: the environment does not say which rank this is, or, with `processes`, it
            says that there are others.
        OSError: there is no such program.
    """
    place = start.place_to_start(os.environ, mpi_built=False)
    if processes is not None:
        if place is not None or start.is_horovods(os.environ, mpi_built=False):
            raise LaunchError(
                "adasum-hvd exec: required a process without a job for --nprocs, got one that "
                "another launcher has started; leave --nprocs out"
            )
        return _Ranks(command, _local(processes)).wait()
    if place is not None:
        start.start(place, start.over_small_store(place))
    if place is None or place.rank:
        os.execvp(command[0], command)
    return _Ranks(
        command, [os.environ]
    ).wait()  # the rendezvous server is in this process


def _local(processes: int) -> list[dict[str, str]]:
    """Return the environments of ranks on this host, and start their rendezvous server."""
    name, stays = socket.gethostname(), Route("127.0.0.1", "127.0.0.1")
    places = [
        Place("adasum-hvd exec", rank, processes, "127.0.0.1", 0)
        for rank in range(processes)
    ]
    answer = start.serve([Hello(place, name, stays) for place in places])
    return [
        {**os.environ, **start.variables_of(answer, rank, os.environ)}
        for rank in range(processes)
    ]


class _Ranks:
    """Processes that end together; input goes to the first, as mpirun has it."""

    def __init__(self, command: list[str], environments: Sequence[Mapping[str, str]]):
        self._status = 0
        self._kill_at = float("inf")
        self._processes: list[subprocess.Popen[bytes]] = []
        if shutil.which(command[0]) is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), command[0])
        words = [sys.executable, "-S", "-c", _TETHERED, str(os.getpid()), *command]
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        for environment in environments:
            stdin = subprocess.DEVNULL if self._processes else None
            self._processes.append(
                subprocess.Popen(words, env=environment, stdin=stdin)
            )

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self._fail(128 + number)

    def _fail(self, status: int) -> None:
        """End all processes, and note why unless something came before."""
        self._status = self._status or status
        self._kill_at = min(self._kill_at, time.monotonic() + GRACE_SECONDS)
        for process in self._processes:
            process.terminate()

    def wait(self) -> int:
        """Return the exit status of them all when all have ended."""
        running = self._processes
        while running:
            ended = [process for process in running if process.poll() is not None]
            failed = [process.returncode for process in ended if process.returncode]
            if failed and not self._status:
                status = failed[0]
                self._fail(status if status > 0 else 128 - status)
            if time.monotonic() > self._kill_at:
                for process in running:
                    process.kill()
            running = [process for process in running if process not in ended]
            time.sleep(_POLL_SECONDS)
        return self._status
